"""Strided memory as one message, which MPI packs and unpacks while it travels, and as one copy within a rank.

A box inside a tensor is described once, as a derived type of MPI. What would otherwise be a copy into staging memory, a
message
and a copy out of it is then one call: MPI copies a few kilobytes at a time, so that they stay in a cache, and the two
ends work at the same time. Measured on one node against torch's copies with a message between them (Open MPI, 2 ranks
on 2 cores; packed and unpacked): 1 KiB 5 against 21 µs, 16 KiB 7 against 26, 256 KiB 60 against 95; in rows of 4 bytes
5, 8 and 65 against 21, 29 and 116.

Copies between a box and one run of memory, by addresses alone, take 0.25 to 0.5 of the time of torch's at 4 KiB (the
views of tensors that those need cost most of it), 0.3 to 0.85 at 64 KiB, 0.45 to 1.05 at 1 MiB and 0.8 to 1.16 at 8
MiB, for runs of 4 bytes to 4 KiB (Open MPI; MPICH saves 5 µs of torch's 8 up to 4 KiB, nothing at 16 KiB, and takes 2
to 8 times as long from 64 KiB up, Intel MPI up to 16 times for short runs).

Not every message: large ones are handed over in many pieces, for each of which both ranks must be running, and lose
much where they are not (cores that others use too). MPICH's pieces go twice through shared memory, where one run of
memory goes from process to process in one copy: a repartition of 512 x 512 float32 (256 KiB in runs of 1 KiB) takes 165
µs so, and 100 packed by torch, on two cores of one cache. And beyond a few kilobytes MPICH and Intel MPI are slow with
short runs of memory: up to 5 times as slow as torch.
"""

from __future__ import annotations

import ctypes
import math
import os
from dataclasses import dataclass
from typing import Any

from . import Fast


def asked_for() -> bool:
    """Whether MPI may pack strided memory by itself (``DISTDL_MPI_TYPES``)."""
    return os.environ.get("DISTDL_MPI_TYPES", "1") != "0"


wanted = asked_for()
_FAST, _LARGEST = ("Open MPI",), 2**19  # bytes of such a message by these MPIs, which copy any box within a rank;
_SMALL, _LONG, _MIDDLE = 2**12, 2**10, 2**15  # by others up to so many, or in runs of so many messages up to so many


@dataclass(eq=False)
class Strided:
    """A box that is not one run of memory, as MPI knows it.

    Attributes:
        nbytes: of the box.
        span: bytes from its first one to its last one, gaps included.
        kind: all of it, as a committed type of MPI.
        MPI: the module.
    """

    nbytes: int
    span: int
    kind: Any
    MPI: Any

    def __index__(self):
        return self.nbytes

    def pack(self, to: int, source: int, nbytes: int) -> None:
        """Copy the box at address ``source`` to one run of memory."""
        memory = self.MPI.buffer.fromaddress
        self.kind.Pack(memory(source, self.span), memory(to, nbytes), 0, self.MPI.COMM_SELF)

    def unpack(self, to: int, source: int, nbytes: int) -> None:
        """Copy one run of memory to the box at address ``to``."""
        memory = self.MPI.buffer.fromaddress
        self.kind.Unpack(memory(source, nbytes), 0, memory(to, self.span), self.MPI.COMM_SELF)

    def __del__(self):
        if not self.MPI.Is_finalized():
            self.kind.Free()  # messages under way keep it


class ByAddress(Fast):
    """Runs of memory by ``memmove``; other boxes where the engine is MPI, which knows types for them."""

    def info(self):
        copied = "copied into staging memory"
        if not asked_for():
            return "strided boxes", f"{copied} (DISTDL_MPI_TYPES=0)"
        return (
            "strided boxes",
            f"up to {_LARGEST >> 10} KiB (Open MPI; others {_MIDDLE >> 10}) packed by MPI while they "
            f"travel, larger ones {copied}",
        )

    def message(self, part, transport):
        return _box(part, transport, travels=True)

    def copies(self, pairs, transport):
        done, others = [], []
        for to, source in pairs:
            copy = None
            if to.contiguous and not to.add and not to.cast:
                if source.contiguous:
                    copy = ctypes.memmove
                elif (box := _box(source, transport, travels=False)) is not None:
                    copy = box.pack
            elif source.contiguous and (box := _box(to, transport, travels=False)) is not None:
                copy = box.unpack
            if copy is None:
                others.append((to, source))
            else:
                ends = [number for part in (to, source) for number in (part.leaf, part.offset * part.dtype.itemsize)]
                done.append((copy, *ends, to.nbytes))
        return done, others


def _box(part, transport, travels):
    itemsize = part.dtype.itemsize
    if not wanted or not transport.takes_types or part.add or part.cast or part.nbytes > transport.chunk:
        return None
    return strided(part.size, tuple(s * itemsize for s in part.stride), itemsize, travels)


def strided(sizes: tuple[int, ...], strides: tuple[int, ...], itemsize: int, travels: bool = True) -> Strided | None:
    """A box (strides in bytes) as one message, or as one copy; ``None`` where torch does it better."""
    from mpi4py import MPI  # an engine has it: importing distdl starts no MPI

    run, dims = itemsize, [(n, step) for n, step in zip(sizes, strides) if n != 1]
    while dims and dims[-1][1] == run:
        run *= dims.pop()[0]
    runs = math.prod(n for n, _ in dims)
    nbytes = runs * run
    if MPI.get_vendor()[0] in _FAST:
        most = _LARGEST if travels else nbytes
    else:
        most = _MIDDLE if travels and run >= _LONG else _SMALL
    if nbytes > most:
        return None
    span = run + sum((n - 1) * step for n, step in dims)
    kind = MPI.BYTE.Create_contiguous(run)  # of bytes, whatever the dtype: the fastest
    for n, step in reversed(dims):
        inner, kind = kind, kind.Create_hvector(n, 1, step)
        inner.Free()
    return Strided(nbytes, span, kind.Commit(), MPI)


path = ByAddress()
