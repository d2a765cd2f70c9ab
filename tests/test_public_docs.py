"""The table of public names: each has a docstring that tells shapes, errors and messages, and an example that runs.

A docstring tells a thing itself, or by the one that it names (``:func:`dist_conv```, "as for :func:`reorder`"), or by
the head of the file that it stands in. Examples are doctests, of one process; ``torch``, ``dd`` and ``F`` are imported.
"""

import doctest
import importlib
import inspect
import os
import re
import sys
from unittest import mock

import pytest
import torch
from test_wrong_calls import modules

import distdl as dd
import distdl.functional as F

DRAWN = ("viz.draw", "viz.spy")  # by matplotlib
TELLS = {
    "errors": r"Raises:|refus|error",
    "messages": r"[Mm]essage|[Nn]othing is sent|[Nn]egotiat|all-reduce|all-gather|[Pp]ure|free of MPI|sends nothing",
    "shapes": r"\([\w*., ]*,[\w*., /·]*\)|\bshape|[Bb]lock|element|dim|[Ll]ayout|[Ss]calar|number|[Ww]indow",
}


def public():
    """{name: function or class}"""
    found = {f"{face}.{n}": getattr(module, n) for face, (module, names) in modules().items() for n in names}
    found |= {n: getattr(dd, n) for n in dd.__all__}
    return {name: thing for name, thing in found.items() if callable(thing)}


NAMES = public()


def own_doc(thing) -> str:
    """What was written for it; a class's own, not its base's."""
    thing = inspect.unwrap(thing)
    return inspect.cleandoc(vars(thing).get("__doc__") or "" if isinstance(thing, type) else thing.__doc__ or "")


def named_in(text, thing):
    """What a docstring names by a role: the first public thing of that name."""
    for role in re.findall(r":(?:func|class|meth|mod):`~?([\w.]+)`", text):
        short = role.rpartition(".")[2]
        if role.startswith("distdl.") and role.count(".") == 2 and role in sys.modules:
            yield sys.modules[role]
        candidates = [name for name in NAMES if name.rpartition(".")[2] == short]
        home = getattr(inspect.unwrap(thing), "__module__", "")
        near = getattr(sys.modules.get(home), short, None)
        if candidates:
            yield NAMES[candidates[0]]
        elif near is not None:
            yield near


def told(thing, depth=2) -> str:
    """The docstring, those of what it names, and the head of its file."""
    text = inspect.cleandoc(thing.__doc__ or "") if inspect.ismodule(thing) else own_doc(thing)
    if not inspect.ismodule(thing):
        home = sys.modules.get(inspect.unwrap(thing).__module__)
        text += "\n" + (home.__doc__ or "")
    for other in named_in(text, thing) if depth else ():
        text += "\n" + told(other, depth - 1)
    return text


@pytest.mark.parametrize("what", TELLS)
def test_every_name_tells(what):
    lacking = [name for name, thing in NAMES.items() if not re.search(TELLS[what], told(thing))]
    assert lacking == []


def test_every_name_has_words_of_its_own():
    """A sentence at least, that ends."""
    lacking = [n for n, thing in NAMES.items() if len(own_doc(thing).split()) < 3 or "." not in own_doc(thing)]
    assert lacking == []


def test_every_name_has_an_example():
    lacking = [name for name, thing in NAMES.items() if ">>> " not in own_doc(thing)]
    assert lacking == []


def failures(text, name) -> str:
    """What goes wrong with the examples of a docstring, run as it stands."""
    test = doctest.DocTestParser().get_doctest(text, {"torch": torch, "dd": dd, "F": F}, name, None, 0)
    said = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE, verbose=False).run(test, out=said.append)
    return "".join(said)


@pytest.fixture
def apart(monkeypatch, tmp_path):
    """Examples make worlds, files, variables and process groups: they stay among themselves."""
    worlds = importlib.import_module("distdl.world")
    monkeypatch.setattr(worlds, "_worlds", dict(worlds._worlds))
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    with mock.patch.dict(os.environ):
        yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", sorted(NAMES))
def test_example(name, apart):
    """It runs, prints what it says, and calls what it is an example of."""
    if name in DRAWN:
        pytest.importorskip("matplotlib")
    text = own_doc(NAMES[name])
    assert not (wrong := failures(text, name)), wrong
    shown = "\n".join(re.findall(r"^ *(?:>>>|\.\.\.) (.*)$", text, re.MULTILINE))
    assert re.search(rf"\b{name.rpartition('.')[2]}\b", shown), shown


def test_a_wrong_example_is_seen():
    assert "Expected" in failures(">>> F.roll(torch.arange(2), dd.Partition((1,)), 0, 1)\ntensor([0, 1])", "wrong")
    assert "Error" in failures(">>> F.roll(1, 2)", "wrong")
