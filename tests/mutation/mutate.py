"""Mutants of a module: its syntax tree with one thing changed."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator

COMPARE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
           ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}  # fmt: skip
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
              ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.Div: ast.Mult}  # fmt: skip
NAMES = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "sorted": "list",
    "reversed": "list",
    "append": "extend",
}


def _changes(node) -> Iterator[tuple[str, ast.AST]]:
    """(what was done, the changed node) for each mutant of one node."""

    def changed(what, **fields):
        other = copy.copy(node)
        for name, value in fields.items():
            setattr(other, name, value)
        return what, ast.copy_location(other, node)

    if isinstance(node, ast.Compare) and len(node.ops) >= 1:
        for i, op in enumerate(node.ops):
            ops = list(node.ops)
            ops[i] = COMPARE[type(op)]()
            yield changed(f"{type(op).__name__} -> {type(ops[i]).__name__}", ops=ops)
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in ARITHMETIC and not _text(node):
        yield changed(
            f"{type(node.op).__name__} -> {ARITHMETIC[type(node.op)].__name__}", op=ARITHMETIC[type(node.op)]()
        )
    elif isinstance(node, ast.BoolOp):
        yield changed("and <-> or", op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield f"without {type(node.op).__name__}", node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield changed(f"{node.value} -> {not node.value}", value=not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield changed(f"{node.value} -> {node.value + 1}", value=node.value + 1)
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
        yield changed("condition negated", test=ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test))
    elif isinstance(node, ast.comprehension) and node.ifs:
        yield changed("without its filter", ifs=[])
    elif isinstance(node, ast.Name) and node.id in NAMES and isinstance(node.ctx, ast.Load):
        yield changed(f"{node.id} -> {NAMES[node.id]}", id=NAMES[node.id])
    elif isinstance(node, ast.Slice) and (node.lower or node.upper):
        yield changed(
            "without its start" if node.lower else "without its stop", **{"lower" if node.lower else "upper": None}
        )
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield changed("returns None", value=ast.copy_location(ast.Constant(None), node.value))
    elif isinstance(node, (ast.Assign, ast.AugAssign)) and isinstance(_target(node), (ast.Attribute, ast.Subscript)):
        yield "assignment removed", ast.copy_location(ast.Pass(), node)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call removed", ast.copy_location(ast.Pass(), node)
    elif isinstance(node, (ast.Break, ast.Continue)):
        yield "jump removed", ast.copy_location(ast.Pass(), node)
    elif isinstance(node, ast.Raise):
        yield "raise removed", ast.copy_location(ast.Pass(), node)


def _target(node):
    return node.targets[0] if isinstance(node, ast.Assign) else node.target


def _text(node) -> bool:
    sides = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
    texts = [s for s in sides if isinstance(s, ast.Constant) and isinstance(s.value, str)]
    return bool(texts) or any(isinstance(s, (ast.JoinedStr, ast.List)) for s in sides)


def _ignored(node) -> bool:
    """Texts, pictures and annotations are not judged here: an error's words, ``__repr__`` and ``__str__``."""
    if isinstance(node, ast.FunctionDef) and node.name in ("__repr__", "__str__"):
        return True
    return isinstance(node, ast.JoinedStr)


def mutants(source: str) -> Iterator[tuple[int, str, ast.Module]]:
    """(line, what was done, tree) of every mutant of a module."""
    tree = ast.parse(source)

    def walk(parent):
        for field, value in ast.iter_fields(parent):
            if field in ("annotation", "returns", "decorator_list", "type_comment") or (
                isinstance(parent, ast.Raise) and field == "exc"):  # fmt: skip
                continue
            places = [(value, i) for i in range(len(value))] if isinstance(value, list) else [(None, field)]
            for container, at in places:
                node = container[at] if container is not None else value
                if not isinstance(node, ast.AST) or _ignored(node):
                    continue
                for what, other in _changes(node):
                    if container is not None:
                        container[at] = other
                    else:
                        setattr(parent, field, other)
                    yield getattr(node, "lineno", getattr(parent, "lineno", 0)), what, tree
                    if container is not None:
                        container[at] = node
                    else:
                        setattr(parent, field, node)
                yield from walk(node)

    yield from walk(tree)


def _statements(tree) -> dict[int, str]:
    """The innermost statement of each line, on one line and without its body, as no formatter wraps it."""
    found: dict[int, str] = {}
    for node in ast.walk(tree):  # from the outside inwards
        if isinstance(node, (ast.stmt, ast.ExceptHandler)):
            head = copy.copy(node)
            for field in ("body", "orelse", "finalbody", "handlers", "cases", "decorator_list"):
                if isinstance(getattr(head, field, None), list):
                    setattr(head, field, [ast.Pass()] if field == "body" else [])
            text = ast.unparse(head).splitlines()[0]
            found |= dict.fromkeys(range(node.lineno, node.end_lineno + 1), text)
    return found


def named(source: str) -> Iterator[tuple[int, str, str, ast.Module]]:
    """(line, its statement, name, tree) of every mutant: what was done, numbered where it is done again to statements
    of that text ("0 -> 1 (2)")."""
    seen: Counter = Counter()
    statements = _statements(ast.parse(source))
    for line, what, tree in mutants(source):
        text = statements[line]
        seen[text, what] += 1
        yield line, text, what if seen[text, what] == 1 else f"{what} ({seen[text, what]})", tree
