"""Where the tensors of a model lie, and blocks of others for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .._arguments import checked
from ..errors import ShapeError
from ..partition import Layout
from .layer import Layer

__all__ = ["layouts", "shard_state"]


@checked
def layouts(module: torch.nn.Module) -> dict[str, Layout]:
    """{name: Layout} of the partitioned parameters and buffers of a module and its children, named as in
    ``state_dict()``.

    A name that is missing belongs to a module that knows no partition: its tensor is whole on every rank. A layout
    names the ranks of one copy, the one that this rank is in; where layers are replicated, other ranks name others.

    No messages.

    Raises:
        ShapeError: it is no module.

    Example:
        >>> {n: L.shape for n, L in dd.nn.layouts(dd.nn.Linear(dd.Partition((1, 1, 1)), 3, 5)).items()}
        {'weight': (5, 3), 'bias': (5,)}
    """
    return _layouts(module)


@checked
def shard_state(module: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's blocks of global tensors that are named as the module's parameters and buffers:
    ``model.load_state_dict(dd.nn.shard_state(model, serial.state_dict()))`` begins with a serial model's values.

    Args:
        module: a model with layers of :mod:`distdl.nn`; parameters of :class:`~distdl.nn.Sharded` are cut further.
        state: {name: global tensor, whole on every rank}, of any dtypes and devices; some of the names, too.

    Returns:
        {name: block}, a view where the module is partitioned, in the order of ``state``. A tensor whose name has no
        layout (:func:`layouts`) is there as it came. A rank outside a layer's partition keeps the layer's own tensor,
        whatever was passed.

    No messages. From a file no rank needs a whole tensor: ``dd.checkpoint.restore``.

    Raises:
        ShapeError: a tensor has another shape than the module's global one (a block was passed, say), or it is no
            module, or no dictionary of tensors.

    Example:
        >>> model = dd.nn.Linear(dd.Partition((1, 1, 1)), 3, 5)
        >>> model.load_state_dict(dd.nn.shard_state(model, torch.nn.Linear(3, 5).state_dict()))
        <All keys matched successfully>
    """
    where, own = _layouts(module), module.state_dict()
    for name, tensor in state.items():
        if name in where and tuple(tensor.shape) != where[name].shape:
            raise ShapeError(
                f"{name!r} is not the global tensor",
                expected=f"shape {where[name].shape}",
                actual=tuple(tensor.shape),
                partitions=where[name].partition,
                next_step="pass whole tensors, such as a serial model's state_dict(); the model's own blocks go to "
                "load_state_dict as they are",
            )
    return {
        name: tensor if (L := where.get(name)) is None else L.shard(tensor) if L.active else own[name]
        for name, tensor in state.items()
    }


def _layouts(module: torch.nn.Module) -> dict[str, Layout]:
    return {
        f"{prefix}.{name}" if prefix else name: layout
        for prefix, child in module.named_modules(remove_duplicate=False)
        if isinstance(child, Layer)
        for name, layout in child.layouts.items()
        if getattr(child, name) is not None
    }
