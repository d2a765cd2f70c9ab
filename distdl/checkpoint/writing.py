"""Write a checkpoint: each rank its own boxes, straight into one safetensors file.

A save has four steps, and after each one the ranks agree (one small all-gather) whether it went well everywhere: **describe**
(who holds what: gives the same plan on every rank), **create** (the lowest rank writes the header to a temporary file beside the
target, and reserves its size), **write** (every rank its boxes, in contiguous runs, and fsync), **publish** (the lowest rank
renames the file). So no tensor travels, no rank needs memory for another's block, nodes write at the same time, and the target is
the old file or the new one at any moment. A step that fails on one rank removes the temporary file and raises one error on every
rank.
"""

from __future__ import annotations

import glob
import json
import os
import secrets
import threading
import warnings
import zlib
from contextlib import suppress

import torch

from .format import DTYPES, Report, header, plan, runs
from .group import Group

__all__ = ["Pending", "async_save", "save"]


def _describe(path, tensors, layouts, metadata, token) -> Report:
    unknown = sorted(set(layouts) - set(tensors))
    if unknown:
        raise ValueError(f"layouts without a tensor: {unknown}")
    table = {}
    for name, x in tensors.items():
        if not isinstance(name, str) or name == "__metadata__" or not isinstance(x, torch.Tensor):
            raise TypeError(f"expected {{name: tensor}}, got {name!r}: {type(x).__name__}")
        if x.dtype not in DTYPES or x.layout is not torch.strided:
            raise TypeError(f"safetensors cannot hold {name!r}, {x.dtype}, {x.layout}; save torch.view_as_real(x), or its parts")
        layout = layouts.get(name)
        if layout is not None and layout.active and tuple(x.shape) != layout.local_shape():
            raise ValueError(f"{name!r} has shape {tuple(x.shape)}, but its block of {layout} has {layout.local_shape()}")
        shape, box = (tuple(x.shape), tuple((0, n) for n in x.shape)) if layout is None else (layout.shape, layout.box())
        table[name] = (str(x.dtype).removeprefix("torch."), shape, box)
    return Report(path, json.dumps(metadata), token, table)


def _bytes(x) -> memoryview:
    """The elements of a tensor in row-major order, on the host."""
    x = x.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return memoryview(x.reshape(-1).view(torch.uint8).numpy())


def copied(x):
    """A copy on the host."""
    return x.detach().to("cpu", copy=True)


def _write_all(fd, data, offset) -> None:
    while data:
        n = os.pwrite(fd, data, offset)  # may write less than asked
        data, offset = data[n:], offset + n


class Pending:
    """A save under way, as :func:`async_save` returns it.

    Attributes:
        done: whether this rank has written its part (or failed to).
    """

    def __init__(self, path, tensors, layouts, metadata, P, background):
        self._waiting = False
        self._group = group = Group("checkpoint.save", path, P)
        metadata, mine = metadata or {}, secrets.token_hex(8)
        reports = group.step(lambda: _describe(group.path, tensors, layouts or {}, metadata, mine))
        try:
            self._entries = plan(reports)
        except ValueError as error:  # all ranks see the same reports, so all raise it
            raise group.error(str(error), "give every rank its blocks of the same tensors, and the same metadata") from error
        token, (folder, name) = reports[group.ranks[0]].token, os.path.split(group.path)
        self._stale = os.path.join(glob.escape(folder), f".{glob.escape(name)}.*.saving")
        self._temporary = os.path.join(folder, f".{name}.{token}.saving")
        self._head = header(self._entries, json.dumps(metadata), token)
        boxes = {name: box for name, (_, _, box) in reports[group.world.rank].tensors.items()}
        self._mine: list[tuple] = []
        group.step(lambda: self._create(tensors, boxes, background), self._remove)
        self._sums, self._failure, self._thread = {}, None, None
        self._waiting = True
        if background:
            self._thread = threading.Thread(target=self._write_here, name=f"save {group.path}")
            self._thread.start()

    @property
    def done(self) -> bool:
        return not self._waiting or self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Complete the save: collective, once. Only now does the file take its name.

        Raises:
            CheckpointError: on every rank, when any failed to write, or when copies of one block differ between ranks.
        """
        if not self._waiting:
            return
        self._waiting = False
        found = self._group.step(self._join, self._remove)
        copies: dict = {}
        for rank, sums in found.items():
            for place, checksum in sums.items():
                copies.setdefault(place, {})[rank] = checksum
        differ = {place[0]: sorted(told) for place, told in copies.items() if len(set(told.values())) > 1}
        if differ:
            self._remove()
            raise self._group.error(f"copies of one block differ between ranks: {differ}",
                                    "make them equal first (broadcast), or save only one rank's; see the cotangent convention")
        self._group.step(self._publish, self._remove)

    def _create(self, tensors, boxes, background) -> None:
        self._mine += [(name, boxes[name], copied(x) if background else x) for name, x in tensors.items()
                       if boxes[name] in self._entries[name].holders]  # fmt: skip
        if not self._group.leads:
            return
        for path in glob.glob(self._stale):  # of a job that was killed while it saved
            os.unlink(path)
        end = max((e.end for e in self._entries.values()), default=0)
        fd = os.open(self._temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        try:
            _write_all(fd, self._head, 0)
            os.posix_fallocate(fd, 0, len(self._head) + end)  # a full disk shows here, before any data travels
        finally:
            os.close(fd)

    def _write(self) -> dict:
        """Write this rank's boxes; checksums of those that other ranks hold too."""
        rank, sums = self._group.world.rank, {}
        fd = os.open(self._temporary, os.O_WRONLY)
        try:
            for name, box, x in self._mine:
                entry, data = self._entries[name], _bytes(x)
                if len(entry.holders[box]) > 1:
                    sums[name, box] = zlib.crc32(data)
                if entry.writers[box] == rank:
                    size, offsets = runs(box, entry.shape)
                    size, item, begin = size * x.element_size(), x.element_size(), len(self._head) + entry.begin
                    for i, offset in enumerate(offsets):
                        _write_all(fd, data[i * size : (i + 1) * size], begin + offset * item)
            os.fsync(fd)
        finally:
            os.close(fd)
        return sums

    def _write_here(self) -> None:
        try:
            self._sums = self._write()
        except Exception as error:  # raised by wait
            self._failure = error

    def _join(self) -> dict:
        if self._thread is None:
            return self._write()
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._sums

    def _publish(self) -> None:
        if self._group.leads:
            os.replace(self._temporary, self._group.path)
            fd = os.open(os.path.dirname(self._group.path) or ".", os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _remove(self) -> None:
        if self._group.leads:
            with suppress(FileNotFoundError):
                os.unlink(self._temporary)

    def __del__(self):
        if self._waiting:
            text = f"nobody waited for the save to {self._group.path!r}: the file was not made"
            warnings.warn(text, ResourceWarning, stacklevel=2)


def save(path, tensors, layouts=None, metadata=None, *, P=None) -> None:
    """Write global tensors to one safetensors file; collective.

    Args:
        path: where to, on a file system that all ranks share. An existing file is replaced in one moment, or not at all.
        tensors: {name: this rank's block}. A rank may lack what others have (a pipeline's stages).
        layouts: {name: Layout}; what has none is whole on this rank. Ranks may pass other layouts, as :func:`distdl.nn.layouts`
            gives them: only the boxes count. Where several ranks hold the same box it is written once, and checksums make
            sure that the copies are equal.
        metadata: what JSON can write (step, learning rate, a scheduler's ``state_dict()``), the same on every rank.
        P: the ranks that make the call, a Partition or Layout; default: all ranks of the default world.

    Messages: four small all-gathers, no tensor. Each rank writes its boxes with ``pwrite``, in contiguous runs.

    Raises:
        CheckpointError: on every rank, and the old file stays: a full disk, or another failure of any rank; a dtype that
            safetensors lacks (complex128); shapes, layouts or metadata that disagree, blocks that are not the whole of a tensor,
            copies that differ.
        PartitionError: this rank is not one of ``P``.
    """
    Pending(path, tensors, layouts, metadata, P, background=False).wait()


def async_save(path, tensors, layouts=None, metadata=None, *, P=None) -> Pending:
    """:func:`save`, written by a thread from a copy in host memory; returns a :class:`Pending` as soon as the copy is made.

    Call ``pending.wait()`` on every rank before the next save and before the program ends: it raises what went wrong, and gives the
    file its name. The thread sends no message, so it does not disturb the program's own.
    """
    return Pending(path, tensors, layouts, metadata, P, background=True)
