"""The attention of one rank's queries to a block of keys, and how blocks are merged.

A block of keys gives of each query (n, l, m): numerator, denominator, and the largest score, which both are relative
to. Blocks merge by

    (n₁, l₁, m₁) ⊕ (n₂, l₂, m₂) = (n₁ e^(m₁-m) + n₂ e^(m₂-m), l₁ e^(m₁-m) + l₂ e^(m₂-m), m),   m = max(m₁, m₂)

which is associative, and o = n / l (Milakov & Gimelshein, arXiv:1805.02867; Rabe & Staats, arXiv:2112.05682). No value
is ever divided by another block's, nor has its logarithm taken: zeros stay zeros. As o does not depend on m, m is a
constant, and merging saves one number of each query for backward, not a numerator. A query that no key is visible to
has l = 0, and o = 0 by definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as tf

from .. import _torch
from .._value import Value
from ..errors import DistdlError, PartitionError
from .numeric import wide

__all__: list[str] = []

KERNELS = ("auto", "fused", "math")
Mask = torch.Tensor | Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # (n, l, m)


# ---------------------------------------------------------------- what is visible


@dataclass(frozen=True)
class Pattern(Value):
    """Which keys a query sees by its place alone: ``causal``, at most ``window`` away, in its own document."""

    causal: bool = False
    window: int | None = None
    documents: tuple[int, ...] | None = None

    __hash__ = Value.__hash__

    @property
    def everything(self) -> bool:
        """Whether every query sees every key."""
        return not self.causal and self.window is None and self.documents is None

    def keys(self, a: int, b: int, n: int) -> tuple[int, int]:
        """The range of the n keys that queries a .. b-1 see some of; nothing for no queries."""
        if a >= b:
            return n, n
        lo, hi = 0, n
        if self.window is not None:
            lo, hi = max(lo, a - self.window), min(hi, b + self.window)
        if self.causal:
            hi = min(hi, b)
        if self.documents is not None:
            lo = max(lo, max(d for d in self.documents if d <= a))
            hi = min(hi, min(d for d in self.documents if d >= b))
        lo = min(lo, n)
        return lo, max(hi, lo)

    def visible(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor | None:
        """Whether the queries at positions i see the keys at j (they broadcast); ``None``: all do."""
        keep, distance = None, i - j
        if self.causal:
            keep = distance >= 0
        if self.window is not None:
            keep = _both(keep, (distance if self.causal else distance.abs()) <= self.window)
        if self.documents is not None:
            bounds = _torch.constant(self.documents[1:], torch.int64, i.device)
            keep = _both(keep, torch.bucketize(i, bounds, right=True) == torch.bucketize(j, bounds, right=True))
        return keep


def _both(a: torch.Tensor | None, b: torch.Tensor) -> torch.Tensor:
    return b if a is None else a & b


def visible(
    pattern: Pattern, mask: Mask | None, i: torch.Tensor, j: torch.Tensor, place: Sequence[slice]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(whether queries see keys, what is added to the scores), ``None`` where it is all of them, or nothing.

    Args:
        mask: whole, or a function of positions, (queries, 1) and (1, keys).
        i, j: positions of the queries and of the keys.
        place: the examples and the heads that the queries have.
    """
    i, j = i[:, None], j[None, :]
    keep = pattern.visible(i, j)
    if mask is None:
        return keep, None
    if isinstance(mask, torch.Tensor):
        lead = mask.dim() - 2
        for d, part in zip(range(lead), place[2 - lead :]):
            mask = mask if mask.shape[d] == 1 else mask.narrow(d, part.start, part.stop - part.start)
        found = mask[(..., i, j)]
    else:
        found = mask(i, j)
    return (_both(keep, found), None) if found.dtype == torch.bool else (keep, found)


# ---------------------------------------------------------------- the mathematics: derivatives of every order


def partial(q, k, v, keep, bias, scale) -> Part:
    """(n, l, m) of a block of keys, in float32 for half precision."""
    q, k, v = wide(q), wide(k), wide(v)
    scores = q @ k.transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias
    if keep is not None:
        scores = scores.masked_fill(~keep, -math.inf)
    m = scores.detach().amax(-1, keepdim=True)
    e = (scores - _finite(m)).exp()
    return e @ v, e.sum(-1, keepdim=True), m


def no_keys(q, features: int) -> Part:
    """(n, l, m) of no keys: the neutral element of the merge."""
    n = wide(q).new_zeros((*q.shape[:-1], features))
    return n, n.new_zeros((*q.shape[:-1], 1)), n.new_full((*q.shape[:-1], 1), -math.inf)


def merged(a: Part, b: Part) -> Part:
    """Both blocks together."""
    m = torch.maximum(a[2], b[2]).detach()
    old, new = ((x[2].detach() - _finite(m)).exp() for x in (a, b))
    return a[0] * old + b[0] * new, a[1] * old + b[1] * new, m


def _finite(m):
    return torch.where(m == -math.inf, 0, m)


def result(part: Part, dtype: torch.dtype):
    """n / l, and 0 where no key was visible."""
    n, total, _ = part
    return (n / torch.where(total == 0, 1, total)).to(dtype)


# ---------------------------------------------------------------- torch's own kernels: first derivatives


def _further(*tensors: torch.Tensor) -> bool:
    """Whether more than a first derivative in reverse mode is under way: forward mode, or two levels that record."""
    levels = _torch.grad_levels() if _torch.transforms_active() else ()
    if _torch.forward_mode_active() or any(kind == "Jvp" for _, kind in levels):
        return True
    beneath = bool(levels) and any(map(_torch.recorded_beneath, tensors))
    return len(levels) + beneath > 1


def takes_fused(kernel: str, steps: int, *tensors: torch.Tensor) -> bool:
    """Whether torch's fused kernel does it. Its inputs are the same as those of the mathematics: no rank need ask
    another.

    Raises:
        PartitionError: ``"fused"``, where no fused kernel has what is wanted.
    """
    if kernel == "math":
        return False
    several, further = steps > 1, _further(*tensors)
    if kernel == "auto":
        # A vjp of torch.func may be pulled back in a batch (jacrev): torch's kernels do that one by one, and warn.
        return not several and not further and not _torch.transforms_active()
    if further:
        raise PartitionError(
            "torch's fused attention has neither forward mode nor second derivatives",
            expected='kernel="math"',
            actual=kernel,
            next_step='pass kernel="math", or "auto", which chooses',
        )
    if several:
        raise PartitionError(
            "torch's fused attention returns no sums to merge blocks by",
            expected='kernel="math"',
            actual=kernel,
            next_step='pass kernel="math", or method="gather" or "heads"',
        )
    return True


def causal(q, k, v, scale):
    """Of the keys' last rows: each sees the rows up to its own. torch's kernels then leave out half of the work."""
    n, m = q.shape[-2], k.shape[-2]
    if n == m:
        return fused(q, k, v, None, None, scale, False, causal=True)
    keep: torch.Tensor
    if q.is_cuda and q.dtype != torch.float64 and not _torch.transforms_active():
        from torch.nn.attention.bias import causal_lower_right  # which imports torch's compiler

        keep = causal_lower_right(n, m)
    else:
        keep = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
    return fused(q, k, v, keep, None, scale, False)


def fused(q, k, v, keep, bias, scale, blind: bool, causal: bool = False):
    """torch's scaled dot product attention of all keys at once.

    Args:
        blind: whether a query may see no key: it then gets 0, as with the mathematics.
        causal: as torch's is_causal, of as many queries as keys.
    """
    mask, seen = keep, None
    if bias is not None:
        mask = (bias if keep is None else torch.where(keep, bias, -math.inf)).to(q.dtype)
    if blind and mask is not None:
        seen = (mask if mask.dtype == torch.bool else mask > -math.inf).any(-1, keepdim=True)
        mask = mask | ~seen if mask.dtype == torch.bool else torch.where(seen, mask, 0)
    plain = not _torch.transforms_active()
    if plain:
        q, k, v = (t.view_as(t) for t in (q, k, v))  # hooks must not stay on the caller's own tensors
    o = tf.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    if plain and _is_fused(o.grad_fn):
        for t in (q, k, v):
            if t.requires_grad:
                t.register_hook(_first)
    return o if seen is None else torch.where(seen, o, 0)


def _is_fused(node, depth: int = 3) -> bool:
    """Whether a fused kernel made this: of what torch composes itself there are all derivatives."""
    if node is None or depth == 0:
        return False
    earlier = any(_is_fused(before, depth - 1) for before, _ in node.next_functions)
    return earlier or "ScaledDotProduct" in type(node).__name__


def _first(gradient: torch.Tensor) -> None:
    if gradient.requires_grad:  # create_graph=True: torch would fail only when that graph is used
        gradient.register_hook(_second)


def _second(_: torch.Tensor) -> None:
    raise DistdlError(
        "torch's fused attention has no second derivative",
        op="dist_attention",
        expected='kernel="math" where backward is differentiated again',
        actual="the backward of a backward",
        next_step='pass kernel="math": derivatives of every order, and the same messages',
    )
