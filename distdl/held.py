"""Who already sums: how the ranks hold a parameter, and over which of them its layer's adjoint sums the gradient.

A layer over a grid ``P`` holds a parameter as a block along some dims of ``P``, ``split``, and as a copy along the
others, over which its adjoint sums (:func:`distdl.functional.replicated`). So within ``P`` the gradient is
complete as it stands; who reduces gradients over ranks R asks :func:`complete`:

    R inside of P               nothing is left to sum
    R and P share one rank      R are replicas of the layer, to be summed
    anything between            an error: no sum over all of R is right

The layer knows it (a module with ``hold_parameters()`` is asked), and marks the tensors that stand for its parameters:
when they are registered, moved, copied or unpickled, and at every call, then also those that ``functional_call`` put
there. A mark is a plain tuple on the tensor, so that files of parameters stay loadable anywhere; a gradient has its
parameter's.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch

from . import _torch
from ._types import Dims, Place
from .engine import transport as traffic
from .errors import PartitionError
from .partition import Partition, partition_of
from .signature import NAME

_MARK, _MARKED = "_distdl_held", "_distdl_marked"
Mark = tuple[Any, ...]
T = TypeVar("T", bound=torch.Tensor)
_LISTS = (torch.nn.ParameterList, torch.nn.ParameterDict)  # which compute nothing
_marked: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()  # leaves, to find a gradient's


class Held(NamedTuple):
    """A block along the dims ``split`` of ``grid``, a copy along the others; ``split=None``: of such blocks' making."""

    grid: Partition
    split: tuple[int, ...] | None

    @property
    def copies(self) -> tuple[int, ...]:
        """The dims along which it is a copy, as far as is known."""
        return () if self.split is None else tuple(d for d in range(self.grid.ndim) if d not in self.split)

    @property
    def blocks(self) -> int:
        """How many different blocks there are."""
        return math.prod(self.grid.shape[d] for d in self.split or ())


def mark_of(P: Place, split: Dims | Iterable[int]) -> Mark:
    """The mark of a parameter that is a block along the partition dims ``split`` of ``P``."""
    where = partition_of(P)
    cut = None if split is None else tuple(d for d in where.dims(split) if where.shape[d] > 1)
    return where.world, where.shape, where.ranks, cut


def hold(tensor: torch.Tensor, mark: Mark, name: str | None = None) -> None:
    """Mark ``tensor``; a leaf's gradient then has its mark too. ``name``: for errors, where it has none."""
    if getattr(tensor, _MARK, None) != mark:
        setattr(tensor, _MARK, mark)
        if name is not None and not hasattr(tensor, NAME):
            setattr(tensor, NAME, name)
    if isinstance(tensor, torch.nn.Parameter) or (
        tensor.is_leaf and tensor.requires_grad and not _torch.transforms_active()
    ):
        _marked[id(tensor)] = tensor


def declare(parameter: T, P: Place, split: int | Sequence[int] = ()) -> T:
    """Say how the ranks hold a parameter of your own module, as the layers of ``dd.nn`` say it of theirs; returns it.

    Args:
        parameter: a leaf tensor, this rank's part.
        P: the ranks among which your module sums its gradient: a grid.
        split: the dims of ``P`` along which ranks hold different blocks; along the others they hold copies, over which
            your module's adjoint sums (``F.mark_varying``).

    A ``deepcopy`` of a Parameter loses it, unless its module has a method ``hold_parameters()`` that declares again.

    Example:
        >>> w = dd.nn.declare(torch.nn.Parameter(torch.ones(2)), dd.Partition((1, 1)), split=1)
        >>> w.shape
        torch.Size([2])
    """
    hold(parameter, mark_of(P, split))
    return parameter


@lru_cache(maxsize=4096)
def _held(mark: Mark) -> Held:
    world, shape, ranks, split = mark
    return Held(Partition(tuple(shape), tuple(ranks), world), split if split is None else tuple(split))


def held(tensor: Any) -> Held | None:
    """How ranks hold ``tensor``; ``None``: no layer has said."""
    mark = getattr(tensor, _MARK, None)
    return None if mark is None else _held(mark)


def keep(new: T, old: torch.Tensor) -> T:
    """``new``, another form of ``old`` (its cast, say), with its marks."""
    for name in (_MARK, _MARKED):
        if new is not old and (mark := getattr(old, name, None)) is not None:
            setattr(new, name, mark)
    return new


def ask(module: torch.nn.Module) -> None:
    """Let the layers of a module mark their parameters, and name all of them.

    Raises:
        PartitionError: a layer that sums a parameter's gradient over ranks shares it with a layer of torch, which does
            not: no sum of their gradient is right.
    """
    sums: dict[torch.Tensor, torch.nn.Module] = {}
    for child in module.modules():
        mark = getattr(child, "hold_parameters", None)
        if mark is not None:
            mark()
            sums |= dict.fromkeys(child.parameters(recurse=False), child)
    for name, p in module.named_parameters():
        setattr(p, NAME, name)
    for child in module.modules():
        if type(child).__module__.startswith("torch.nn.") and not isinstance(child, _LISTS):
            for shared in sums.keys() & set(child.parameters(recurse=False)):
                how = held(shared)
                if how is not None and math.prod(how.grid.shape[d] for d in how.copies) > 1:
                    raise PartitionError(
                        "a layer that sums its gradients over ranks and one of torch share a parameter",
                        partitions=how.grid,
                        expected=f"{getattr(shared, NAME)} in layers of one kind",
                        actual=f"{type(sums[shared]).__name__} of dd.nn and {type(child).__name__} of torch.nn",
                        next_step=f"use dd.nn's {type(child).__name__}, or a module of your own that calls F",
                    )


def named(tree: Any) -> dict[str, torch.Tensor]:
    """{name: tensor} of a module, with its buffers, or of a pytree; its leaves then have their names in errors."""
    if isinstance(tree, torch.nn.Module):
        ask(tree)
        return dict(tree.named_parameters()) | dict(tree.named_buffers())
    pairs, _ = torch.utils._pytree.tree_flatten_with_path(tree)
    leaves: dict[str, torch.Tensor] = {}
    for path, leaf in pairs:
        keys = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
        name = ".".join(keys) or "the tensor"
        if isinstance(leaf, torch.Tensor):
            leaves[name] = leaf
            if not hasattr(leaf, NAME):
                setattr(leaf, NAME, name)
    return leaves


def holders(tree: Any, of: Any = None) -> list[Held | None]:
    """How ranks hold each leaf of ``tree``: parameters, their gradients, or other tensors that stand for them.

    Args:
        of: whose they are, where the tensors themselves do not know (gradients of torch.func, detached copies): a
            pytree of parameters with the same leaves, or the module, by whose names ``tree`` is then a dictionary.
    """
    leaves, _ = _torch.flatten(tree)
    if isinstance(of, torch.nn.Module):
        ask(of)
        known = dict(of.named_parameters(remove_duplicate=False)) | dict(of.named_buffers(remove_duplicate=False))
        if not isinstance(tree, Mapping) or not known.keys() >= tree.keys():
            raise PartitionError(
                "tensors without the names of the module's parameters",
                expected="a dictionary with names of module.named_parameters()",
                actual=sorted(map(str, tree.keys() - known.keys())) if isinstance(tree, Mapping) else type(tree),
                next_step="pass dict(module.named_parameters()), or what belongs to it",
            )
        sources: Any = _torch.flatten({name: known[name] for name in tree})[0]  # in the order of the leaves
    else:
        sources = leaves if of is None else _torch.flatten(of)[0]
    if len(sources) != len(leaves):
        raise PartitionError(
            "not as many parameters as tensors",
            expected=len(leaves),
            actual=len(sources),
            next_step="pass the parameters in a pytree like that of the tensors",
        )
    marks = [held(t) for t in sources]
    if None in marks and not torch.compiler.is_compiling() and len(_marked):  # a graph's tensors are nobody's .grad
        by_gradient = {id(p.grad): p for p in list(_marked.values()) if p.grad is not None}
        marks = [how or held(by_gradient.get(id(t))) for how, t in zip(marks, sources)]
    return marks


def name_when_checking(tree: Any) -> None:
    """Under ``dd.checking()``: name the leaves, so that an error can say which copies differ."""
    if traffic.observer is not None and traffic.observer.timeout is not None and not isinstance(tree, torch.Tensor):
        named(tree)


@lru_cache(maxsize=4096)
def complete(how: Held | None, R: Partition, what: str = "a parameter") -> bool:
    """Whether a gradient is complete over all ranks of ``R`` as its layer leaves it; ``False``: it is still to be
    summed over them.

    Raises:
        PartitionError: the layer sums over some of them, or it cannot be known which blocks they hold.
    """
    if how is None or (how.grid.size == 1 or R.size == 1):
        return False
    if how.grid.world == R.world:
        shared = set(R.ranks).intersection(how.grid.ranks)
        if len(shared) < 2:
            return False
        summed = how.grid.along(how.copies, min(shared))
        if len(shared) == R.size and (how.split is not None or (summed is not None and shared <= set(summed.ranks))):
            return True
    raise PartitionError(
        f"the layer of {what} sums its gradient over some of these ranks",
        partitions=R,
        expected=f"ranks within the layer's, or replicas of it: no two ranks of {how.grid.ranks}",
        actual=f"ranks {R.ranks} of world {R.world!r}, a block along dims {how.split} of {how.grid.shape}",
        next_step="reduce over the partition dims along which whole layers are replicas (dims=)",
    )


def whole(marks: Iterable[Held | None], R: Partition | None) -> None:
    """Raise where ranks of ``R`` hold different blocks of one of these parameters."""
    for how in marks:
        if how is None or R is None or how.blocks == 1:
            continue
        shared = set(R.ranks).intersection(how.grid.ranks)
        places = {tuple(how.grid.index(r)[d] for d in how.split or ()) for r in shared}
        if len(places) > 1:
            raise PartitionError(
                "these ranks hold different blocks of a parameter",
                partitions=R,
                actual=how.grid.shape,
                expected="copies of one tensor",
                next_step="leave out the parameters of split layers, or pass the "
                "partition dims along which the layers are replicas",
            )


# ---------------------------------------------------------------- tensors that F.mark_varying has marked


def tag(ys: Any, xs: Any, P: Place, dims: Dims = None) -> None:
    """Note that the gradient of ``ys`` is summed along partition dims ``dims`` of ``P`` on its way to ``xs``."""
    where = partition_of(P)
    mark = where.world, where.shape, where.ranks, tuple(dims) if isinstance(dims, Sequence) else dims
    for y, x in zip(_torch.flatten(ys)[0], _torch.flatten(xs)[0]):
        if y is not x:
            setattr(y, _MARKED, (*getattr(x, _MARKED, ()), mark))


_dims = lru_cache(maxsize=1024)(Partition.dims)


def unmarked_dims(tensor: torch.Tensor, P: Partition, dims: int | Iterable[int]) -> tuple[int, ...]:
    """Those of the partition dims ``dims`` of a layer over which the gradient of ``tensor`` is not summed yet.

    Raises:
        PartitionError: it was marked over ranks that hold different blocks, or over a part of a dim.
    """
    left, marks = _dims(P, tuple(dims) if isinstance(dims, Iterable) else dims), getattr(tensor, _MARKED, ())
    if not marks or P.index() is None:
        return left
    for world, shape, ranks, along in marks:
        fibre = Partition(shape, ranks, world).along(along) if world == P.world else None
        ranks = () if fibre is None else fibre.ranks
        shared = set(ranks).intersection(P.ranks)
        if len(shared) < 2:
            continue
        done = tuple(d for d in left if set(P.along(d).ranks) <= shared)
        if set(P.along(done).ranks) != shared:
            raise PartitionError(
                "a parameter was marked over other ranks than its layer's copies",
                partitions=P,
                expected=f"ranks of the dims {left}, along which it is a copy",
                actual=f"ranks {ranks}",
                next_step="leave it as it is: dp.replicate(params, P, of=module) marks only what no layer marks",
            )
        left = tuple(d for d in left if d not in done)
    return left
