"""Norms as modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import _torch, init
from .. import functional as F
from .._types import Device, Place, Size
from ..errors import PartitionError
from ..held import mark_of
from ..movement.options import plain, sizes_of
from ..partition import partition_of
from .layer import Layer, ones, zeros

__all__ = ["BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm"]


class BatchNorm(Layer, torch.nn.modules.batchnorm._BatchNorm):
    """:func:`distdl.functional.dist_batch_norm` for any number of spatial dims; torch.nn.BatchNorm1d/2d/3d's arguments.

    In training it updates its running statistics (buffers), once, also where a checkpoint runs it again in backward;
    inside torch.func transforms use the pure function. An instance of torch's ``_BatchNorm``: what
    ``torch.optim.swa_utils.update_bn`` and its like do with one is right here.

    Example:
        >>> layer = dd.nn.BatchNorm(dd.Partition((1, 1, 1)), 2)
        >>> layer(torch.ones(1, 2, 8)).shape
        torch.Size([1, 2, 8])
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor
    num_batches_tracked: torch.Tensor

    def __init__(
        self,
        P: Place,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        Layer.__init__(self, P, device, dtype)
        self.eps, self.momentum = eps, momentum
        self.affine, self.track_running_stats = affine, track_running_stats
        self._parameter("weight", (num_features,), (1,), ones, affine)
        self._parameter("bias", (num_features,), (1,), zeros, affine and bias)
        layout = init.parameter_layout(P, (num_features,), (1,))
        shape = layout.local_shape(None if layout.active else layout.partition.ranks[0])
        for name, make in (("running_mean", torch.zeros), ("running_var", torch.ones)):
            self.register_buffer(name, make(shape, device=device, dtype=dtype) if track_running_stats else None)
            self.layouts[name], self._marks[name] = layout, mark_of(P, 1)
        self.layouts["num_batches_tracked"] = init.parameter_layout(P, (), ())
        count = torch.zeros((), dtype=torch.int64, device=device) if track_running_stats else None
        self.register_buffer("num_batches_tracked", count)

    @property
    def num_features(self) -> int:  # type: ignore[override]
        """Raises: who asks a ``_BatchNorm`` for it makes another norm of this one
        (``SyncBatchNorm.convert_sync_batchnorm``), which would know nothing of the partition."""
        raise PartitionError(
            "torch's norm cannot take the place of this one",
            partitions=self.P,
            expected="a norm that knows the partition",
            actual="a request for the number of features",
            next_step="keep this norm, whose statistics are those of all ranks (SyncBatchNorm adds nothing), or "
            "ask module.layouts['running_mean'].shape",
        )

    def reset_parameters(self) -> None:
        """Draw the parameters again, the same as at first, and forget the statistics."""
        self.reset_running_stats()
        super().reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise with the batch's statistics in training, with the running ones (where there are any) in
        evaluation."""
        tracked = self.track_running_stats and self.running_mean is not None
        update = self.training and tracked and not _torch.in_backward()
        if update and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        count = int(self.num_batches_tracked) if self.training and tracked and self.momentum is None else None
        old = (self.running_mean, self.running_var) if tracked or not self.training else (None, None)  # torch's rule
        y, mean, var = F.dist_batch_norm(
            x,
            self.P,
            *old,
            self.weight,
            self.bias,
            self.training or old[0] is None,
            self.momentum,
            self.eps,
            num_batches_tracked=count,
            params="invariant",
        )
        if update:
            with torch.no_grad():
                self.running_mean.copy_(mean)
                self.running_var.copy_(var)
        return y


class _Norm(Layer):
    """A norm with ``weight`` and ``bias`` over some dims, and without state."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float | None

    def _affine(self, shape: Sequence[int], dims: Sequence[int], affine: bool, bias: bool) -> None:
        self._parameter("weight", shape, dims, ones, affine)
        self._parameter("bias", shape, dims, zeros, affine and bias)


class LayerNorm(_Norm):
    """:func:`distdl.functional.dist_layer_norm`; ``normalized_shape`` is global.

    Raises:
        PartitionError, ShapeError: as its function does.

    Example:
        >>> layer = dd.nn.LayerNorm(dd.Partition((1, 1, 1)), 8)
        >>> layer(torch.ones(1, 2, 8)).shape
        torch.Size([1, 2, 8])
    """

    def __init__(
        self,
        P: Place,
        normalized_shape: Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(P, device, dtype)
        self.shape, self.eps = sizes_of(normalized_shape, "normalized_shape"), eps
        ndim = partition_of(P).ndim
        self._affine(self.shape, range(ndim - len(self.shape), ndim), elementwise_affine, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise over the trailing dims."""
        return F.dist_layer_norm(x, self.P, self.shape, self.weight, self.bias, self.eps, params="invariant")


class RMSNorm(LayerNorm):
    """:func:`distdl.functional.dist_rms_norm`; ``normalized_shape`` is global.

    Raises:
        PartitionError, ShapeError: as its function does.

    Example:
        >>> layer = dd.nn.RMSNorm(dd.Partition((1, 1, 1)), 8)
        >>> layer(torch.ones(1, 2, 8)).shape
        torch.Size([1, 2, 8])
    """

    def __init__(
        self,
        P: Place,
        normalized_shape: Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(P, normalized_shape, eps, elementwise_affine, False, device, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Divide by the root mean square over the trailing dims."""
        return F.dist_rms_norm(x, self.P, self.shape, self.weight, self.eps, params="invariant")


class GroupNorm(_Norm):
    """:func:`distdl.functional.dist_group_norm`.

    Raises:
        PartitionError, ShapeError: as its function does.

    Example:
        >>> layer = dd.nn.GroupNorm(dd.Partition((1, 1, 1)), 1, 2)
        >>> layer(torch.ones(1, 2, 8)).shape
        torch.Size([1, 2, 8])
    """

    def __init__(
        self,
        P: Place,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(P, device, dtype)
        self.groups, self.eps = plain(num_groups, "num_groups"), eps
        self._affine((num_channels,), (1,), affine, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise each group of channels."""
        return F.dist_group_norm(x, self.P, self.groups, self.weight, self.bias, self.eps, params="invariant")


class InstanceNorm(_Norm):
    """:func:`distdl.functional.dist_instance_norm`.

    Example:
        >>> layer = dd.nn.InstanceNorm(dd.Partition((1, 1, 1)), 2)
        >>> layer(torch.ones(1, 2, 8)).shape
        torch.Size([1, 2, 8])
    """

    def __init__(
        self,
        P: Place,
        num_features: int,
        eps: float = 1e-5,
        affine: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(P, device, dtype)
        self.eps = eps
        self._affine((num_features,), (1,), affine, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise each channel of each example."""
        return F.dist_instance_norm(x, self.P, self.weight, self.bias, self.eps, params="invariant")
