"""Expert parallelism: tokens travel to the ranks of their experts and back (mixture of experts; Lepikhin et al.,
arXiv:2006.16668).

Dispatch is a plan like any other: a rank holds its tokens sorted by expert, and wants all tokens of its own experts.
Combining is the transpose.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import _torch
from .._types import Place
from ..agree import check_tensor
from ..boxes import balanced
from ..calls import public_call
from ..errors import AgreementError, PartitionError, ShapeError
from ..linear_map import LinearMap, movement
from ..partition import Partition, partition_of
from ..plan import Axis, Side, whole
from ..ties import nothing
from ..world import world
from .autocast import autocast
from .enter import outside, present

__all__ = ["dist_expert_linear", "expert_parallel"]


def _dispatch(line: Partition, counts, width: int, name: str) -> LinearMap:
    """Tokens sorted by expert on every rank -> all tokens of each rank's experts, by expert and then by rank.

    ``counts[r][e]``: how many tokens rank r has for expert e.
    """
    experts, held, wanted, at = len(counts[0]), [[] for _ in counts], [], 0
    places, firsts = [0] * len(counts), []
    for e in range(experts):
        firsts.append(at)
        for r, mine in enumerate(counts):
            if mine[e]:
                held[r].append((at, at + mine[e], places[r]))
                places[r], at = places[r] + mine[e], at + mine[e]
    firsts.append(at)
    e = 0
    for size in balanced(experts, line.size):
        wanted.append((firsts[e], firsts[e + size]))
        e += size
    held_axis = Axis(0, tuple(map(tuple, held)), tuple(places))
    wanted_axis = Axis(0, tuple(((a, b, 0),) if a < b else () for a, b in wanted), tuple(b - a for a, b in wanted))
    return movement(name, Side(line, (held_axis, whole(width))), Side(line, (wanted_axis, whole(width))))


def expert_parallel(
    f: Callable[[int, torch.Tensor], torch.Tensor], x: torch.Tensor, expert: torch.Tensor, P: Place, num_experts: int
) -> torch.Tensor:
    """Apply to every token its expert, where the expert lives.

    Args:
        f: ``f(k, tokens) -> (tokens', features)``: this rank's k-th expert on the tokens that came for it (perhaps
            none); as many tokens out as in, and the same number of features from all experts.
        x: (tokens, features), this rank's tokens; any number on each rank.
        expert: (tokens,) int64, the global expert of each.
        P: a partition of one dim; its ranks have the experts in balanced blocks.
        num_experts: experts in all.

    Returns:
        (tokens, new features), in the order of ``x``.

    Messages: two small all-gathers, of counts and of widths and dtypes; forward each token goes to its expert's rank
    and back, one message for each pair of ranks each way; the same backward.

    Raises:
        AgreementError: experts return different numbers of features, or dtypes.
        PartitionError, ShapeError: P has other than one dim; shapes that do not fit; an expert that does not exist.

    Example:
        >>> x, expert = torch.ones(2, 1), torch.tensor([1, 0])
        >>> F.expert_parallel(lambda k, tokens: (k + 1) * tokens, x, expert, dd.Partition((1,)), 2)
        tensor([[2.],
                [1.]])
    """
    return _parallel(f, x, expert, P, num_experts)


def _parallel(f, x, expert, P, num_experts, features=None, parameters=()):
    grid = partition_of(P)
    if grid.ndim != 1:
        raise PartitionError(
            "experts lie along one dim",
            expected=1,
            actual=grid.ndim,
            next_step="use a partition of one dim, such as P.along(dim)",
        )
    at = grid.index()
    if at is None:
        check_tensor(x, P)
        if features is None:
            features = x.shape[1] if x.dim() == 2 else 0
        return outside(x, *parameters, like=(0, features))
    if x.dim() != 2 or expert.shape != x.shape[:1] or expert.is_floating_point() or expert.dtype == torch.bool:
        raise ShapeError(
            "one expert for each token is needed",
            expected="x (tokens, features), integers expert (tokens,)",
            actual=(tuple(x.shape), tuple(expert.shape), expert.dtype),
            next_step="flatten x to one row for each token, and give one expert's number for each row",
        )
    if expert.numel() and not 0 <= int(expert.min()) <= int(expert.max()) < num_experts:
        raise ShapeError(
            "no such expert",
            expected=f"0 <= expert < {num_experts}",
            actual=(int(expert.min()), int(expert.max())),
            next_step="experts are counted over all ranks, from 0",
        )
    order = torch.argsort(expert, stable=True)
    call, _ = public_call()
    mine = _torch.numbers(torch.bincount(expert, minlength=num_experts))
    reports = world(grid.world).all_gather(mine, grid.ranks, call)
    counts = [reports[r] for r in grid.ranks]
    first = sum(balanced(num_experts, grid.size)[: at[0]])
    local = range(first, first + balanced(num_experts, grid.size)[at[0]])

    arrived = _dispatch(grid, counts, x.shape[1], "dispatch")(x.index_select(0, order))
    sizes = [sum(of_rank[e] for of_rank in counts) for e in local]
    results = [f(k, tokens) for k, tokens in enumerate(arrived.split(sizes))] if sizes else []
    y = torch.cat(results) if results else None
    made = world(grid.world).all_gather(None if y is None else (y.shape[1], y.dtype, y.requires_grad), grid.ranks, call)
    kinds = {kind[:2] for kind in made.values() if kind is not None} or {(x.shape[1], x.dtype)}
    if len(kinds) > 1:
        raise AgreementError(
            "the experts' results do not fit together",
            actual={r: kind and kind[:2] for r, kind in made.items()},
            expected="one number of features and one dtype",
            next_step="let f return the same on all ranks",
        )
    width, dtype = kinds.pop()
    if y is None:
        y = nothing((0, width), arrived, *present(*parameters), dtype=dtype)
        # Parameters that f uses elsewhere are not seen here: where they have gradients this rank's backward joins in.
        if not y.requires_grad and not _torch.transforms_active() and any(kind and kind[2] for kind in made.values()):
            y = y.detach().requires_grad_()
    back = _dispatch(grid, counts, width, "dispatch").T(y)
    return back.index_select(0, torch.argsort(order))


def dist_expert_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    P: Place,
    expert: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    num_experts: int,
) -> torch.Tensor:
    """One linear layer for each expert: y[t] = W[expert[t]] x[t] + b[expert[t]].

    Args:
        w: (this rank's experts, out, in), a balanced block of the experts over ``P``; each is on one rank only.
        bias: (this rank's experts, out).
        x, expert, P, num_experts: as for :func:`expert_parallel`.

    Returns:
        (tokens, out). Messages as for :func:`expert_parallel`; the gradients of w and bias send nothing.

    Example:
        >>> x, w, expert = torch.ones(2, 1), torch.tensor([[[1.0]], [[5.0]]]), torch.tensor([1, 0])
        >>> F.dist_expert_linear(x, w, dd.Partition((1,)), expert, num_experts=2)
        tensor([[5.],
                [1.]])
    """
    if bias is not None and bias.shape != w.shape[:2]:
        raise ShapeError(
            "bias does not fit w",
            expected=tuple(w.shape[:2]),
            actual=tuple(bias.shape),
            next_step="give every expert of this rank its own bias",
        )
    (x,) = autocast("dist_expert_linear", 2, x)
    return _parallel(
        lambda k, tokens: torch.nn.functional.linear(tokens, w[k], None if bias is None else bias[k]),
        x,
        expert,
        P,
        num_experts,
        w.shape[1],
        (w, bias),
    )
