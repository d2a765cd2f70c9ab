"""DTensors and device meshes of torch.distributed as blocks, Layouts and Partitions, and back; without a message.

A DTensor is a block and the rule that cut it; so is a block over a Layout. ``Shard(d)`` is a grid dim at tensor dim d,
of ``torch.chunk``'s blocks; ``Replicate()`` an *invariant* value; ``Partial("sum")`` a *varying* one, whose sum is
meant. torch.distributed is imported when a function here is called, and must be initialised then, with MPI's ranks:
``dd.parallel.export_rendezvous()`` sees to that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any

import torch

from . import functional as F
from ._arguments import check_functions
from .calls import public
from .errors import DistdlError, PartitionError, ShapeError
from .partition import Layout, Partition, partition_of
from .ties import nothing
from .world import world

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = ["device_mesh", "from_dtensor", "layout", "partition", "to_dtensor"]

# Before 2.13 torch made the gradient of a DTensor without its graph: a second derivative came out without it, silently.
_TWICE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def partition(mesh: DeviceMesh, world: str = "default") -> Partition:
    """The ranks of a DeviceMesh, or of one of its sub-meshes, as a grid of the same shape.

    Raises:
        PartitionError: torch.distributed counts this process as another rank than ``world`` does.

    Example:
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> mesh = torch.distributed.init_device_mesh("cpu", (1, 1))
        >>> dd.interop.partition(mesh)
        Partition((1, 1))
    """
    _check_ranks(world)
    return Partition(tuple(mesh.mesh.shape), tuple(mesh.mesh.reshape(-1).tolist()), world)


def device_mesh(P: Partition | Layout, device_type: str = "cpu", names: Sequence[str] | None = None) -> DeviceMesh:
    """A DeviceMesh of the grid's shape and ranks.

    Collective over all ranks of torch.distributed, also those that are not in ``P``: torch makes a process group for
    each fibre of the mesh. Make it once, and keep it.

    Args:
        P: the grid, of one dim at least.
        device_type: where the tensors will lie.
        names: of the mesh's dims.

    Raises:
        PartitionError: a grid without dims, or ranks that torch.distributed counts in another way.

    Example:
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> dd.interop.device_mesh(dd.Partition((1, 1)), names=("data", "model")).shape
        (1, 1)
    """
    from torch.distributed.device_mesh import DeviceMesh

    P = partition_of(P)
    _check_ranks(P.world)
    if not P.ndim:
        raise PartitionError(
            "a mesh has one dim at least",
            expected="a grid of one dim or more",
            actual=P,
            next_step="Partition((1,)) is one rank, too",
        )
    return DeviceMesh(
        device_type, torch.tensor(P.ranks).reshape(P.shape), mesh_dim_names=tuple(names) if names else None
    )


def _check_ranks(name: str) -> None:
    from torch import distributed

    if not distributed.is_initialized():
        raise PartitionError(
            "torch.distributed is not initialised",
            expected="a process group of the same ranks",
            actual="none",
            next_step='dd.parallel.export_rendezvous(), then torch.distributed.init_process_group("gloo")',
        )
    theirs, ours = (distributed.get_rank(), distributed.get_world_size()), (world(name).rank, world(name).size)
    if theirs != ours:
        raise PartitionError(
            "torch.distributed counts the ranks in another way",
            expected=f"rank {ours[0]} of {ours[1]}, as in the world {name!r}",
            actual=f"rank {theirs[0]} of {theirs[1]}",
            next_step="call dd.parallel.export_rendezvous() before init_process_group, and nothing else in between",
        )


def layout(
    tensor: Any, placements: Sequence[Any] | None = None, shape: Sequence[int] | None = None, *, world: str = "default"
) -> tuple[Layout, Partition, Partition]:
    """How a DTensor lies: (the Layout of this rank's block, the ranks with copies of it, the ranks whose values sum).

    The Layout spans the ranks that share this rank's place in the mesh dims that do not shard, so that together they
    have the whole tensor; its splits are ``torch.chunk``'s: 10 over 4 ranks are 3, 3, 3, 1. Mesh dims that shard one
    tensor dim cut from left to right, as torch does. No message.

    Args:
        tensor: a DTensor; or a DeviceMesh, followed by ``placements`` and the global ``shape``.
        world: the world of the Layout's ranks.

    Returns:
        The Layout; and two grids through this rank: of the mesh dims with ``Replicate()``, over which the block is
        invariant, and of those with ``Partial("sum")``, over which it is one of the summands. Without such dims they
        have one rank. A rank outside of the mesh gets those of the mesh's first rank.

    Raises:
        PartitionError: a placement that is none of these three; the error names a redistribution that helps.

    Example:
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> from torch.distributed.tensor import Shard
        >>> mesh = dd.interop.device_mesh(dd.Partition((1,)))
        >>> dd.interop.layout(mesh, [Shard(0)], (4, 2))[0]
        Layout(Partition((1, 1)), (4, 2))
    """
    if hasattr(tensor, "device_mesh") and placements is None:
        mesh, placements, shape = tensor.device_mesh, tensor.placements, tensor.shape
    elif placements is None or shape is None:
        raise PartitionError(
            "how does the tensor lie?",
            expected="a DTensor; or a DeviceMesh, placements and the global shape",
            actual=f"{type(tensor).__name__}, placements {placements}, shape {shape}",
            next_step="layout(t), or layout(mesh, placements, shape)",
        )
    else:
        mesh = tensor
    grid = partition(mesh, world)
    return _layout(grid, _cuts(tuple(placements), len(shape)), tuple(shape))


def _cuts(placements: tuple[Any, ...], ndim: int) -> tuple[int | str, ...]:
    """For each mesh dim the tensor dim that it shards, or "copies" or "sum"."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    cuts: list[int | str] = []
    for placement in placements:
        if type(placement) is Shard and -ndim <= placement.dim < ndim:
            cuts.append(placement.dim % ndim)
        elif type(placement) is Replicate:
            cuts.append("copies")
        elif type(placement) is Partial and placement.reduce_op == "sum":
            cuts.append("sum")
        else:
            # _StridedShard (FSDP2 over tensor parallelism) cuts in another order of the mesh dims than a Layout says
            instead = [p if type(p) in (Shard, Replicate) or p == Partial() else
                       Shard(p.dim) if hasattr(p, "dim") else Replicate() for p in placements]  # fmt: skip
            raise PartitionError(
                f"no Layout says {placement!r}",
                expected='Shard(dim), Replicate() or Partial("sum")',
                actual=tuple(placements),
                next_step=f"t.redistribute(placements={instead})",
            )
    return tuple(cuts)


def _layout(
    grid: Partition, cuts: tuple[int | str, ...], shape: tuple[int, ...]
) -> tuple[Layout, Partition, Partition]:
    if len(cuts) != grid.ndim:
        raise PartitionError(
            "one placement for each mesh dim",
            partitions=grid,
            expected=grid.ndim,
            actual=len(cuts),
            next_step="Replicate() stands for a mesh dim that does not cut",
        )
    here = grid.index() or (0,) * grid.ndim
    sizes, splits = [], []
    for d, n in enumerate(shape):
        blocks = [n]
        for i, cut in enumerate(cuts):
            if cut == d:
                blocks = [part for block in blocks for part in chunks(block, grid.shape[i])]
        sizes.append(len(blocks))
        splits.append(tuple(blocks))
    # grid coordinates in the order of tensor dims, and of mesh dims within one
    order = sorted((cut, i) for i, cut in enumerate(cuts) if isinstance(cut, int))
    block = Layout(Partition(tuple(sizes), _ranks(grid, here, [i for _, i in order]), grid.world), shape, tuple(splits))
    copies, summands = ([i for i, cut in enumerate(cuts) if cut == kind] for kind in ("copies", "sum"))
    return block, _fibre(grid, here, copies), _fibre(grid, here, summands)


def _fibre(grid: Partition, here: tuple[int, ...], dims: list[int]) -> Partition:
    return Partition(tuple(grid.shape[i] for i in dims), _ranks(grid, here, dims), grid.world)


def _ranks(grid: Partition, here: tuple[int, ...], dims: list[int]) -> tuple[int, ...]:
    """The ranks through ``here`` along ``dims``, the last of which runs fastest."""
    places = product(*(range(grid.shape[i]) for i in dims))
    return tuple(grid.rank_at([dict(zip(dims, place)).get(i, c) for i, c in enumerate(here)]) for place in places)


def chunks(n: int, p: int) -> tuple[int, ...]:
    """``torch.chunk``'s sizes, with the empty ones that it leaves out: 10 over 4 is 3, 3, 3, 1, and 2 over 4 is
    1, 1, 0, 0."""
    size = -(-n // p)
    return tuple(min(size, max(0, n - i * size)) for i in range(p))


def from_dtensor(t: DTensor, *, summed: bool = False, world: str = "default") -> tuple[torch.Tensor, Layout]:
    """A DTensor's block, and its Layout: the same memory, no message, and differentiable.

    A replicated block is *invariant* over the copies: mark it varying before ranks use it differently
    (``F.mark_varying(block, dd.interop.layout(t)[1])``). A block with ``Partial("sum")`` is this rank's summand.

    Args:
        summed: sum partial values: one ``F.invariant_sum`` over the ranks that have summands (a message where there
            are several).
        world: the world of the Layout's ranks.

    Raises:
        PartitionError: a placement that no Layout says, as in :func:`layout`; the error names a redistribution.
        DistdlError: in a backward with ``create_graph=True``, where this torch (before 2.13) would lose a second
            derivative with respect to the DTensor.

    Example:
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> from torch.distributed.tensor import ones
        >>> dd.interop.from_dtensor(ones(2, device_mesh=dd.interop.device_mesh(dd.Partition((1,)))))
        (tensor([1., 1.]), Layout(Partition((1,)), (2,)))
    """
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import Partial, Replicate

    L, _, summands = layout(t, world=world)
    block = t.to_local(grad_placements=[Replicate() if type(p) is Partial else p for p in t.placements])
    if isinstance(block, AsyncCollectiveTensor):  # torch's messages are still under way: any copy waits for them
        block = block.clone()
    if block.requires_grad:
        if not _TWICE:
            block.register_hook(_once)
        if block.is_contiguous():
            block.register_hook(_laid_out)
    if not L.active:
        block = nothing(L.local_shape(), block)
    if summed and summands.size > 1:
        block = F.invariant_sum(block, summands)
    return block, L


def _once(grad: torch.Tensor) -> None:
    """A hook of a DTensor's block, where torch differentiates it once only."""
    if torch.is_grad_enabled() and grad.requires_grad:
        raise DistdlError(
            "this torch loses second derivatives with respect to a DTensor",
            op="from_dtensor",
            expected="torch 2.13 or newer; or a first derivative, without create_graph=True",
            actual=f"torch {torch.__version__}",
            next_step="differentiate twice with respect to blocks, L.shard(x), and make the DTensor afterwards",
        )


def _laid_out(grad: torch.Tensor) -> torch.Tensor:
    """A hook of a DTensor's block: its cotangent with the strides of a contiguous tensor, also where it has no element
    or one along a dim. With others torch redistributes it before it is accumulated: on the ranks that have them, while
    the others do not come (seen in torch 2.11)."""
    stride = _contiguous(grad.shape)
    return grad if grad.stride() == stride else grad.contiguous().as_strided(grad.shape, stride)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(accumulate(reversed(shape[1:]), lambda a, n: a * max(n, 1), initial=1))[::-1] if shape else ()


def to_dtensor(
    block: torch.Tensor,
    L: Layout,
    mesh: DeviceMesh,
    placements: Sequence[Any] | None = None,
    *,
    repartition: bool = False,
) -> DTensor:
    """This rank's block over ``L`` as a DTensor: the same memory where the block is contiguous, no message, and
    differentiable.

    Args:
        block, L: as :func:`from_dtensor` gives them.
        mesh: the DTensor's mesh. Mesh dims that ``L`` does not cut hold copies.
        placements: the DTensor's; left out, those under which ``L`` is this rank's layout. ``Partial("sum")`` must be
            named: nothing tells a summand from a copy.
        repartition: where ``L`` is none that ``placements`` say (DTensor knows ``torch.chunk``'s blocks only), move
            the block to the one that they do, by one ``F.repartition`` among the same ranks.

    Raises:
        PartitionError: no placements say ``L``, and ``repartition`` is not set; or ``L`` has other ranks.
        ShapeError: the block is not this rank's.

    Example:
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> P = dd.Partition((1,))
        >>> dd.interop.to_dtensor(torch.ones(2), dd.Layout(P, (2,)), dd.interop.device_mesh(P)).to_local()
        tensor([1., 1.])
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    grid = partition(mesh, L.partition.world)
    if placements is None:
        cuts, target = _placements(grid, L)
        placements = [Shard(cut) if isinstance(cut, int) else Replicate() for cut in cuts]
    else:
        placements = list(placements)
        target = _layout(grid, _cuts(tuple(placements), L.ndim), L.shape)[0]
    if target != L:
        if not repartition or set(target.partition.ranks) != set(L.partition.ranks):
            raise PartitionError(
                f"{placements} say another layout",
                partitions=L,
                expected=target,
                actual=L,
                next_step=(
                    "to_dtensor(..., repartition=True) moves the block there by one repartition"
                    if set(target.partition.ranks) == set(L.partition.ranks)
                    else "F.repartition to the expected layout first"
                ),
            )
        block = F.repartition(block, L, target)
    if target.active and tuple(block.shape) != target.local_shape():
        raise ShapeError(
            "not this rank's block",
            partitions=target,
            expected=target.local_shape(),
            actual=tuple(block.shape),
            next_step="pass the block that L.shard(x_global) gives",
        )
    return DTensor.from_local(
        block.contiguous(),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(L.shape),
        stride=_contiguous(L.shape),
    )


def _placements(grid: Partition, L: Layout) -> tuple[tuple[int | str, ...], Layout]:
    """What each mesh dim cuts, and the layout that this gives: L, or one over the same grid of ranks.

    Mesh dims of one rank count as copies, so that every rank of the mesh finds the same.
    """
    choices = [("copies",) if n == 1 else ("copies", *range(L.ndim)) for n in grid.shape]
    alike = None
    for cuts in product(*choices):
        if math.prod(n for n, cut in zip(grid.shape, cuts) if cut != "copies") != L.partition.size:
            continue
        target = _layout(grid, cuts, L.shape)[0]
        if target == L:
            return cuts, target
        if target.partition == L.partition and alike is None:
            alike = cuts, target
    if alike is None:
        raise PartitionError(
            "no placements over this mesh say the layout",
            partitions=(grid, L),
            expected="ranks in the order of the mesh, which mesh dims cut from left to right",
            actual=L,
            next_step="F.repartition to dd.interop.layout(mesh, placements, shape)[0] first",
        )
    return alike


public({f"interop.{name}": globals()[name] for name in __all__}, alike=False)
check_functions(globals(), __all__)
