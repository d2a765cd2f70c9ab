"""Fast paths: each file here makes some movements faster and changes no result, and each may be removed.

A file defines one ``path``, a :class:`Fast`; a program asks all of them, in order, and does by torch's copies what
nobody takes. ``DISTDL_FAST`` names the files to use, separated by commas (default: all that are here; empty: none).
"""

from __future__ import annotations

import os
from importlib import import_module
from pkgutil import iter_modules

import torch


class Fast:
    """What a fast path may do; by default nothing. A *part* is a :class:`distdl.engine.part.Part`."""

    def message(self, part, transport):
        """A box that is not one run of memory as a message that the engine packs while it travels: anything that stands
        for its number of bytes (``__index__``) and that :meth:`Transport.post` takes in place of a number; or
        ``None``."""

    def copies(self, pairs, transport):
        """Of copies in host memory (to, from): those that need no tensors, as ``Program.moves`` has them, and the
        others."""
        return [], pairs

    def rewrite(self, program, xs) -> None:
        """Change a new program for tensors like ``xs``."""

    def info(self) -> tuple[str, str] | None:
        """What ``python -m distdl info`` says of it: (subject, what it does here)."""
        return None

    def take(self, nbytes: int):
        """Scratch memory on the host of at least so many bytes, or ``None``."""

    def give(self, block) -> None:
        """Take it back."""


def _paths():
    here = [module.name for module in iter_modules(__path__)]
    names = os.environ.get("DISTDL_FAST", ",".join(here)).split(",")
    return [import_module(f"{__name__}.{name}").path for name in here if name in names]


class Plain(Fast):
    """Scratch memory that is fresh each time."""

    def take(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")  # whatever torch's default device is


paths = _paths()
scratch = next((path for path in paths if type(path).take is not Fast.take), Plain())
