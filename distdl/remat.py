"""Activation checkpointing of distributed functions: less memory for the same movements, twice."""

from __future__ import annotations

import functools

import torch
from torch.utils.checkpoint import checkpoint

from . import _torch
from .engine import transport
from .errors import DistdlError
from .ties import is_smooth, nothing, tie

__all__ = ["remat"]


def _smooth(tree):
    """The differentiable tensors among the leaves of a pytree."""
    return [t for t in _torch.flatten(tree)[0] if is_smooth(t)]


def _empty(*tensors):
    """Of real numbers, and dependent on the tensors."""
    hooks = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
    return nothing((0,), *hooks).float()


def _asking(anchor, empty):
    """``exp`` of ``empty`` that saves nothing in the region: where backward comes to it, it asks for what ``anchor`` saved."""
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda saved: (anchor.grad_fn._saved_result, saved)[1]):
        return empty.exp()


def _anchored(f, begin):
    """``f(*begin(*args))``, its outputs tied to an anchor, ``exp`` of an empty tensor, so that every rank recomputes.

    torch recomputes a checkpointed region when a tensor that it saved is asked for, up to the last one that it saved. A rank whose
    part saves nothing (an empty block, a linear function) would never recompute, while its peers do and wait for its messages.
    So something is saved after the last message: right after ``begin`` where f moves nothing, else behind f. Backward asks for it
    behind f in either case: hooks on tensors inside f (a GradientSync's) may send messages too.
    """
    moves = None  # whether f does, as the first run found out

    def run(*args, **kwargs):
        nonlocal moves
        smooth = _smooth((args, kwargs))
        if begin is not None:
            args = begin(*args)
        empty = _empty(*smooth) if any(t.requires_grad for t in smooth) else None
        anchor = None if empty is None else empty.exp()
        before = transport.begun
        leaves, tree = _torch.flatten(f(*args, **kwargs))
        if moves is None:
            moves = transport.begun != before
        if made := _smooth(leaves):
            anchor = _empty(*made, *smooth).exp() if moves or anchor is None else _asking(anchor, empty)
        return _torch.unflatten([tie(y, anchor) if is_smooth(y) else y for y in leaves], tree)

    return run


def remat(f, *, begin=None):
    """``f``, whose intermediate results are not kept but worked out again in backward, movements included.

    As ``torch.utils.checkpoint`` with ``use_reentrant=False``, made safe for functions that send messages: all of them are sent
    again, by every rank, at the same point of backward, also where a rank's part saves nothing. Where f sends none (all are sent in
    ``begin``), local work of which backward needs nothing is left out. The random state is kept.

    Args:
        f: a function of tensors (any pytrees) or a module. Every rank of its movements calls it.
        begin: work that belongs to f, and is run again with it: f gets the tuple that it makes of the positional arguments. Where
            all messages are sent in there (parameters gathered, say), local work at the end of f need not be done again.

    Returns:
        A function of the same arguments. Its results are f's (a copy of each); backward, of any order, sends f's forward
        messages once more before its backward ones. Where no gradient is recorded it is f.

    Raises:
        DistdlError: inside a torch.func transform, which torch cannot checkpoint: call f itself there.
    """

    @functools.wraps(f, updated=())
    def call(*args, **kwargs):
        if _torch.transforms_active():
            raise DistdlError("activation checkpointing works on .backward(), not inside torch.func", op="remat",
                              expected="eager mode", actual="a torch.func transform",
                              next_step="call the function itself inside grad, vjp, jvp and vmap")
        if not torch.is_grad_enabled():
            return f(*(args if begin is None else begin(*args)), **kwargs)
        return checkpoint(_anchored(f, begin), *args, use_reentrant=False, **kwargs)

    return call
