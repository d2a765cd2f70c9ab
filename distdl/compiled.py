"""torch.compile: a call of the library is one node of Dynamo's graph, and AOTAutograd traces what is inside it.

Dynamo does not look into a call. It runs it with fake tensors, under whatever transforms of torch.func are active
there, and AOTAutograd does so again: the same code as in eager, down to the raw movement, ``distdl::move``
(engine/operators.py), which is all that stays in the graph, forward and adjoint. So the one Function of the library
gives the backward graph too. Partitions, layouts, halos and maps are constants of a graph, guarded by equality.

All of it hangs on attributes that Dynamo looks for on functions, and on classes that torch knows to be constants: eager
calls pass nothing here. Older torch, which knows no such constants, breaks its graph at every call, as at
:func:`distdl._torch.opaque` functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any, TypeVar

import torch

from . import _torch
from .errors import DistdlError

F = TypeVar("F", bound=Callable[..., Any])
available = _torch.register_opaque_type is not None  # whether calls stay in the graph
_nodes: list[Callable[..., Any]] = []  # of which Dynamo has not been told yet
_refusal = ""  # what the call said that could not be traced

# ---------------------------------------------------------------- constants of a graph


def constants(*classes: type) -> None:
    """Let instances of these classes, frozen values, be constants of a graph; what is public of them is looked up, or
    called, while it is traced."""
    for cls in classes if available else ():
        names = (*dir(cls), *getattr(cls, "__dataclass_fields__", ()))
        members = {name: _torch.read_while_tracing for name in names if name == "__eq__" or not name.startswith("_")}
        _torch.register_opaque_type(cls, typ="value", members=members)
        for name, value in list(vars(cls).items()):
            if type(value) is property:
                setattr(cls, name, _Property(value.fget))


class _Property:
    """A property of a constant: of torch's own kind Dynamo 2.13 does not know where it is from."""

    def __init__(self, function: Any) -> None:
        self.fget, self.__doc__ = function, function.__doc__

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        value = self.fget(instance)
        if self.fget.__name__ in ("ndim", "size"):  # what no world changes is worked out once
            instance.__dict__[self.fget.__name__] = value
        return value


class _Absent(_torch.Constant):
    """``None`` among a node's arguments: Dynamo wants values that a graph can hold."""

    def __eq__(self, other: object) -> bool:
        return type(other) is _Absent

    def __hash__(self) -> int:
        return 0


_ABSENT = _Absent()


class Held(_torch.Constant):
    """Any other object as a constant of a graph, equal to those of an equal object."""

    __slots__ = ("what",)

    def __init__(self, what: Any) -> None:
        self.what = what

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is Held and self.what == other.what)

    def __hash__(self) -> int:
        return hash(self.what)


constants(_Absent, Held)


def _hidden(value: Any) -> Any:
    """An argument, as a node's (Dynamo traces this, and :func:`_whole`)."""
    if value is None:
        return _ABSENT
    if type(value) is list or type(value) is tuple:
        return type(value)([_hidden(one) for one in value])
    if type(value) is dict:
        return {key: _hidden(one) for key, one in value.items()}
    if isinstance(value, FunctionType):
        torch._dynamo.graph_break(msg="distdl: a function is no argument of a graph's node; call this outside of it")
    return value if isinstance(value, _torch.Constant) else getattr(value, "_held", value)


def _shown(value: Any) -> Any:
    """The argument again (this runs, and :func:`_packed`)."""
    if type(value) in (list, tuple):
        return type(value)(map(_shown, value))
    if type(value) is dict:
        return {key: _shown(one) for key, one in value.items()}
    if isinstance(value, torch.Tensor) and any(type(n) is not int for n in value.shape):
        return value.reshape([int(n) for n in value.shape])  # a plan is for sizes that are known
    return None if type(value) is _Absent else value.what if type(value) is Held else value


def _packed(value: Any) -> Any:
    """A result, as a node's: nor may ``None`` come out of it."""
    if type(value) in (list, tuple):
        return type(value)(map(_packed, value))
    return {"": {}} if value is None else value


def _whole(value: Any) -> Any:
    """The result again."""
    if type(value) is list or type(value) is tuple:
        return type(value)([_whole(one) for one in value])
    return None if type(value) is dict and "" in value else value


# ---------------------------------------------------------------- nodes of a graph


def node(function: F) -> F:
    """Let a call of ``function`` be one node of a compiled graph; returns it. Where the graph breaks all the same,
    Dynamo does not look inside either."""
    run = _run(function)

    def traced(*args: Any, **kwargs: Any) -> Any:
        _prepare()
        return _in_graph(run, args, kwargs)

    return traced_as(function, traced)


def traced_as(function: F, traced: Callable[..., Any]) -> F:
    """Let Dynamo trace another function in place of ``function``; returns it."""
    _torch.opaque(function)
    if available:
        vars(function).pop("_torchdynamo_disable")
        vars(function)["_torchdynamo_inline"] = traced
    return function


def outside(namespace: Mapping[str, Any], names: Iterable[str], words: str) -> None:
    """Let a graph break at these functions of a module, with these words where it may not."""
    for name in names:
        _torch.opaque(namespace[name], words)


def _run(function: Callable[..., Any]) -> Callable[..., Any]:
    """The node itself, which Dynamo and AOTAutograd call."""

    def run(*args: Any, **kwargs: Any) -> Any:
        global _refusal
        try:
            if _torch.in_subgraph():
                raise DistdlError(
                    "a movement inside of another construct of the graph",
                    op=function.__name__,
                    expected="the compiled function itself, with any transforms of torch.func",
                    actual="a body of torch.utils.checkpoint, torch.cond or an autograd.Function",
                    next_step="leave the construct out of the compiled function, or move before and after it",
                )
            with _torch.without_numbers():
                return _packed(function(*_shown(args), **_shown(kwargs)))
        except Exception as error:  # of the call, with its own words; run outside of the graph it says so again
            if not _torch.dynamo_runs() or _torch.of_dynamo(error):
                raise
            _refusal = str(error) if isinstance(error, DistdlError) else f"{function.__name__}: {error!r}"
            return {}

    run.__name__ = function.__name__
    _nodes.append(run)
    return run


def _in_graph(run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A call of a node (Dynamo traces this)."""
    y = run(*_hidden(args), **_hidden(kwargs))
    if type(y) is dict and not y:
        torch._dynamo.graph_break(msg=_why())
    return _whole(y)


_run_map = _run(lambda map, x: map(x))


def _map_in_graph(map: Any, x: Any) -> Any:
    _prepare()
    return _in_graph(_run_map, (map, x), {})


def map_call(function: F) -> F:
    """The same for the method that calls a map: Dynamo has no name for what a closure of a method holds."""
    return traced_as(function, _map_in_graph)


def _why() -> str:
    return _refusal


def _prepare() -> None:
    """Tell Dynamo which functions are nodes; not at import: the compiler takes longer to load than torch."""
    while _nodes:
        _torch.as_node(_nodes.pop())
    _torch.keep_order(torch.ops.distdl)


# Dynamo calls these while it traces, and takes the result as a constant.
for _function in (_prepare, _why):
    vars(_function)["_dynamo_marked_constant"] = True


class _Evaluated(_torch.Constant):
    """What a function makes of constants, a constant too: Dynamo calls constructors of such classes while it traces."""

    def __new__(cls, number: int, *args: Any, **kwargs: Any) -> Any:
        return _functions[number](*args, **kwargs)


_functions: list[Callable[..., Any]] = []


def evaluated(function: Callable[..., Any]) -> None:
    """Let a call of ``function``, which makes a constant of constants, be evaluated while a graph is traced."""
    number = len(_functions)
    _functions.append(function)

    def traced(*args: Any, **kwargs: Any) -> Any:
        return _Evaluated(number, *args, **kwargs)

    traced_as(function, traced)


def in_graphs(namespace: Mapping[str, Any], names: Iterable[str]) -> None:
    """Let the functions of a module, by these names, be nodes of compiled graphs."""
    constants(_Evaluated)
    for name in names:
        if "_torchdynamo_inline" in vars(namespace[name]):
            continue
        (evaluated if name.endswith("_layout") else node)(namespace[name])
