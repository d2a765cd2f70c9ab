"""Layers as modules."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from .. import _torch, init
from .. import functional as F
from .._arguments import Checked
from ..agree import partition_of
from ..errors import PartitionError
from ..functional import random
from ..held import complete, held, hold, mark_of, unmarked_dims
from ..movement.halo import per_dim, plain, sizes_of
from ..partition import Partition
from ..world import world

_OF_DIMS = ("Conv", "ConvTranspose", "LocalConv", "MaxPool", "AvgPool", "L2Pool", "AdaptiveMaxPool", "AdaptiveAvgPool")
__all__ = [
    "BatchNorm",
    "Dropout",
    "Embedding",
    "FeatureDropout",
    "GroupNorm",
    "InstanceNorm",
    "LCN",
    "Layer",
    "LayerNorm",
    "Linear",
    "Movement",
    "RMSNorm",
    "Upsample",
    *(f"{name}{n}d" for name in _OF_DIMS for n in (1, 2, 3)),
]


def agreed_seed(P) -> int:
    """A seed from torch's generator on the CPU, the one of ``P``'s first rank: parameters fit together also where
    generators do not. A number also where tensors have none (meta device, FakeTensorMode): what is filled in later has
    the values of a module that was made at once."""
    with _torch.no_modes():
        seed, P = int(torch.randint(2**62, (), device="cpu")), partition_of(P)
    where = world(P.world)
    if P.size > 1 and P.index(where.rank) is not None:
        seed = where.all_gather(seed, P.ranks, "a seed for parameters")[P.ranks[0]]
    return seed


@_torch.opaque
def _enter(layer) -> None:
    """What a layer does before its forward: whatever tensors stand for its parameters now, functional_call's too, are
    marked."""
    layer.hold_parameters()
    layer._check_parts()
    ranks, reduced = _torch.reduced_by_ddp()
    if ranks:
        R = Partition((len(ranks),), ranks, partition_of(layer.P).world)
        for name, p in layer.named_parameters():
            if id(p) in reduced and complete(held(p), R, "DistributedDataParallel", name):
                raise PartitionError(
                    "this layer sums its gradients over the ranks itself",
                    op="DistributedDataParallel",
                    partitions=layer.P,
                    expected=f"{name} of {type(layer).__name__} on DDP's ignore list",
                    actual=f"a sum over {ranks}, once more",
                    next_step="call dd.parallel.ignore_in_ddp(model, P) before DistributedDataParallel(model)",
                )


class Layer(Checked, torch.nn.Module):
    """Base of the modules with parameters.

    Attributes:
        P: the partition (or Layout) that its function takes.
        layouts: the global layout of every parameter and buffer, by name (:func:`distdl.nn.layouts` asks a whole
            model).
    """

    def __init__(self, P, device=None, dtype=None):
        torch.nn.Module.__init__(self)  # BatchNorm has torch's for a base too, whose constructor takes other arguments
        self.P, self.layouts, self._draws, self._marks = P, {}, {}, {}
        self._seed = agreed_seed(P)
        self._kind = {"device": device, "dtype": dtype}

    def _parameter(self, name: str, shape, dims, draw, wanted=True):
        """Register a parameter of global ``shape``, dim i split along partition dim ``dims[i]``; ``draw(layout, seed,
        ...)``."""
        if not wanted:
            self.register_parameter(name, None)
            return
        shape = tuple(plain(n, f"a size of {name}", type(self).__name__) for n in shape)
        layout = init.parameter_layout(self.P, shape, dims)
        self.layouts[name], self._draws[name] = layout, draw
        self._marks[name] = mark_of(self.P, [d for d in dims if d is not None])
        self.register_parameter(name, torch.nn.Parameter(self._block(name, **self._kind)))

    def _parts(self):
        """(name, tensor that the parameter of that name is made of by torch's hooks or parametrizations, whether it is
        an original, whether the function that makes it is known to act on blocks as on the whole)."""
        for name, tensor in self._parameters.items():
            of, _, suffix = name.rpartition("_")
            if tensor is not None and of in self._marks and suffix in ("g", "v", "orig"):  # torch's older hooks
                yield of, tensor, True, f"{of}_mask" in self._buffers
        parametrizations: Any = self._modules.get("parametrizations") or {}
        for name, made in parametrizations.items():
            blockwise = all(getattr(p, "blockwise", False) for p in made)
            for tensor in made.parameters():
                yield name, tensor, any(tensor is t for t in made._parameters.values()), blockwise

    def hold_parameters(self) -> None:
        """Mark the tensors that stand for this layer's parameters now: over which ranks it sums their gradients, and of
        what they are blocks (:mod:`distdl.held`), for whoever reduces gradients. No message."""
        for name, mark in self._marks.items():
            if (tensor := self._parameters.get(name, self._buffers.get(name))) is not None:
                hold(tensor, mark, f"{name} of {type(self).__name__}")
        for name, tensor, original, _ in self._parts():
            if name in self._marks and (original or held(tensor) is None):
                hold(tensor, self._marks[name] if original or not self._marks[name][3] else mark_of(self.P, None))

    def _check_parts(self) -> None:
        """Refuse what is made of one block as if it were the whole, or of tensors whose gradients others sum too."""
        for name, tensor, _, blockwise in self._parts():
            if not blockwise and self._marks.get(name, (None,))[-1]:
                raise PartitionError(
                    f"a parametrization would see one block of {name}",
                    op=type(self).__name__,
                    partitions=self.P,
                    actual=self.layouts[name].partition.shape,
                    expected="a parameter that every rank has whole",
                    next_step="if it acts on each block as on the whole tensor (element by element), give its "
                    "class the attribute blockwise = True; else compute the weight in a layer of your own",
                )
            unmarked_dims(tensor, partition_of(self.P), (), type(self).__name__)

    def register_parameter(self, name, param):
        """As torch's."""
        super().register_parameter(name, param)
        self.hold_parameters()

    def _apply(self, fn, recurse=True):
        done = super()._apply(fn, recurse)  # may make new ones
        self.hold_parameters()
        return done

    def __setstate__(self, state):
        super().__setstate__(state)
        self.hold_parameters()

    def __call__(self, *args, **kwargs):
        """The layer of this rank's block; see ``forward``."""
        _enter(self)
        return super().__call__(*args, **kwargs)

    def _block(self, name, device=None, dtype=None):
        layout, seed = self.layouts[name], F.fold_in(self._seed, list(self._draws).index(name))
        if not layout.active:  # a rank outside the partition: never used, but of a shape that its empty part accepts
            return torch.zeros(layout.local_shape(layout.partition.ranks[0]), device=device, dtype=dtype)
        if _torch.is_fake(torch.empty(0, device=device, dtype=dtype)):  # nothing to draw
            return torch.empty(layout.local_shape(), device=device, dtype=dtype)
        return self._draws[name](layout, seed, device=device, dtype=dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all parameters again, the same as at first."""
        for name in (n for n in self._draws if getattr(self, n) is not None):
            old = getattr(self, name)
            old.copy_(self._block(name, old.device, old.dtype))

    def extra_repr(self):
        shapes = ", ".join(f"{name}={tuple(self.layouts[name].shape)}" for name in self._draws)
        return f"{str(self.P).splitlines()[0]}, {shapes}"


def _ones(layout, seed, **kind):
    return init.ones(layout, **kind)


def _zeros(layout, seed, **kind):
    return init.zeros(layout, **kind)


def _weight(layout, seed, **kind):
    return init.kaiming_uniform(layout, seed, a=math.sqrt(5), **kind)


def _bias(layout, seed, weight_shape, **kind):
    return init.bias_uniform(layout, seed, weight_shape, **kind)


class Linear(Layer):
    """:func:`distdl.functional.dist_linear`; ``P`` is (*batch, out, in). Takes its ``x_layout`` and so on."""

    def __init__(self, P, in_features, out_features, bias=True, device=None, dtype=None, **layout):
        super().__init__(P, device, dtype)
        n, shape = partition_of(P).ndim, (out_features, in_features)
        self.options = layout
        self._parameter("weight", shape, (n - 2, n - 1), _weight)
        self._parameter("bias", shape[:1], (n - 2,), functools.partial(_bias, weight_shape=shape), bias)

    def forward(self, x):
        """y = x Wᵀ + b."""
        return F.dist_linear(x, self.weight, self.P, self.bias, params="invariant", **self.options)


class _Conv(Layer):
    """torch.nn's arguments after the partition: (batch, channel, *space), or with one dim more (batch, out, in,
    *space)."""

    n: int

    def __init__(
        self,
        P,
        in_channels,
        out_channels,
        kernel_size,
        stride=1,
        padding=0,
        dilation=1,
        groups=1,
        bias=True,
        padding_mode="zeros",
        device=None,
        dtype=None,
        **layout,
    ):
        in_channels, out_channels, groups = self._counts(P, in_channels, out_channels, groups)
        options = dict(
            stride=stride, padding=padding, dilation=dilation, groups=groups, padding_mode=padding_mode, **layout
        )
        shape = (out_channels, in_channels // groups, *per_dim(kernel_size, self.n, "kernel_size", type(self).__name__))
        self._build(P, shape, out_channels, in_channels, groups, bias, device, dtype, options)

    def _counts(self, P, in_channels, out_channels, groups):
        numbers = per_dim((in_channels, out_channels, groups), 3, "a number of channels or groups", type(self).__name__)
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise PartitionError(
                "groups do not divide the channels",
                op=type(self).__name__,
                actual=groups,
                expected=f"a divisor of {in_channels} and {out_channels}",
                partitions=P,
                next_step="choose groups that divide both",
            )
        return numbers

    def _build(self, P, shape, out_channels, in_channels, groups, bias, device, dtype, options):
        Layer.__init__(self, P, device, dtype)
        where = partition_of(P)
        general = where.ndim == self.n + 3
        self.options = options if general else {**options, "out_channels": out_channels}
        self._weights(shape, general, groups)
        self._parameter("bias", (out_channels,), (1,), functools.partial(_bias, weight_shape=shape), bias)

    def _weights(self, shape, general, groups):
        self._parameter("weight", shape, (1, 2 if general else None, *(None,) * self.n), _weight)

    def forward(self, x):
        """The convolution of this rank's block."""
        return F.dist_conv(x, self.weight, self.P, self.bias, params="invariant", **self.options)


class _ConvTranspose(_Conv):
    """As the convolutions, with torch.nn.ConvTranspose's arguments."""

    def __init__(
        self,
        P,
        in_channels,
        out_channels,
        kernel_size,
        stride=1,
        padding=0,
        output_padding=0,
        groups=1,
        bias=True,
        dilation=1,
        device=None,
        dtype=None,
        **layout,
    ):
        in_channels, out_channels, groups = self._counts(P, in_channels, out_channels, groups)
        options = dict(
            stride=stride, padding=padding, output_padding=output_padding, groups=groups, dilation=dilation, **layout
        )
        shape = (in_channels, out_channels // groups, *per_dim(kernel_size, self.n, "kernel_size", type(self).__name__))
        self._build(P, shape, out_channels, in_channels, groups, bias, device, dtype, options)

    def _weights(self, shape, general, groups):
        k = partition_of(self.P).shape[1]
        if general:
            self._parameter("weight", shape, (2, 1, *(None,) * self.n), _weight)
        elif groups > 1 and k > 1:
            if groups % k:
                raise PartitionError(
                    "ranks of the channel dim need whole groups",
                    op=type(self).__name__,
                    partitions=self.P,
                    expected=f"a multiple of {k} groups",
                    actual=groups,
                    next_step="use fewer ranks along the channels, or more groups",
                )
            self._parameter("weight", shape, (1, None, *(None,) * self.n), _weight)
        else:
            self._parameter("weight", shape, (None, 1, *(None,) * self.n), _weight)

    def forward(self, x):
        """The transposed convolution of this rank's block."""
        return F.dist_conv_transpose(x, self.weight, self.P, self.bias, params="invariant", **self.options)


class _LocalConv(Layer):
    """:func:`distdl.functional.dist_local_conv`; ``input_size`` is the spatial size of x, as every output pixel has its
    filters."""

    n: int

    def __init__(self, P, in_channels, out_channels, kernel_size, input_size, stride=1, device=None, dtype=None):
        super().__init__(P, device, dtype)
        kernel, size, step = (
            per_dim(v, self.n, "an argument", type(self).__name__) for v in (kernel_size, input_size, stride)
        )
        self.options = {"stride": step, "out_channels": out_channels}
        shape = (out_channels, *((m - k) // s + 1 for m, k, s in zip(size, kernel, step)), in_channels, *kernel)
        dims = (*range(1, self.n + 2), *(None,) * (self.n + 1))
        bound = (in_channels * math.prod(kernel)) ** -0.5
        self._parameter("weight", shape, dims, functools.partial(init.uniform, low=-bound, high=bound))

    def forward(self, x):
        """The untied filters of this rank's block."""
        return F.dist_local_conv(x, self.weight, self.P, params="invariant", **self.options)


class _Function(Checked, torch.nn.Module):
    """A function of :mod:`distdl.functional` without parameters: ``Module(P, *args, **kwargs)(x)`` is ``function(x, P,
    ...)``."""

    function: staticmethod

    def __init__(self, P, *args, **kwargs):
        super().__init__()
        self.P, self.args, self.kwargs = P, args, kwargs

    def forward(self, x):
        """The function of this rank's block."""
        return type(self).function(x, self.P, *self.args, **self.kwargs)

    def extra_repr(self):
        words = [str(self.P).splitlines()[0], *map(str, self.args), *(f"{k}={v}" for k, v in self.kwargs.items())]
        return ", ".join(words)


class Movement(torch.nn.Module):
    """A data movement as a module: ``Movement(F.repartition, P_in, P_out)``."""

    def __init__(self, function, *args, **kwargs):
        super().__init__()
        self.function, self.args, self.kwargs = function, args, kwargs

    def forward(self, x):
        """The movement of this rank's block."""
        return self.function(x, *self.args, **self.kwargs)

    def extra_repr(self):
        return ", ".join([self.function.__name__, *(str(a).splitlines()[0] for a in self.args)])


class Upsample(_Function):
    """:func:`distdl.functional.dist_interpolate`: ``Upsample(P, size=None, scale_factor=None, mode="nearest",
    ...)``."""

    function = staticmethod(F.dist_interpolate)


class LCN(_Function):
    """:func:`distdl.functional.dist_lcn`: ``LCN(P, kernel_size)``."""

    function = staticmethod(F.dist_lcn)


def _define(base, name, n, **attributes):
    attributes |= {"n": n, "__module__": __name__, "__doc__": f"{n}-D. {base.__doc__}"}
    globals()[name] = type(name, (base,), attributes)


for _n in (1, 2, 3):
    _define(_Conv, f"Conv{_n}d", _n)
    _define(_ConvTranspose, f"ConvTranspose{_n}d", _n)
    _define(_LocalConv, f"LocalConv{_n}d", _n)
    for _kind, _function in (
        ("MaxPool", F.dist_max_pool),
        ("AvgPool", F.dist_avg_pool),
        ("L2Pool", F.dist_l2_pool),
        ("AdaptiveMaxPool", F.dist_adaptive_max_pool),
        ("AdaptiveAvgPool", F.dist_adaptive_avg_pool),
    ):
        _define(_Function, f"{_kind}{_n}d", _n, function=staticmethod(_function))


class BatchNorm(Layer, torch.nn.modules.batchnorm._BatchNorm):
    """:func:`distdl.functional.dist_batch_norm` for any number of spatial dims; torch.nn.BatchNorm1d/2d/3d's arguments.

    In training it updates its running statistics (buffers), once, also where a checkpoint runs it again in backward;
    inside torch.func transforms use the pure function. An instance of torch's ``_BatchNorm``: what
    ``torch.optim.swa_utils.update_bn`` and its like do with one is right here.
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor
    num_batches_tracked: torch.Tensor

    def __init__(
        self,
        P,
        num_features,
        eps=1e-5,
        momentum=0.1,
        affine=True,
        track_running_stats=True,
        device=None,
        dtype=None,
        *,
        bias=True,
    ):
        Layer.__init__(self, P, device, dtype)
        self.eps, self.momentum, self.affine, self.track_running_stats = eps, momentum, affine, track_running_stats
        self._parameter("weight", (num_features,), (1,), _ones, affine)
        self._parameter("bias", (num_features,), (1,), _zeros, affine and bias)
        layout = init.parameter_layout(P, (num_features,), (1,))
        shape = layout.local_shape(None if layout.active else layout.partition.ranks[0])
        for name, make in (("running_mean", torch.zeros), ("running_var", torch.ones)):
            self.register_buffer(name, make(shape, device=device, dtype=dtype) if track_running_stats else None)
            self.layouts[name], self._marks[name] = layout, mark_of(P, 1)
        self.layouts["num_batches_tracked"] = init.parameter_layout(P, (), ())
        count = torch.zeros((), dtype=torch.int64, device=device) if track_running_stats else None
        self.register_buffer("num_batches_tracked", count)

    @property
    def num_features(self):  # type: ignore[override]
        """Raises: who asks a ``_BatchNorm`` for it makes another norm of this one
        (``SyncBatchNorm.convert_sync_batchnorm``), which would know nothing of the partition."""
        raise PartitionError(
            "torch's norm cannot take the place of this one",
            op="BatchNorm.num_features",
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

    def forward(self, x):
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

    def _affine(self, shape, dims, affine, bias):
        self._parameter("weight", shape, dims, _ones, affine)
        self._parameter("bias", shape, dims, _zeros, affine and bias)


class LayerNorm(_Norm):
    """:func:`distdl.functional.dist_layer_norm`; ``normalized_shape`` is global."""

    def __init__(self, P, normalized_shape, eps=1e-5, elementwise_affine=True, bias=True, device=None, dtype=None):
        super().__init__(P, device, dtype)
        self.shape, self.eps = sizes_of(normalized_shape, "normalized_shape", "LayerNorm"), eps
        first = partition_of(P).ndim - len(self.shape)
        self._affine(self.shape, tuple(range(first, first + len(self.shape))), elementwise_affine, bias)

    def forward(self, x):
        """Normalise over the trailing dims."""
        return F.dist_layer_norm(x, self.P, self.shape, self.weight, self.bias, self.eps, params="invariant")


class RMSNorm(LayerNorm):
    """:func:`distdl.functional.dist_rms_norm`; ``normalized_shape`` is global."""

    def __init__(self, P, normalized_shape, eps=None, elementwise_affine=True, device=None, dtype=None):
        super().__init__(P, normalized_shape, eps, elementwise_affine, False, device, dtype)

    def forward(self, x):
        """Divide by the root mean square over the trailing dims."""
        return F.dist_rms_norm(x, self.P, self.shape, self.weight, self.eps, params="invariant")


class GroupNorm(_Norm):
    """:func:`distdl.functional.dist_group_norm`."""

    def __init__(self, P, num_groups, num_channels, eps=1e-5, affine=True, device=None, dtype=None, *, bias=True):
        super().__init__(P, device, dtype)
        self.groups, self.eps = plain(num_groups, "num_groups", "GroupNorm"), eps
        self._affine((num_channels,), (1,), affine, bias)

    def forward(self, x):
        """Normalise each group of channels."""
        return F.dist_group_norm(x, self.P, self.groups, self.weight, self.bias, self.eps, params="invariant")


class InstanceNorm(_Norm):
    """:func:`distdl.functional.dist_instance_norm`."""

    def __init__(self, P, num_features, eps=1e-5, affine=False, device=None, dtype=None, *, bias=True):
        super().__init__(P, device, dtype)
        self.eps = eps
        self._affine((num_features,), (1,), affine, bias)

    def forward(self, x):
        """Normalise each channel of each example."""
        return F.dist_instance_norm(x, self.P, self.weight, self.bias, self.eps, params="invariant")


class Embedding(Layer):
    """:func:`distdl.functional.dist_embedding`: ``P`` is (*dims of idx, vocabulary, embedding); takes its keyword
    arguments."""

    def __init__(self, P, num_embeddings, embedding_dim, padding_idx=None, device=None, dtype=None, **options):
        super().__init__(P, device, dtype)
        n, padding_idx = partition_of(P).ndim, plain(padding_idx, "padding_idx", "Embedding")
        self.options = dict(options, padding_idx=padding_idx, num_embeddings=num_embeddings)
        draw = functools.partial(_rows, padding_idx=padding_idx)
        self._parameter("weight", (num_embeddings, embedding_dim), (n - 2, n - 1), draw)

    def forward(self, idx):
        """The rows of ``idx``."""
        return F.dist_embedding(idx, self.weight, self.P, params="invariant", **self.options)


def _rows(layout, seed, padding_idx, **kind):
    block = init.normal(layout, seed, **kind)
    if padding_idx is not None:
        row, (first, last) = padding_idx % layout.shape[0], layout.box()[0]
        if first <= row < last:
            block[row - first] = 0
    return block


class Dropout(Checked, torch.nn.Module):
    """:func:`distdl.functional.dist_dropout`: the same global mask on any partition, another one at each call.

    Calls are counted, so every rank must call it equally often; the seed comes from torch's generator. A call that a
    checkpoint runs again has its first mask again. Under vmap ``randomness`` decides, as it does for torch's: "same" is
    one mask for all examples, "different" one for each, and "error" an error.

    Raises:
        DistdlError: a call in backward that is no repetition of one in forward (a checkpoint with
            preserve_rng_state=False).
    """

    function = staticmethod(F.dist_dropout)

    def __init__(self, P, p=0.5):
        super().__init__()
        self.P, self.p, self._seed, self._calls = P, p, agreed_seed(P), random.Calls()

    @property
    def calls(self) -> int:
        """The number of calls so far; with the seed it is all that a checkpoint file must remember."""
        return self._calls.count

    @calls.setter
    def calls(self, count):
        self._calls.count = count

    def forward(self, x):
        """Drop elements in training; x itself in evaluation."""
        if not self.training:
            return x
        call = self._calls.next(type(self).__name__)
        return type(self).function(x, self.P, self.p, F.fold_in(self._seed, call, *random.examples(x.device)))

    def extra_repr(self):
        return f"{str(self.P).splitlines()[0]}, p={self.p}"


class FeatureDropout(Dropout):
    """:func:`distdl.functional.dist_feature_dropout`: torch.nn.Dropout1d/2d/3d."""

    function = staticmethod(F.dist_feature_dropout)
