"""What is worked out once: the hash of values that are dictionary keys on every call (partitions, layouts, halos and
plans), and what a step knows of the rank that this process is."""

from __future__ import annotations

import weakref
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from ._torch import Constant

_Found = TypeVar("_Found")


class Value(Constant):
    """Hash once: partitions and layouts are dictionary keys on every call, and may hold thousands of ranks."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @cached_property
    def _hash(self) -> int:
        return hash((type(self).__name__, *(getattr(self, name) for name in self.__dataclass_fields__)))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


_placed: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # what has a value of a :class:`placed`


class placed(cached_property[_Found]):
    """A cached property of which rank of which world this process is; :func:`forget` where another one is to stand
    there."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is not None:
            _placed[id(instance)] = instance
        return super().__get__(instance, owner)


def forget() -> None:
    """Let all that knows this process's rank work it out again."""
    for instance in list(_placed.values()):
        for name in [name for name in vars(instance) if isinstance(getattr(type(instance), name, None), placed)]:
            del vars(instance)[name]
    _placed.clear()
