"""Where the user's program is: the innermost line that belongs neither to distdl nor to torch."""

from __future__ import annotations

import os
import sys

import torch

_INSIDE = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (os.path.dirname(__file__), torch.__file__))
_known: dict[str, bool] = {}


def _users(filename: str) -> bool:
    known = _known.get(filename)
    if known is None:
        known = _known[filename] = not filename.startswith((*_INSIDE, "<frozen")) and not filename.endswith("contextlib.py")
    return known


def user_line() -> str:
    """``file:line in function`` of the user's call, as far as this thread knows it (CUDA backward has threads of its own)."""
    frame = sys._getframe(1)
    while frame is not None:
        if _users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "backward, on a thread of torch's own"
