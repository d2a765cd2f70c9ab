"""The arguments of attention: its tensors and their layouts, and what must be true of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch

from .._types import Place
from ..agree import check_tensor, resolve
from ..boxes import is_int
from ..errors import PartitionError, ShapeError
from ..movement.gathers import all_gather
from ..movement.options import plain
from ..movement.reorder import Order, Ranges, runs_of
from ..partition import Layout, Partition, partition_of
from .attention_kernel import Pattern
from .attention_plan import FEATURES, HEADS, SEQ
from .autocast import autocast
from .enter import FLOATING, check_block, check_kind

__all__: list[str] = []


def pattern_of(P: Place, causal: bool, window: int | None, documents: Sequence[int] | None) -> Pattern:
    if window is not None and (not is_int(window) or window < 0):
        raise PartitionError(
            "not a window",
            partitions=P,
            expected="how many keys a query sees on a side, an integer, at least 0; or None",
            actual=window,
            next_step="window=w: query i sees keys with |i - j| <= w",
        )
    if documents is not None:
        documents = plain(documents, "documents")
        fits = isinstance(documents, tuple) and len(documents) > 1 and all(map(is_int, documents))
        if not fits or documents[0] != 0 or any(a >= b for a, b in pairwise(documents)):
            raise PartitionError(
                "documents do not rise",
                partitions=P,
                expected="bounds (0, ..., S), each larger than the one before",
                actual=documents,
                next_step="give the rows at which documents begin, and the length of the sequence last",
            )
    return Pattern(bool(causal), None if window is None else int(window), cast(Any, documents))


def check_dims(P: Place) -> Partition:
    """The partition of ``P``, which has a dim for each of (batch, heads, seq, features)."""
    grid = partition_of(P)
    if grid.ndim != 4:
        raise PartitionError(
            "attention is of (batch, heads, seq, features)",
            partitions=P,
            expected="4 dims",
            actual=grid.ndim,
            next_step="give the partition one dim for each; 1: not split",
        )
    if grid.shape[FEATURES] != 1:
        raise PartitionError(
            "features are not split",
            partitions=P,
            expected="a partition of (batch, heads, seq, 1)",
            actual=grid.shape,
            next_step="split heads instead",
        )
    return grid


def check_layouts(L_q: Layout, L_k: Layout, L_v: Layout, pattern: Pattern) -> None:
    (B, H, S, D), (B_k, H_k, S_k, D_k) = L_q.shape, L_k.shape
    if (B_k, D_k) != (B, D) or L_k.shape[:FEATURES] != L_v.shape[:FEATURES]:
        raise ShapeError(
            "q, k and v do not fit together",
            partitions=L_q,
            expected="(batch, heads, seq, features): one batch for all, one number of features for q and k, and all "
            "but the features equal for k and v",
            actual=(L_q.shape, L_k.shape, L_v.shape),
            next_step="pass blocks of tensors that fit; kv_shape where k has other heads or rows than q",
        )
    if H_k == 0 or H % H_k:
        raise ShapeError(
            "q's heads are not shared out evenly among k's",
            partitions=L_q,
            expected="as many heads of q for each head of k",
            actual=f"{H} heads of q, {H_k} of k",
            next_step="choose a number of heads of k that divides q's",
        )
    apart = L_q.sizes(0) != L_k.sizes(0) or any(L_k.sizes(d) != L_v.sizes(d) for d in (0, HEADS, SEQ))
    if L_k.partition != L_q.partition or apart:
        raise PartitionError(
            "k and v lie otherwise than q",
            partitions=(L_q, L_k, L_v),
            expected="one partition, one batch in the same blocks, and blocks of one size for k and v",
            actual=(L_k, L_v),
            next_step="repartition them first",
        )
    if pattern.documents is not None and (pattern.documents[-1] != S or S_k != S):
        raise PartitionError(
            "documents do not cover the sequence",
            partitions=L_q,
            expected=f"bounds (0, ..., {S}), of queries and keys alike",
            actual=f"{pattern.documents}, {S} queries and {S_k} keys",
            next_step="let the last bound be the length of the sequence",
        )


def check_mask(mask: Any, L_q: Layout, L_k: Layout) -> None:
    if mask is None or (callable(mask) and not isinstance(mask, torch.Tensor)):
        return
    if not isinstance(mask, torch.Tensor):
        raise ShapeError(
            "not a mask",
            partitions=L_q,
            expected="a tensor, or a function of positions",
            actual=type(mask).__name__,
            next_step="mask=tensor, or mask=lambda i, j: i >= j",
        )
    whole = (*L_q.shape[:SEQ], L_q.shape[SEQ], L_k.shape[SEQ])
    lead = mask.shape[:-2]
    if (
        not 2 <= mask.dim() <= 4
        or mask.shape[-2:] != whole[SEQ:]
        or any(n not in (1, m) for n, m in zip(lead, whole[SEQ - len(lead) : SEQ]))
        or not (mask.dtype == torch.bool or mask.is_floating_point())
    ):
        raise ShapeError(
            "the mask does not cover queries and keys",
            partitions=L_q,
            expected=f"true or false, or numbers to add, that broadcast to {whole}, with all of the last two dims",
            actual=(tuple(mask.shape), mask.dtype),
            next_step="pass the whole mask on every rank, or a function of positions",
        )


def _kv_layouts(L_q: Layout, k: torch.Tensor, v: torch.Tensor, kv_shape: Any) -> tuple[Layout, Layout]:
    """The layouts of k and v where q's is known: those of ``kv_shape``; else as q's, but for unsplit heads."""
    if isinstance(kv_shape, Layout):
        L_k = kv_shape
    else:
        heads = k.shape[HEADS] if L_q.partition.shape[HEADS] == 1 and k.dim() == 4 else L_q.shape[HEADS]
        L_k = L_q.with_shape((L_q.shape[0], heads, *L_q.shape[SEQ:]) if kv_shape is None else kv_shape)
    features = v.shape[FEATURES] if v.dim() == 4 else L_k.shape[FEATURES]
    return L_k, L_k.with_shape((*L_k.shape[:FEATURES], features))


def enter_three(q, k, v, P: Place):
    """q, k and v in the dtype that torch.autocast gives them: floating tensors of one dtype."""
    grid = partition_of(P)
    q, k, v = autocast("dist_attention", grid.ndim, q, k, v)
    for what, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, torch.Tensor):
            check_kind(x, FLOATING)
        elif grid.index() is None:
            check_tensor(x, P)
        else:
            check_block(x, P, what)
    if not q.dtype == k.dtype == v.dtype:
        raise ShapeError(
            "q, k and v are of different dtypes",
            partitions=P,
            expected="one dtype",
            actual=(q.dtype, k.dtype, v.dtype),
            next_step="convert them first",
        )
    return q, k, v


def enter_all(q, k, v, P: Place, shape: Any, kv_shape: Any):
    """(q, k, v, their layouts); no layouts on a rank that takes no part."""
    grid = check_dims(P)
    q, k, v = enter_three(q, k, v, P)
    if isinstance(P, Layout) or shape is not None:
        _, (L_q,) = resolve([q], P, shape)
        layouts = (L_q, *_kv_layouts(L_q, k, v, kv_shape))
    else:
        if kv_shape is not None:
            raise PartitionError(
                "kv_shape goes with a Layout, or with shape",
                partitions=P,
                expected="None: blocks of all three tensors are asked for",
                actual=kv_shape,
                next_step="leave it out, or pass shape too",
            )
        (q, k, v), layouts = resolve([q, k, v], P)
        if layouts is None:
            return q, k, v, None
        layouts = tuple(layouts)
    if grid.index() is not None:
        for what, x, L in zip(("q", "k", "v"), (q, k, v), layouts):
            check_block(x, L, what)
    return q, k, v, layouts


def runs_in_order(order: Order, L_q: Layout, L_k: Layout) -> tuple[Ranges, ...]:
    """The runs of rows that each coordinate of seq has, of queries and of keys alike."""
    if L_q.shape[SEQ] != L_k.shape[SEQ]:
        raise ShapeError(
            "an order deals out the rows of one sequence",
            partitions=(L_q, L_k),
            expected=f"as many rows of k as of q, {L_q.shape[SEQ]}, where order= is given",
            actual=f"{L_k.shape[SEQ]} rows of k, order={order!r}",
            next_step="leave order out where q and k are of different sequences, with rows in their own order",
        )
    runs = runs_of(L_q, SEQ, order)
    sizes = tuple(sum(b - a for a, b in some) for some in runs)
    if not L_q.sizes(SEQ) == L_k.sizes(SEQ) == sizes:
        raise ShapeError(
            "rows in this order lie in other blocks",
            partitions=(L_q, L_k),
            expected=f"{sizes} rows of queries and of keys",
            actual=(L_q.sizes(SEQ), L_k.sizes(SEQ)),
            next_step="pass F.reorder(x, L, 2, order), and F.reorder_layout(L, 2, order) as P",
        )
    return runs


def all_positions(positions: Any, L_q: Layout, L_k: Layout) -> torch.Tensor:
    """The positions of all rows, in the order in which ranks have them."""
    n = L_q.local_shape()[SEQ]
    if not isinstance(positions, torch.Tensor) or positions.is_floating_point() or tuple(positions.shape) != (n,):
        raise ShapeError(
            "positions are not this rank's",
            partitions=L_q,
            expected=f"an int64 tensor of shape ({n},)",
            actual=tuple(getattr(positions, "shape", ())) or type(positions).__name__,
            next_step="pass the place in the sequence of each of this rank's rows",
        )
    if L_q.sizes(SEQ) != L_k.sizes(SEQ):
        raise ShapeError(
            "positions are of queries and keys alike",
            partitions=(L_q, L_k),
            expected="as many rows of k as of q on every rank",
            actual=(L_q.sizes(SEQ), L_k.sizes(SEQ)),
            next_step="leave positions out where q and k are of different sequences",
        )
    fibre = L_q.partition.along(SEQ)
    assert fibre is not None  # a rank outside has gone
    line = Layout(Partition((fibre.size,), fibre.ranks, fibre.world), L_q.shape[SEQ : SEQ + 1], (L_q.sizes(SEQ),))
    return all_gather(positions, line, 0)
