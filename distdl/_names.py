"""A package's names: what is public, what is imported when first asked for, and what to say of the rest."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable
from types import ModuleType

__all__ = ["only_public"]
_FACES = ("distdl", "distdl.functional", "distdl.nn")


def only_public(package: str, keep=(), lazy=None):
    """Take submodules that are neither public nor to ``keep`` out of a package's names (``F.linear`` would be a module
    where a user means a function), and return its ``__getattr__``, which says what may be meant.
    ``import package.submodule as m`` and ``from package.submodule import x`` work as ever.

    Args:
        keep: submodules that stay.
        lazy: {name: submodule} of what is imported when first asked for.
    """
    module = sys.modules[package]
    for name, value in list(vars(module).items()):
        if isinstance(value, ModuleType) and name not in (*module.__all__, *keep) and not name.startswith("_"):
            delattr(module, name)

    def __getattr__(name):
        if lazy and name in lazy:
            return importlib.import_module(f"{package}.{lazy[name]}")
        meant = [] if name.startswith("_") else _meant(name, package)
        hint = f"; did you mean {', '.join(meant)}?" if meant else ""
        raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")

    return __getattr__


def _meant(name: str, package: str) -> list[str]:
    """Up to four public names like this one, of the package or of others: the same but for capitals and underscores (a
    class's function), longer ones, those that it contains (a class with more in its name), those spelt alike."""
    wanted, own, others = _plain(name), (package,), tuple(face for face in _FACES if face != package)
    tests: tuple[tuple[Callable[[str], bool], tuple[str, ...]], ...] = (
        (lambda known: known in (wanted, f"dist{wanted}"), own),
        (lambda known: wanted in known, own),
        (lambda known: known in (wanted, f"dist{wanted}"), others),
        (lambda known: len(known) > 3 and known in wanted, (*own, *others)),
        (lambda known: difflib.SequenceMatcher(None, known, wanted).ratio() > 0.75, (*own, *others)),
    )
    for test, places in tests:
        for place in places:
            names = getattr(sys.modules.get(place), "__all__", ())
            if found := [known for known in names if test(_plain(known))]:
                found.sort(key=lambda known: abs(len(known) - len(name)))
                return [known if place == package else f"{place}.{known}" for known in found[:4]]
    return []


def _plain(name: str) -> str:
    return name.replace("_", "").lower()
