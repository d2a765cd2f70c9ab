"""Norms of gradients over ranks, each element counted once, and clipping by them. What does not fit is an error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from .. import _torch
from .. import functional as F
from .._types import Dims, Place, Tree
from ..errors import DistdlError, PartitionError, ShapeError
from ..functional.numeric import wide, wider
from ..held import Held, ask, holders
from ..partition import Partition
from ..world import world as world_of
from .topology import along

__all__ = ["clip_by_norm", "clip_grad_norm_", "global_norm"]


def _norm(g: torch.Tensor, order: float) -> torch.Tensor:
    """The norm of a tensor, zero of an empty one; halves in float32."""
    if not g.numel():
        return wide(g.new_zeros(())).abs()
    return torch.linalg.vector_norm(g, order, dtype=wider(g.dtype))


def global_norm(grads: Any, P: Place, dims: Dims = None, *, of: Any = None, norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all gradients of all ranks, each element counted once: torch's ``get_total_norm``, of blocks and
    copies.

    Args:
        grads: a pytree of gradients, in one order on all ranks.
        P, dims: the ranks of the model: each has a block or a copy of all these parameters (so not the stages of a
            pipeline).
        of: what they are gradients of: the parameters, in a pytree like that of ``grads``; or the module, by whose
            names ``grads`` is a dictionary. Parameters of ``dd.nn``, and blocks of a :class:`Sharding`, know of what
            they are blocks, and ``p.grad`` knows its parameter; all others are whole on every rank. Without ``of``, and
            where no gradient knows any better, they are blocks that differ along ``dims`` (``()`` for whole, equal
            gradients).
        norm_type: the order; ``inf`` for the largest entry.

    Returns:
        An invariant scalar; float32 where gradients are float16 or bfloat16, whose own range 256 squared leaves. Norms
        of several groups combine as norms do: ``(a**2 + b**2) ** 0.5``.

    Messages: one all-reduce of one element (``inf``: an all-gather); where some are blocks and others copies, of three
    for each.

    Raises:
        ShapeError: no tensor at all, which has neither dtype nor device: pass a zero on a rank that has no gradients.
        PartitionError: without ``of``, some gradients know what they are and others do not; blocks on ranks that are
            not in ``P``; a gradient that should be equal on all ranks is not.

    Example:
        >>> dd.parallel.global_norm([torch.tensor([3.0, 4.0])], dd.Partition((1,)))
        tensor(5.)
    """
    leaves, _ = _torch.flatten(grads)
    if not leaves:
        raise ShapeError(
            "no gradients",
            expected="one tensor or more on every rank",
            actual=grads,
            next_step="pass torch.zeros(()), of the other ranks' dtype and device, where a rank has none",
        )
    how = holders(grads, of)
    norms = torch.stack([_norm(g, norm_type) for g in leaves])
    line = along(P, dims)
    if math.isinf(norm_type):
        return F.all_gather(norms.max().reshape(1), line, shape=(line.size,)).max()
    powers = norms**norm_type
    if line.size > 1 and (of is not None or any(how)):
        if of is None and None in how:
            raise PartitionError(
                "some gradients are of split layers, others of none that is known",
                expected="of=",
                actual=f"{how.count(None)} of {len(how)} unknown",
                next_step="pass of=list(model.parameters()): what no layer splits is then whole",
            )
        total = _counted_once(powers.double(), [h or Held(line, ()) for h in how], line).to(powers.dtype)
    else:
        total = F.invariant_sum(powers.sum(), line)
    norm: torch.Tensor = total ** (1 / norm_type)
    return norm


@lru_cache(maxsize=4096)
def _all_blocks_in(how: Held, line: Partition) -> bool:
    """Whether ranks of ``line`` hold all blocks of a parameter, or none."""
    if how.split is None or how.grid.world != line.world:
        return False
    ranks = set(line.ranks)
    return all(ranks.issuperset(how.grid.along(how.split, r).ranks) for r in ranks.intersection(how.grid.ranks))


def _counted_once(powers: torch.Tensor, holders_of: Sequence[Held], line: Partition) -> torch.Tensor:
    """The sum of ``powers``, one for each tensor on each rank, over all different blocks of all tensors."""
    rank = world_of(line.world).rank
    for how in holders_of:
        if not _all_blocks_in(how, line):
            raise PartitionError(
                "a parameter has blocks on other ranks, or unknown ones",
                partitions=line,
                expected="all ranks that hold its blocks",
                actual=f"dims {how.split} of {how.grid.shape}",
                next_step="pass a partition of all ranks of the model, and blockwise parametrizations only",
            )
    constant = partial(_torch.constant, dtype=powers.dtype, device=powers.device)
    holds = constant([float(rank in how.grid.ranks) for how in holders_of])
    blocks = constant([how.blocks for how in holders_of])
    total, squares, count = F.invariant_sum(torch.stack([powers * holds, powers**2 * holds, holds]), line)
    count = count.clamp(min=1)
    differ = (blocks == 1) & (count * squares - total**2 > 1e-8 * total**2)
    whole = any(how.blocks == 1 for how in holders_of)  # to look at the numbers of a device waits for it
    if whole and not _torch.transforms_active() and not _torch.is_fake(differ) and differ.any():
        raise PartitionError(
            "a gradient that should be equal on all ranks differs",
            partitions=line,
            expected="sums over the ranks, of parameters that are whole on every rank",
            actual=f"tensors {differ.nonzero().reshape(-1).tolist()} differ",
            next_step="sum them first (GradientSync.finish(), reduce_gradients); dd.nn.declare tells of blocks",
        )
    return (total * blocks / count).sum()


def clip_grad_norm_(
    parameters: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    P: Place,
    dims: Dims = None,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """:func:`torch.nn.utils.clip_grad_norm_` of a model whose parameters are split, copied or sharded over the ranks,
    in one call.

    Args:
        parameters: a module, or its parameters: the same ones in one order on every rank. One without a gradient counts
            as zero.
        P, dims, norm_type: see :func:`global_norm`; a parameter of which nothing is known is whole on every rank.

    Returns:
        The norm before, equal on every rank. ``.grad`` is scaled in place.

    Example:
        >>> w = torch.ones(2, requires_grad=True)
        >>> (w * torch.tensor([3.0, 4.0])).sum().backward()
        >>> dd.parallel.clip_grad_norm_([w], 1.0, dd.Partition((1,))), w.grad
        (tensor(5.), tensor([0.6000, 0.8000]))
    """
    if isinstance(parameters, torch.nn.Module):
        ask(parameters)
        of: list[torch.Tensor] = list(parameters.parameters())
    else:
        of = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if not of:
        return torch.zeros(())
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in of]
    norm = global_norm(grads, P, dims, of=of, norm_type=norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise DistdlError(
            "the gradients' norm is not finite",
            expected="a finite norm",
            actual=float(norm),
            next_step="skip the step, or error_if_nonfinite=False",
        )
    torch.nn.utils.clip_grads_with_norm_(of, max_norm, norm)
    return norm


def clip_by_norm(grads: Tree, norm: torch.Tensor, max_norm: float) -> Tree:
    """Gradients scaled to a global norm of at most ``max_norm``, as :func:`torch.nn.utils.clip_grad_norm_` does, in new
    memory.

    Example:
        >>> grads = [torch.tensor([3.0, 4.0])]
        >>> norm = dd.parallel.global_norm(grads, dd.Partition((1,)))
        >>> dd.parallel.clip_by_norm(grads, norm, 1.0)
        [tensor([0.6000, 0.8000])]
    """
    leaves, tree = _torch.flatten(grads)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return _torch.unflatten([g * factor.to(g.dtype) for g in leaves], tree)
