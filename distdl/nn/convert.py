"""Turn a serial torch model into its distributed twin, and ask whose twin a module is."""

from __future__ import annotations

import copy

import torch
from torch.nn.utils.parametrize import is_parametrized

from .._arguments import checked
from ..agree import partition_of
from ..errors import PartitionError
from . import layers, losses

nn = torch.nn


def _conv(m):
    w = m.weight  # its shape, not in_channels and so on, is what torch's forward goes by
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


def _conv_transpose(m):
    w = m.weight
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


def _same(*names):
    """The options of torch's module that have these names."""
    return lambda m: {name: getattr(m, name) for name in names if hasattr(m, name)}


_POOL = "kernel_size", "stride", "padding", "ceil_mode"
# torch's class without the number of dims -> (ours, the options that are not tensors)
_KINDS = {
    "Conv": ("Conv", _conv), "ConvTranspose": ("ConvTranspose", _conv_transpose),
    "MaxPool": ("MaxPool", _same(*_POOL, "dilation", "return_indices")),
    "AvgPool": ("AvgPool", _same(*_POOL, "count_include_pad", "divisor_override")),
    "AdaptiveMaxPool": ("AdaptiveMaxPool", _same("output_size", "return_indices")),
    "AdaptiveAvgPool": ("AdaptiveAvgPool", _same("output_size")),
    "BatchNorm": ("BatchNorm", _same("num_features", "eps", "momentum")),
    "InstanceNorm": ("InstanceNorm", _same("num_features", "eps")), "Dropout": ("FeatureDropout", _same("p")),
}  # fmt: skip
_UPSAMPLE = "Upsample", _same("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor")
# torch's class -> (ours, options, spatial dims where it has a number of them)
_OURS = {
    getattr(nn, f"{name}{n}d"): (getattr(layers, ours, None) or getattr(layers, f"{ours}{n}d"), options, n)
    for name, (ours, options) in _KINDS.items()
    for n in (1, 2, 3)
}
_OURS |= {
    kind: (getattr(layers, ours), options, None)
    for kind, (ours, options) in {
        nn.GroupNorm: ("GroupNorm", _same("num_groups", "num_channels", "eps")),
        nn.Dropout: ("Dropout", _same("p")),
        nn.Upsample: _UPSAMPLE,
        nn.UpsamplingNearest2d: _UPSAMPLE,
        nn.UpsamplingBilinear2d: _UPSAMPLE,
    }.items()
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
_CONTAINERS = {nn.ModuleDict, nn.ModuleList, nn.Sequential}
_OF_MODULES = vars(nn.Module()).keys() - {"_parameters", "_buffers"}
_OF_BOTH = {
    "affine",
    "eps",
    "momentum",
    "p",
    "track_running_stats",
}  # attributes that mean the same in torch's module and in ours


@checked
def convert(module, P, *, containers=()):
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
            read.

    Raises:
        PartitionError: split channels; a module that has no twin over this partition (Linear, LayerNorm, flattening, a
            subclass, a lazy, parametrized or pruned layer, ...), or one that is reached through a plain list.
    """
    P = partition_of(P, "convert")
    if P.ndim < 2 or P.shape[1] != 1:
        raise PartitionError(
            "convert keeps channels whole",
            op="convert",
            partitions=P,
            expected="(batch, 1, *space)",
            actual=P.shape,
            next_step="use 1 for the channel dim, or build the layers of dd.nn by hand",
        )
    found = {id(m): (name, m) for name, m in module.named_modules()}
    for name, m in found.values():
        fault = _fault(m, P, set(containers))
        if fault is not None:
            raise PartitionError(
                f"{name or 'the model'} ({type(m).__name__}) has no twin over this partition: {fault[0]}",
                op="convert",
                partitions=P,
                expected="a layer of a convolutional network",
                actual=repr(m),
                next_step=fault[1],
            )
    memo: dict = {}  # what deepcopy takes instead of copying: the twins and their tensors
    try:
        twins = [(m, _twin(m, P, memo)) for _, m in found.values() if type(m) in _OURS]
        memo |= {id(m): twin for m, twin in twins}
        for m, twin in twins:
            _dress(twin, m, memo)
        copied = copy.deepcopy(module, memo)
    except (TypeError, RuntimeError) as error:
        raise PartitionError(
            f"an attribute cannot be copied ({error})",
            op="convert",
            partitions=P,
            expected="what deepcopy takes",
            actual=type(module).__name__,
            next_step="take it off the model, and put it on the twin",
        ) from error
    stray = next((m for key, m in memo.items() if isinstance(m, nn.Module) and key not in found), None)
    if stray is not None:
        raise PartitionError(
            "a module is reached, but not registered",
            op="convert",
            partitions=P,
            actual=repr(stray),
            expected="modules as attributes, or in a ModuleList or ModuleDict",
            next_step="put it into a ModuleList or ModuleDict instead of a list or dict",
        )
    return copied


def _fault(m, P, containers):
    """Why ``m`` has no twin and what to do, or ``None``."""
    kind, by_hand = type(m), "build this part by hand"
    if is_parametrized(m):
        return "it is parametrized", (
            "torch.nn.utils.parametrize.remove_parametrizations first, and register them on the twin, "
            "whose parameters are whole too"
        )
    if isinstance(m, nn.modules.lazy.LazyModuleMixin):
        return "its parameters are not there yet", "call the serial model once before"
    own = any(t is not None for t in (*m._parameters.values(), *m._buffers.values()))
    if kind in containers or kind in _CONTAINERS:
        if own:
            return "it has tensors of its own, and its forward is not read", by_hand
    elif kind not in _OURS and kind not in _ELEMENTWISE:
        base = next((c.__name__ for c in kind.__mro__ if c in _OURS or c in _ELEMENTWISE or c in _CONTAINERS), None)
        return (
            ("it is none that convert knows", by_hand)
            if base is None
            else (
                f"it is a subclass of {base}, whose forward may be another",
                f"use {base} itself, or name the class in containers= if its forward works on single "
                "elements or along channels only",
            )
        )
    if "forward" in vars(m) and kind not in containers:
        return "its forward was replaced", f"take the module's own forward away, or {by_hand}"
    return _fault_of_ours(m, P) if kind in _OURS else None


def _fault_of_ours(m, P):
    n, name, by_hand = _OURS[type(m)][2], type(m).__name__, "build this part by hand"
    if n is not None and P.ndim != n + 2 and not (P.ndim == 2 and name == "BatchNorm1d"):
        return f"it has {n} spatial dims, the partition {P.ndim - 2}", f"pass a partition of {n + 2} dims"
    if issubclass(_OURS[type(m)][0], layers.Layer):
        if not {"weight", "bias"} <= m._parameters.keys():
            return "its weight or bias is no parameter, but worked out of others", (
                "undo it first (torch.nn.utils.remove_weight_norm, prune.remove and the like)"
            )
        odd = [type(t).__name__ for t in m._parameters.values() if t is not None and type(t) is not nn.Parameter]
        if odd:
            return f"a parameter is a {odd[0]}", by_hand
    if name.startswith("InstanceNorm") and (m.track_running_stats or m.running_mean is not None):
        return "it keeps running statistics", "use track_running_stats=False"
    if getattr(m, "inplace", False):
        return "it works in place", "set inplace=False: no function of distdl changes its input"
    return None


def _twin(m, P, memo):
    """The twin with copies of the tensors of ``m``: those that are in ``memo`` already, where it shares them."""
    kind, options, _ = _OURS[type(m)]
    given, held = options(m), m._parameters | m._buffers
    if issubclass(kind, layers.Layer):
        weight, bias = (held[name] is not None for name in ("weight", "bias"))
        given |= {"bias": bias} | ({} if "kernel_size" in given else {"affine": weight or bias})
        given["device"] = next((t.device for t in held.values() if t is not None), None)
    if kind is layers.BatchNorm:
        given["track_running_stats"] = m.running_mean is not None
    twin = kind(P, **given)
    for name, t in m._parameters.items():
        twin._parameters[name] = _parameter(t, twin._parameters.get(name), memo)
    twin._buffers |= copy.deepcopy(m._buffers, memo)
    return twin


def _parameter(t, own, memo):
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


def _dress(twin, m, memo):
    """Give the twin all else that ``m`` has: hooks, flags, children and attributes."""
    clash = (vars(twin).keys() - vars(nn.Module()).keys() - _OF_BOTH) & vars(m).keys()
    if clash:
        raise PartitionError(
            "an attribute has the name of one of the twin's own",
            op="convert",
            partitions=twin.P,
            actual=clash,
            expected="other names",
            next_step="rename it",
        )
    vars(twin).update(
        copy.deepcopy({k: v for k, v in vars(m).items() if k in _OF_MODULES or k not in vars(nn.Module())}, memo)
    )


def stands_for(module, classes) -> bool:
    """``isinstance(module, classes)``, where a module of ``dd.nn`` is also an instance of torch's classes whose twin it
    is.

    For programs that pick layers by torch's classes (which to freeze, to regularise, to quantise): ``dd.nn.Conv2d`` is
    a twin of ``torch.nn.Conv2d``, ``dd.nn.BatchNorm`` of all three of torch's, ``dd.nn.FeatureDropout`` of
    ``torch.nn.Dropout1d/2d/3d``.

    Args:
        classes: a class, or a tuple of classes, as for ``isinstance``.
    """
    if isinstance(module, classes):
        return True
    own = next((c for c in type(module).__mro__ if c.__module__ in (layers.__name__, losses.__name__)), None)
    twins = [serial for serial, (ours, *_) in _OURS.items() if ours is own]
    twins += [getattr(nn, own.__name__)] if own is not None and hasattr(nn, own.__name__) else []
    return any(issubclass(c, classes) for c in twins)
