"""Attention over a sequence that lies across ranks: exact, with every pattern, and derivatives of every order.

A rank's queries meet the keys that they see: those are brought there (attention_plan.py says how), and what is left is
local (attention_kernel.py). As keys and values come by movements, their gradients go back by the transposes, and a
rank's work is what the pattern leaves of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import _torch
from .._arguments import checked
from .._types import Place
from ..errors import PartitionError
from ..movement.blocks import repartition
from ..movement.call import move
from ..movement.halo import HaloSpec
from ..movement.reorder import Order
from ..partition import Layout
from ..remat import remat
from ..ties import tie
from . import attention_kernel as kernels
from .attention_arguments import (
    all_positions,
    check_dims,
    check_layouts,
    check_mask,
    enter_all,
    pattern_of,
    runs_in_order,
)
from .attention_kernel import KERNELS, Mask, Part, Pattern
from .attention_plan import FEATURES, HEADS, SEQ, Method, group, needs_spec, resolved, windows, windows_map
from .enter import outside
from .numeric import wide

__all__ = ["attention_needs", "dist_attention"]

_MOST_RUNS = 8  # of a rank's queries, each of which is a call of torch's kernel


@checked
def attention_needs(
    L_q: Layout,
    L_kv: Layout,
    *,
    causal: bool = False,
    window: int | None = None,
    documents: Sequence[int] | None = None,
) -> HaloSpec:
    """Which keys each rank's queries see, as the windows of a halo exchange: what :func:`dist_attention` moves with
    ``method="gather"``, to look at and to count (``F.attention_needs(...).plan().volume(rank)``).

    Args:
        L_q, L_kv: layouts (batch, heads, seq, features) of q, and of k or v, over one partition.
        causal, window, documents: as for :func:`dist_attention`.

    Raises:
        PartitionError, ShapeError: layouts that do not fit together, a negative window, documents that do not rise.

    Example:
        >>> L = dd.Layout(dd.Partition((1, 1, 4, 1)), (1, 2, 64, 8))
        >>> F.attention_needs(L, L, causal=True).windows[2]  # the keys that come to each rank
        ((0, 16), (0, 32), (0, 48), (0, 64))
    """
    for L in (L_q, L_kv):
        check_dims(L)
    pattern = pattern_of(L_q, causal, window, documents)
    check_layouts(L_q, L_kv, L_kv, pattern)
    return needs_spec(L_q, L_kv, pattern)


@checked
def dist_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    P: Place,
    *,
    causal: bool = False,
    window: int | None = None,
    documents: Sequence[int] | None = None,
    mask: Mask | None = None,
    positions: torch.Tensor | None = None,
    order: Order | None = None,
    scale: float | None = None,
    method: Method = "auto",
    kernel: str = "auto",
    shape: Sequence[int] | None = None,
    kv_shape: Sequence[int] | Layout | None = None,
) -> torch.Tensor:
    """softmax(q kᵀ · scale) v over a sequence, heads and a batch that lie across ranks, as
    torch.nn.functional.scaled_dot_product_attention of the global tensors.

    Args:
        q: (batch, heads, seq, features), this rank's block, floating.
        k, v: likewise, over the same partition; of fewer heads (of which each serves as many of q's, in order), of
            another length, and v of other features, as they may be.
        P: partition or Layout of q. Batch, heads and seq may be split, into uneven and empty blocks; features not.
        causal: query i sees keys j <= i.
        window: query i sees keys with |i - j| <= window (``causal`` too: 0 <= i - j <= window).
        documents: bounds (0, ..., S): a query sees its own document's keys.
        mask: true where a query sees a key, or numbers to add to the scores; whole on every rank, of (seq of q, seq of
            k), and of (batch, heads) or ones before them. Or a function of positions, (n, 1) and (1, m), that makes
            such a block. It does not lessen what is moved. A mask with a gradient is one value on all ranks: mark it
            (:func:`mark_varying`).
        positions: integers, the place in the sequence of each of this rank's rows, where they stand in another order
            (that of a permutation of yours); of q's and k's rows alike. All rows' are gathered, and all keys come.
        order: likewise by name, as :func:`reorder` dealt out the rows of q and k, as many of each; nothing is gathered:
            "zigzag" is causal attention's balance, of which torch's kernels then leave out what no query sees.
        scale: default 1/√features.
        method: how queries and keys meet. "gather": the keys that a rank's queries see come at once. "ring": one rank's
            keys at a time, none of which are kept: backward moves them again. "heads": every rank works on whole
            sequences of some heads. ("heads", u): that among each u neighbours along seq, a ring among the groups.
            "auto": "gather" or "heads", whichever moves less.
        kernel: "fused": torch's kernels, with first derivatives in reverse mode. "math": derivatives of every order and
            mode. "auto": math under forward mode and torch.func, and where blocks are merged (rings); else fused.
        shape: the global shape of q; left out with a bare partition, it is negotiated.
        kv_shape: with a Layout or ``shape``: the global shape of k (or its Layout); default: q's, of k's heads where
            these are not split.

    Returns:
        (batch, heads, seq, v's features): this rank's block, in q's layout. A query that no key is visible to gets 0.

    Messages: of keys and values together, one set for each step (p of them in a ring, of which one is the rank's own),
    to the ranks whose queries see this rank's keys: none to others. "heads": two repartitions more. Backward: the
    transposes; rings send their forward messages once more. ``positions``: one all-gather more.

    After Liu et al. (ring attention), arXiv:2310.01889; Jacobs et al. (heads), arXiv:2309.14509; Fang & Zhao (both),
    arXiv:2405.07719. All steps of a ring take keys from their owners directly, so that every gradient is rounded once,
    and summed in float32 for half precision.

    Raises:
        ShapeError: tensors, heads or a mask that do not fit together.
        PartitionError: a window below 0, documents that do not rise or cover the sequence, no such method or kernel, or
            one that the partition or the derivative does not allow.

    Example:
        >>> q = k = v = torch.ones(1, 1, 3, 2)  # (batch, heads, seq, features)
        >>> F.dist_attention(q, k, v, dd.Partition((1, 1, 1, 1)), causal=True)[0, 0]
        tensor([[1., 1.],
                [1., 1.],
                [1., 1.]])
    """
    pattern = pattern_of(P, causal, window, documents)
    if kernel not in KERNELS:
        raise PartitionError(
            "no such kernel", partitions=P, expected=KERNELS, actual=kernel, next_step="use one of them"
        )
    q, k, v, layouts = enter_all(q, k, v, P, shape, kv_shape)
    if layouts is None:
        return outside(q, k, v, like=(*q.shape[:FEATURES], v.shape[-1]) if q.dim() == v.dim() == 4 else (0,) * 4)
    L_q, L_k, L_v = layouts
    check_layouts(L_q, L_k, L_v, pattern)
    check_mask(mask, L_q, L_k)
    runs = None if order is None else runs_in_order(order, L_q, L_k)
    if runs is not None and positions is not None:
        raise PartitionError(
            "the rows' places are given twice",
            partitions=P,
            expected="positions or an order",
            actual=f"both, order={order!r}",
            next_step="leave positions out",
        )
    moving = pattern if positions is None and runs is None else Pattern()
    u, steps = resolved(method, L_q, L_k, L_v, moving)
    L_o = L_q.with_shape((*L_q.shape[:FEATURES], L_v.shape[FEATURES]))
    if L_q.partition.index() is None:
        return outside(q, k, v, like=L_o)
    fuses = kernels.takes_fused(kernel, steps, q, k, v)
    rows = None if positions is None else all_positions(positions, L_q, L_k)
    there = group(L_q, u)
    q = repartition(q, L_q, there)
    work = _Work(there, L_k, L_v, moving, pattern, mask, rows, runs, scale, steps)
    o = work.at_once(q, k, v) if fuses else kernels.result(work.merged(q, k, v), q.dtype)
    return repartition(o, group(L_o, u), L_o)


class _Work:
    """What one rank does with its queries, which lie over ``L_q``.

    Args:
        moving: the pattern by which keys come; ``pattern``: the one of positions.
        rows: the positions of all rows, where they are not in order,
        runs: or the ranges of rows at each coordinate of seq.
    """

    def __init__(self, L_q, L_k, L_v, moving, pattern, mask, rows, runs, scale, steps):
        self.L_q, self.layouts, self.moving, self.pattern = L_q, (L_k, L_v), moving, pattern
        self.given, self.steps, self.at, self.place = (mask, rows), steps, L_q.partition.index(), L_q.slices()
        self.runs = runs
        self.scale = L_q.shape[FEATURES] ** -0.5 if scale is None else float(scale)

    def _come(self, k, v, step):
        """The keys and values of a step, with a head for each of the queries', and the range of rows that they are."""
        maps = [windows_map(self.L_q, L, self.moving, step, self.steps) for L in self.layouts]
        k, v = move([k, v], maps)
        dims = windows(self.L_q, self.layouts[0], self.moving, step, self.steps)
        (first, last), rows = (dims[d][self.at[d]] for d in (HEADS, SEQ))
        shared = self.L_q.shape[HEADS] // self.layouts[0].shape[HEADS]
        wanted = [h // shared - first for h in range(self.place[HEADS].start, self.place[HEADS].stop)]
        if wanted != list(range(last - first)):
            index = _torch.constant(wanted, torch.int64, k.device)
            k, v = k.index_select(HEADS, index), v.index_select(HEADS, index)
        return k, v, rows

    def _visible(self, q, rows, given):
        mask, every = given
        if self.pattern.everything and mask is None:
            return None, None
        if self.runs is not None:
            every = torch.cat([torch.arange(a, b, device=q.device) for some in self.runs for a, b in some])
        own = self.place[SEQ]
        ranges = ((own.start, own.stop), rows)
        i, j = (torch.arange(a, b, device=q.device) if every is None else every[a:b] for a, b in ranges)
        return kernels.visible(self.pattern, mask, i, j, self.place[:SEQ])

    def at_once(self, q, k, v):
        """By torch's kernel, which takes no empty keys."""
        k, v, rows = self._come(k, v, 0)
        if rows[0] == rows[1] or not q.numel():
            return tie(q.new_zeros((*q.shape[:-1], v.shape[-1])), q, k, v)
        own = self._prefixes()
        if own is not None:
            k, v = (k, v) if self.runs is None else map(self._in_sequence, (k, v))
            queries = q.split([stop - start for start, stop in own], SEQ)
            ends = [(t, (k.narrow(SEQ, 0, stop), v.narrow(SEQ, 0, stop))) for t, (_, stop) in zip(queries, own)]
            parts = [kernels.causal(t, *seen, self.scale) for t, seen in ends]
            return parts[0] if len(parts) == 1 else torch.cat(parts, SEQ)
        keep, bias = self._visible(q, rows, self.given)
        blind = self.given[0] is not None or self.place[SEQ].stop > self.layouts[0].shape[SEQ]
        return kernels.fused(q, k, v, keep, bias, self.scale, blind)

    def _prefixes(self):
        """The (start, stop) of this rank's queries in the sequence, run by run, where each sees all rows up to its own
        and no others; else ``None``."""
        mask, rows = self.given
        alone = mask is None and self.pattern == Pattern(causal=True)
        if not alone or rows is not None or self.L_q.shape[SEQ] != self.layouts[0].shape[SEQ]:
            return None
        if self.runs is None:
            return [(self.place[SEQ].start, self.place[SEQ].stop)]
        u, c = len(self.runs) // self.L_q.partition.shape[SEQ], self.at[SEQ]
        own = [(a, b) for some in self.runs[c * u : (c + 1) * u] for a, b in some if a < b]
        return own if len(own) <= _MOST_RUNS else None

    def _in_sequence(self, t):
        """All rows of keys, as they stand in the sequence."""
        sizes = [b - a for some in self.runs for a, b in some]
        firsts = [a for some in self.runs for a, _ in some]
        parts = t.split(sizes, SEQ)
        return torch.cat([parts[i] for i in sorted(range(len(parts)), key=firsts.__getitem__) if sizes[i]], SEQ)

    def _part(self, q, k, v, given, step, dtype) -> Part:
        k, v, rows = self._come(k.to(dtype), v.to(dtype), step)
        if rows[0] == rows[1]:
            n, total, m = kernels.no_keys(q, v.shape[-1])
            return tie(n, q, k, v), total, m
        keep, bias = self._visible(q, rows, given)
        return kernels.partial(q, k, v, keep, bias, self.scale)

    def merged(self, q, k, v) -> Part:
        """(n, l, m) of all steps. Of several, what came is not kept for backward but moved again; and k and v are
        widened before they go, and narrowed for the way, so that their gradients add up wide."""
        dtype, given = k.dtype, self.given  # a variable of its own: there remat finds tensors
        if self.steps == 1:
            return self._part(q, k, v, given, 0, dtype)
        k, v, total = wide(k), wide(v), None
        for step in range(self.steps):
            part = remat(lambda q, k, v, step=step: self._part(q, k, v, given, step, dtype))(q, k, v)
            total = part if total is None else kernels.merged(total, part)
        return total
