"""Movements in two phases: begin one, work, and finish it."""

from __future__ import annotations

from typing import Any

import torch

from ..autograd import apply
from ..compiled import node, traced_as
from ..engine import dispatch
from ..engine import transport as traffic
from ..errors import PartitionError, ShapeError
from ..linear_map import LinearMap, Move
from .call import move


class _Pending:
    """What :func:`start` returns: a movement under way."""

    def __init__(self, A: Any, xs: list[Any], moving: Any) -> None:
        self.map, self.xs, self.moving = A, xs, moving


class _Moved:
    """The same in compiled code: the whole movement happens in :func:`start`."""

    def __init__(self, ys: Any) -> None:
        self.ys = ys


def _at_once(A: LinearMap | tuple[LinearMap, ...], x: Any) -> Any:
    if isinstance(A, tuple):
        return _all_of(A, [m.operand(one) for m, one in zip(A, x)])
    return A(x)


def _all_of(maps: tuple[LinearMap, ...], xs: list[Any]) -> list[Any]:
    if all(len(m.steps) == 1 and isinstance(m.steps[0], Move) for m in maps):
        return move(xs, maps)
    return [m(x) for m, x in zip(maps, xs)]


def start(A: LinearMap | tuple[LinearMap, ...], x: Any) -> _Pending:
    """Begin ``y = A(x)``; messages travel until :func:`wait`.

    Args:
        A: a map; or a tuple of maps of one kind over the same ranks, which go as one set of messages.
        x: this rank's tensor; or as many. Do not change them in between.

    Under torch.func, and for maps that are not a single plan, the whole movement happens in ``wait``; in compiled code
    in ``start``. Every rank must start and wait in the same order. On CUDA the adjoint overlaps too: in ``.backward()``
    it runs beside what stands between the two calls.

    Raises:
        ShapeError: an x that is not the map's; of ``wait`` something that was not started, or was waited for before.

    Example:
        >>> L = dd.Layout(dd.Partition((1,)), (3,))
        >>> pending = F.start(dd.maps.roll(L, 0, 1), torch.arange(3.0))  # work of your own may follow
        >>> F.wait(pending)
        tensor([2., 0., 1.])
    """
    maps, given = (A, tuple(x)) if isinstance(A, tuple) else ((A,), (x,))
    if not maps or len(given) != len(maps) or not all(isinstance(m, LinearMap) for m in maps):
        raise PartitionError(
            "not a linear map, or not one tensor for each",
            expected="one of dd.maps and a tensor, or a tuple of them and as many tensors",
            actual=(A, f"{len(given)} x"),
            next_step="F.start(dd.maps.repartition(L, M), x)",
        )
    moving, xs, steps = None, [m.operand(one) for m, one in zip(maps, given)], [step for m in maps for step in m.steps]
    if len(steps) == len(maps) and all(type(step) is Move and not step.is_identity for step in steps):
        moving, xs = dispatch.begin(steps, xs)
    return _Pending(A, xs, moving)


def wait(pending: _Pending) -> Any:
    """Finish what :func:`start` began, and return y; of a tuple of maps a list. Once only.

    Raises:
        ShapeError: an x that is not the map's; of ``wait`` something that was not started, or was waited for before.

    Example:
        >>> L = dd.Layout(dd.Partition((1,)), (3,))
        >>> F.wait(F.start(dd.maps.roll(L, 0, 1), torch.arange(3.0)))
        tensor([2., 0., 1.])
    """
    if isinstance(pending, _Moved):
        return pending.ys
    if not isinstance(pending, _Pending):
        raise ShapeError(
            "not a movement under way",
            expected="what F.start returned",
            actual=type(pending).__name__,
            next_step="y = F.wait(F.start(A, x))",
        )
    if pending.map is None:
        raise ShapeError(
            "this movement was already waited for",
            next_step="keep the result of the first wait",
            expected="a movement under way",
            actual="one that is finished",
        )
    A, pending.map = pending.map, None
    several, moving = isinstance(A, tuple), pending.moving
    maps = A if several else (A,)
    if moving is not None:
        traffic.begun += 1
        with moving.joining():
            ys = apply([m.steps[0] for m in maps], pending.xs, pending=moving)[: len(maps)]
    else:
        ys = _all_of(maps, pending.xs)
    return ys if several else ys[0]


_move = node(_at_once)


def _start_in_graph(A: Any, x: Any) -> _Moved:
    return _Moved(_move(A, x))


def _wait_in_graph(pending: Any) -> Any:
    if not isinstance(pending, _Moved):
        torch._dynamo.graph_break(msg="F.wait: this movement was not started in the same compiled function")
    return pending.ys


traced_as(start, _start_in_graph)
traced_as(wait, _wait_in_graph)
