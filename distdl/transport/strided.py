"""Strided memory as one message, which MPI packs and unpacks while it travels.

A box inside a tensor is described once, as a derived type of MPI. What would otherwise be a copy into staging memory, a message
and a copy out of it is then one call: MPI copies a few kilobytes at a time, so that they stay in a cache, and the two ends work
at the same time. Measured on one node against torch's copies with a message between them (Open MPI, 2 ranks on 2 cores; packed
and unpacked): 1 KiB 5 against 21 µs, 16 KiB 7 against 26, 256 KiB 60 against 95; in rows of 4 bytes 5, 8 and 65 against 21, 29
and 116.

Not every message: large ones are handed over in many pieces, for each of which both ranks must be running, and lose much where
they are not (cores that others use too). And beyond a few kilobytes MPICH and Intel MPI are slow with short runs of memory: up to 5
times as slow as torch.
"""

from __future__ import annotations

import math

from mpi4py import MPI

_LARGEST = 2**19  # bytes of such a message
_SMALL, _LONG = 2**12, 2**10  # up to so many bytes runs may be short; beyond they need so many each,
_FAST = ("Open MPI",)  # unless this MPI copies short runs faster than torch does


class Strided(int):
    """The number of bytes of a box that is not one run of memory, and how it lies there.

    Attributes:
        span: bytes from its first one to its last one, gaps included.
        kind: all of it, as a committed type of MPI.
    """

    span: int
    kind: MPI.Datatype

    def __del__(self, finalized=MPI.Is_finalized):
        if hasattr(self, "kind") and not finalized():
            self.kind.Free()  # messages under way keep it


def strided(sizes: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Strided | None:
    """A box (strides in bytes) as one message; ``None`` where it is better packed and unpacked by hand."""
    run, dims = itemsize, [(n, step) for n, step in zip(sizes, strides) if n != 1]
    while dims and dims[-1][1] == run:
        run *= dims.pop()[0]
    runs = math.prod(n for n, _ in dims)
    message = Strided(runs * run)
    short = message > _SMALL and run < _LONG
    if message > _LARGEST or (short and MPI.get_vendor()[0] not in _FAST):
        return None
    message.span = run + sum((n - 1) * step for n, step in dims)
    kind = MPI.BYTE.Create_contiguous(run)  # of bytes, whatever the dtype: the fastest
    for n, step in reversed(dims):
        inner, kind = kind, kind.Create_hvector(n, 1, step)
        inner.Free()
    message.kind = kind.Commit()
    return message
