"""Layers whose parameters live in parts, and are gathered when they are called (ZeRO-3, FSDP)."""

from __future__ import annotations

from typing import Any

import torch

from .. import maps
from .._types import Device, Dims
from ..boxes import balanced
from ..errors import PartitionError
from ..held import Held, held, mark_of, tag
from ..linear_map import LinearMap
from ..movement.call import move
from ..partition import Layout, Partition
from .layer import Layer, first_line

__all__ = ["Sharded"]


class Sharded(Layer):
    """A layer whose parameters are cut along the partition dims over which it keeps copies of them: a forward gathers
    them, and its adjoint, a reduce-scatter, brings each rank its part of the summed gradient, on which any
    element-wise optimizer steps (Rajbhandari et al., arXiv:1910.02054, stage 3).

    ``dd.nn.Sharded(dd.nn.Linear(P, 6, 4))`` has ``weight`` and ``bias`` by the same names, and the values that they
    had; blocks are cut further along their first dim, evenly, and empty where ranks outnumber rows. Buffers stay whole,
    in ``layer``.

    Args:
        layer: a layer with parameters; it is taken over, and has none of its own any more. What shared one with it
            does not share the part: tie parts (``a.weight = b.weight`` of two Sharded) after they are made.
        dims: the partition dims of the layer's P to cut along, where a parameter is a copy along them; ``None``: all.

    Messages, beside the layer's: one all-gather forward of all parameters that are copies along the same dims, one
    reduce-scatter backward. Backward keeps what was gathered; ``dd.remat(lambda x: sharded(x))`` gathers again.

    Raises:
        PartitionError: no layer of ``dd.nn``, one of several layers, or a dim that P does not have.

    Example:
        >>> layer = dd.nn.Sharded(dd.nn.Linear(dd.Partition((1, 1, 1)), 3, 5))
        >>> layer(torch.ones(2, 3)).shape
        torch.Size([2, 5])
    """

    layer: Layer

    def __init__(self, layer: Layer, dims: Dims = None) -> None:
        torch.nn.Module.__init__(self)
        own = dict(layer._parameters) if isinstance(layer, Layer) else {}
        there = {name for name, p in own.items() if p is not None}
        if not there or len(there) != len(list(layer.parameters())) or not there <= layer._marks.keys():
            raise PartitionError(
                "not one layer of dd.nn with parameters",
                expected="such as dd.nn.Linear(P, ...), which knows where its parameters are copies",
                actual=type(layer).__name__,
                next_step="shard the layers of a model one by one; dd.parallel.Sharding is for other modules",
                partitions=getattr(layer, "P", None),
            )
        self.P, self.layer, self.layouts, self._marks = layer.P, layer, {}, {}
        self._draws, self._seed, self._kind = layer._draws, layer._seed, layer._kind
        self._gathered: dict[str, tuple[LinearMap, Held, tuple[int, ...]]] = {}  # with maps: compiled code makes none
        for name, whole in own.items():
            part = None if whole is None else self._cut(name, whole, dims)
            layer.register_parameter(name, None)
            self.register_parameter(name, part)

    def _cut(self, name: str, whole: torch.Tensor, dims: Dims) -> torch.nn.Parameter:
        """This rank's part of a parameter of the layer, whose layout and mark are noted."""
        how, L = held(whole), self.layer.layouts[name]
        over = tuple(d for d in how.grid.dims(dims) if d in how.copies)
        k = 1 if not over else how.grid.along(over, how.grid.ranks[0]).size
        cut = [balanced(n, k) for n in L.sizes(0)]
        shape = (L.partition.shape[0] * k, *L.partition.shape[1:])
        inner = L.partition.size // L.partition.shape[0]
        rows = [L.partition.ranks[i : i + inner] for i in range(0, L.partition.size, inner)]
        ranks = [how.grid.along(over, rank).ranks[s] for row in rows for s in range(k) for rank in row]
        splits = (tuple(n for some in cut for n in some), *(L.splits or (None,) * L.ndim)[1:])
        self.layouts[name] = Layout(Partition(shape, tuple(ranks), L.partition.world), L.shape, splits)
        self._marks[name] = mark_of(how.grid, (*how.split, *over))
        fibre = how.grid.along(over)
        if fibre is None:  # a rank outside: what its layer had, whose shape says what the result's is
            return torch.nn.Parameter(whole.detach(), whole.requires_grad)
        row = L.partition.index()
        line = Partition((k, *(1,) * (L.ndim - 1)), fibre.ranks, fibre.world)
        there = Layout(line, tuple(whole.shape), (cut[row[0]], *(None,) * (L.ndim - 1)))
        self._gathered[name] = (maps.all_gather(there, 0), how, over)
        return torch.nn.Parameter(there.shard(whole.detach()).clone(), whole.requires_grad)

    def _block(self, name: str, device: Device = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        if not self.layouts[name].active:
            return torch.zeros(getattr(self, name).shape, device=device, dtype=dtype)
        return super()._block(name, device, dtype)

    def _whole(self) -> dict[str, torch.Tensor]:
        """The layer's parameters, and marked: their gradients are summed on the way back. Those that lie along the same
        dims come in one set of messages."""
        own: dict[str, torch.Tensor] = {name: getattr(self, name) for name in self._marks}
        sets: dict[tuple[int, ...], list[str]] = {}
        for name, (_, _, over) in self._gathered.items():
            sets.setdefault(over, []).append(name)
        for over, names in sets.items():
            gathers = [self._gathered[name][0] for name in names]
            for name, y in zip(names, move([own[name] for name in names], gathers)):
                tag(y, own[name], self._gathered[name][1].grid, over)
                own[name] = y
        return own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer of this rank's block, with its parameters gathered."""
        return torch.func.functional_call(self.layer, self._whole(), args, kwargs)

    def extra_repr(self) -> str:
        """The partition, and the parts of this rank."""
        shapes = ", ".join(f"{name}={L.local_shape()} of {L.shape}" for name, L in self.layouts.items())
        return f"{first_line(self.P)}, {shapes}"
