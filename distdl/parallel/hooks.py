"""Communication hooks: how a bucket of gradients is summed. Pure functions ``hook(bucket, state) -> (bucket, state)``.

A bucket is a list of tensors of one dtype, this rank's gradients; the result is their sum over the ranks, or what
stands for it, equal on every rank. ``state`` is ``None`` on the first call. Lossy hooks feed their error back: what a
step leaves out is added to the next step's gradients, so that nothing is lost, only late. A step whose sum is not
finite (mixed precision skips it) leaves the state as it was: an infinity in there would come again for ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import functional as F
from .._types import Dims, Place
from ..errors import DistdlError
from ..flat import parts_of, vector_of
from ..functional.numeric import wide
from .topology import along

__all__ = ["all_reduce", "cast", "power_sgd", "top_k"]
Bucket = list[torch.Tensor]
Hook = Callable[[Bucket, Any], tuple[Bucket, Any]]


def all_reduce(P: Place, dims: Dims = None) -> Hook:
    """The exact sum, as one message for the bucket: views of one vector. The default."""
    return lambda bucket, state: (_like(F.all_sum_reduce(vector_of(bucket), P, dims), bucket), state)


def _unless_infinite(
    sums: Sequence[torch.Tensor], new: Sequence[torch.Tensor], old: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """``new`` where all of ``sums``, equal on every rank, are finite, else ``old``; the device alone decides."""
    finite = torch.stack([s.isfinite().all() for s in sums]).all()
    return [torch.where(finite, a, b) for a, b in zip(new, old)]


def _like(flat: torch.Tensor, bucket: Bucket) -> Bucket:
    return parts_of(flat, [g.shape for g in bucket])


def cast(P: Place, dtype: torch.dtype = torch.bfloat16, dims: Dims = None) -> Hook:
    """Summed in ``dtype`` (float16 or bfloat16), which is sent. Each rank sums its block of the bucket in float32, and
    rounds once.

    Messages, for n elements on k ranks: a reduce-scatter and an all-gather of n elements of ``dtype``: 2n(k-1)/k sent.
    """

    def hook(bucket: Bucket, state: Any) -> tuple[Bucket, Any]:
        line, flat = along(P, dims), vector_of(bucket)
        summed = F.all_gather(F.reduce_scatter(flat.to(dtype), line), line, shape=flat.shape)
        return _like(summed.to(flat.dtype), bucket), state

    return hook


def top_k(P: Place, share: float = 0.01, dims: Dims = None) -> Hook:
    """Only the ``share`` largest entries of each rank's bucket, with error feedback (Stich et al., arXiv:1809.07599,
    algorithm 1).

    The state is this rank's error. Messages: an all-gather of ⌈share·n⌉ values and as many int64 places. Values are
    added rank by rank, in one order everywhere: a device adds what falls on one place in any order, and parameters
    would drift apart.
    """
    if not 0 < share <= 1:
        raise DistdlError(
            "a share of the entries",
            expected="0 < share <= 1",
            actual=share,
            next_step="give the share of entries to send, such as 0.01",
        )

    def hook(bucket: Bucket, state: Any) -> tuple[Bucket, Any]:
        line = along(P, dims)
        flat = vector_of(bucket) if state is None else vector_of(bucket) + state
        k = math.ceil(share * flat.numel())
        places = flat.abs().topk(k).indices
        shape = (line.size * k,)
        values, where = F.all_gather([flat[places], places], line, shape=shape)
        total = torch.zeros_like(wide(flat))
        for part, at in zip(values.split(k), where.split(k)):
            total = total.index_add(0, at, part.to(total.dtype))
        before = torch.zeros_like(flat) if state is None else state
        (error,) = _unless_infinite([total], [flat.index_fill(0, places, 0)], [before])
        return _like(total.to(flat.dtype), bucket), error

    return hook


def power_sgd(P: Place, rank: int = 4, dims: Dims = None, seed: int = 0) -> Hook:
    """Matrices by a low-rank approximation, with error feedback (Vogels et al., arXiv:1905.13727, algorithms 1 and 2).

    M ≈ P̂ Qᵀ with M the sum of the ranks' matrices (gradients reshaped to their first dim times the rest), P̂ an
    orthonormal basis of M Q from the last step's Q. What is not smaller that way, vectors first of all, is summed
    exactly.

    Messages, for matrices (n, m) on k ranks: two all-reduces, of Σ n·rank and Σ m·rank elements, and one of all that is
    exact.
    """

    def hook(bucket: Bucket, state: Any) -> tuple[Bucket, Any]:
        copies, small = along(P, dims).size, []
        for i, g in enumerate(bucket):
            if g.dim() > 1 and g.numel() and rank * (g.shape[0] + g.numel() // g.shape[0]) < g.numel():
                small.append(i)
        done, exact = list(bucket), [i for i in range(len(bucket)) if i not in small]
        if exact:
            for i, y in zip(exact, F.all_sum_reduce([bucket[i] for i in exact], P, dims)):
                done[i] = y
        if not small:
            return done, state
        matrices = [bucket[i].reshape(bucket[i].shape[0], -1) for i in small]
        if state is None:
            draw = torch.Generator().manual_seed(seed)  # the same first guess on every rank
            guess = [
                torch.randn(M.shape[1], rank, dtype=M.dtype, generator=draw, device="cpu").to(M.device)
                for M in matrices
            ]
            errors = [torch.zeros_like(M) for M in matrices]
        else:
            guess, errors = state
            matrices = [M + error for M, error in zip(matrices, errors)]
        left = F.all_sum_reduce([M @ Q for M, Q in zip(matrices, guess)], P, dims)
        left = [torch.linalg.qr(wide(A)).Q.to(A.dtype) for A in left]
        right = F.all_sum_reduce([M.mT @ A for M, A in zip(matrices, left)], P, dims)
        approximate = [A @ B.mT for A, B in zip(left, right)]
        for i, Y in zip(small, approximate):
            done[i] = Y.view(bucket[i].shape)
        left_out = [M - Y / copies for M, Y in zip(matrices, approximate)]
        kept = _unless_infinite(approximate, [*right, *left_out], [*guess, *errors])
        return done, (kept[: len(right)], kept[len(right) :])

    return hook
