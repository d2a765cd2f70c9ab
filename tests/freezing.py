"""What stays as it is unless somebody means to change it: names, error texts, messages, Python calls.

``tests/frozen/*.json`` hold them. Where something differs a test says what; ``make refreeze`` takes today's as the new
ones and prints the difference, which belongs to the change's review.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from functools import wraps
from pathlib import Path

import torch

import distdl as dd
from distdl import calls
from distdl.errors import DistdlError

FOLDER = Path(__file__).parent / "frozen"
_PINS = FOLDER.parent.parent / "requirements/dev.txt"
PINNED = f"torch=={torch.__version__.partition('+')[0]}\n" in _PINS.read_text()
REFREEZE = bool(os.environ.get("DISTDL_REFREEZE"))


def read(name: str) -> dict:
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write(name: str, values: dict) -> None:
    text = json.dumps(dict(sorted(values.items())), indent=1, ensure_ascii=False)
    (FOLDER / f"{name}.json").write_text(text + "\n")


def compare(name: str, now: dict) -> str:
    """What differs from the frozen values, a line each; or nothing, and today's are frozen, where that is asked for."""
    if REFREEZE:
        write(name, now)
        return ""
    then = read(name)
    lines = []
    for key in sorted({*then, *now}):
        if then.get(key) != now.get(key):
            lines += [f"{key}", f"  frozen: {then.get(key)}", f"  now:    {now.get(key)}"]
    return "\n".join(lines)


# ---------------------------------------------------------------- public names


def _default(value) -> str:
    if isinstance(value, (bool, int, float, str, tuple, type(None))) or type(value).__module__ == "torch":
        return repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def signature(function) -> str:
    """A function's arguments, as every version of Python spells them; annotations are left out."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return "(?)"
    texts, star = [], False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not star:
            texts.append("*")
        star = star or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        name = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "") + p.name
        texts.append(name if p.default is p.empty else f"{name}={_default(p.default)}")
        if p.kind is p.POSITIONAL_ONLY:
            texts.append("/")
    while texts.count("/") > 1:
        texts.remove("/")
    return f"({', '.join(texts)})"


def _of_class(cls):
    """name: signature of the public members that are distdl's own."""
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("distdl"):
            for name, member in vars(base).items():
                member = getattr(member, "__func__", member)
                if hasattr(member, "fget") or type(member).__name__ == "cached_property":
                    text = "property"
                else:
                    text = signature(member) if callable(member) else None
                if text and (not name.startswith("_") or name == "__call__"):
                    yield name, text


MODULES = ("", "functional", "maps", "nn", "parallel", "parallel.hooks", "checkpoint", "func", "solve", "init",
           "testing", "viz", "errors", "data")  # fmt: skip


def names() -> dict[str, str]:
    """Every public name of the library: its signature, and those of its public members."""
    found = {}
    for path in MODULES:
        module = dd
        for part in filter(None, path.split(".")):
            module = getattr(module, part)
        for name in module.__all__:
            value, full = getattr(module, name), f"dd.{path}.{name}".replace("..", ".")
            if inspect.ismodule(value):
                found[full] = "module"
            elif isinstance(value, type):
                found[full] = signature(value)
                if not issubclass(value, torch.nn.Module):  # torch's own names, and what holds parameters
                    found |= {f"{full}.{member}": text for member, text in _of_class(value)}
            else:
                found[full] = signature(value) if callable(value) else _default(value)
    return found


# ---------------------------------------------------------------- error texts

NORMAL = (
    (re.compile(r"\S*\.py:\d+"), "<line>"),
    (re.compile(r"0x[0-9a-f]{6,}"), "<address>"),
    (re.compile(r"\b(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{12,16}\b"), "<digest>"),
    (re.compile(r"\d+(\.\d+)?( ?s\b| seconds)"), "<time>"),
    (re.compile(r"(SafetensorError|ValueError): [^;]*"), r"\1"),  # of several faults of a file, the first that was met
    (re.compile(r"(/[\w.-]+)*/tmp[\w.-]*(/[\w.-]+)*"), "<path>"),
)


def normal(text: str) -> str:
    """A text without lines, addresses, digests, times and temporary folders."""
    for pattern, instead in NORMAL:
        text = pattern.sub(instead, text)
    return text


class Texts:
    """The texts of the errors that each test makes, kept with those of ``file``."""

    def __init__(self, file: str):
        self.file, self.frozen, self.now, self.ran = file, read(file), {}, set()

    def collect(self, test: str):
        """A generator around one test: what differs from the frozen texts is an AssertionError afterwards. A test that
        is not frozen yet is not compared."""
        found, init = set(), DistdlError.__init__
        self.ran.add(test)

        @wraps(init)
        def noted(self, *args, **named):
            init(self, *args, **named)
            found.add(f"{type(self).__name__}: {normal(str(self))}")

        calls._known[__file__] = False  # this frame is no user's
        DistdlError.__init__ = noted
        try:
            yield
        finally:
            DistdlError.__init__ = init
        if len(found) > 20:  # a table of wrong arguments: what came is left out
            found = {re.sub(", got .*?(?=; next step|$)", ", got <what came>", text, flags=re.S) for text in found}
        if found:
            self.now[test] = sorted(found)
        if not REFREEZE and test in self.frozen:
            then = set(self.frozen[test])
            assert found == then, "error texts differ (make refreeze, if that is meant):\n" + "\n".join(
                [*(f"- {text}" for text in sorted(then - found)), *(f"+ {text}" for text in sorted(found - then))]
            )

    def finish(self):
        """Today's texts are frozen, where that is asked for; those of tests that have not run stay."""
        if REFREEZE and self.ran:
            write(self.file, {t: texts for t, texts in self.frozen.items() if t not in self.ran} | self.now)
