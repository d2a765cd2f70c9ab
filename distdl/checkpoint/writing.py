"""Write a checkpoint: each rank its own boxes, straight into one safetensors file.

A save has four steps, and after each one the ranks agree (one small all-gather) whether it went well everywhere:
**describe** (who holds what: gives the same plan on every rank), **create** (the lowest rank makes a temporary file
beside the target, and reserves its size), **write** (every rank its boxes, in contiguous runs, and fsync; their
checksums go to all), **publish** (the lowest rank writes the header and renames the file). So no tensor travels, no
rank needs memory for another's block, nodes write at the same time, and the target is the old file or the new one at
any moment. A step that fails on one rank removes the temporary file and raises one error on every rank.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import secrets
import stat
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from .._types import Place
from ..boxes import row_major
from ..errors import CheckpointError
from ..partition import Layout
from .choice import check_layouts
from .format import DTYPES, Box, Report, header, keyed, plan
from .group import Group, Path
from .sums import parts, whole

__all__ = ["Pending", "async_save", "save"]
# Of a rank's boxes that others hold too, and {name: {piece: what the rank adds to its checksum}}.
Checksums = tuple[dict[tuple[str, Box], int], dict[str, dict[int, int]]]
_under_way: dict[str, Any] = {}  # saves of this process that nobody has waited for yet: {temporary file: target}


def describe(
    path: str,
    tensors: Mapping[str, torch.Tensor],
    layouts: Mapping[str, Layout],
    metadata: Any,
    token: str,
    any_dtype: bool = False,
) -> Report:
    """This rank's part of a save; ``any_dtype``: also those that safetensors lacks."""
    check_layouts(layouts)
    if not isinstance(tensors, Mapping):
        raise TypeError(f"expected {{name: tensor}}, got {type(tensors).__name__}")
    unknown = sorted(set(layouts) - set(tensors))
    if unknown:
        raise ValueError(f"layouts without a tensor: {unknown}")
    table = {}
    for name, x in tensors.items():
        if not isinstance(name, str) or name == "__metadata__" or not isinstance(x, torch.Tensor):
            raise TypeError(f"expected {{name: tensor}}, got {name!r}: {type(x).__name__}")
        if any("\ud800" <= c <= "\udfff" for c in name):
            raise ValueError(f"the name {name!r} is no valid text: it has half of a surrogate pair")
        if (x.dtype not in DTYPES and not any_dtype) or x.layout is not torch.strided:
            raise TypeError(
                f"safetensors cannot hold {name!r}, {x.dtype}, {x.layout}; save torch.view_as_real(x), or its parts"
            )
        layout = layouts.get(name)
        if layout is not None and layout.active and tuple(x.shape) != layout.local_shape():
            raise ValueError(
                f"{name!r} has shape {tuple(x.shape)}, but its block of {layout} has {layout.local_shape()}"
            )
        shape, box = tuple(x.shape), tuple((0, n) for n in x.shape)
        if layout is not None:
            shape, box = layout.shape, layout.box()
        table[name] = (str(x.dtype).removeprefix("torch."), shape, box)
    return Report(path, _json(metadata), token, table)


def _json(metadata: Any) -> str:
    for place, what in _unwritable(metadata, "metadata"):
        raise TypeError(f"JSON cannot write {place}, {what}: save tensors as tensors, or their .item() or .tolist()")
    return json.dumps(keyed(metadata))


def _unwritable(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Where in the metadata something is that JSON cannot write, and what it is."""
    if isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            yield from _unwritable(part, f"{place}[{i}]")
    elif isinstance(value, dict):
        for key, part in value.items():
            if key is not None and not isinstance(key, (str, int, float)):
                yield f"a key of {place}", f"{key!r}: {type(key).__name__}"
            yield from _unwritable(part, f"{place}[{key!r}]")
    elif value is not None and not isinstance(value, (str, int, float)):
        yield place, f"a {type(value).__name__}"


def bytes_of(x: torch.Tensor) -> memoryview:
    """The elements of a tensor in row-major order, on the host."""
    x = x.detach().resolve_conj().resolve_neg().cpu().contiguous()
    x = x.as_strided((x.numel(),), (1,))  # one element may have any stride, and is called contiguous
    data: memoryview = x.view(torch.uint8).numpy().data
    return data


def copied(x: torch.Tensor) -> torch.Tensor:
    """A copy on the host."""
    return x.detach().to("cpu", copy=True)


def _write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    while data:
        n = os.pwrite(fd, data, offset)  # may write less than asked
        data, offset = data[n:], offset + n


def refuse_differing(group: Group, sums: Mapping[int, Mapping[tuple[str, Box], int]], undo: Callable[[], None]) -> None:
    """One error on every rank, after ``undo``, where copies of a block differ; ``sums``: checksums by rank."""
    copies: dict[tuple[str, Box], dict[int, int]] = {}
    for rank, mine in sums.items():
        for place, checksum in mine.items():
            copies.setdefault(place, {})[rank] = checksum
    differ = {place[0]: sorted(ranks) for place, ranks in copies.items() if len(set(ranks.values())) > 1}
    if differ:
        undo()
        raise group.error(
            f"copies of one block differ between ranks: {differ}",
            "make them equal first (broadcast), or save only one rank's; see the cotangent convention",
        )


class Pending:
    """A save under way, as :func:`async_save` returns it.

    Example:
        >>> pending = dd.checkpoint.async_save("run.safetensors", {"w": torch.ones(2)})
        >>> isinstance(pending, dd.checkpoint.Pending), pending.wait()
        (True, None)
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, torch.Tensor],
        layouts: Mapping[str, Layout] | None,
        metadata: Any,
        P: Place | None,
        background: bool,
    ) -> None:
        self._waiting = False
        self._group = group = Group("checkpoint.save", path, P)
        token = secrets.token_hex(8)
        self._folder = self._name = self._target = ""

        def described() -> Report:
            folder, self._name = os.path.split(group.path)
            self._folder = os.path.realpath(folder)  # the same however it is spelt, and wherever the process goes
            self._target = os.path.join(self._folder, self._name)
            return describe(group.path, tensors, layouts or {}, metadata or {}, token)

        reports = group.step(described)
        try:
            self._entries = plan(reports)
            self._token, self._metadata = reports[group.ranks[0]].token, reports[group.ranks[0]].metadata
            self._start = len(header(self._entries, self._metadata, self._token))
        except ValueError as error:  # all ranks see the same reports, so all raise it
            raise group.error(
                str(error), "give every rank its blocks of the same tensors, and the same metadata"
            ) from error
        self._temporary = os.path.join(self._folder, f".{self._name}.{self._token}.saving")
        boxes = {name: box for name, (_, _, box) in reports[group.world.rank].tensors.items()}
        self._blocks: list[tuple[str, Box, torch.Tensor]] = []  # that this rank holds
        self._made = False  # whether this rank has made the temporary file
        group.step(lambda: self._create(tensors, boxes, background), self._remove)
        self._checksums: Checksums = ({}, {})
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._waiting = True
        if background:
            if not _under_way:
                atexit.unregister(_lost)
                atexit.register(_lost)  # now: so that it runs while the world can still end the job
            _under_way[self._temporary] = group.path
            self._thread = threading.Thread(target=self._write_beside, name=f"save {group.path}")
            self._thread.start()

    @property
    def done(self) -> bool:
        """Whether this rank has written its part (or failed to)."""
        return not self._waiting or self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Complete the save: collective, once. Only now does the file take its name.

        Raises:
            CheckpointError: on every rank, when any failed to write, or when copies of one block differ between ranks.
        """
        if not self._waiting:
            return
        self._waiting = False
        try:
            self._complete()
        finally:
            _under_way.pop(self._temporary, None)

    def _complete(self) -> None:
        reports: dict[int, Checksums] = self._group.step(self._join, self._remove)
        refuse_differing(self._group, {rank: copies for rank, (copies, _) in reports.items()}, self._remove)
        self._group.step(lambda: self._publish([sums for _, sums in reports.values()]), self._remove)

    def _create(self, tensors: Mapping[str, torch.Tensor], boxes: Mapping[str, Box], background: bool) -> None:
        for name, x in tensors.items():
            if boxes[name] in self._entries[name].holders:
                self._blocks.append((name, boxes[name], copied(x) if background else x))
        if not self._group.leads:
            return
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(os.stat(self._target).st_mode):
                raise ValueError("there is something that is no regular file, and stays")
        stale = re.compile(rf"\.{re.escape(self._name)}\.[^.]+\.saving")  # the token has no dot: no other target's
        for name in os.listdir(self._folder):
            path = os.path.join(self._folder, name)
            if stale.fullmatch(name) and path not in _under_way:  # of a job that was killed while it saved
                os.unlink(path)
        end = max((e.end for e in self._entries.values()), default=0)
        fd = os.open(self._temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        self._made = True
        try:
            os.posix_fallocate(fd, 0, self._start + end)  # a full disk shows here, before any data travels
        finally:
            os.close(fd)

    def _write(self) -> Checksums:
        """Write this rank's boxes; checksums of those that other ranks hold too, and what it adds to those of the
        file's pieces."""
        rank = self._group.world.rank
        copies: dict[tuple[str, Box], int] = {}
        sums: dict[str, dict[int, int]] = {}
        fd = os.open(self._temporary, os.O_WRONLY)
        try:
            for name, box, x in self._blocks:
                entry, data, item = self._entries[name], bytes_of(x), x.element_size()
                if len(entry.holders[box]) > 1:
                    copies[name, box] = zlib.crc32(data)
                if entry.writers[box] == rank:
                    elements, starts = row_major(box, entry.shape)
                    size, offsets = elements * item, [start * item for start in starts]
                    sums[name] = parts(data, size, offsets, entry.end - entry.begin)
                    for i, offset in enumerate(offsets):
                        _write_all(fd, data[i * size : (i + 1) * size], self._start + entry.begin + offset)
            os.fsync(fd)
        finally:
            os.close(fd)
        return copies, sums

    def _write_beside(self) -> None:
        try:
            self._checksums = self._write()
        except Exception as error:  # raised by wait
            self._failure = error

    def _join(self) -> Checksums:
        if self._thread is None:
            return self._write()
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._checksums

    def _publish(self, sums: Sequence[Mapping[str, dict[int, int]]]) -> None:
        if not self._group.leads:
            return
        text = "".join(
            whole([own[name] for own in sums if name in own], e.end - e.begin) for name, e in self._entries.items()
        )
        fd = os.open(self._temporary, os.O_WRONLY)
        try:
            _write_all(fd, header(self._entries, self._metadata, self._token, text), 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(self._temporary, self._target)
        fd = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _remove(self) -> None:
        if self._made:
            with suppress(FileNotFoundError):
                os.unlink(self._temporary)

    def __del__(self) -> None:
        if self._waiting:
            text = f"nobody waited for the save to {self._group.path!r}: the file was not made"
            warnings.warn(text, RuntimeWarning, stacklevel=2)


def _lost() -> None:
    """At exit: what was never waited for is not there, which must not pass unseen."""
    if _under_way:
        raise CheckpointError(
            "the program ends, and nobody waited for a save: its file was not made",
            op="checkpoint.async_save",
            expected="pending.wait() on every rank",
            actual=sorted(_under_way.values()),
            partitions=None,
            next_step="call wait() before the next save and before the program ends",
        )


def save(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    layouts: Mapping[str, Layout] | None = None,
    metadata: Any = None,
    *,
    P: Place | None = None,
) -> None:
    """Write global tensors to one safetensors file; collective.

    Args:
        path: where to, on a file system that all ranks share. An existing file is replaced in one moment, or not at
            all.
        tensors: {name: this rank's block}. A rank may lack what others have (a pipeline's stages).
        layouts: {name: Layout}; what has none is whole on this rank. Ranks may pass other layouts, as
            :func:`distdl.nn.layouts` gives them: only the boxes count. Where several ranks hold the same box it is
            written once, and checksums make sure that the copies are equal.
        metadata: what JSON can write (step, learning rate, a scheduler's ``state_dict()``), the same on every rank. The
            file's own metadata has also the checksums (CRC32) of each MiB of every tensor, and of the header.
        P: the ranks that make the call, a Partition or Layout; default: all ranks of the default world.

    Messages: four small all-gathers, no tensor; in one of them a few bytes for each MiB that a rank writes. Each rank
    writes its boxes with ``pwrite``, in contiguous runs.

    Raises:
        CheckpointError: on every rank, and the old file stays: a full disk, or another failure of any rank; a dtype
            that safetensors lacks (complex128); a name that is no valid text; metadata that JSON cannot write, by its
            key; shapes, layouts or metadata that disagree, blocks that are not the whole of a tensor, copies that
            differ; a path that is none, or where something is that is no regular file.
        PartitionError: this rank is not one of ``P``.

    Example:
        >>> L = dd.Layout(dd.Partition((1,)), (2,))
        >>> dd.checkpoint.save("run.safetensors", {"w": torch.ones(2)}, {"w": L}, {"step": 7})
        >>> dd.checkpoint.load("run.safetensors", {"w": L})
        ({'w': tensor([1., 1.])}, {'step': 7})
    """
    Pending(path, tensors, layouts, metadata, P, background=False).wait()


def async_save(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    layouts: Mapping[str, Layout] | None = None,
    metadata: Any = None,
    *,
    P: Place | None = None,
) -> Pending:
    """:func:`save`, written by a thread from a copy in host memory; returns a :class:`Pending` as soon as the copy is
    made.

    Call ``pending.wait()`` on every rank before the next save and before the program ends: it raises what went wrong,
    and gives the file its name. A save that nobody waits for warns, and is an error when the program ends. The
    thread sends no message, so it does not disturb the program's own.

    Example:
        >>> w = torch.ones(2)
        >>> pending = dd.checkpoint.async_save("run.safetensors", {"w": w})
        >>> w.zero_(), pending.wait()  # what was copied is saved
        (tensor([0., 0.]), None)
        >>> dd.checkpoint.load("run.safetensors")[0]["w"]
        tensor([1., 1.])
    """
    return Pending(path, tensors, layouts, metadata, P, background=True)
