"""Turn a serial torch model into its distributed twin, and ask whose twin a module is."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn.utils.parametrize import is_parametrized

from .._arguments import checked
from .._types import Place
from ..errors import PartitionError
from ..partition import Partition, partition_of
from .conv import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from .dropout import Dropout, FeatureDropout
from .function import Upsample
from .layer import Layer
from .norm import BatchNorm, GroupNorm, InstanceNorm
from .pool import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveAvgPool3d,
    AdaptiveMaxPool1d,
    AdaptiveMaxPool2d,
    AdaptiveMaxPool3d,
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
)

__all__ = ["convert", "stands_for"]
nn = torch.nn
M = TypeVar("M", bound=torch.nn.Module)


Options = Callable[[Any], dict[str, Any]]


def _conv(m: torch.nn.Module) -> dict[str, Any]:
    w: Any = m.weight  # its shape, not in_channels and so on, is what torch's forward goes by
    return {
        "in_channels": w.shape[1] * m.groups,
        "out_channels": w.shape[0],
        "kernel_size": tuple(w.shape[2:]),
        "stride": m.stride,
        "padding": m.padding,
        "dilation": m.dilation,
        "groups": m.groups,
        "padding_mode": m.padding_mode,
    }


def _conv_transpose(m: torch.nn.Module) -> dict[str, Any]:
    w: Any = m.weight
    return {
        "in_channels": w.shape[0],
        "out_channels": w.shape[1] * m.groups,
        "kernel_size": tuple(w.shape[2:]),
        "stride": m.stride,
        "padding": m.padding,
        "output_padding": m.output_padding,
        "groups": m.groups,
        "dilation": m.dilation,
    }


def _same(*names: str) -> Options:
    """The options of torch's module that have these names."""
    return lambda m: {name: getattr(m, name) for name in names if hasattr(m, name)}


_MAX_POOL = _same("kernel_size", "stride", "padding", "ceil_mode", "dilation", "return_indices")
_AVG_POOL = _same("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
_BATCH_NORM = _same("num_features", "eps", "momentum")
_INSTANCE_NORM = _same("num_features", "eps")
_UPSAMPLE = _same("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor")
# torch's class -> (ours, its options that are not tensors, spatial dims where it has a number of them)
_OURS: dict[type[torch.nn.Module], tuple[type[torch.nn.Module], Options, int | None]] = {
    nn.Conv1d: (Conv1d, _conv, 1),
    nn.Conv2d: (Conv2d, _conv, 2),
    nn.Conv3d: (Conv3d, _conv, 3),
    nn.ConvTranspose1d: (ConvTranspose1d, _conv_transpose, 1),
    nn.ConvTranspose2d: (ConvTranspose2d, _conv_transpose, 2),
    nn.ConvTranspose3d: (ConvTranspose3d, _conv_transpose, 3),
    nn.MaxPool1d: (MaxPool1d, _MAX_POOL, 1),
    nn.MaxPool2d: (MaxPool2d, _MAX_POOL, 2),
    nn.MaxPool3d: (MaxPool3d, _MAX_POOL, 3),
    nn.AvgPool1d: (AvgPool1d, _AVG_POOL, 1),
    nn.AvgPool2d: (AvgPool2d, _AVG_POOL, 2),
    nn.AvgPool3d: (AvgPool3d, _AVG_POOL, 3),
    nn.AdaptiveMaxPool1d: (AdaptiveMaxPool1d, _same("output_size", "return_indices"), 1),
    nn.AdaptiveMaxPool2d: (AdaptiveMaxPool2d, _same("output_size", "return_indices"), 2),
    nn.AdaptiveMaxPool3d: (AdaptiveMaxPool3d, _same("output_size", "return_indices"), 3),
    nn.AdaptiveAvgPool1d: (AdaptiveAvgPool1d, _same("output_size"), 1),
    nn.AdaptiveAvgPool2d: (AdaptiveAvgPool2d, _same("output_size"), 2),
    nn.AdaptiveAvgPool3d: (AdaptiveAvgPool3d, _same("output_size"), 3),
    nn.BatchNorm1d: (BatchNorm, _BATCH_NORM, 1),
    nn.BatchNorm2d: (BatchNorm, _BATCH_NORM, 2),
    nn.BatchNorm3d: (BatchNorm, _BATCH_NORM, 3),
    nn.InstanceNorm1d: (InstanceNorm, _INSTANCE_NORM, 1),
    nn.InstanceNorm2d: (InstanceNorm, _INSTANCE_NORM, 2),
    nn.InstanceNorm3d: (InstanceNorm, _INSTANCE_NORM, 3),
    nn.Dropout1d: (FeatureDropout, _same("p"), 1),
    nn.Dropout2d: (FeatureDropout, _same("p"), 2),
    nn.Dropout3d: (FeatureDropout, _same("p"), 3),
    nn.GroupNorm: (GroupNorm, _same("num_groups", "num_channels", "eps"), None),
    nn.Dropout: (Dropout, _same("p"), None),
    nn.Upsample: (Upsample, _UPSAMPLE, None),
    nn.UpsamplingNearest2d: (Upsample, _UPSAMPLE, None),
    nn.UpsamplingBilinear2d: (Upsample, _UPSAMPLE, None),
}
# Their forward is a function of each element alone.
_ELEMENTWISE = {
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardshrink,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Identity,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softshrink,
    nn.Softsign,
    nn.Tanh,
    nn.Tanhshrink,
    nn.Threshold,
}
# What a container's own code calls for its neighbours' elements, mostly: then its blocks are not those of the whole.
_READ_ACROSS = {"avg_pool", "conv", "conv_transpose", "adaptive_avg_pool", "adaptive_max_pool", "max_pool"}
_READ_ACROSS = {f"{name}{n}d" for name in _READ_ACROSS for n in (1, 2, 3)}
_READ_ACROSS |= {"batch_norm", "fold", "grid_sample", "group_norm", "instance_norm", "interpolate", "pad", "unfold"}
_CONTAINERS = {nn.ModuleDict, nn.ModuleList, nn.Sequential}
_OF_MODULES = vars(nn.Module()).keys() - {"_parameters", "_buffers"}
# Attributes that mean the same in torch's module and in ours.
_OF_BOTH = {"affine", "eps", "momentum", "p", "track_running_stats"}


@checked
def convert(
    module: M,
    P: Place,
    *,
    containers: Iterable[type[torch.nn.Module]] = (),
    twins: Mapping[type[torch.nn.Module], Callable[[Any, Any], torch.nn.Module]] | None = None,
) -> M:
    """The twin of a convolutional network whose tensors are split over ``P`` = (batch, 1, *space): a copy, with its
    weights.

    Convolutions, pooling, batch, group and instance norms, upsampling and dropout become this package's; modules that
    act on each element alone stay as they are, and Sequential, ModuleList and ModuleDict are converted inside. Weights
    are whole on every rank. A class counts, not its subclasses, whose forward may be another.

    All else is as :func:`copy.deepcopy` would leave it: one module used twice is one twin used twice, a tied weight one
    parameter; ``requires_grad``, ``training``, dtypes, devices, attributes and hooks of modules and parameters are
    kept, and nothing is shared with ``module``. A twin has the serial module's options as attributes to read; what it
    computes they no longer change. Hooks are called with this rank's blocks. Gradients are not copied.

    Args:
        containers: your own module classes to convert inside; you promise that their ``forward`` combines children's
            results element by element or along channels only (a residual block, a U-Net's concatenation). It is not
            read; a warning says where its class calls a function of torch that reads across elements.
        twins: {class: function}: your own layers. ``function(layer, P)`` gives the twin of a layer of just this class,
            which stands for it and all that is below it; a parameter that it shares with other layers is no longer
            shared then.

    Raises:
        PartitionError: split channels; a module that has no twin over this partition (Linear, LayerNorm, flattening, a
            subclass, a lazy, parametrized or pruned layer, ...), or one that is reached through a plain list; a twin
            that is no module.

    Messages: a small all-gather of a seed for each layer with parameters; values are cut from the serial module's.
    What the functions in ``twins`` send comes on top.

    Example:
        >>> net = dd.nn.convert(torch.nn.Sequential(torch.nn.Conv1d(2, 4, 3)), dd.Partition((1, 1, 1)))
        >>> net(torch.ones(1, 2, 8)).shape
        torch.Size([1, 4, 6])
    """
    grid = partition_of(P)
    if grid.ndim < 2 or grid.shape[1] != 1:
        raise PartitionError(
            "convert keeps channels whole",
            expected="(batch, 1, *space)",
            actual=grid.shape,
            next_step="use 1 for the channel dim, or build the layers of dd.nn by hand",
        )
    twins = twins or {}
    modules = {id(m): (name, m) for name, m in _registered(module, twins)}
    own = {id(m): m for _, m in modules.values() if type(m) in twins}
    for name, m in modules.values():
        if id(m) in own:
            continue
        fault = _fault(m, grid, set(containers))
        if fault is not None:
            raise PartitionError(
                f"{name or 'the model'} ({type(m).__name__}) has no twin over this partition: {fault.problem}",
                expected="a layer of a convolutional network",
                actual=_named(m),
                next_step=fault.next_step,
            )
        _warn(m)
    # What deepcopy takes instead of copying: the twins and their tensors.
    memo: dict[int, Any] = {key: _own_twin(m, P, twins) for key, m in own.items()}
    try:
        made = [(m, _twin(m, grid, memo)) for key, (_, m) in modules.items() if type(m) in _OURS and key not in own]
        memo |= {id(m): twin for m, twin in made}
        for m, twin in made:
            _dress(twin, m, memo)
        copied = copy.deepcopy(module, memo)
    except (TypeError, RuntimeError) as error:
        raise PartitionError(
            f"an attribute cannot be copied ({error})",
            expected="what deepcopy takes",
            actual=type(module).__name__,
            next_step="take it off the model, and put it on the twin",
        ) from error
    stray = next((m for key, m in memo.items() if isinstance(m, nn.Module) and key not in modules), None)
    if stray is not None:
        raise PartitionError(
            "a module is reached, but not registered",
            actual=repr(stray),
            expected="modules as attributes, or in a ModuleList or ModuleDict",
            next_step="put it into a ModuleList or ModuleDict instead of a list or dict",
        )
    return copied


def _registered(module: torch.nn.Module, twins: Iterable[type]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules and their names; what lies below one that has a twin of the user's is that twin's matter."""
    seen, waiting = set(), [("", module)]
    while waiting:
        name, m = waiting.pop(0)
        if id(m) in seen:
            continue
        seen.add(id(m))
        yield name, m
        if type(m) not in twins:
            children = [(f"{name}.{k}".lstrip("."), c) for k, c in m._modules.items() if c is not None]
            waiting[:0] = children


def _names_in(code: CodeType) -> set[str]:
    """What a function's code names, and what functions inside it do."""
    return {*code.co_names}.union(*(_names_in(c) for c in code.co_consts if isinstance(c, CodeType)))


def _warn(m: torch.nn.Module) -> None:
    """Warn where a class of the user's calls what reads across elements, under torch's name for it."""
    kinds = [c for c in type(m).__mro__ if not c.__module__.startswith(("torch.", "distdl."))]
    methods = {name: f for c in reversed(kinds) for name, f in vars(c).items()}  # not those that a subclass replaces
    functions = filter(inspect.isfunction, methods.values())
    named = set().union(*(_names_in(f.__code__) for f in functions))
    called = {name for name in named & _READ_ACROSS if not hasattr(m, name)}
    if called:
        warnings.warn(
            f"convert: {type(m).__name__} is named in containers=, and calls {', '.join(sorted(called))} itself: on "
            "blocks that is right along whole dims only (channels). Where it works on space, make it a module of its "
            "own, and name that in twins=",
            stacklevel=4,
        )


def _own_twin(m: torch.nn.Module, P: Place, twins: Mapping[type[torch.nn.Module], Any]) -> torch.nn.Module:
    twin = twins[type(m)](m, P)
    if not isinstance(twin, nn.Module):
        raise PartitionError(
            f"what twins= gives for {type(m).__name__} is no module",
            expected="a torch.nn.Module",
            actual=type(twin).__name__,
            next_step="return the layer that stands for it over P",
        )
    return twin


def _named(m: torch.nn.Module) -> str:
    """A layer as it prints itself; of a module with children, which may be a whole model, its class."""
    return f"a {type(m).__module__}.{type(m).__qualname__}" if m._modules else repr(m)


class _Fault(NamedTuple):
    """Why a module has no twin, and what to do."""

    problem: str
    next_step: str


_BY_HAND = "build this part by hand, and name what makes it in twins="
_NAME_IT = "if its forward combines children's results element by element or along channels only, containers="
_WORKED_OUT = "undo it first (torch.nn.utils.remove_weight_norm, prune.remove and the like)"


def _fault(m: torch.nn.Module, P: Partition, containers: set[type[torch.nn.Module]]) -> _Fault | None:
    return next(_faults(m, P, containers), None)


def _faults(m: torch.nn.Module, P: Partition, containers: set[type[torch.nn.Module]]) -> Iterator[_Fault]:
    kind = type(m)
    if is_parametrized(m):
        first = "torch.nn.utils.parametrize.remove_parametrizations first"
        yield _Fault("it is parametrized", f"{first}, and register them on the twin, whose parameters are whole too")
    if isinstance(m, nn.modules.lazy.LazyModuleMixin):
        yield _Fault("its parameters are not there yet", "call the serial model once before")
    if kind in containers or kind in _CONTAINERS:
        if any(t is not None for t in (*m._parameters.values(), *m._buffers.values())):
            yield _Fault("it has tensors of its own, and its forward is not read", _BY_HAND)
    elif kind not in _OURS and kind not in _ELEMENTWISE:
        base = next((c.__name__ for c in kind.__mro__ if c in _OURS or c in _ELEMENTWISE or c in _CONTAINERS), None)
        if base is None:
            name_it = f"{_NAME_IT}[{kind.__name__}]; else " if m._modules else ""
            yield _Fault("it is none that convert knows", name_it + _BY_HAND)
        else:
            yield _Fault(
                f"it is a subclass of {base}, whose forward may be another",
                f"use {base} itself, or name the class in containers= if its forward works on single "
                "elements or along channels only",
            )
    if "forward" in vars(m) and kind not in containers:
        yield _Fault("its forward was replaced", f"take the module's own forward away, or {_BY_HAND}")
    if kind in _OURS:
        yield from _faults_of_ours(m, P)


def _faults_of_ours(m: torch.nn.Module, P: Partition) -> Iterator[_Fault]:
    ours, _, n = _OURS[type(m)]
    name = type(m).__name__
    if n is not None and P.ndim != n + 2 and not (P.ndim == 2 and name == "BatchNorm1d"):
        yield _Fault(f"it has {n} spatial dims, the partition {P.ndim - 2}", f"pass a partition of {n + 2} dims")
    if issubclass(ours, Layer):
        if not {"weight", "bias"} <= m._parameters.keys():
            yield _Fault("its weight or bias is no parameter, but worked out of others", _WORKED_OUT)
        for t in m._parameters.values():
            if t is not None and type(t) is not nn.Parameter:
                yield _Fault(f"a parameter is a {type(t).__name__}", _BY_HAND)
    if name.startswith("InstanceNorm") and (m.track_running_stats or m.running_mean is not None):
        yield _Fault("it keeps running statistics", "use track_running_stats=False")
    if getattr(m, "inplace", False):
        yield _Fault("it works in place", "set inplace=False: no function of distdl changes its input")


def _twin(m: torch.nn.Module, P: Partition, memo: dict[int, Any]) -> torch.nn.Module:
    """The twin with copies of the tensors of ``m``: those that are in ``memo`` already, where it shares them."""
    kind, options, _ = _OURS[type(m)]
    given, held = options(m), m._parameters | m._buffers
    if issubclass(kind, Layer):
        weight, bias = (held[name] is not None for name in ("weight", "bias"))
        given |= {"bias": bias} | ({} if "kernel_size" in given else {"affine": weight or bias})
        given["device"] = next((t.device for t in held.values() if t is not None), None)
    if kind is BatchNorm:
        given["track_running_stats"] = m.running_mean is not None
    twin = kind(P, **given)
    for name, t in m._parameters.items():
        twin._parameters[name] = _parameter(t, twin._parameters.get(name), memo)
    twin._buffers |= copy.deepcopy(m._buffers, memo)
    return twin


def _parameter(t: Any, own: Any, memo: dict[int, Any]) -> Any:
    """``own`` with the value, flag, attributes and hooks of ``t``; a copy of ``t``, where the twin has none of that
    name."""
    if t is None or own is None or id(t) in memo:
        return copy.deepcopy(t, memo)
    own.data = t.detach().clone()
    for hook in (t._backward_hooks or {}).values():
        own.register_hook(hook)
    for hook in (t._post_accumulate_grad_hooks or {}).values():
        own.register_post_accumulate_grad_hook(hook)
    vars(own).update(copy.deepcopy(vars(t), memo))
    memo[id(t)] = own.requires_grad_(t.requires_grad)
    return own


def _dress(twin: torch.nn.Module, m: torch.nn.Module, memo: dict[int, Any]) -> None:
    """Give the twin all else that ``m`` has: hooks, flags, children and attributes."""
    clash = (vars(twin).keys() - vars(nn.Module()).keys() - _OF_BOTH) & vars(m).keys()
    if clash:
        raise PartitionError(
            "an attribute has the name of one of the twin's own",
            actual=clash,
            expected="other names",
            next_step="rename it",
        )
    vars(twin).update(
        copy.deepcopy({k: v for k, v in vars(m).items() if k in _OF_MODULES or k not in vars(nn.Module())}, memo)
    )


def stands_for(module: torch.nn.Module, classes: type[torch.nn.Module] | tuple[type[torch.nn.Module], ...]) -> bool:
    """``isinstance(module, classes)``, where a module of ``dd.nn`` is also an instance of torch's classes whose twin it
    is.

    For programs that pick layers by torch's classes (which to freeze, to regularise, to quantise): ``dd.nn.Conv2d`` is
    a twin of ``torch.nn.Conv2d``, ``dd.nn.BatchNorm`` of all three of torch's, ``dd.nn.FeatureDropout`` of
    ``torch.nn.Dropout1d/2d/3d``.

    Args:
        classes: a class, or a tuple of classes, as for ``isinstance``.

    No messages, and no errors: what is no module stands for none.

    Example:
        >>> net = dd.nn.convert(torch.nn.Sequential(torch.nn.Conv1d(2, 4, 3)), dd.Partition((1, 1, 1)))
        >>> dd.nn.stands_for(net[0], torch.nn.Conv1d)
        True
    """
    if isinstance(module, classes):
        return True
    own = next((c for c in type(module).__mro__ if c.__module__.rpartition(".")[0] == __package__), None)
    twins = [serial for serial, (ours, *_) in _OURS.items() if ours is own]
    twins += [getattr(nn, own.__name__)] if own is not None and hasattr(nn, own.__name__) else []
    return any(issubclass(c, classes) for c in twins)
