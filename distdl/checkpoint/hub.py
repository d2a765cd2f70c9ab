"""Safetensors as the Hugging Face hub has them, one file or several with an index: straight into shards.

A rank opens the files that hold what it wants, reads their headers, and then its boxes' bytes, with ``pread``: no map
of the file, and no tensor of which it holds a part only.
"""

from __future__ import annotations

import json
import math
import os
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .._types import Place
from ..boxes import row_major
from .choice import Layouts, Names, block_of, chosen
from .format import DTYPES, Box, unkeyed, volume
from .group import Group, Path
from .reading import checked_sources, refuse_half
from .writing import bytes_of

__all__ = ["load_safetensors"]
_DTYPES = {code: dtype for dtype, code in DTYPES.items()}
_INDEX, _ALONE = "model.safetensors.index.json", "model.safetensors"
_GAP = 4096  # bytes that are read and thrown away rather than asked around
_MOST = 2**20  # bytes of several runs that are read at once


@dataclass
class _Plain:
    """One tensor of an open file without checksums."""

    fd: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    def read(self, box: Box, out: memoryview) -> None:
        """The box's bytes, in row-major order."""
        size, offsets = row_major(box, self.shape)
        item = self.dtype.itemsize
        size, starts = size * item, [offset * item for offset in offsets]
        for first, last in _neighbours(starts, size):
            if last - first == 1:
                self._fill(out[first * size : last * size], starts[first])
                continue
            span = memoryview(bytearray(starts[last - 1] + size - starts[first]))
            self._fill(span, starts[first])
            for i in range(first, last):
                at = starts[i] - starts[first]
                out[i * size : (i + 1) * size] = span[at : at + size]

    def _fill(self, out: memoryview, at: int) -> None:
        while out:
            n = os.preadv(self.fd, [out[: 2**30]], self.begin + at)
            if not n:
                raise ValueError("the file ends before its last tensor")
            out, at = out[n:], at + n


def _neighbours(starts: list[int], size: int) -> Iterator[tuple[int, int]]:
    """Runs that one read takes: [first, last) in ``starts``, which rise."""
    first = 0
    for i in range(1, len(starts) + 1):
        if i == len(starts) or starts[i] - starts[i - 1] - size > _GAP or starts[i] + size - starts[first] > _MOST:
            yield first, i
            first = i


class _File:
    """A safetensors file that is open for reading."""

    def __init__(self, path: str, verify: bool):
        self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a fifo would wait for its writer
        try:
            found = os.fstat(self.fd)
            if not stat.S_ISREG(found.st_mode):
                raise ValueError(f"{path!r} is no regular file")
            start = os.pread(self.fd, 8, 0)
            end = 8 + int.from_bytes(start, "little")
            if len(start) < 8 or end > min(found.st_size, 100_000_008):
                raise ValueError(f"{path!r} is no safetensors file: its header would be longer than it")
            head = os.pread(self.fd, end, 0)
            try:
                self.table: dict[str, dict[str, Any]] = json.loads(head[8:])
            except ValueError as error:
                raise ValueError(f"{path!r} is no safetensors file: its header is no JSON") from error
            self.metadata: dict[str, str] = self.table.pop("__metadata__", {})
            self.checked = checked_sources(self.fd)[1] if verify else None
            if verify and self.checked is None:
                refuse_half(self.metadata)
            self.path, self.begin, self.size, self.token = path, end, found.st_size, zlib.crc32(head)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self.fd)

    def kind(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """dtype and shape of a tensor."""
        entry = self.table.get(name)
        if entry is None:
            raise KeyError(f"{self.path!r} has no {name!r}, and the index says that it does")
        dtype, shape, (begin, end) = _DTYPES.get(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
        if dtype is None:
            raise TypeError(f"{name!r} has dtype {entry['dtype']}, which torch does not have")
        if end - begin != math.prod(shape) * dtype.itemsize or self.begin + end > self.size:
            raise ValueError(f"{self.path!r} is damaged: {name!r} has not the bytes of {entry['dtype']} {shape}")
        return dtype, shape

    def read(self, name: str, box: Box, block: torch.Tensor) -> None:
        """Fill the block, checked where there are checksums."""
        dtype, shape = self.kind(name)
        if self.checked is not None:
            block.copy_(self.checked[name][tuple(slice(start, stop) for start, stop in box)])
        else:
            _Plain(self.fd, dtype, shape, self.begin + self.table[name]["data_offsets"][0]).read(box, bytes_of(block))


def _where(path: str) -> tuple[dict[str, str] | None, str, dict[str, Any]]:
    """({tensor: its file}, the folder, the index's metadata); ``None`` and the path of a file that stands alone."""
    if os.path.isdir(path):
        index = os.path.join(path, _INDEX)
        path = index if os.path.exists(index) else os.path.join(path, _ALONE)
    if not path.endswith(".json"):
        return None, path, {}
    with open(path, encoding="utf-8") as file:
        index = json.load(file)
    files = index["weight_map"]
    outside = sorted({name for name in files.values() if os.path.basename(name) != name})
    if outside:
        raise ValueError(f"the index names files outside of its folder: {outside}")
    return files, os.path.dirname(path), index.get("metadata", {})


def load_safetensors(
    path: Path,
    layouts: Layouts = None,
    *,
    names: Names = None,
    device: torch.device | str | None = None,
    P: Place | None = None,
    verify: bool = True,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read this rank's blocks of a model as the Hugging Face hub has it; collective.

    A rank reads the headers of the files that hold its tensors, and of the tensors its boxes' bytes (runs of them that
    lie less than 4 KiB apart in one go, with what lies between).

    Args:
        path: a safetensors file; an index (``model.safetensors.index.json``) beside the files that it names; or a
            folder with either, under their usual names.
        layouts: {own name: Layout}, or a function of own name and global shape that gives a Layout or ``None``; what
            has none is read whole.
        names: which tensors (default: all) and what they are called here: {own name: name in the files}; a function
            that gives a file's name its own one, or ``None`` to leave it out; or a list of names that stay.
        device: where to put them (default: CPU).
        P: the ranks that make the call; default: all ranks of the default world.
        verify: check the files of :func:`save`, as :func:`load` does; other writers' have no checksums.

    Returns:
        ({own name: block}, the metadata of the index, or of the one file). A rank outside a layout gets an empty
        tensor.

    Messages: one small all-gather.

    Raises:
        CheckpointError: on every rank: no such file or tensor, another shape than its layout's, two tensors of one
            name, a dtype that torch lacks, a damaged file, ranks that read different files.
        PartitionError: this rank is not one of ``P``.

    Example:
        >>> dd.checkpoint.save("model.safetensors", {"model.w": torch.ones(2)})
        >>> dd.checkpoint.load_safetensors(".", names=lambda name: name.removeprefix("model."))
        ({'w': tensor([1., 1.])}, {})
    """
    tensors: dict[str, torch.Tensor] = {}
    metadata: dict[str, Any] = {}
    group = Group("checkpoint.load_safetensors", path, P)

    def job() -> int:
        files, folder, described = _where(os.fsdecode(group.path))
        token: Any = sorted(files.items()) if files is not None else None
        opened: dict[str, _File] = {}

        def file_of(name: str) -> _File:
            full = folder if files is None else os.path.join(folder, files[name])
            if full not in opened:
                opened[full] = _File(full, verify)
            return opened[full]

        try:
            there = file_of("").table if files is None else files
            if files is None:
                described, token = file_of("").metadata, file_of("").token
                described = json.loads(described["distdl"], object_hook=unkeyed) if "distdl" in described else described
            for own, name in chosen(names, layouts, there).items():
                file = file_of(name)
                dtype, shape = file.kind(name)
                block, box = block_of(own, shape, dtype, layouts)
                if box is not None and volume(box):
                    file.read(name, box, block)
                tensors[own] = block.to(device or "cpu")
        finally:
            for file in opened.values():
                file.close()
        metadata.update(described)
        return zlib.crc32(json.dumps(token).encode())

    if len(set(group.step(job).values())) > 1:
        raise group.error(
            "the ranks read different files", "read from a file system that all share, while nobody saves to it"
        )
    return tensors, metadata
