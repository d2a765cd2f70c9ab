"""Many tensors as one vector, and back: one message instead of many."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def vector_of(tensors: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
    """The elements of all tensors as one vector, of ``dtype``, or their own one; a view where that is possible."""
    parts = [t.reshape(-1) if dtype is None else t.reshape(-1).to(dtype) for t in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def parts_of(vector: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The tensors of these shapes that make up ``vector``: views of it."""
    return [part.view(shape) for part, shape in zip(vector.split(list(map(math.prod, shapes))), shapes)]
