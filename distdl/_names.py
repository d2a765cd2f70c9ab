"""A package's names: what is public, what is imported when first asked for, and what to say of the rest."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

__all__ = ["only_public"]


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
        alike = [known for known in module.__all__ if not name.startswith("_") and name.lower() in known.lower()]
        alike.sort(key=lambda known: (known != f"dist_{name}", len(known)))
        hint = f"; did you mean {', '.join(alike[:4])}?" if alike else ""
        raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")

    return __getattr__
