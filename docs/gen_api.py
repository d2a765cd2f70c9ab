"""Fill docs/api.md from docstrings: a line ``::: distdl.func`` becomes an entry for each public name of that module.

mkdocs calls :func:`on_page_markdown` (see mkdocs.yml). ``python docs/gen_api.py`` prints the whole page.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path

SECTION = re.compile(r"^(Args|Returns|Raises|Attributes|Messages)([:,].*)$")
ITEM = re.compile(r"^([*\w][\w*, .]*):\s+(.*)$")


def on_page_markdown(markdown, page, **kwargs):
    """mkdocs' hook."""
    return expand(markdown) if page.file.src_path == "api.md" else markdown


def expand(markdown: str) -> str:
    """Replace every ``::: name`` by the entries of that module, or by the one of that class or function."""
    return re.sub(r"^::: (\S+)$", lambda match: "\n".join(entries(match[1])), markdown, flags=re.MULTILINE)


def entries(name: str) -> list[str]:
    """The entries of a module's ``__all__`` that it defines, or the entry of one object."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:
        parent, _, attribute = name.rpartition(".")
        return entry(attribute, getattr(importlib.import_module(parent), attribute))
    names = getattr(module, "__all__", None) or [n for n, v in vars(module).items() if is_own(v, module) and not n.startswith("_")]
    return [line for n in names for line in entry(n, getattr(module, n))]


def is_own(value, module) -> bool:
    """Whether a class or function (cached ones too) was written in this module."""
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def entry(name: str, value) -> list[str]:
    """Heading, signature and documentation; for a class its public members too."""
    lines = [f"#### {escaped(name)}", "", "```text", signature(name, value), "```", "", *documentation(inspect.getdoc(value) or "")]
    members = []
    for member, found in vars(value).items() if inspect.isclass(value) and not issubclass(value, BaseException) else ():
        text = inspect.getdoc(getattr(value, member))
        described = callable(found) or isinstance(found, (property, classmethod, staticmethod))
        if text and described and not member.startswith("_"):
            call = member if isinstance(found, property) else signature(member, getattr(value, member))
            members.append(f"- **`{call}`**: {escaped(' '.join(text.split(chr(10) * 2)[0].split()))}")
    if members:
        lines += ["", "**Members**:", "", *members]
    return [*lines, ""]


def signature(name: str, value) -> str:
    """How it is called, without annotations: they are in the text."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    parameters = [p.replace(annotation=p.empty) for p in found.parameters.values() if p.name != "self"]
    return name + str(found.replace(parameters=parameters, return_annotation=found.empty))


def escaped(text: str) -> str:
    """Text as markdown: roles as code, and nothing that starts an emphasis, a tag or a link, outside of code."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?([\w]+)`", r"`\1`", text).replace("``", "`")
    parts = text.split("`")
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([*_\[\]|])", r"\\\1", parts[i]).replace("<", "&lt;")
    return "`".join(parts)


def documentation(text: str) -> list[str]:
    """A docstring as markdown: paragraphs, code after ``::``, and sections as lists."""
    lines, section, code = [], False, False
    for line in text.split("\n"):
        head, item = SECTION.match(line), ITEM.match(line.strip())
        indent = len(line) - len(line.lstrip())
        if code and (indent >= 4 or not line):
            lines.append(line)
        elif head:
            section = head[1] in ("Args", "Raises", "Attributes")
            lines += ["", f"**{head[1]}**{escaped(head[2])}", *[""] * (head[1] != "Messages")]
        elif section and indent == 4 and item:
            lines.append(f"- `{item[1]}`: {escaped(item[2])}")
        elif section and indent:
            lines.append(f"    {escaped(line.strip())}")
        else:
            section = section and (not line or bool(indent))
            lines.append(escaped(line.strip()).removesuffix("::") + ":" * line.endswith("::"))
        code = line.endswith("::") or (code and (indent >= 4 or not line))
    return lines


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    print(expand(Path(__file__).with_name("api.md").read_text(encoding="utf-8")))
