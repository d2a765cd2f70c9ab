"""Which tensors of somebody else's files a rank wants, under what names, and which box of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from ..partition import Layout
from .format import Box

__all__ = ["Layouts", "Names", "block_of", "check_layouts", "chosen", "listed"]

Names = Mapping[str, str] | Iterable[str] | Callable[[str], str | None] | None
Layouts = Mapping[str, Layout] | Callable[[str, tuple[int, ...]], Layout | None] | None


def check_layouts(layouts: Layouts, functions: bool = False) -> None:
    """Raises TypeError: ``layouts`` are not {name: Layout}, nor, where that is welcome, a function."""
    if layouts is None or (functions and callable(layouts)):
        return
    if not isinstance(layouts, Mapping):
        raise TypeError(f"layouts are {{name: Layout}}; got {type(layouts).__name__}")
    for name, layout in layouts.items():
        if not isinstance(name, str) or not isinstance(layout, Layout | None):
            raise TypeError(f"layouts are {{name: Layout}}; got {type(name).__name__}: {type(layout).__name__}")


def listed(names: Iterable[str]) -> list[str]:
    """Raises TypeError: ``names`` are no sequence of strings (a string is a sequence of its letters, and refused)."""
    if isinstance(names, str | bytes) or not isinstance(names, Iterable):
        raise TypeError(f"names are a sequence of strings; got {type(names).__name__}")
    names = list(names)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"names are a sequence of strings; got {', '.join(type(name).__name__ for name in names)}")
    return names


def chosen(names: Names, layouts: Layouts, there: Iterable[str]) -> dict[str, str]:
    """{own name: name in the files}.

    Raises:
        KeyError: the files have no such tensor.
        TypeError: names or layouts are of another kind.
        ValueError: two tensors would get one name.
    """
    there = list(there)
    check_layouts(layouts, functions=True)
    if callable(names):
        pairs = [(own, name) for name in there if (own := names(name)) is not None]
    elif isinstance(names, Mapping):
        pairs = list(names.items())
    else:
        pairs = [(name, name) for name in (there if names is None else listed(names))]
    if not all(isinstance(name, str) for pair in pairs for name in pair):
        raise TypeError(f"names of tensors are strings; got {pairs}")
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = sorted({own for own, name in pairs if found[own] != name})
        raise ValueError(f"names gives several tensors the names {twice}")
    lacking = {name for name in found.values() if name not in set(there)}
    if isinstance(layouts, Mapping):
        lacking |= {name for name in layouts if name not in found}
    if lacking:
        raise KeyError(f"there is no {sorted(lacking)}; there are {sorted(there)}")
    return found


def block_of(own: str, shape: tuple[int, ...], dtype: torch.dtype, layouts: Layouts) -> tuple[torch.Tensor, Box | None]:
    """An empty block for this rank, and its box; ``None`` for a box where the rank holds nothing.

    Raises:
        ValueError: the tensor has another shape than its layout.
    """
    layout = layouts(own, shape) if callable(layouts) else (layouts or {}).get(own)
    if layout is None:
        return torch.empty(shape, dtype=dtype), tuple((0, n) for n in shape)
    if layout.shape != shape:
        raise ValueError(f"{own!r} has shape {shape} in the files, and {layout.shape} in its layout")
    return torch.empty(layout.local_shape(), dtype=dtype), layout.box()
