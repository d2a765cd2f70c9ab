"""Which call is this? Found on the stack when somebody asks, so that no function has to hand its name on.

The user's line is the innermost one that is neither distdl's nor torch's; the call is the outermost public function
between it and here. Errors ask, checking, and who waits for a message that does not come.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

_DISTDL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
F = TypeVar("F", bound=Callable[..., Any])
_known: dict[str, bool] = {}
_names: dict[CodeType, str] = {}  # of public functions, by their code; "" of a constructor: its class says
_alike: set[CodeType] = set()  # those that get the same plain arguments on all ranks that call them together
wrappers: set[CodeType] = set()  # of ``call(*args, **kwargs)`` around a public ``function``: a frame of it is its call
_trees: set[CodeType] = set()  # of functions whose ``tree`` is the structure of the pytree that moves
_NO_LINE, _TENSOR = "backward, on a thread of torch's own", "a tensor"


def public(names: Mapping[str, Any], *, alike: bool = True) -> None:
    """Let calls of these functions and classes (constructors and public methods) be found under their names; see the
    list of each public package. What a function returns, and was written inside of it, speaks in its name too.

    ``alike``: ranks that call one of them together give it the same plain arguments, which checking then compares.
    """
    for name, thing in names.items():
        if not isinstance(thing, type):
            _register(name, thing, alike)
            continue
        for constructor in ("__init__", "__post_init__"):  # classes may share one
            _register("", getattr(thing, constructor, None), alike)
        for method, value in vars(thing).items():
            if not method.startswith("_") and method != "forward":  # forward: the call of its function says more
                _register(f"{name}.{method}", getattr(value, "fget", getattr(value, "__func__", value)), alike)


def _register(name: str, function: Any, alike: bool) -> None:
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    if code is None or not code.co_filename.startswith(_DISTDL):
        return
    if alike:
        _alike.add(code)
    written = [code]
    while written:
        code = written.pop()
        _names.setdefault(code, name)  # a class may call a function its own
        written += [inner for inner in code.co_consts if isinstance(inner, CodeType)]


def _name_of(frame: FrameType) -> str:
    return _names[frame.f_code] or type(frame.f_locals["self"]).__name__


def name_of(function: Any) -> str:
    """The name of a public function, "" of a constructor: its class says."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return _names.get(code, "" if function.__name__ == "__init__" else function.__name__)


def has_tree(function: F) -> F:
    """Mark a function that everything which moves a pytree passes through; its variable ``tree`` says which."""
    _trees.add(function.__code__)
    return function


def _users(filename: str) -> bool:
    torch = sys.modules.get("torch")  # not imported here: a launcher's errors do without
    libraries = (_DISTDL, "<frozen", *([os.path.dirname(torch.__file__) + os.sep] if torch else []))
    return not filename.startswith(libraries) and not filename.endswith(("contextlib.py", "functools.py"))


def _stack() -> list[tuple[FrameType, bool]]:
    """The frames from the caller's outwards, to the innermost one of the user's (as far as this thread knows it: CUDA
    backward has threads of its own), each with whether it is the user's."""
    found: list[tuple[FrameType, bool]] = []
    frame, known, users = sys._getframe(2), _known, False
    while frame is not None and not users:
        filename = frame.f_code.co_filename
        if filename not in known:
            known[filename] = _users(filename)
        users = known[filename]
        found.append((frame, users))
        frame = frame.f_back
    return found


def _outermost(codes: Collection[CodeType]) -> FrameType | None:
    """The outermost frame of one of the functions, inside of the user's line."""
    for frame, users in reversed(_stack()):
        if not users and frame.f_code in codes:
            return frame
    return None


def public_call() -> tuple[str, str]:
    """The public call in progress as all ranks of an agreement should have it, whatever they hold: its name, and its
    plain arguments after the first in words; "" of none."""
    outer = _outermost(_alike)
    return ("", "") if outer is None else (_name_of(outer), _in_words(_arguments(outer)[1:]))


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def user_line() -> str:
    """``file:line in function`` of the user's call."""
    for frame, users in _stack():
        if users:
            return _line(frame)
    return _NO_LINE


class Called(NamedTuple):
    """The call of the library that a movement belongs to: its line, the outermost public function on the way (none in
    a backward, or where a map was called), its plain arguments and the pytree that moves, in words."""

    line: str = _NO_LINE
    name: str = ""
    keywords: str = ""
    tree: str = _TENSOR


def called() -> Called:
    """What the user has called, as every rank of a call should have it."""
    line, outer, tree = _NO_LINE, None, _TENSOR
    for frame, users in _stack():
        if users:
            line = _line(frame)
        elif frame.f_code in _alike:
            outer = frame
        elif frame.f_code in _trees:  # also where it is that of the ranks that hold something
            structure = frame.f_locals["tree"]
            tree = _TENSOR if structure is None else _short(structure.text)
    if outer is None:
        return Called(line)
    (first, moves), *others = [(name, value) for name, value in _arguments(outer)] or [("", None)]
    if not isinstance(moves, (tuple, list)) or moves:  # a rank that holds nothing may say so by []
        others.insert(0, (first, moves))
    return Called(line, _name_of(outer), _in_words(others), tree)


def _in_words(arguments: Iterable[tuple[str, Any]]) -> str:
    texts = ((name, _plain(value)) for name, value in arguments)
    return _short(", ".join(f"{name}={text}" for name, text in texts if text))


def collective_call() -> tuple[FrameType, tuple[int, ...], str] | None:
    """(the frame of the outermost call that concerns several ranks, their numbers, their world); ``None`` outside of
    any."""
    found = None
    for frame, users in _stack():
        code = frame.f_code
        if not users and (code in _alike or _wraps_alike(frame) or code.co_name in ("__call__", "operand")):
            places = [place for _, value in _arguments(frame) for place in _places(value)]
            ranks = {r for place in places for r in place.ranks}
            if len(ranks) > 1:
                found = frame, tuple(sorted(ranks)), places[0].world
    return found


def _wraps_alike(frame: FrameType) -> bool:
    return frame.f_code in wrappers and getattr(frame.f_locals["function"], "__code__", None) in _alike


def single_plan() -> Any:
    """The plan of the movement whose operand is looked at, where it is the only one of its map; ``None`` elsewhere."""
    found = None
    for frame, users in _stack():
        if not users and frame.f_code.co_name in ("operand", "__call__"):
            found = getattr(frame.f_locals.get("self"), "plans", found)
    return found[0] if found and len(found) == 1 else None


def of_error() -> tuple[str | None, Any]:
    """(name, its partitions) of the public call in which an error is made: what the error's text begins and ends with,
    where whoever raises it does not say more."""
    outer = _outermost(_names)
    if outer is None:
        return None, None
    around = [(name, outer.f_locals.get(name)) for name in outer.f_code.co_freevars]
    places = [value for _, value in _arguments(outer) + around if _places(value)]
    return _name_of(outer), places[0] if len(places) == 1 else tuple(places) or None


def _arguments(frame: FrameType) -> list[tuple[str, Any]]:
    code, values = frame.f_code, frame.f_locals
    if code in wrappers:
        return [("", value) for value in (*values["args"], *values["kwargs"].values())]
    return [(name, values.get(name)) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]


def _places(value: Any) -> list[Any]:
    """The partitions of an argument: a Partition, a Layout, a HaloSpec or a LinearMap, or several."""
    if isinstance(value, (tuple, list)):
        return [place for one in value[:16] for place in _places(one)]
    if type(value).__module__.partition(".")[0] != __name__.partition(".")[0]:
        return []
    if hasattr(value, "steps"):
        sides = [(step.plan.held, step.plan.wanted) for step in value.steps if hasattr(step, "plan")]
        return [side.partition for pair in sides for side in pair]
    if hasattr(value, "plan") and hasattr(value, "transposed"):  # a step of a map
        return [value.plan.held.partition, value.plan.wanted.partition]
    value = getattr(value, "in_layout", value)
    value = getattr(value, "partition", value)
    return [value] if hasattr(value, "ranks") and hasattr(value, "rank_at") else []


def _plain(value: Any) -> str | None:
    """A number, a text, a dtype, or several of these, in words; ``None`` for what may differ by rank: tensors and all
    else."""
    import torch

    if isinstance(value, (bool, str, complex, torch.dtype)):
        return repr(value)
    if isinstance(value, (int, float)):
        return repr(
            int(value) if value == value and abs(value) != float("inf") and int(value) == value else float(value)
        )
    if isinstance(value, (tuple, list)):
        parts = ["None" if one is None else _plain(one) for one in value]
        return None if None in parts else f"({', '.join(map(str, parts))}{',' * (len(parts) == 1)})"
    if isinstance(value, dict):
        return None if not value else _plain([list(pair) for pair in sorted(value.items(), key=repr)])
    if hasattr(value, "item") and not isinstance(value, torch.Tensor) and getattr(value, "ndim", 1) == 0:
        return _plain(value.item())  # a number of NumPy's
    return None


def _short(text: str) -> str:
    """The text, or its beginning and a digest of it all: what is swapped has little room."""
    return text if len(text) <= 300 else f"{text[:280]}... {hashlib.sha256(text.encode()).hexdigest()[:12]}"
