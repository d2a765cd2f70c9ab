"""Fill docs/api.md from docstrings: a line ``::: distdl.func`` becomes an entry for each public name of that module.

mkdocs calls :func:`on_page_markdown` (see mkdocs.yml). ``python docs/gen_api.py`` prints the whole page; with
``--summaries`` it writes into docs/api.md what a reader of the checkout sees: below each ``:::`` line a line of what
stands there.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path

LINE = re.compile(r"^::: (\S+)$(?:\n> .*)*", re.MULTILINE)
SECTION = re.compile(r"^(Args|Returns|Raises|Attributes|Messages)([:,].*)$")
ITEM = re.compile(r"^([*\w][\w*, .]*):\s+(.*)$")


def on_page_markdown(markdown, page, **kwargs):
    """mkdocs' hook."""
    return expand(markdown) if page.file.src_path == "api.md" else markdown


def expand(markdown: str) -> str:
    """Replace every ``::: name``, with its summary, by the entries of that module, or by the one of that class or
    function."""
    return LINE.sub(
        lambda match: "\n".join(line for name, value in named(match[1]) for line in entry(name, value)), markdown
    )


def summarised(markdown: str) -> str:
    """The page with today's summaries."""
    return LINE.sub(lambda match: f"{match[0].splitlines()[0]}\n> {summary(match[1])}", markdown)


def summary(name: str) -> str:
    """One line: the first sentence of an object's documentation; a module's, and its names."""
    found = [n for n, _ in named(name)]
    owner = sys.modules.get(name) or named(name)[0][1]
    text = " ".join((inspect.getdoc(owner) or "").split("\n\n")[0].split()).split(". ")[0].rstrip(".:")
    return f"{escaped(text)}{': ' + ', '.join(f'`{n}`' for n in found) if name in sys.modules else ''}."


def named(name: str) -> list[tuple[str, object]]:
    """The names of a module's ``__all__``, or one object: [(name, value)]."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:
        parent, _, attribute = name.rpartition(".")
        return [(attribute, getattr(importlib.import_module(parent), attribute))]
    names = getattr(module, "__all__", None) or [
        n for n, v in vars(module).items() if is_own(v, module) and not n.startswith("_")
    ]
    return [(n, getattr(module, n)) for n in names]


def is_own(value, module) -> bool:
    """Whether a class or function (cached ones too) was written in this module."""
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def entry(name: str, value) -> list[str]:
    """Heading, signature and documentation; for a class its public members too."""
    lines = [
        f"#### {escaped(name)}",
        "",
        "```text",
        signature(name, value),
        "```",
        "",
        *documentation(inspect.getdoc(value) or ""),
    ]
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
    path = Path(__file__).with_name("api.md")
    if "--summaries" in sys.argv:
        path.write_text(summarised(path.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(expand(path.read_text(encoding="utf-8")))
