"""Editors and type checkers know the public surface: every public callable is annotated, and the package says so."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import distdl as dd
import distdl.functional as F

ROOT = Path(__file__).parent.parent
PACKAGES = dd, F, dd.maps, dd.nn, dd.parallel, dd.parallel.hooks, dd.checkpoint, dd.func, dd.init, dd.testing, dd.viz


def own(thing) -> bool:
    return getattr(thing, "__module__", "").startswith("distdl")


def public_callables():
    """(name, function) of every public function, and of constructors and public methods of public classes."""
    for package in PACKAGES:
        for name in package.__all__:
            thing = getattr(package, name)
            where = f"{package.__name__}.{name}"
            if not isinstance(thing, type):
                if callable(thing):
                    yield where, thing
                continue
            for kind in thing.__mro__:
                for method, value in vars(kind).items() if own(kind) else ():
                    value = getattr(value, "fget", getattr(value, "__func__", value))
                    if inspect.isfunction(value) and (method == "__init__" or not method.startswith("_")):
                        yield f"{where}.{method}", value


def unannotated(function) -> list[str]:
    function = inspect.unwrap(function)
    signature = inspect.signature(function)
    names = [p.name for p in signature.parameters.values() if p.annotation is p.empty and p.name not in ("self", "cls")]
    return names + ["the result"] * (signature.return_annotation is signature.empty)


def test_public_callables_are_annotated():
    found = dict(public_callables())
    assert len(found) > 250
    assert {name: names for name, function in found.items() if (names := unannotated(function))} == {}


def standing_for_functions():
    kinds = {name: getattr(dd.nn, name) for name in dd.nn.__all__}
    return [n for n, kind in kinds.items() if hasattr(kind, "function") and not issubclass(kind, dd.nn.Dropout)]


@pytest.mark.parametrize("name", standing_for_functions())
def test_modules_take_what_their_functions_take(name):
    """A module's constructor spells the options of the function that it stands for, in its order, with its defaults."""
    kind = getattr(dd.nn, name)
    theirs = [p for p in inspect.signature(kind.function).parameters.values() if p.name != "P"]
    ours = list(inspect.signature(kind).parameters.values())
    assert ours[0].name == "P"
    data = len(theirs) - len(ours) + 1  # x, or prediction and target
    assert [(p.name, p.default) for p in ours[1:]] == [(p.name, p.default) for p in theirs[data:]]


def test_the_package_says_that_it_is_typed():
    assert (Path(dd.__file__).parent / "py.typed").exists()
    assert 'distdl = ["py.typed"]' in (ROOT / "pyproject.toml").read_text()


def strict(program: str, folder: Path) -> str:
    """What ``mypy --strict`` says of a program that imports distdl."""
    pytest.importorskip("mypy")
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--config-file", os.devnull]
    command += ["--cache-dir", str(ROOT / ".mypy_cache" / "strict"), "program.py"]
    env = os.environ | {"MYPYPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder, timeout=600)
    return done.stdout + done.stderr


def test_a_typed_program(tmp_path):
    """The type checker knows what a user's program gets, and sees what is wrong with one."""
    program = (Path(__file__).parent / "typed_program.py").read_text()
    assert strict(program, tmp_path).startswith("Success")
    wrong = {
        "F.repartition(torch.ones(2), P, Q).nothing": '"Tensor" has no attribute "nothing"',
        "dd.nn.Conv1d(dd.Partition((1, 1, 2)), 1, 1, 3).nothing()": '"Tensor" not callable',
        "dd.nn.MaxPool2d(P, 2, strides=2)": 'Unexpected keyword argument "strides"',
        "dd.Partition(2)": 'expected "tuple[int, ...]"',
    }
    said = strict("\n".join([program, *wrong]), tmp_path)
    first = program.count("\n") + 2
    for line, error in enumerate(wrong.values(), first):
        assert any(text.startswith(f"program.py:{line}:") and error in text for text in said.splitlines()), said
