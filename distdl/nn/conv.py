"""Convolutions as modules: torch.nn's arguments after the partition, which is (batch, channel, *space), or with one dim
more (batch, out, in, *space)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from .. import functional as F
from .. import init
from .._types import Device, Place, Size
from ..errors import PartitionError
from ..movement.options import per_dim
from ..partition import partition_of
from .layer import Layer, bias_of, weight

__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "LocalConv1d",
    "LocalConv2d",
    "LocalConv3d",
]


class _Windowed(Layer):
    """What all convolutions share."""

    n: int  # spatial dims
    weight: torch.Tensor
    options: dict[str, Any]


class _Tied(_Windowed):
    """One filter for all pixels: a weight that is whole in space, and a bias."""

    bias: torch.Tensor | None

    def _channels(self, P: Place, *counts: int) -> tuple[int, ...]:
        """Channels in, channels out and groups in Python's own numbers."""
        counts = per_dim(counts, 3, "a number of channels or groups")
        in_channels, out_channels, groups = counts
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise PartitionError(
                "groups do not divide the channels",
                actual=groups,
                expected=f"a divisor of {in_channels} and {out_channels}",
                next_step="choose groups that divide both",
            )
        return counts

    def _general(self) -> bool:
        """Whether the partition is (batch, out, in, *space)."""
        return partition_of(self.P).ndim == self.n + 3

    def _fill(
        self,
        shape: Sequence[int],
        split: tuple[int | None, int | None],
        out_channels: int,
        bias: bool,
        options: dict[str, Any],
    ) -> None:
        """The parameters: a weight of ``shape``, whose first two dims lie along the partition dims ``split``."""
        self.options = options if self._general() else {**options, "out_channels": out_channels}
        over = self.P if self._general() else partition_of(self.P)  # a Layout of x knows none of y's channels
        self._parameter("weight", shape, (*split, *(None,) * self.n), weight, over=over)
        self._parameter("bias", (out_channels,), (1,), bias_of(shape), bias, over=over)


class _Conv(_Tied):
    def __init__(
        self,
        P: Place,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Device = None,
        dtype: torch.dtype | None = None,
        **layout: Any,
    ) -> None:
        in_channels, out_channels, groups = self._channels(P, in_channels, out_channels, groups)
        shape = (out_channels, in_channels // groups, *per_dim(kernel_size, self.n, "kernel_size"))
        super().__init__(P, device, dtype)
        options = dict(stride=stride, padding=padding, dilation=dilation, groups=groups, padding_mode=padding_mode)
        self._fill(shape, (1, 2 if self._general() else None), out_channels, bias, options | layout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The convolution of this rank's block."""
        return F.dist_conv(x, self.weight, self.P, self.bias, params="invariant", **self.options)


class Conv1d(_Conv):
    """:func:`distdl.functional.dist_conv` over 1 spatial dim, with torch.nn.Conv1d's arguments; takes its ``x_layout``
    and so on.

    Example:
        >>> layer = dd.nn.Conv1d(dd.Partition((1, 1, 1)), 2, 4, 3, padding=1)
        >>> layer(torch.ones(1, 2, 8)).shape
        torch.Size([1, 4, 8])
    """

    n = 1


class Conv2d(_Conv):
    """:func:`distdl.functional.dist_conv` over 2 spatial dims, with torch.nn.Conv2d's arguments; takes its ``x_layout``
    and so on.

    Example:
        >>> layer = dd.nn.Conv2d(dd.Partition((1, 1, 1, 1)), 2, 4, 3, padding=1)
        >>> layer(torch.ones(1, 2, 8, 8)).shape
        torch.Size([1, 4, 8, 8])
    """

    n = 2


class Conv3d(_Conv):
    """:func:`distdl.functional.dist_conv` over 3 spatial dims, with torch.nn.Conv3d's arguments; takes its ``x_layout``
    and so on.

    Example:
        >>> layer = dd.nn.Conv3d(dd.Partition((1, 1, 1, 1, 1)), 2, 4, 3, padding=1)
        >>> layer(torch.ones(1, 2, 8, 8, 8)).shape
        torch.Size([1, 4, 8, 8, 8])
    """

    n = 3


class _ConvTranspose(_Tied):
    def __init__(
        self,
        P: Place,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Size = 1,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **layout: Any,
    ) -> None:
        in_channels, out_channels, groups = self._channels(P, in_channels, out_channels, groups)
        shape = (in_channels, out_channels // groups, *per_dim(kernel_size, self.n, "kernel_size"))
        super().__init__(P, device, dtype)
        options = dict(stride=stride, padding=padding, output_padding=output_padding, groups=groups, dilation=dilation)
        self._fill(shape, self._split(groups), out_channels, bias, options | layout)

    def _split(self, groups: int) -> tuple[int | None, int | None]:
        k = partition_of(self.P).shape[1]
        if self._general():
            return 2, 1
        if groups == 1 or k == 1:
            return None, 1
        if groups % k:
            raise PartitionError(
                "ranks of the channel dim need whole groups",
                expected=f"a multiple of {k} groups",
                actual=groups,
                next_step="use fewer ranks along the channels, or more groups",
            )
        return 1, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The transposed convolution of this rank's block."""
        return F.dist_conv_transpose(x, self.weight, self.P, self.bias, params="invariant", **self.options)


class ConvTranspose1d(_ConvTranspose):
    """:func:`distdl.functional.dist_conv_transpose` over 1 spatial dim, with torch.nn.ConvTranspose1d's arguments.

    Example:
        >>> layer = dd.nn.ConvTranspose1d(dd.Partition((1, 1, 1)), 2, 4, 2, stride=2)
        >>> layer(torch.ones(1, 2, 8)).shape
        torch.Size([1, 4, 16])
    """

    n = 1


class ConvTranspose2d(_ConvTranspose):
    """:func:`distdl.functional.dist_conv_transpose` over 2 spatial dims, with torch.nn.ConvTranspose2d's arguments.

    Example:
        >>> layer = dd.nn.ConvTranspose2d(dd.Partition((1, 1, 1, 1)), 2, 4, 2, stride=2)
        >>> layer(torch.ones(1, 2, 8, 8)).shape
        torch.Size([1, 4, 16, 16])
    """

    n = 2


class ConvTranspose3d(_ConvTranspose):
    """:func:`distdl.functional.dist_conv_transpose` over 3 spatial dims, with torch.nn.ConvTranspose3d's arguments.

    Example:
        >>> layer = dd.nn.ConvTranspose3d(dd.Partition((1, 1, 1, 1, 1)), 2, 4, 2, stride=2)
        >>> layer(torch.ones(1, 2, 8, 8, 8)).shape
        torch.Size([1, 4, 16, 16, 16])
    """

    n = 3


class _LocalConv(_Windowed):
    def __init__(
        self,
        P: Place,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        input_size: Size,
        stride: Size = 1,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(P, device, dtype)
        kernel, size, step = (per_dim(value, self.n, "an argument") for value in (kernel_size, input_size, stride))
        self.options = {"stride": step, "out_channels": out_channels}
        shape = (out_channels, *((m - k) // s + 1 for m, k, s in zip(size, kernel, step)), in_channels, *kernel)
        dims = (*range(1, self.n + 2), *(None,) * (self.n + 1))
        bound = (in_channels * math.prod(kernel)) ** -0.5
        draw = functools.partial(init.uniform, low=-bound, high=bound)
        self._parameter("weight", shape, dims, draw, over=partition_of(P))  # y's channels and pixels, and P is x's

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The untied filters of this rank's block."""
        return F.dist_local_conv(x, self.weight, self.P, params="invariant", **self.options)


class LocalConv1d(_LocalConv):
    """:func:`distdl.functional.dist_local_conv` over 1 spatial dim; ``input_size`` is the spatial size of x, as every
    output pixel has its filters.

    Example:
        >>> layer = dd.nn.LocalConv1d(dd.Partition((1, 1, 1)), 2, 4, 3, input_size=8)
        >>> layer(torch.ones(1, 2, 8)).shape
        torch.Size([1, 4, 6])
    """

    n = 1


class LocalConv2d(_LocalConv):
    """:func:`distdl.functional.dist_local_conv` over 2 spatial dims; ``input_size`` is the spatial size of x, as every
    output pixel has its filters.

    Example:
        >>> layer = dd.nn.LocalConv2d(dd.Partition((1, 1, 1, 1)), 2, 4, 3, input_size=8)
        >>> layer(torch.ones(1, 2, 8, 8)).shape
        torch.Size([1, 4, 6, 6])
    """

    n = 2


class LocalConv3d(_LocalConv):
    """:func:`distdl.functional.dist_local_conv` over 3 spatial dims; ``input_size`` is the spatial size of x, as every
    output pixel has its filters.

    Example:
        >>> layer = dd.nn.LocalConv3d(dd.Partition((1, 1, 1, 1, 1)), 2, 4, 3, input_size=8)
        >>> layer(torch.ones(1, 2, 8, 8, 8)).shape
        torch.Size([1, 4, 6, 6, 6])
    """

    n = 3
