"""What bytes of a safetensors file hold which box of which tensor. Pure functions of what the ranks say; no file is
touched.

The format (https://huggingface.co/docs/safetensors): the length of the header as 8 bytes, little-endian; the header,
JSON: for each tensor its dtype, global shape, and (begin, end) in what follows; then the tensors, row-major, without
gaps. Its metadata is a table of texts, free to use: checksums are there, see :mod:`.sums`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch

from .sums import MARK, PIECE, pieces, sealed

__all__ = ["DTYPES", "Entry", "Report", "header", "plan", "volume"]

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
Box = tuple[tuple[int, int], ...]
_LONGEST = 100_000_000  # bytes of a header; safetensors reads no longer one


@dataclass(frozen=True)
class Report:
    """What one rank brings to a save: where to, the metadata, and for each tensor (dtype, global shape, its box or
    ``None``)."""

    path: str
    metadata: str
    token: str
    tensors: dict[str, tuple[str, tuple[int, ...], Box | None]]


@dataclass(frozen=True)
class Entry:
    """One tensor of the file: bytes ``begin .. end`` after the header, and who writes each box; ``holders`` have a copy
    of it."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    writers: dict[Box, int]
    holders: dict[Box, tuple[int, ...]]


_ITEMS = "distdl.items"  # a dictionary whose keys are no texts, as JSON has none: [[key, value], ...]


def keyed(value: Any) -> Any:
    """Metadata that JSON gives back with its keys: a scheduler's milestones are numbers, and would come back as
    texts."""
    if isinstance(value, (list, tuple)):
        return [keyed(part) for part in value]
    if not isinstance(value, dict):
        return value
    items = [[key, keyed(part)] for key, part in value.items()]
    return dict(items) if all(isinstance(key, str) for key in value) and _ITEMS not in value else {_ITEMS: items}


def unkeyed(found: dict[str, Any]) -> dict[Any, Any]:
    """For JSON's ``object_hook``: what :func:`keyed` has written."""
    return dict(found[_ITEMS]) if found.keys() == {_ITEMS} else found


def volume(box: Box) -> int:
    """Number of elements."""
    return math.prod(stop - start for start, stop in box)


def plan(reports: dict[int, Report]) -> dict[str, Entry]:
    """The file's tensors, in order, from all ranks' reports; the same on every rank.

    Copies of a box are written once, in turn by one and another of the ranks that hold it.

    Raises:
        ValueError: the ranks disagree, or their boxes are not the whole of a tensor.
    """
    for what in ("path", "metadata"):
        values = {r: getattr(report, what) for r, report in reports.items()}
        if len(set(values.values())) > 1:
            raise ValueError(f"the ranks disagree in the {what}: {values}")
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    holders_of: dict[str, dict[Box, list[int]]] = {}
    for rank, report in reports.items():
        for name, (dtype, shape, box) in report.tensors.items():
            kind = kinds.setdefault(name, (dtype, shape))
            if kind != (dtype, shape):
                raise ValueError(
                    f"the ranks disagree in {name!r}: {kind[0]} {kind[1]}, and {dtype} {shape} on rank {rank}"
                )
            boxes = holders_of.setdefault(name, {})
            if box is not None and volume(box):
                boxes.setdefault(box, []).append(rank)
    sizes = {name: getattr(torch, dtype).itemsize for name, (dtype, _) in kinds.items()}
    entries: dict[str, Entry] = {}
    begin, turn = 0, 0
    for name in sorted(kinds, key=lambda name: (-sizes[name], name)):  # so every tensor is aligned
        (dtype, shape), boxes = kinds[name], holders_of[name]
        _check_whole(name, shape, boxes)
        writers = {}
        for box, holders in boxes.items():
            writers[box] = holders[turn % len(holders)]
            turn += 1
        end = begin + math.prod(shape) * sizes[name]
        entries[name] = Entry(dtype, shape, begin, end, writers, {box: tuple(ranks) for box, ranks in boxes.items()})
        begin = end
    return entries


def _check_whole(name: str, shape: tuple[int, ...], boxes: dict[Box, list[int]]) -> None:
    """Blocks of a layout are a grid: in each dim the intervals follow one another, and every combination is there."""
    if not math.prod(shape):
        return
    count = 1
    for d, n in enumerate(shape):
        intervals = sorted({box[d] for box in boxes})
        count *= len(intervals)
        at = 0
        for start, stop in intervals:
            if start != at:
                raise ValueError(
                    f"the blocks of {name!r} do not fit together: dim {d} of {shape} is held in {intervals}"
                )
            at = stop
        if at != n:
            raise ValueError(f"the blocks of {name!r} are not the whole: dim {d} of {shape} is held in {intervals}")
    if count != len(boxes):
        raise ValueError(f"the blocks of {name!r} are not the whole of {shape}: {len(boxes)} of {count} are there")


def header(entries: dict[str, Entry], metadata: str, token: str, sums: str | None = None) -> bytes:
    """The file's first bytes; ``distdl`` in its metadata is JSON, and ``distdl.save`` another text for every save.

    ``sums``: the checksums of the tensors' pieces, tensor by tensor in the file's order; without them the header is as
    long.

    Raises:
        ValueError: more tensors or pieces than safetensors can read the header of.
    """
    if sums is None:
        sums = "0" * 8 * sum(pieces(e.end - e.begin) for e in entries.values())
    own = {"distdl.header": "0" * 8, "format": "pt", "distdl": metadata, "distdl.save": token}
    table: dict[str, Any] = {"__metadata__": own | {"distdl.crc32": f"{PIECE}:{sums}"}}
    for name, e in entries.items():
        table[name] = {"dtype": DTYPES[getattr(torch, e.dtype)], "shape": e.shape, "data_offsets": [e.begin, e.end]}
    text = b"{ " + json.dumps(table, separators=(",", ":")).encode()[1:]
    text += b" " * (-len(text) % 8)
    if len(text) > _LONGEST or not text.startswith(MARK):
        raise ValueError(
            f"the header would have {len(text)} bytes; safetensors reads {_LONGEST}: save less, or two files"
        )
    return sealed(len(text).to_bytes(8, "little") + text)
