"""Pytrees: torch's, with the keys of dictionaries in an order that is the same on every rank."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Structure:
    """A pytree without its leaves. ``order``: the place, in torch's own order, of each leaf in :func:`flatten`'s."""

    spec: Any
    order: tuple[int, ...]

    @cached_property
    def text(self) -> str:
        """In words, the same for equal containers, whatever order their keys stand in."""
        return _words(self.spec)


def flatten(tree):
    """(leaves, :class:`Structure`) of a pytree; a tensor is its own only leaf, and its structure ``None``.

    What stands under a key of a dictionary comes in the order of the keys, not in that in which they were set: two
    ranks' leaves then match by their keys. The pytree that :func:`unflatten` makes has the keys in their own order.
    """
    if isinstance(tree, torch.Tensor) or tree is None:
        return [tree], None
    leaves, spec = pytree.tree_flatten(tree)
    order: list[int] = []
    _visit(spec, 0, order)
    return [leaves[place] for place in order], Structure(spec, tuple(order))


def spread(tree, structure) -> list | None:
    """A leaf of ``tree`` for each leaf of a pytree of that structure, in :func:`flatten`'s order: a leaf stands for all
    that is below its place. ``None`` where their containers differ."""
    leaves, mine = flatten(tree)
    if structure is None or mine is None:
        return None
    return _spread(mine.spec, structure.spec, iter(leaves))


def _spread(mine, spec, leaves) -> list | None:
    if mine.is_leaf():
        return [next(leaves)] * spec.num_leaves
    ours, others = _children(mine), [] if spec.is_leaf() else _children(spec)
    if mine.type is not spec.type or [key for key, _, _ in ours] != [key for key, _, _ in others]:
        return None
    parts = [_spread(one, other, leaves) for (_, _, one), (_, _, other) in zip(ours, others)]
    return None if None in parts else [leaf for part in parts for leaf in part]


def unflatten(leaves, structure):
    """The pytree of that structure."""
    return unflatten_as_given(as_given(leaves, structure), structure)


def as_given(leaves, structure) -> list:
    """:func:`flatten`'s leaves in the order in which the containers of that structure have them."""
    if structure is None:
        return leaves
    given = list(leaves)
    for place, leaf in zip(structure.order, leaves, strict=True):
        given[place] = leaf
    return given


def unflatten_as_given(leaves, structure):
    """The pytree of leaves in the order of :func:`as_given`."""
    return leaves[0] if structure is None else pytree.tree_unflatten(leaves, structure.spec)


def _children(spec):
    """[(key or ``None``, place of its first leaf, spec)] of a node, dictionaries in the order of their keys."""
    found, first, keys = [], 0, None
    children = spec.children() if hasattr(spec, "children") else spec.children_specs  # torch 2.6 to 2.8
    if isinstance(spec.type, type) and issubclass(spec.type, dict):
        keys = spec.context[1] if issubclass(spec.type, defaultdict) else spec.context
    for i, child in enumerate(children):
        found.append((None if keys is None else keys[i], first, child))
        first += child.num_leaves
    return found if keys is None else sorted(found, key=lambda one: _place_of(one[0]))


def _place_of(key):
    """By what the keys of a dictionary are sorted, the same in every process. Keys that have no such thing stay as they
    are."""
    if isinstance(key, (str, bytes)):
        return type(key).__name__, key
    if isinstance(key, (int, float)):
        return "number", key
    if isinstance(key, (tuple, frozenset)):
        parts = map(_place_of, key)
        return type(key).__name__, tuple(parts if isinstance(key, tuple) else sorted(parts))
    text = "" if isinstance(key, (torch.Tensor, torch.nn.Module)) else repr(key)
    return type(key).__qualname__, "" if " at 0x" in text else text


def _visit(spec, first: int, order: list[int]) -> None:
    if spec.is_leaf():
        order.append(first)
        return
    for _, place, child in _children(spec):
        _visit(child, first + place, order)


def _words(spec) -> str:
    if spec.is_leaf():
        return "*"
    parts = [_words(child) if key is None else f"{key!r}: {_words(child)}" for key, _, child in _children(spec)]
    keyed = isinstance(spec.type, type) and issubclass(spec.type, dict)
    what = "" if keyed or spec.context is None else f"{' '.join(str(spec.context).split())}: "
    return f"{spec.type.__name__}({what}{', '.join(parts)})"
