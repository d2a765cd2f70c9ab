"""What an argument must be, by its name: asked when a call has ended in an error of Python's own, and never before.

A public function is wrapped once (:func:`checked`), and pays for a ``try``. Where what it raises is not the library's,
its arguments are compared with a table of kinds (``_kinds.py``); if one does not fit, that is what the user hears, with
Python's error as the cause. Else the error goes on as it was: it may be a user's own function that raised it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, MutableMapping
from pickle import PicklingError
from typing import Any, TypeVar

import numpy as np
import torch

from . import _torch, calls
from ._kinds import BESIDE, KINDS, Kind, is_tree, kind_of
from .errors import DistdlError, PartitionError, ShapeError
from .partition import Layout, Partition

__all__ = ["Checked", "check_classes", "check_functions", "checked"]
_RAW = (TypeError, AttributeError, LookupError, ValueError, ArithmeticError, RuntimeError, StopIteration, PicklingError)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def checked(function: _Function) -> _Function:
    """The function; where it ends in an error of Python's own, an argument that is not of its name's kind is named.

    Raises:
        PartitionError: a partition or a layout that is none.
        ShapeError: another argument.
    """

    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except _RAW as error:
            wrong = None if isinstance(error, DistdlError) else _misfit(function, args, kwargs, error)
            if wrong is None:
                raise
            raise wrong from error

    wrapped: Any = call
    code = wrapped.__code__.replace(co_name=function.__name__)  # each its own, for torch.compile and profiles
    wrapped.__code__ = code
    calls.wrappers.add(code)
    return _torch.unseen(wrapped)


def _misfit(function, args, kwargs, error) -> DistdlError | None:
    """The error of the first argument that is not what it must be; ``None`` where all are. Too many, too few and
    unknown ones are Python's own TypeErrors."""
    try:
        signature = inspect.signature(function)
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return None
    op = calls.name_of(function) or type(args[0]).__name__
    if isinstance(error, TypeError) and "unhashable" in str(error):
        for value in given.values():
            if not _is_key(value) and not is_tree(value):
                return PartitionError(
                    "maps are found again by their arguments, which must be hashable",
                    op=op,
                    expected="layouts, partitions, numbers, and tuples of them",
                    actual=f"{type(value).__name__} {value!r:.60}",
                    next_step="give a tuple in place of a list",
                )
    named = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    function_name = op.rpartition(".")[2]
    kinds = [(p.name, kind_of(function_name, p)) for p in named if p.name in given]
    name, kind = _first_misfit(function_name, kinds, given)
    places = [one for one in given.values() if isinstance(one, (Partition, Layout))]
    dtypes = _dtypes(given, error) if kind is None else ""
    if dtypes:
        return ShapeError(
            "tensors of different dtypes",
            op=op,
            partitions=tuple(places) or None,
            expected="one dtype",
            actual=dtypes,
            next_step="convert the input, or the parameters (module.to(dtype)), or call it under torch.autocast",
        )
    if kind is None:
        return None
    grid = kind.error is PartitionError and "Partition" in kind.words
    return kind.error(
        f"{name} is not {kind.words}",
        op=op,
        expected=kind.words,
        actual=_in_words(given[name]),
        partitions=places[0] if len(places) == 1 else tuple(places) or None,
        next_step="dd.Partition(shape), or dd.Layout(P, shape)" if grid else f"pass {name} as the docstring says",
    )


def _dtypes(given, error) -> str:
    """The dtypes of tensors that torch takes in one dtype only, each right by itself; "" where the error is not about
    dtypes, or may be that of a user's own function."""
    if not isinstance(error, RuntimeError) or "type" not in str(error) or any(map(callable, given.values())):
        return ""
    tensors = {name: v for name, v in given.items() if isinstance(v, torch.Tensor)}
    dtypes = {name: t.dtype for name, t in tensors.items() if t.is_floating_point() or t.is_complex()}
    return ", ".join(f"{name}: {dtype}" for name, dtype in dtypes.items()) if len(set(dtypes.values())) > 1 else ""


def _first_misfit(function, named, given) -> tuple[str, Kind | None]:
    """The first argument that is not of its kind, by itself or beside the others, and that kind."""
    for name, kind in named:
        if kind is not None and not _holds(kind.fits, given[name], False):
            return name, kind
    for name, _ in named:
        words, fits = BESIDE.get(f"{function}.{name}") or BESIDE.get(name, ("", None))
        if given[name] is not None and fits and not _holds(fits, given[name], True, given):
            return name, KINDS[name]._replace(words=words)
    return "", None


def _is_key(value) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _holds(test, value, otherwise: bool, *more) -> bool:
    """What the test says of the value; ``otherwise`` where it cannot."""
    try:
        return bool(test(value, *more))
    except _RAW:
        return otherwise


def _in_words(value) -> str:
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        return f"{kind} of shape {tuple(value.shape)}"
    return f"{kind} {(repr(value).splitlines() or [''])[0][:60]}"


def own_numbers(value: Any) -> Any:
    """NumPy's numbers and arrays as Python's own numbers and tuples, inside of containers too; others as they are."""
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
        return own_numbers(tuple(value)) if isinstance(value, list) else value
    if type(value) in (tuple, list):
        return type(value)(map(own_numbers, value))
    if type(value) is dict:
        return {own_numbers(key): own_numbers(one) for key, one in value.items()}
    return value


class Checked:
    """Constructors of the library's modules are :func:`checked`, and keep options in Python's own numbers, as copies,
    files and comparisons have them; those of a user's own subclass are the user's."""

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        constructor = vars(cls).get("__init__")
        if not cls.__module__.startswith("distdl.") or constructor is None or constructor.__code__ in calls.wrappers:
            return

        @functools.wraps(constructor)
        def construct(self, *args, **kwargs):
            constructor(self, *map(own_numbers, args), **{name: own_numbers(v) for name, v in kwargs.items()})

        cls.__init__ = checked(construct)  # type: ignore[method-assign]


def check_classes(*classes: type) -> None:
    """Let the constructors of these classes be :func:`checked`."""
    for cls in classes:
        constructor = cls.__dict__.get("__init__")
        if constructor is not None and constructor.__code__ not in calls.wrappers:
            cls.__init__ = checked(constructor)  # type: ignore[misc]


def check_functions(namespace: MutableMapping[str, Any], names: Iterable[str]) -> None:
    """Let the public functions of a module, by these names, be :func:`checked`, and the constructors of its classes."""
    for name in names:
        thing = namespace[name]
        if isinstance(thing, type):
            if thing.__module__.startswith("distdl.") and not issubclass(thing, BaseException):
                check_classes(thing)
        elif callable(thing) and getattr(thing, "__code__", None) not in calls.wrappers:
            namespace[name] = function = checked(thing)
            # Where it is found, by a pickle too: the module that defines it has it as it was.
            function.__module__, function.__qualname__ = namespace["__name__"], name
