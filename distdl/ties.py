"""Dependence without a value: placeholders and outputs that stay part of the graph, so that every rank's backward
comes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ._torch import opaque
from .errors import ShapeError


def _flat(t: torch.Tensor) -> torch.Tensor:
    """``t`` in one dim; not ``reshape(-1)``, which cannot tell the size inside a vmap over nothing."""
    return t.reshape(t.numel())


def is_smooth(t: Any) -> bool:
    """Whether ``t`` is a tensor that can have a gradient."""
    return isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex())


def _check(tensors: Iterable[Any]) -> None:
    for t in tensors:
        if not isinstance(t, torch.Tensor):
            raise ShapeError(
                "not a tensor",
                expected="tensors",
                actual=type(t).__name__,
                next_step="pass tensors only; a pytree leaf by leaf",
            )


def _hooks(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Empty views of the differentiable ones among ``tensors``, of two dims: torch.cat's gradient for an empty tensor
    of one dim is a constant, which would cut it off in the second derivative."""
    for t in tensors:
        if t.is_complex():
            t = torch.view_as_real(t.resolve_conj())
        if t.is_floating_point():
            yield _flat(t)[:0].unsqueeze(1)


@opaque
def nothing(shape: Sequence[int], *tensors: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor without elements that depends on ``tensors``: a placeholder that stays part of the graph.

    Args:
        shape: its shape; one size at least must be 0. ``F.nothing((0,), y).sum()`` is a rank's connected zero loss.
        tensors: what it depends on; the first gives dtype and device.
        dtype: another dtype.

    Raises:
        ShapeError: the shape has elements.

    No messages.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> F.nothing((0,), x).sum().backward()  # a rank's connected zero loss
        >>> x.grad
        tensor([0., 0.])
    """
    sizes = tuple(shape) if hasattr(shape, "__iter__") else ()
    if 0 not in sizes:
        raise ShapeError(
            "this shape has elements",
            expected="a size 0",
            actual=shape,
            next_step="give a shape with a 0 in it, such as (0,)",
        )
    if not tensors:
        raise ShapeError(
            "a placeholder of what?",
            expected="at least one tensor",
            actual="none",
            next_step="F.nothing(shape, x): it gets dtype and device of x, and depends on it",
        )
    _check(tensors)
    first, *others = tensors
    empty = tie(_flat(first)[:0], *others)
    return (empty if dtype is None else empty.to(dtype)).reshape(sizes)


@opaque
def tie(value: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
    """``value``, made to depend on ``tensors`` without changing, not even where they hold NaN.

    For outputs that this rank, or only some ranks, do not use: the peers of an operator whose output is dropped wait
    for a backward that never comes. ``F.tie(loss, unused)`` makes it come, with cotangent zero.

    Raises:
        ShapeError: one of them is no tensor. No messages, forward or backward.

    Example:
        >>> unused = torch.tensor(float("nan"), requires_grad=True)
        >>> F.tie(torch.tensor(3.0), unused).item()
        3.0
    """
    _check((value, *tensors))
    hooks = [h.to(value.device, value.dtype) for h in _hooks(tensors)]
    return torch.cat([_flat(value).unsqueeze(1), *hooks]).reshape(value.shape) if hooks else value
