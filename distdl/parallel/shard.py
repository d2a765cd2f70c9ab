"""Sharded training: each rank keeps 1/k of the parameters, of their gradients and of the optimizer's state (ZeRO,
FSDP).

A *unit* of parameters (a layer's, say) is one flat vector, cut into balanced blocks. ``w = sharding.gather(block)`` is
an all-gather; its adjoint, the reduce-scatter, brings this rank's block of the summed gradient. Optimizers that work
element by element (SGD, Adam, ...) then step on blocks, exactly as they would on the whole (Rajbhandari et al.,
arXiv:1910.02054). Tensors that are not the unit's, and gradients that a layer has summed already, are refused:

    ZeRO-1   whole gradients, ``sharding.reduce(grads)``, a step on the block, ``sharding.gather(block)``
    ZeRO-2   :func:`chain` with ``remat=False``: a layer's gradient is reduce-scattered before the next layer's backward
    ZeRO-3   :func:`chain`: a layer's parameters are gathered for its forward, freed, and gathered again for its
             backward, where its activations are worked out again as well, or are kept (``remat="parameters"``)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import _torch, maps
from .. import functional as F
from .._types import Dims, Place
from ..errors import DistdlError, PartitionError, ShapeError
from ..flat import parts_of, vector_of
from ..held import complete, declare, holders, tag
from ..partition import Layout, Partition
from ..remat import remat as recomputed
from .topology import along

__all__ = ["Sharding", "chain"]
Layer = Callable[[Any, Any], Any]  # (parameters, x) -> x
Blocks = Sequence[torch.Tensor]  # this rank's, of one layer
Flats = list[torch.Tensor]  # whole flat vectors, of one layer


@dataclass(frozen=True)
class Sharding:
    """How one unit of parameters is shared out: made by :meth:`of`, equal on all ranks, and without tensors.

    Attributes:
        structure, shapes: the pytree of the whole parameters.
        layout: the flat vector's balanced blocks over the ranks of this fibre; some are empty where ranks outnumber
            elements.

    Example:
        >>> w = [torch.ones(2, 2), torch.zeros(2)]
        >>> sharding = dd.parallel.Sharding.of(w, dd.Partition((1,)))
        >>> sharding.block(w), [p.shape for p in sharding.gather(sharding.block(w))]
        (tensor([1., 1., 1., 1., 0., 0.]), [torch.Size([2, 2]), torch.Size([2])])
    """

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    layout: Layout
    _whole: Any = field(init=False, repr=False, compare=False)  # a map, made here: compiled code makes none

    def __post_init__(self) -> None:
        self.__dict__["_whole"] = maps.all_gather(self.layout)

    @classmethod
    def of(cls, params: Any, P: Place, dims: Dims = None) -> Sharding:
        """The sharding of a pytree of tensors of one dtype over partition dims ``dims`` of ``P`` (None: all).

        Only shapes and dtypes are read: tensors on the meta device will do.

        Raises:
            PartitionError: parameters of layers that sum over these ranks themselves, or over some of them.
        """
        leaves, structure = _torch.flatten(params)
        leaves = _torch.as_given(leaves, structure)  # as they always lay in checkpoints
        _refuse_summed(params, along(P, dims))
        if not leaves or len({leaf.dtype for leaf in leaves}) > 1:
            raise ShapeError(
                "one unit has one dtype",
                expected="tensors of one dtype",
                actual=[str(leaf.dtype) for leaf in leaves],
                next_step="make a unit for each dtype",
            )
        shapes = tuple(tuple(leaf.shape) for leaf in leaves)
        return cls(structure, shapes, Layout(along(P, dims), (sum(map(math.prod, shapes)),)))

    def _flat(self, tree: Any) -> torch.Tensor:
        leaves, _ = _torch.flatten(tree)
        if len(leaves) == len(self.shapes):
            leaves = _torch.as_given(leaves, self.structure)
        if tuple(tuple(leaf.shape) for leaf in leaves) != self.shapes:
            raise ShapeError(
                "not this unit's tensors",
                partitions=self.layout,
                expected=self.shapes,
                actual=tuple(tuple(leaf.shape) for leaf in leaves),
                next_step="pass the tensors from which the Sharding was made, in their order",
            )
        return vector_of(leaves)

    def _tree(self, flat: torch.Tensor) -> Any:
        """The parameters as views of the whole flat vector."""
        parts = parts_of(flat, self.shapes)
        tag(parts, [None] * len(parts), self.layout.partition)  # a layer that gets them does not sum here again
        return _torch.unflatten_as_given(parts, self.structure)

    def _declared(self, block: torch.Tensor) -> torch.Tensor:
        """``block``, a leaf whose gradient will be this rank's part of the sum."""
        return declare(block, self.layout.partition, 0) if block.is_leaf else block

    def block(self, params: Any) -> torch.Tensor:
        """This rank's block of parameters that it holds whole: a detached copy, for an optimizer. No message."""
        return self._declared(self.layout.shard(self._flat(params).detach()).clone())

    def gather(self, block: torch.Tensor) -> Any:
        """The whole parameters (views of one vector) from every rank's block. Adjoint: :meth:`reduce`."""
        return self._tree(F.all_gather(self._declared(block), self.layout))

    def reduce(self, grads: Any) -> torch.Tensor:
        """This rank's block of the sum of all ranks' gradients. Adjoint: :meth:`gather`."""
        _refuse_summed(grads, self.layout.partition)
        return F.reduce_scatter(self._flat(grads), self.layout)

    def start(self, block: torch.Tensor) -> Any:
        """Begin :meth:`gather`; messages travel until :meth:`wait`."""
        return F.start(self._whole, self._declared(block))

    def wait(self, pending: Any) -> Any:
        """Finish what :meth:`start` began."""
        return self._tree(F.wait(pending))


def _refuse_summed(tree: Any, R: Partition) -> None:
    """Sharding sums gradients over all ranks: not for parameters whose layers do."""
    done = [complete(how, R) for how in holders(tree)]  # all of them: one may be complete in part
    if any(done):
        raise PartitionError(
            "a layer sums these gradients over these ranks itself",
            partitions=R,
            actual="layers of dd.nn",
            expected="parameters whose gradients are still to be summed",
            next_step="keep the parameters of layers that span these ranks out of the unit",
        )


def _gathered_again(layer: Layer, tree: Callable[[Flats], Any], whole: Callable[[Blocks], Flats]) -> Layer:
    """``layer(tree(flats), x)`` of ``flats = whole(blocks)``, without keeping ``flats``: when a gradient of the result
    comes, on every rank, ``whole`` brings them again for what backward saved of them."""

    def call(blocks: Blocks, x: Any) -> Any:
        flats = whole(blocks)
        again: Flats = []
        if not any(flat.requires_grad and flat.numel() for flat in flats):
            return layer(tree(flats), x)
        memory = {(_torch.storage(flat), flat.dtype): k for k, flat in enumerate(flats) if flat.numel()}

        def ask(*_: Any) -> None:
            if not again:
                with torch.no_grad():
                    again.extend(whole(blocks))

        def pack(t: torch.Tensor) -> Any:
            k = memory.get((_torch.storage(t), t.dtype))
            return t if k is None else (k, t.size(), t.stride(), t.storage_offset())

        def unpack(kept: Any) -> torch.Tensor:
            if isinstance(kept, torch.Tensor):
                return kept
            ask()
            return again[kept[0]].as_strided(*kept[1:])

        params = tree(flats)
        # Where a flat vector is cut into parameters: that node's backward comes last, and has all their gradients.
        cuts: set[Any] = {p.grad_fn.next_functions[0][0] for p in _torch.flatten(params)[0] if p.requires_grad}
        numbers = range(len(cuts))
        left = set(numbers)

        def done(k: int) -> None:
            left.discard(k)
            if not left:
                again.clear()
                left.update(numbers)  # for another backward of a graph that is kept

        for k, cut in enumerate(cuts):
            cut.register_prehook(lambda _, k=k: done(k))
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = layer(params, x)
        for t in _torch.flatten(y)[0]:
            if isinstance(t, torch.Tensor) and t.requires_grad:
                t.register_hook(ask)
        return y

    return call


def _do_nothing(_: Any) -> None:
    pass


def _parts(one_or_several: Any) -> tuple[Any, ...]:
    return one_or_several if isinstance(one_or_several, tuple) else (one_or_several,)


def chain(
    layers: Sequence[Layer],
    shardings: Sequence[Sharding | tuple[Sharding, ...]],
    *,
    remat: bool | str = True,
    prefetch: bool = True,
) -> Callable[[Sequence[Any], Any], Any]:
    """A sequence of layers whose parameters are gathered when they are needed: ``run(blocks, x)``.

    Args:
        layers: functions ``layer(params, x) -> x``; the last may return the loss.
        shardings: one for each layer; or a tuple of them, where an optimizer treats parts of a layer differently
            (decayed weights and other parameters, say). Then a layer's blocks, and what it gets, are tuples too.
        remat: free a layer's parameters and activations after its forward, and gather and compute them again in
            backward (ZeRO-3, FSDP with activation checkpointing). ``"parameters"``: gather these again, and keep the
            activations (FSDP alone); what a layer makes of its parameters, a cast say, counts among these; inside
            torch.func, which has no hooks for what is saved, as ``True``. ``False``: keep both (ZeRO-2).
        prefetch: start to gather the next layer's parameters (in backward: the one's before) while this one computes;
            not inside torch.func.

    Returns:
        ``run(blocks, x)``, with ``blocks`` this rank's block of each layer. Messages, for n elements in all on k ranks,
        each way (k-1)/k·n elements: an all-gather forward, a reduce-scatter backward, and with ``remat`` one more
        all-gather there.

    Example:
        >>> w, P = [torch.ones(2, 2)], dd.Partition((1,))
        >>> sharding = dd.parallel.Sharding.of(w, P)
        >>> run = dd.parallel.chain([lambda w, x: w[0] @ x] * 2, [sharding] * 2)
        >>> run([sharding.block(w)] * 2, torch.ones(2))
        tensor([4., 4.])
    """
    if len(layers) != len(shardings):
        raise DistdlError(
            "one sharding for each layer",
            expected=len(layers),
            actual=len(shardings),
            next_step="give lists of equal length",
        )
    if remat not in (True, False, "parameters"):
        raise DistdlError(
            "no such way",
            expected='True, False or "parameters"',
            actual=remat,
            next_step="pass one of them as remat=",
        )

    def run(blocks: Sequence[Any], x: Any) -> Any:
        inside = _torch.transforms_active()
        parts = [_parts(s) for s in shardings]
        under_way: dict[int, list[Any]] = {}
        given, planned = ([len(_parts(one)) for one in several] for several in (blocks, shardings))
        if given != planned:
            raise DistdlError(
                "not this chain's blocks",
                expected=f"{planned} blocks of the layers",
                actual=given,
                next_step="pass sharding.block(params) of each layer, in tuples where its shardings are one",
            )

        def early(i: int) -> None:
            if 0 <= i < len(layers) and i not in under_way:
                under_way[i] = [s.start(b) for s, b in zip(parts[i], _parts(blocks[i]), strict=True)]

        # Inside torch.func a region takes all tensors in its closures as arguments: not the other layers' blocks.
        ahead = early if prefetch and not inside else _do_nothing

        def gathered(i: int) -> Layer:
            step = 1  # in backward the layers come in reverse

            def whole(own: Blocks) -> Flats:
                nonlocal step
                pending = under_way.pop(i, None)
                if pending is None:
                    flats = [F.all_gather(s._declared(b), s.layout) for s, b in zip(parts[i], own, strict=True)]
                else:
                    flats = [F.wait(p) for p in pending]
                ahead(i + step)
                step = -1
                return flats

            def tree(flats: Flats) -> Any:
                trees = tuple(s._tree(flat) for s, flat in zip(parts[i], flats))
                return trees if isinstance(shardings[i], tuple) else trees[0]

            if remat == "parameters" and not inside:
                return _gathered_again(layers[i], tree, whole)

            def begin(own: Blocks, x: Any) -> tuple[Any, Any]:
                return tree(whole(own)), x

            return recomputed(layers[i], begin=begin) if remat else lambda own, x: layers[i](*begin(own, x))

        for i in range(len(layers)):
            x = gathered(i)(_parts(blocks[i]), x)
        return x

    return run
