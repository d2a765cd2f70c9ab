"""Sharded training: each rank keeps 1/k of the parameters, of their gradients and of the optimizer's state (ZeRO, FSDP).

A *unit* of parameters (a layer's, say) is one flat vector, cut into balanced blocks. ``w = sharding.gather(block)`` is an
all-gather; its adjoint, the reduce-scatter, brings this rank's block of the summed gradient. Optimizers that work element by
element (SGD, Adam, ...) then step on blocks, exactly as they would on the whole (Rajbhandari et al., arXiv:1910.02054):

    ZeRO-1   whole gradients, ``sharding.reduce(grads)``, a step on the block, ``sharding.gather(block)``
    ZeRO-2   :func:`chain` with ``remat=False``: a layer's gradient is reduce-scattered before the next layer's backward
    ZeRO-3   :func:`chain`: a layer's parameters are gathered for its forward, freed, and gathered again for its backward, where its
             activations are worked out again as well, or are kept (``remat="parameters"``)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from .. import _torch, maps
from .. import functional as F
from ..errors import DistdlError, ShapeError
from ..partition import Layout
from ..remat import remat as _remat
from .topology import along

__all__ = ["Sharding", "chain", "clip_by_norm", "global_norm"]


@dataclass(frozen=True)
class Sharding:
    """How one unit of parameters is shared out: made by :meth:`of`, equal on all ranks, and without tensors.

    Attributes:
        structure, shapes: the pytree of the whole parameters.
        layout: the flat vector's balanced blocks over the ranks of this fibre; some are empty where ranks outnumber elements.
    """

    structure: Any
    shapes: tuple
    layout: Layout

    @classmethod
    def of(cls, params, P, dims=None) -> Sharding:
        """The sharding of a pytree of tensors of one dtype over partition dims ``dims`` of ``P`` (None: all).

        Only shapes and dtypes are read: tensors on the meta device will do.
        """
        leaves, structure = _torch.flatten(params)
        if not leaves or len({leaf.dtype for leaf in leaves}) > 1:
            raise ShapeError("one unit has one dtype", op="Sharding.of", partitions=P, expected="tensors of one dtype",
                             actual=[str(leaf.dtype) for leaf in leaves], next_step="make a unit for each dtype")
        shapes = tuple(tuple(leaf.shape) for leaf in leaves)
        return cls(structure, shapes, Layout(along(P, dims), (sum(map(math.prod, shapes)),)))

    def _flat(self, tree):
        leaves, _ = _torch.flatten(tree)
        if tuple(tuple(leaf.shape) for leaf in leaves) != self.shapes:
            raise ShapeError("not this unit's tensors", op="Sharding", partitions=self.layout, expected=self.shapes,
                             actual=tuple(tuple(leaf.shape) for leaf in leaves),
                             next_step="pass the tensors from which the Sharding was made, in their order")
        return torch.cat([leaf.reshape(-1) for leaf in leaves])

    def _tree(self, flat):
        parts = flat.split([math.prod(shape) for shape in self.shapes])
        return _torch.unflatten([part.view(shape) for part, shape in zip(parts, self.shapes)], self.structure)

    def block(self, params):
        """This rank's block of parameters that it holds whole: a detached copy, for an optimizer. No message."""
        return self.layout.shard(self._flat(params).detach()).clone()

    def gather(self, block):
        """The whole parameters (views of one vector) from every rank's block. Adjoint: :meth:`reduce`."""
        return self._tree(F.all_gather(block, self.layout))

    def reduce(self, grads):
        """This rank's block of the sum of all ranks' gradients. Adjoint: :meth:`gather`."""
        return F.reduce_scatter(self._flat(grads), self.layout)

    def start(self, block):
        """Begin :meth:`gather`; messages travel until :meth:`wait`."""
        return F.start(maps.all_gather(self.layout), block)

    def wait(self, pending):
        """Finish what :meth:`start` began."""
        return self._tree(F.wait(pending))


def _gathered_again(layer, tree, whole):
    """``layer(tree(flat), x)`` of ``flat = whole(block)``, without keeping ``flat``: when a gradient of the result comes, on every
    rank, ``whole`` brings it again for what backward saved of it."""

    def call(block, x):
        flat, again = whole(block), []
        if not flat.requires_grad or not flat.numel():
            return layer(tree(flat), x)
        memory, dtype = flat.untyped_storage().data_ptr(), flat.dtype

        def ask(*_):
            if not again:
                with torch.no_grad():
                    again.append(whole(block))

        def pack(t):
            ours = t.untyped_storage().data_ptr() == memory and t.dtype == dtype
            return (t.size(), t.stride(), t.storage_offset()) if ours else t

        def unpack(kept):
            if isinstance(kept, torch.Tensor):
                return kept
            ask()
            return again[0].as_strided(*kept)

        params = tree(flat)
        cut = _torch.flatten(params)[0][0].grad_fn.next_functions[0][0]  # its backward comes last, and has all gradients
        cut.register_prehook(lambda _: again.clear())
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = layer(params, x)
        for t in _torch.flatten(y)[0]:
            if isinstance(t, torch.Tensor) and t.requires_grad:
                t.register_hook(ask)
        return y

    return call


def chain(layers, shardings, *, remat: bool | str = True, prefetch: bool = True):
    """A sequence of layers whose parameters are gathered when they are needed: ``run(blocks, x)``.

    Args:
        layers: functions ``layer(params, x) -> x``; the last may return the loss.
        shardings: one for each layer.
        remat: free a layer's parameters and activations after its forward, and gather and compute them again in backward (ZeRO-3,
            FSDP with activation checkpointing). ``"parameters"``: gather these again, and keep the activations (FSDP alone); what a
            layer makes of its parameters, a cast say, counts among these. Both not inside torch.func. ``False``: keep both
            (ZeRO-2).
        prefetch: start to gather the next layer's parameters (in backward: the one's before) while this one computes.

    Returns:
        ``run(blocks, x)``, with ``blocks`` this rank's block of each layer. Messages, for n elements in all on k ranks, each way
        (k-1)/k·n elements: an all-gather forward, a reduce-scatter backward, and with ``remat`` one more all-gather there.
    """
    if len(layers) != len(shardings):
        raise DistdlError("one sharding for each layer", op="chain", expected=len(layers), actual=len(shardings),
                          next_step="give lists of equal length")
    if remat not in (True, False, "parameters"):
        raise DistdlError("no such way", op="chain", expected='True, False or "parameters"', actual=remat,
                          next_step="pass one of them as remat=")

    def run(blocks, x):
        if remat == "parameters" and _torch.transforms_active():
            raise DistdlError("parameters are gathered again on .backward(), not inside torch.func", op="chain",
                              expected="eager mode", actual="a torch.func transform",
                              next_step="use remat=False inside grad, vjp, jvp and vmap")
        under_way: dict[int, Any] = {}

        def ahead(i):
            if prefetch and 0 <= i < len(layers) and i not in under_way:
                under_way[i] = shardings[i].start(blocks[i])

        def gathered(i):
            step = 1  # in backward the layers come in reverse

            def whole(block):
                nonlocal step
                pending = under_way.pop(i, None)
                flat = F.all_gather(block, shardings[i].layout) if pending is None else F.wait(pending)
                ahead(i + step)
                step = -1
                return flat

            tree = shardings[i]._tree
            if remat == "parameters":
                return _gathered_again(layers[i], tree, whole)

            def call(block, x):
                return layers[i](tree(whole(block)), x)

            return _remat(call) if remat else call

        for i in range(len(layers)):
            x = gathered(i)(blocks[i], x)
        return x

    return run


def global_norm(grads, P, dims=None, *, norm_type: float = 2.0):
    """The norm of all gradients of all ranks, each element counted once: :func:`torch.nn.utils.get_total_norm` of blocks.

    Args:
        grads: a pytree of blocks that differ along partition dims ``dims`` (None: all; ``()`` for whole, equal gradients).
        norm_type: the order; ``inf`` for the largest entry.

    Returns:
        An invariant scalar. Norms of several groups combine as norms do: ``(a**2 + b**2) ** 0.5``.

    Messages: one all-reduce of one element (``inf``: an all-gather).
    """
    leaves, _ = _torch.flatten(grads)
    norms = torch.stack([torch.linalg.vector_norm(g, norm_type) if g.numel() else g.new_zeros(()).abs() for g in leaves])
    line = along(P, dims)
    if math.isinf(norm_type):
        return F.all_gather(norms.max().reshape(1), line, shape=(line.size,)).max()
    return F.invariant_sum((norms**norm_type).sum(), line) ** (1 / norm_type)


def clip_by_norm(grads, norm, max_norm: float):
    """Gradients scaled to a global norm of at most ``max_norm``, as :func:`torch.nn.utils.clip_grad_norm_` does, in new memory."""
    leaves, tree = _torch.flatten(grads)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return _torch.unflatten([g * factor.to(g.dtype) for g in leaves], tree)
