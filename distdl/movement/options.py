"""Options in Python's own numbers: one for all dims, or one for each. What does not fit is an error; sends nothing."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index as as_int
from typing import Any

from ..boxes import is_bool, is_int
from ..errors import PartitionError


def plain(value: Any, what: str) -> Any:
    """An option in Python's own numbers and tuples: NumPy's and torch's integers and arrays are as good, and not all
    hashable."""
    if is_bool(value):
        raise PartitionError(
            f"{what} is a truth value",
            expected="numbers",
            actual=value,
            next_step="give an int (True would count as 1)",
        )
    if is_int(value):
        return as_int(value)
    sequence = isinstance(value, Iterable) and not isinstance(value, str) and getattr(value, "shape", None) != ()
    return tuple(plain(v, what) for v in value) if sequence else value


def sizes_of(value: Any, what: str) -> tuple[Any, ...]:
    """One number, or some, as a tuple of Python's own."""
    value = plain(value, what)
    return value if isinstance(value, tuple) else (value,)


def per_dim(value: Any, n: int, what: str) -> tuple[Any, ...]:
    """``value`` for each of ``n`` dims, in Python's own numbers: repeated when it is a single one.

    Raises:
        PartitionError: another number of them, or a truth value.
    """
    values = v if isinstance(v := plain(value, what), tuple) else (v,) * n
    if len(values) != n:
        raise PartitionError(
            f"{what} does not fit",
            expected=f"one value or {n}",
            actual=value,
            next_step="give one value for all dims, or one for each",
        )
    return values
