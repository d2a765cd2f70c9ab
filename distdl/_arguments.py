"""What a plain argument must be, by its name: one rule for constructors and functions that take the same names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, TypeVar, cast

import torch

from .errors import PartitionError, ShapeError
from .partition import Layout, Partition, is_int

__all__ = ["Checked", "checked"]
_Function = TypeVar("_Function", bound=Callable[..., Any])
_INTEGERS = ("in_features", "out_features", "in_channels", "groups", "num_features", "num_embeddings",
             "embedding_dim", "num_groups", "num_channels", "padding_idx")  # fmt: skip
_NUMBERS = ("eps", "p", "a", "b", "low", "high", "mean", "std", "gain")


def _is_number(value) -> bool:
    return isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.ndim == 0)


_KINDS = {
    "P": ("a Partition or a Layout", lambda v: isinstance(v, (Partition, Layout))),
    "layout": ("a Layout", lambda v: isinstance(v, Layout)),
    "L": ("a Layout", lambda v: isinstance(v, Layout)),
    "module": ("a torch.nn.Module", lambda v: isinstance(v, torch.nn.Module)),
    "model": ("a torch.nn.Module", lambda v: isinstance(v, torch.nn.Module)),
    "normalized_shape": (
        "an integer or a sequence of them",
        lambda v: is_int(v) or (isinstance(v, Iterable) and all(map(is_int, v))),
    ),
    "w": ("a tensor, this rank's block", lambda v: isinstance(v, torch.Tensor)),
    "out_channels": (
        "an integer, or one for each block",
        lambda v: is_int(v) or (isinstance(v, tuple) and all(map(is_int, v))),
    ),
    "momentum": ("a number or None", lambda v: v is None or _is_number(v)),
    "dtype": ("a torch.dtype", lambda v: isinstance(v, torch.dtype)),
    "device": ("a device, or its name", lambda v: isinstance(v, (torch.device, str)) or is_int(v)),
    **dict.fromkeys(_INTEGERS, ("an integer", is_int)),
    **dict.fromkeys(_NUMBERS, ("a number", _is_number)),
}


def rules(function) -> dict:
    """{name: (place, what it must be, the test, whether ``None`` will do)} of the arguments that have a kind."""
    found = enumerate(inspect.signature(function).parameters.values())
    return {
        p.name: (i, *_KINDS[p.name], p.default is None)
        for i, p in found
        if p.name in _KINDS and p.kind is not p.VAR_KEYWORD
    }


def check(op: str, known: dict, args, kwargs) -> None:
    """Raise where an argument is not of its name's kind. Too many, too few and unknown ones are Python's own
    TypeErrors.

    Raises:
        PartitionError: a partition or a layout that is none.
        ShapeError: another argument.
    """
    for name, (place, kind, fits, optional) in known.items():
        value = args[place] if place < len(args) else kwargs.get(name, known)
        if value is not known and not fits(value) and not (optional and value is None):
            grid = name in ("P", "layout", "L")
            raise (PartitionError if grid else ShapeError)(
                f"{name} is not {kind}",
                op=op,
                expected=kind,
                actual=f"{type(value).__name__} {repr(value)[:60]}",
                partitions=None,
                next_step="dd.Partition(shape), or dd.Layout(P, shape)"
                if grid
                else f"pass {name} as the docstring says",
            )


def checked(function: _Function) -> _Function:
    """The function, with :func:`check` before it."""
    known = rules(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        check(function.__name__, known, args, kwargs)
        return function(*args, **kwargs)

    return cast(_Function, call)


class Checked:
    """Constructors of the library's classes check their arguments; those of a user's own subclass are the user's."""

    def __new__(cls, *args, **kwargs):
        if (args or kwargs) and cls.__init__.__module__.startswith("distdl."):  # copies and pickles are made without
            check(cls.__name__, rules(cls.__init__), (None, *args), kwargs)
        return super().__new__(cls)
