"""The base of values that are dictionary keys on every call: partitions, layouts, halos and plans."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar


class Value:
    """Hash once: partitions and layouts are dictionary keys on every call, and may hold thousands of ranks."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @cached_property
    def _hash(self) -> int:
        return hash((type(self).__name__, *(getattr(self, name) for name in self.__dataclass_fields__)))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}
