"""Large pages for large results.

Blocks of 32 MiB and more come fresh from the system on every call (malloc keeps smaller ones), and fresh memory costs a
page fault for every 4 KiB, several times what copying these costs. In pages of 2 MiB, which Linux gives on request,
that is a fraction: a repartition of 4096² float32 on 2 ranks takes 0.6 to 0.7 times as long.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

from . import Fast

LARGE = 2**25  # bytes: glibc's highest threshold for mapping a block by itself
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux
_madvise = ctypes.CDLL(None).madvise if _ADVICE is not None else None
_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def asked_for() -> bool:
    """Whether large pages are wanted (``DISTDL_LARGE_PAGES``)."""
    return os.environ.get("DISTDL_LARGE_PAGES", "1") != "0"


wanted = _madvise is not None and asked_for()


class Pages(Fast):
    """Results of at least :data:`LARGE` bytes."""

    def info(self):
        if not asked_for():
            return "large pages", "not asked for (DISTDL_LARGE_PAGES=0)"
        if not _SYSTEM.exists() or "[never]" in (says := _SYSTEM.read_text()):
            return "large pages", "none: this system has none, or gives none"
        return "large pages", f"asked for results of {LARGE >> 20} MiB and more; the system says {says.strip()}"

    def rewrite(self, program, xs):
        if wanted:
            large = [i for i, like in enumerate(program.likes) if like.is_cpu and like.nbytes >= LARGE]
            program.fresh += [(i, prefer_large_pages) for i in large]


def prefer_large_pages(tensor) -> None:
    """Ask for large pages under a fresh host tensor. Advice: a system that has none gives the usual ones."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = tensor.data_ptr() + tensor.nbytes - first
    _madvise(ctypes.c_void_p(first), ctypes.c_size_t(length // mmap.PAGESIZE * mmap.PAGESIZE), _ADVICE)


path = Pages()
