"""Read this rank's boxes of a safetensors file: checked, piece by piece, where it has checksums; by safetensors where
not."""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._types import Device, Place
from ..boxes import row_major
from ..partition import Layout
from .choice import check_layouts, listed
from .format import DTYPES, unkeyed, volume
from .group import Group, Path
from .sums import MARK, sealed
from .writing import bytes_of

__all__ = ["load", "read"]
_DTYPES = {code: dtype for dtype, code in DTYPES.items()}
_KEYS = {"distdl.header", "distdl.crc32"}
_DAMAGED = "restore it from a copy, or pass verify=False to read what is there"


def read(
    group: Group,
    layout_of: Callable[[str, tuple[int, ...]], Layout | None],
    choose: Callable[[list[str]], Sequence[str]],
    device: Device = None,
    verify: bool = True,
) -> tuple[dict[str, torch.Tensor], dict[str, Any], set[str]]:
    """({name: block}, metadata, the names that no rank chose).

    ``choose(names of the file)`` are those that this rank wants, ``layout_of(name, global shape)`` is a Layout, or
    ``None``: whole.
    """
    tensors: dict[str, torch.Tensor] = {}
    metadata: dict[str, Any] = {}

    def job() -> tuple[str | None, list[str], set[str]]:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ImportError("reading checkpoints needs safetensors: pip install distdl[checkpoint]") from error
        fd = os.open(group.path, os.O_RDONLY | os.O_NONBLOCK)  # opening a fifo would wait for its writer
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ValueError(f"{group.path!r} is no regular file")
            table, checked = checked_sources(fd) if verify else ({}, None)
            with safe_open(group.path, "pt") as file:
                texts, names = file.metadata() or {}, list(file.keys())
                if verify and checked is None:
                    refuse_half(texts)
                if checked is not None and table != texts:
                    raise ValueError("another save replaced the file while it was opened")
                metadata.update(json.loads(texts.get("distdl", "{}"), object_hook=unkeyed))
                chosen = choose(names)
                lacking = sorted(set(chosen) - set(names))
                if lacking:
                    raise KeyError(f"the file has no {lacking}; it has {names}")
                for name in chosen:
                    source = file.get_slice(name) if checked is None else checked[name]
                    tensors[name] = _block(source, name, layout_of).to(device or "cpu")
        finally:
            os.close(fd)
        return texts.get("distdl.save"), names, set(names) - set(chosen)

    reports = group.step(job)
    if len({(token, *names) for token, names, _ in reports.values()}) > 1:
        raise group.error(
            "the ranks read different files", "read from a file system that all share, while nobody saves to it"
        )
    return tensors, metadata, set.intersection(*(left for _, _, left in reports.values()))


def _block(source: Any, name: str, layout_of: Callable[[str, tuple[int, ...]], Layout | None]) -> torch.Tensor:
    shape = tuple(source.get_shape())
    layout = layout_of(name, shape)
    if layout is None:
        return _owned(source[tuple(slice(0, n) for n in shape)], source)
    if layout.shape != shape:
        raise ValueError(f"{name!r} has shape {shape} in the file, and {layout.shape} in its layout")
    if layout.box() is None or not volume(layout.box()):
        empty: torch.Tensor = source[tuple(slice(0, 0) for _ in shape)]
        return empty.new_empty(layout.local_shape())
    return _owned(source[layout.slices()], source)


def _owned(block: torch.Tensor, source: Any) -> torch.Tensor:
    return block if isinstance(source, _Checked) else block.clone()  # safetensors returns a view of the mapped file


def refuse_half(texts: Mapping[str, str]) -> None:
    """A header of ours has both keys, and another program's copy of one too; that with one of them is damaged."""
    if len(_KEYS & set(texts)) == 1:
        raise ValueError(f"the header is damaged: it lacks {_KEYS - set(texts)}; {_DAMAGED}")


def checked_sources(fd: int) -> tuple[dict[str, str], dict[str, _Checked] | None]:
    """The file's metadata, and {name: its checked bytes}; ({}, ``None``) where it has no checksums."""
    start = os.pread(fd, 8 + len(MARK), 0)
    if start[8:] != MARK:
        return {}, None
    head = os.pread(fd, min(8 + int.from_bytes(start[:8], "little"), os.fstat(fd).st_size), 0)
    if head != sealed(head):
        raise ValueError(f"the header is damaged: it has another checksum than when it was saved; {_DAMAGED}")
    table = json.loads(head[8:])
    metadata: dict[str, str] = table.pop("__metadata__")
    size, _, sums = metadata["distdl.crc32"].partition(":")
    checked: dict[str, _Checked] = {}
    at = 0
    for name, entry in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        n = -(-(end - begin) // int(size))
        checked[name] = _Checked(
            fd,
            name,
            entry["dtype"],
            tuple(entry["shape"]),
            len(head) + begin,
            end - begin,
            int(size),
            [int(sums[8 * i : 8 * i + 8], 16) for i in range(at, at + n)],
        )
        at += n
    return metadata, checked


@dataclass
class _Checked:
    """One tensor of an open file, sliced as safetensors' are: every piece that a slice touches is read to its end and
    checked."""

    fd: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    total: int
    size: int
    sums: list[int]

    def get_shape(self) -> tuple[int, ...]:
        return self.shape

    def piece(self, number: int) -> memoryview:
        """Its bytes."""
        start, data = number * self.size, b""
        stop = min(start + self.size, self.total)
        while len(data) < stop - start and (
            more := os.pread(self.fd, stop - start - len(data), self.begin + start + len(data))
        ):
            data += more
        if len(data) != stop - start or zlib.crc32(data) != self.sums[number]:
            raise ValueError(
                f"{self.name!r} is damaged: bytes {start} to {stop} of its {self.total} have another checksum than "
                f"when they were saved; {_DAMAGED}"
            )
        return memoryview(data)

    def __getitem__(self, slices: Iterable[slice]) -> torch.Tensor:
        box = tuple((s.start, s.stop) for s in slices)
        block = torch.empty([stop - start for start, stop in box], dtype=_DTYPES[self.dtype])
        if not volume(box):
            return block
        out, item = bytes_of(block), block.element_size()
        number, piece = -1, memoryview(b"")
        size, offsets = row_major(box, self.shape)
        for i, offset in enumerate(offsets):
            at, done, stop = offset * item, i * size * item, (i + 1) * size * item
            while done < stop:
                if at // self.size != number:
                    number, piece = at // self.size, self.piece(at // self.size)
                part = piece[at % self.size : at % self.size + stop - done]
                out[done : done + len(part)] = part
                at, done = at + len(part), done + len(part)
        return block


def load(
    path: Path,
    layouts: Mapping[str, Layout] | None = None,
    *,
    names: Iterable[str] | None = None,
    device: Device = None,
    P: Place | None = None,
    verify: bool = True,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read this rank's blocks of a file that :func:`save`, or safetensors, wrote; collective.

    Args:
        path: the file.
        layouts: {name: Layout}, on any ranks, whatever the file was written by; what has none is read whole.
        names: which tensors (default: all).
        device: where to put them (default: CPU).
        P: the ranks that make the call; default: all ranks of the default world.
        verify: compare the header, and every piece (1 MiB) of which this rank wants a byte, with its checksum, and read
            the piece to its end for that. ``False``: read the bytes of the blocks only, and believe them. Files without
            checksums (of other writers, or of distdl 0.1.0) are read so in any case.

    Returns:
        ({name: block}, metadata). A rank outside a layout gets an empty tensor.

    Messages: one small all-gather.

    Raises:
        CheckpointError: on every rank: no such file or tensor, another shape, a damaged file (by the tensor's name),
            ranks that read different files.
        PartitionError: this rank is not one of ``P``.

    Example:
        >>> dd.checkpoint.save("run.safetensors", {"w": torch.ones(2), "b": torch.zeros(1)})
        >>> dd.checkpoint.load("run.safetensors", {"w": dd.Layout(dd.Partition((1,)), (2,))}, names=["w"])
        ({'w': tensor([1., 1.])}, {})
    """
    known = layouts or {}

    def choose(in_file: list[str]) -> list[str]:
        check_layouts(layouts)
        return list(dict.fromkeys([*(in_file if names is None else listed(names)), *known]))

    group = Group("checkpoint.load", path, P)
    tensors, metadata, _ = read(group, lambda name, _: known.get(name), choose, device, verify)
    return tensors, metadata
