"""docs/api.md names what the reference has: a line ``::: distdl.func`` stands for each public name of that module.

The site's conf.py calls :func:`expand`, and Sphinx makes entries from docstrings. ``python docs/gen_api.py
--summaries`` writes into docs/api.md what a reader of the checkout sees: below each line what stands there.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path

LINE = re.compile(r"^::: (\S+)$(?:\n> .*)*", re.MULTILINE)


def expand(markdown: str) -> str:
    """Replace every ``::: name``, with its summary, by Sphinx's directives for that object or module."""
    return LINE.sub(lambda match: "\n".join(directives(match[1])), markdown)


def directives(name: str) -> list[str]:
    """What Sphinx is asked for: each object under the name that users import it by."""
    found, lines = named(name), ["```{eval-rst}"]
    for short, value in found:
        module = name if is_module(name) else name.rpartition(".")[0]
        face = sys.modules[module.rpartition(".")[0] or module]
        module = face.__name__ if inspect.unwrap(getattr(face, short, None)) is inspect.unwrap(value) else module
        lines += [f".. currentmodule:: {module}", "", f".. auto{kind(value)}:: {module}.{short}"]
        lines += ["   :members:" * (kind(value) == "class"), ""]
    return [*lines, "```", ""]


def kind(value: object) -> str:
    """As autodoc calls it."""
    if not inspect.isclass(value):
        return "function" if callable(value) else "data"
    return "exception" if issubclass(value, BaseException) else "class"


def summarised(markdown: str) -> str:
    """The page with today's summaries."""
    return LINE.sub(lambda match: f"{match[0].splitlines()[0]}\n> {summary(match[1])}", markdown)


def summary(name: str) -> str:
    """One line: the first sentence of an object's documentation; a module's, and its names."""
    found = [n for n, _ in named(name)]
    owner = sys.modules[name] if is_module(name) else named(name)[0][1]
    text = " ".join((inspect.getdoc(owner) or "").split("\n\n")[0].split()).split(". ")[0].rstrip(".:")
    return f"{escaped(text)}{': ' + ', '.join(f'`{n}`' for n in found) if is_module(name) else ''}."


def named(name: str) -> list[tuple[str, object]]:
    """The names of a module's ``__all__``, or one object: [(name, value)]. A function counts before a module of its
    name."""
    parent, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(parent), attribute, None) if parent else None
    if value is not None and not inspect.ismodule(value):
        return [(attribute, value)]
    module = importlib.import_module(name)
    names = getattr(module, "__all__", None) or [
        n for n, v in vars(module).items() if is_own(v, module) and not n.startswith("_")
    ]
    return [(n, getattr(module, n)) for n in names]


def is_module(name: str) -> bool:
    """Whether a line stands for a module, with all its names."""
    return [n for n, _ in named(name)] != [name.rpartition(".")[2]]


def is_own(value, module) -> bool:
    """Whether a class or function (cached ones too) was written in this module."""
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def escaped(text: str) -> str:
    """Text as markdown: roles as code, and nothing that starts an emphasis, a tag or a link, outside of code."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?([\w]+)`", r"`\1`", text).replace("``", "`")
    parts = text.split("`")
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([*_\[\]|])", r"\\\1", parts[i]).replace("<", "&lt;")
    return "`".join(parts)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    path = Path(__file__).with_name("api.md")
    if "--summaries" in sys.argv:
        path.write_text(summarised(path.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(expand(path.read_text(encoding="utf-8")))
