"""Rotary position embeddings: by global positions, so that they are the same however rows are dealt out."""

from __future__ import annotations

import torch

from .._arguments import checked
from ..errors import ShapeError
from .enter import FLOATING, check_kind
from .numeric import wide

__all__ = ["rotary_embedding"]


@checked
def rotary_embedding(
    x: torch.Tensor, positions: torch.Tensor, *, base: float = 10000.0, interleaved: bool = False
) -> torch.Tensor:
    """Turn pairs of features by angles that grow with the position: then q · k depends on the distance alone.

    Args:
        x: (..., rows, features), this rank's block with all features, an even number of them, floating.
        positions: (rows,), the place of each row in the *global* sequence: ``F.positions(L, dim)``, or
            ``F.zigzag_positions(L, dim)`` of rows in another order.
        base: pair i turns by position · base^(-2i/features).
        interleaved: pairs are features (2i, 2i+1); else (i, i + features/2), as most checkpoints have them.

    Returns:
        As x; angles are float64, and half precision is turned in float32. No messages.

    After Su et al., arXiv:2104.09864.

    Raises:
        ShapeError: an odd number of features, or not one position for each row.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.0]])  # two rows, at the places 0 and 1
        >>> F.rotary_embedding(x, torch.tensor([0, 1]))
        tensor([[1.0000, 0.0000],
                [0.5403, 0.8415]])
    """
    check_kind(x, FLOATING)
    if x.dim() < 2 or x.shape[-1] % 2 or tuple(positions.shape) != (x.shape[-2],):
        raise ShapeError(
            "positions do not fit x",
            expected="x of (..., rows, an even number of features), and one position for each row",
            actual=(tuple(x.shape), tuple(positions.shape)),
            next_step="pass F.positions(L, dim) of the dim of rows",
        )
    half = x.shape[-1] // 2
    steps = torch.arange(half, dtype=torch.float64, device=x.device) / max(half, 1)
    angles = positions.to(x.device, torch.float64)[:, None] * float(base) ** -steps
    y = wide(x)
    cos, sin = angles.cos().to(y.dtype), angles.sin().to(y.dtype)
    a, b = y.unflatten(-1, (half, 2)).unbind(-1) if interleaved else y.chunk(2, -1)
    turned = (a * cos - b * sin, a * sin + b * cos)
    return (torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)).to(x.dtype)
