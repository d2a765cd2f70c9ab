"""Where the tensors of a model lie."""

from __future__ import annotations

import torch

from .._arguments import checked
from ..partition import Layout
from .layer import Layer

__all__ = ["layouts"]


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
    return {
        f"{prefix}.{name}" if prefix else name: layout
        for prefix, child in module.named_modules(remove_duplicate=False)
        if isinstance(child, Layer)
        for name, layout in child.layouts.items()
        if getattr(child, name) is not None
    }
