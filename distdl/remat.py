"""Activation checkpointing of distributed functions: less memory for the same movements, twice."""

from __future__ import annotations

import functools

import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from . import _torch
from .errors import DistdlError
from .ties import nothing, tie

__all__ = ["remat"]


def _smooth(tree):
    """The differentiable tensors among the leaves of a pytree."""
    leaves = _torch.flatten(tree)[0]
    return [t for t in leaves if isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex())]


def _anchored(f):
    """``f``, whose outputs save something for backward whatever f does: ``exp`` of an empty tensor, tied to each.

    torch recomputes a checkpointed region when a tensor that it saved is asked for. A rank whose part saves nothing (an empty
    block, a linear function) would never recompute, while its peers do and wait for its messages. The anchor is asked for first
    of all, so that every rank recomputes at the same point of its backward.
    """

    def run(*args, **kwargs):
        leaves, tree = _torch.flatten(f(*args, **kwargs))
        smooth = _smooth(leaves) + _smooth((args, kwargs))
        outs = []
        for y in leaves:
            if isinstance(y, torch.Tensor) and (y.is_floating_point() or y.is_complex()):
                hooks = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (y, *smooth)]
                y = tie(y, nothing((0,), *hooks).float().exp())
            outs.append(y)
        return _torch.unflatten(outs, tree)

    return run


def remat(f):
    """``f``, whose intermediate results are not kept but worked out again in backward, movements included.

    As ``torch.utils.checkpoint`` with ``use_reentrant=False``, made safe for functions that send messages: the whole region is
    run again, on every rank, at the same point of backward, also where a rank's part saves nothing. The random state is kept.

    Args:
        f: a function of tensors (any pytrees) or a module. Every rank of its movements calls it.

    Returns:
        A function of the same arguments. Its results are f's (a copy of each); backward, of any order, sends f's forward
        messages once more before its backward ones. Where no gradient is recorded it is f.

    Raises:
        DistdlError: inside a torch.func transform, which torch cannot checkpoint: call f itself there.
    """
    anchored = _anchored(f)

    @functools.wraps(f, updated=())
    def call(*args, **kwargs):
        if _torch.transforms_active():
            raise DistdlError("activation checkpointing works on .backward(), not inside torch.func", op="remat",
                              expected="eager mode", actual="a torch.func transform",
                              next_step="call the function itself inside grad, vjp, jvp and vmap")
        if not torch.is_grad_enabled():
            return f(*args, **kwargs)
        with set_checkpoint_early_stop(False):
            return checkpoint(anchored, *args, use_reentrant=False, **kwargs)

    return call
