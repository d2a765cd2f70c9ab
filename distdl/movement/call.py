"""What the movements share: rules that are cached, calls that find the map of every leaf, and the one landing.

A function of this package is ``return moved(*by_layout(...))``: find the map of each leaf, then move all of them as one
set of messages. Layouts and ``shape`` are taken as they are; a bare partition is negotiated (:mod:`distdl.agree`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, wraps
from operator import index as as_int
from typing import Any, ParamSpec, TypeVar

import torch

from .. import _torch
from .._types import Place
from ..agree import outside, resolve_tree
from ..autograd import apply
from ..calls import has_tree
from ..errors import PartitionError, ShapeError
from ..linear_map import LinearMap, movement
from ..partition import Layout, Partition, partition_of
from ..plan import Axis, key, whole

_Arguments = ParamSpec("_Arguments")
_Map = TypeVar("_Map")

# ---------------------------------------------------------------- rules


def rule(build: Callable[_Arguments, _Map]) -> Callable[_Arguments, _Map]:
    """Cached: equal arguments give the same map, however they are spelt, and so the same plan. An argument that cannot
    be a key is a TypeError here, which the public function around explains."""
    signature = inspect.signature(build)
    made = lru_cache(maxsize=1024, typed=True)(build)  # dim 1.0 is an error, also after dim 1

    @lru_cache(maxsize=1024, typed=True)
    @wraps(build)
    def spelt(*args: Any, **keywords: Any) -> _Map:
        given = signature.bind(*args, **keywords)
        given.apply_defaults()
        return made(*given.args)

    cached: Any = spelt
    clear = cached.cache_clear

    def cache_clear() -> None:
        made.cache_clear()
        clear()

    vars(cached).update(cache_clear=cache_clear, cache_info=made.cache_info)
    return cached


@rule
def transposed(name: str, A: LinearMap) -> LinearMap:
    """The transpose of a movement as a movement of its own name.

    Raises:
        PartitionError: layouts or arguments of which there is no such map.

    Example:
        >>> A = dd.maps.broadcast(dd.Partition((1,)), dd.Partition((2,)), (2,))
        >>> str(A.T), str(dd.maps.transposed("sum_reduce", A))
        ('broadcast.T', 'sum_reduce')
    """
    return movement(name, A.plan.wanted, A.plan.held)


def laid_out(where: Any) -> Layout:
    """``where``, which must be a Layout."""
    if not isinstance(where, Layout):
        raise PartitionError(
            "a map needs the global shape",
            expected="a Layout",
            actual=repr(where),
            next_step="dd.Layout(P, shape)",
        )
    return where


def on_one_rank(root: int, ndim: int, world: str) -> Partition:
    """The partition that holds a whole tensor on ``root``."""
    return Partition((1,) * ndim, (root,), world)


def sized(dim: int, sizes: Sequence[int]) -> Axis:
    """A dim of which the rank at coordinate i has its own ``sizes[i]`` elements, counted from 0 (under a key)."""
    return Axis(dim, tuple(((0, n, 0),) for n in sizes), tuple(sizes))


def own(P: Partition, dims: Iterable[int] | None = None) -> list[Axis]:
    """Key axes that tell ranks apart along ``dims`` (default: all)."""
    return [key(d, range(P.shape[d])) for d in P.dims(dims)]


def tensor_axes(where: Place, shape: Sequence[int] | None) -> tuple[Partition, list[Axis]]:
    """(partition, tensor axes): of a Layout its blocks, tied to its grid dims; of a partition the local shape as it
    is."""
    if shape is None or isinstance(where, Layout):
        L = laid_out(where)
        return L.partition, [sized(d, L.sizes(d)) for d in range(L.ndim)]
    return partition_of(where), [whole(n) for n in shape]


# ---------------------------------------------------------------- calls

Movement = tuple[Sequence[Any], Sequence[LinearMap] | None, _torch.Structure | None]  # what :func:`moved` takes


def by_map(x: Any, A: LinearMap) -> Movement:
    """The same map for every leaf of ``x``."""
    if isinstance(x, torch.Tensor):
        return (x,), (A,), None
    xs, tree = _torch.flatten(x)
    return xs, [A] * len(xs), tree


def by_layout(
    x: Any,
    P: Place,
    shape: Sequence[int] | None,
    rule: Callable[..., LinearMap],
    *args: Any,
    to: Place | None = None,
) -> Movement:
    """``rule(layout of the leaf, *args)``; layouts are negotiated where P is a bare partition without a ``shape``.

    ``to``: where the result lies, if not over P; its ranks take part too.
    """
    if type(P) is Layout and isinstance(x, torch.Tensor) and shape is None:
        return (x,), (rule(P, *args),), None
    xs, tree = _torch.flatten(x)
    xs, tree, layouts = resolve_tree(xs, tree, P, shape, () if to is None else (to,))
    if layouts is None:
        return outside(xs, P if to is None else to), None, tree
    return xs, [rule(L, *args) for L in layouts], tree


def by_shape(x: Any, P: Place, map_of: Callable[[Any], LinearMap]) -> Movement:
    """``map_of(shape of the leaf)``, or ``map_of(None)`` with a Layout, which has the shape: nothing is negotiated."""
    if isinstance(P, Layout):
        return by_map(x, map_of(None))
    if isinstance(x, torch.Tensor):
        return (x,), (map_of(tuple(x.shape)),), None
    xs, tree = _torch.flatten(x)
    for leaf in xs:
        if not isinstance(leaf, torch.Tensor):
            raise ShapeError(
                "not a tensor",
                expected="tensors, or a pytree of them",
                actual=type(leaf).__name__,
                next_step="put numbers into tensors first: torch.tensor(value)",
            )
    return xs, [map_of(tuple(leaf.shape)) for leaf in xs], tree


def local_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """``shape`` of a local tensor, as a user gives it."""
    try:
        return tuple(as_int(n) for n in shape)
    except TypeError:
        raise PartitionError(
            "not a shape",
            expected="a sequence of integers",
            actual=shape,
            next_step="pass the tensor's shape, for example x.shape",
        ) from None


@has_tree
def moved(xs: Sequence[Any], maps: Sequence[LinearMap] | None, tree: _torch.Structure | None) -> Any:
    """The landing of every movement: the leaves' results, as a pytree of structure ``tree`` (checking reads that here).

    ``maps``: one for each leaf; ``None`` on a rank that takes no part, which gets ``xs`` as they are.
    """
    if maps is None:
        return _torch.unflatten(xs, tree)
    if tree is not None:
        return _torch.unflatten(move(xs, maps), tree)
    (step,) = maps[0].steps
    x = step.operand(xs[0])
    return x if step.is_identity else apply(step.alone, (x,))[0]


def move(xs: Sequence[Any], maps: Sequence[LinearMap]) -> list[torch.Tensor]:
    """Apply movements of one kind to tensors, as one set of messages."""
    steps = [A.steps[0] for A in maps]
    results = [step.operand(x) for step, x in zip(steps, xs)]
    moving = [i for i, step in enumerate(steps) if not step.is_identity]
    if moving:
        for i, y in zip(moving, apply([steps[i] for i in moving], [results[i] for i in moving])):
            results[i] = y
    return results
