"""Index maps: which rows of a distributed tensor each rank wants, found out once.

y[k] = x[wanted[k]] is G = U A S. S takes the rows that each owner serves, A moves them (a plan: an all-to-all of
distinct rows), U repeats and orders them where they are wanted. The transpose Gᵀ = Sᵀ Aᵀ Uᵀ adds rows where they came
from. S and U are tensors of row numbers, on their device; the plan holds counts only, so that it has few runs however
many rows there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from . import _torch
from ._value import Value
from .agree import negotiate
from .engine.program import NO_SUMS, wider
from .errors import AgreementError, PartitionError, rank_of
from .linear_map import movement
from .partition import Layout, Partition
from .plan import Axis, Run, Side, whole

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Counts = tuple[tuple[int, ...], ...]  # of each rank of the partition: how many distinct rows of each block it wants


@dataclass(frozen=True, eq=False)
class Selection:
    """y[k] = x[rows[k]], of ``n`` rows: a matrix with one 1 in each row. ``rows=None``: the identity."""

    rows: torch.Tensor | None
    n: int

    def __len__(self) -> int:
        return self.n if self.rows is None else len(self.rows)

    def take(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Rows of ``x``, which lie along ``dim``."""
        if self.rows is None:
            return x
        rows = _torch.literal(self.rows)
        if x.dtype in NO_SUMS:  # torch does not select these either, in one dim: their bits as integers
            return x.view(_BITS[x.dtype.itemsize]).index_select(dim, rows).view(x.dtype)
        return x.index_select(dim, rows)

    def add(self, y: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The transpose: x[i] = Σ y[k] over all k with rows[k] = i, in rising order of k on every device. Narrow dtypes
        are summed in a wider one and rounded once; the sum of truth values is "or", as in torch."""
        if self.rows is None:
            return y
        dtype = y.dtype
        y = y.to(wider(dtype))
        if y.is_cuda and (y.is_floating_point() or y.is_complex()):  # index_add has no fixed order there
            return self._add_in_order(y, dim).to(dtype)
        zeros = y.new_zeros((*y.shape[:dim], self.n, *y.shape[dim + 1 :]))
        return zeros.index_add_(dim, _torch.literal(self.rows), y).to(dtype)

    def _add_in_order(self, y: torch.Tensor, dim: int) -> torch.Tensor:
        if y.is_complex():
            return torch.view_as_complex(self._add_in_order(torch.view_as_real(y.resolve_conj()), dim).contiguous())
        order, lengths = self._segments
        rows = y.movedim(dim, 0).index_select(0, order)
        return torch.segment_reduce(rows, "sum", lengths=lengths, axis=0, unsafe=True, initial=0).movedim(0, dim)

    @cached_property
    def _segments(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows: Any = self.rows
        return rows.argsort(stable=True), torch.bincount(rows, minlength=self.n)


class Refusal(NamedTuple):
    """What is wrong with what a rank wants, for the error on every rank."""

    actual: str
    message: str
    expected: str
    next_step: str
    layout: Layout


class _Asked(NamedTuple):
    """What a rank tells of its rows: how many distinct ones of each block, a digest, and what is wrong with them."""

    counts: tuple[int, ...] = ()
    digest: str = ""
    fault: Refusal | None = None


_Asking = tuple[_Asked, torch.Tensor, torch.Tensor]


def _refused(fault: Refusal) -> _Asking:
    none = torch.zeros(0, dtype=torch.int64)
    return _Asked(fault=fault), none, none


def _no_rows(L: Layout, actual: str) -> _Asking:
    integers = f"a tensor of integers, 0 <= row < {L.shape[0]}"
    return _refused(Refusal(actual, "there are no such rows", integers, "rows are counted over all ranks, from 0", L))


def _ask(L: Layout, wanted: Any) -> _Asking:
    """(what to tell, the distinct rows in rising order, where each of ``wanted`` lies among them). Rows of one block
    are then side by side, in the order of the blocks."""
    if not isinstance(wanted, torch.Tensor) or wanted.dim() != 1:
        return _no_rows(L, "not a tensor of one dim")
    if wanted.is_floating_point() or wanted.is_complex() or wanted.dtype == torch.bool:
        return _no_rows(L, f"a tensor of {wanted.dtype}")
    if _torch.of_torch_func(wanted):
        return _no_rows(L, "a batch of vmap")
    distinct, places = torch.unique(wanted.to(torch.int64), return_inverse=True)
    if len(distinct) and not (int(distinct[0]) >= 0 and int(distinct[-1]) < L.shape[0]):
        low, high = int(distinct[0]), int(distinct[-1])
        return _no_rows(L, f"row {low if low < 0 else high}")
    ends = list(accumulate(L.sizes(0)))  # not blocks': empty ones lie at the end
    stops = _torch.constant(ends, torch.int64, distinct.device)
    blocks = torch.bucketize(distinct, stops, right=True)
    counts = tuple(torch.bincount(blocks, minlength=len(stops)).tolist())
    bits = wanted.to("cpu", torch.int64).contiguous().numpy().data
    return _Asked(counts, hashlib.sha256(bits).hexdigest()[:16]), distinct, places


def _rows_layout(L: Any) -> Layout:
    if not isinstance(L, Layout) or not L.ndim:
        raise PartitionError(
            "the rows need a layout",
            expected="a Layout, whose first dim has the rows",
            actual=L,
            next_step="dd.Layout(dd.Partition((ranks,)), (number of rows,))",
        )
    return L


@dataclass(frozen=True, init=False, repr=False)
class Index(Value):
    """Which rows of a distributed tensor each rank wants, for :func:`distdl.functional.gather_rows`. Collective over
    the ranks of L.

    Args:
        L: the layout of the rows: they lie along its first dim. It may have more dims, then x is its block; with one
            dim x may have any others behind it. Ranks at one place of the other dims find rows among each other.
        wanted: (k,) integers, the global numbers of the rows that this rank wants: in any order, any number of them,
            with repetitions. On a rank outside it is ignored.

    Attributes:
        layout: L.
        counts: of each rank of L how many distinct rows of each block it wants.
        digest: of all ranks' row numbers: Indexes are equal where their layouts and digests are.
        distinct: this rank's rows without repetitions, rising.

    Messages: one small all-gather, of counts; then the distinct row numbers go to their owners, as the rows will come
    back. Nothing of it is said again when the Index is used.

    Raises:
        AgreementError: on every rank, where some rank wants a row that does not exist or gives no integers, or where
            layouts differ.
        PartitionError: L is no Layout, or has no dims.

    Example:
        >>> index = dd.Index(dd.Layout(dd.Partition((1,)), (3,)), torch.tensor([2, 2]))
        >>> F.gather_rows(torch.tensor([10, 20, 30]), index)
        tensor([30, 30])
    """

    layout: Layout
    counts: Counts
    digest: str
    distinct: torch.Tensor
    repeats: Selection  # distinct rows -> wanted ones
    serves: Selection  # rows of this rank's block -> what it serves, requester by requester
    every: tuple[Any, ...] | None = None  # what all ranks ask, where one knows it

    def __init__(self, L: Layout, wanted: torch.Tensor) -> None:
        self._talk(L, wanted, _ask(_rows_layout(L), wanted))

    def _talk(self, L: Layout, wanted: torch.Tensor, asking: _Asking) -> None:
        asked, distinct, places = asking
        (wanted,), _, reports = negotiate([wanted], L.partition, ndim=1, arguments=f"L={L}", told=asked)
        if reports is None:
            self._have_none(wanted)
            self._set(layout=L, counts=((0,) * L.partition.shape[0],) * L.partition.size, digest="")  # it hears of none
            return
        self._hear(L, [reports[r].told for r in L.partition.ranks])
        self._set(distinct=distinct, repeats=Selection(_unless_all(places, len(distinct)), len(distinct)))
        served = movement("Index", *self.sides()).T(distinct)
        self._set(serves=Selection(served - L.box()[0][0], L.local_shape()[0]))

    @classmethod
    def known(cls, L: Layout, wanted: Sequence[torch.Tensor]) -> Index:
        """The same where every rank knows what all want: no message is sent.

        Args:
            wanted: the row numbers of each rank, in the order of ``L.partition.ranks``.
        """
        P = _rows_layout(L).partition
        if not isinstance(wanted, (tuple, list)) or len(wanted) != P.size:
            raise PartitionError(
                "not the rows of every rank",
                expected=f"{P.size} tensors of row numbers",
                actual=len(wanted) if isinstance(wanted, (tuple, list)) else type(wanted).__name__,
                next_step="give them in the order of L.partition.ranks, or this rank's alone to dd.Index(L, wanted)",
            )
        return cls._known(L, [_ask(L, rows) for rows in wanted], rank_of["source"](P.world))

    @classmethod
    def _known(cls, L: Layout, every: Sequence[_Asking], rank: int | None) -> Index:
        """The Index of one rank, of what all of them ask."""
        index, P, at = object.__new__(cls), L.partition, L.partition.index(rank)
        index._hear(L, [asked for asked, _, _ in every])
        if at is None:
            index._have_none(every[0][1])
        else:
            _, distinct, places = every[P.ranks.index(P.rank_at(at))]
            (start, stop), *_ = L.box(rank) or ()
            theirs = [rows for r, (_, rows, _) in zip(P.ranks, every) if (P.index(r) or ())[1:] == at[1:]]
            served = torch.cat([rows[(rows >= start) & (rows < stop)].to(distinct.device) for rows in theirs]) - start
            repeats = Selection(_unless_all(places, len(distinct)), len(distinct))
            index._set(distinct=distinct, repeats=repeats, serves=Selection(served, stop - start))
        index._set(every=tuple(every))
        return index

    def of(self, rank: int) -> Index:
        """Another rank's part, to simulate with.

        Raises:
            PartitionError: this Index was not made of all ranks' rows.
        """
        if self.every is None:
            raise PartitionError(
                "the other ranks' rows are not known here",
                partitions=self.layout,
                expected="dd.Index.known(L, the rows of every rank)",
                actual="dd.Index(L, the rows of this one)",
                next_step="run it on the ranks, or make it of what all of them want",
            )
        return self._known(self.layout, self.every, rank)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _hear(self, L: Layout, told: Sequence[_Asked]) -> None:
        """What all ranks say: the same on each of them, and so is the error."""
        faults = {r: asked.fault for r, asked in zip(L.partition.ranks, told) if asked.fault}
        if faults:
            first = next(iter(faults.values()))
            raise AgreementError(
                first.message,
                partitions=first.layout,
                expected=first.expected,
                actual="; ".join(f"rank {r}: {fault.actual}" for r, fault in faults.items()),
                next_step=first.next_step,
            )
        digest = hashlib.sha256("".join(asked.digest for asked in told).encode()).hexdigest()[:16]
        self._set(layout=L, counts=tuple(asked.counts for asked in told), digest=digest)

    def _have_none(self, like: torch.Tensor) -> None:
        """A rank that takes no part has no rows, and wants none."""
        none = torch.zeros(0, dtype=torch.int64, device=like.device)
        self._set(distinct=none, repeats=Selection(None, 0), serves=Selection(None, 0))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Index)
            and (self.layout, self.digest) == (other.layout, other.digest)
            and self.device == other.device
        )

    @cached_property
    def _hash(self) -> int:
        return hash((self.layout, self.digest))

    __hash__ = Value.__hash__

    @property
    def device(self) -> torch.device:
        """Where the row numbers are, and x has to be."""
        return self.distinct.device

    @cached_property
    def _is_ghost(self) -> torch.Tensor:
        (start, stop), *_ = self.layout.box() or ((0, 0),)
        return (self.distinct < start) | (self.distinct >= stop)

    @cached_property
    def maps(self) -> dict[Any, Any]:
        """The maps that were made of it, and of what it was: they go when it goes, with all row numbers."""
        return {}

    @property
    def ghosts(self) -> torch.Tensor:
        """Global numbers of the distinct rows that other ranks have, rising: what travels."""
        return self.distinct[self._is_ghost]

    @property
    def local(self) -> torch.Tensor:
        """Global numbers of the distinct rows that this rank has itself, rising."""
        return self.distinct[~self._is_ghost]

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """The other ranks that this one has rows from or serves, sorted."""
        P, at = self.layout.partition, self.layout.partition.index()
        if at is None:
            return ()
        column = {r: c for r in P.ranks if (c := P.index(r) or ())[1:] == at[1:]}
        counts = dict(zip(P.ranks, self.counts))
        mine = counts[P.rank_at(at)]
        return tuple(sorted(r for r, c in column.items() if c != at and (mine[c[0]] or counts[r][at[0]])))

    @cached_property
    def own_first(self) -> tuple[Index, torch.Tensor]:
        """The halo form, ``(ghosts, numbers)``: the Index of the distinct rows that others have, and where each wanted
        row lies among this rank's own rows followed by those. So
        ``torch.cat([x, F.gather_rows(x, ghosts)])[numbers]`` equals ``F.gather_rows(x, index)``, and own rows stay
        where they are. No message."""
        L, P, at = self.layout, self.layout.partition, self.layout.partition.index()
        index, n = object.__new__(Index), self.serves.n
        own = {r: (P.index(r) or (0,))[0] for r in P.ranks}
        counts = tuple(
            tuple(0 if c == own[r] else k for c, k in enumerate(row)) for r, row in zip(P.ranks, self.counts)
        )
        index._set(layout=L, counts=counts, digest=f"ghosts of {self.digest}", distinct=self.ghosts)
        index._set(repeats=Selection(None, len(self.ghosts)), serves=Selection(None, 0))
        if at is None:
            return index, self.distinct
        served = self.serves.take(torch.arange(n, device=self.device))
        mine, before = P.rank_at(at), 0
        for r, row in zip(P.ranks, self.counts):
            if r == mine:
                served = torch.cat([served[:before], served[before + row[at[0]] :]])
            elif (P.index(r) or ())[1:] == at[1:]:
                before += row[at[0]]
        index._set(serves=Selection(served, n))
        ghost = self._is_ghost
        numbers = torch.where(ghost, n + ghost.cumsum(0) - 1, self.distinct - (L.box() or ())[0][0])
        return index, self.repeats.take(numbers)

    def sides(self, tail: Sequence[int] = ()) -> tuple[Side, Side]:
        """What is served and what arrives, of rows of local shape ``tail``: for each pair of ranks one run."""
        P, width = self.layout.partition, self.layout.partition.shape[0]
        line = Partition((P.size,), P.ranks, P.world)
        places = {r: i for i, r in enumerate(P.ranks)}
        served: list[list[Run]] = [[] for _ in P.ranks]
        sizes, wanted, at = [0] * P.size, [], 0
        for r, counts in zip(P.ranks, self.counts):
            coords = P.index(r) or ()
            wanted.append((at, at + sum(counts)))
            for owner in range(width):
                if counts[owner]:
                    o = places[P.rank_at((owner, *coords[1:]))]
                    served[o].append((at, at + counts[owner], sizes[o]))
                    sizes[o], at = sizes[o] + counts[owner], at + counts[owner]
        held = Axis(0, tuple(map(tuple, served)), tuple(sizes))
        arriving = Axis(0, tuple(((a, b, 0),) if a < b else () for a, b in wanted), tuple(b - a for a, b in wanted))
        axes = tuple(self._tail_axes(tail))
        return Side(line, (held, *axes)), Side(line, (arriving, *axes))

    def _tail_axes(self, tail: Sequence[int]) -> Iterable[Axis]:
        """Every rank has rows of one shape; only what L splits may differ between its columns."""
        L, split = self.layout, min(self.layout.ndim - 1, len(tail))
        for d in range(1, split + 1):
            sizes = [L.local_shape(r)[d] for r in L.partition.ranks]
            yield Axis(0, tuple(((0, n, 0),) for n in sizes), tuple(sizes))
        yield from map(whole, tail[split:])

    def __repr__(self) -> str:
        return f"Index({self.layout}, {len(self.repeats)} rows, {self.digest})"


def told(L: Layout, wanted: torch.Tensor, fault: Refusal | None) -> Index:
    """The Index of row numbers that were worked out; where some rank could not, all ranks raise what is wrong there."""
    index = object.__new__(Index)
    index._talk(L, wanted, _refused(fault) if fault else _ask(L, wanted))
    return index


def _unless_all(places: torch.Tensor, n: int) -> torch.Tensor | None:
    """``None`` where the wanted rows are the distinct ones in their order: nothing is to be repeated then."""
    same = len(places) == n and bool((places == torch.arange(n, device=places.device)).all())
    return None if same else places
