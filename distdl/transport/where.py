"""Where the user's program is: the innermost line that belongs neither to distdl nor to torch."""

from __future__ import annotations

import os
import sys

import torch

_INSIDE = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (os.path.dirname(__file__), torch.__file__))
_known: dict[str, bool] = {}


def _users(filename: str) -> bool:
    return not filename.startswith((*_INSIDE, "<frozen")) and not filename.endswith(("contextlib.py", "functools.py"))


def user_line() -> str:
    """``file:line in function`` of the user's call, as far as this thread knows it (CUDA backward has threads of its own)."""
    frame, known = sys._getframe(1), _known
    while frame is not None:
        code = frame.f_code
        users = known.get(code.co_filename)
        if users is None:
            users = known[code.co_filename] = _users(code.co_filename)
        if users:
            return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return "backward, on a thread of torch's own"
