"""Boxes of tensors as strided memory: what is packed, sent and unpacked."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate

import torch


@dataclass(eq=False)
class Part:
    """One box of one tensor (``leaf``): as strided memory, and where it waits inside the staging memory."""

    leaf: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements, from the tensor's own first one
    dtype: torch.dtype
    add: bool = False  # arrivals: add to what is there
    cast: bool = False  # arrivals: the output is worked out in another dtype
    place: int = 0  # bytes
    dense: tuple[int, ...] = ()  # strides in the staging memory
    words: bool = False  # whether ``dtype`` stands for several elements of the tensor's own

    def __post_init__(self):
        run = dense(self.size)
        self.dense = self.dense or run
        self.nbytes = math.prod(self.size) * self.dtype.itemsize
        self.contiguous = all(n == 1 or s == d for n, s, d in zip(self.size, self.stride, run))
        self.direct = self.contiguous and not self.add and not self.cast  # travels from, or to, where it lies

    def of(self, tensor):
        """The box inside ``tensor``."""
        if self.words:
            tensor = tensor.view(self.dtype)
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)

    def staged(self, staging):
        """The box inside the staging memory."""
        return staging.view(self.dtype).as_strided(self.size, self.dense, self.place // self.dtype.itemsize)

    @property
    def waiting(self) -> Part:
        """The box inside the staging memory, as strided memory itself."""
        return Part(-1, self.size, self.dense, self.place // self.dtype.itemsize, self.dtype)


ALIGN = 64  # bytes: each part of a message begins at a multiple of it, on both ends


def padded(nbytes: int) -> int:
    """Where what follows so many bytes may begin."""
    return -(-nbytes // ALIGN) * ALIGN


def dense(shape):
    """Strides of a contiguous tensor."""
    return tuple(accumulate(reversed(shape[1:]), lambda a, b: a * max(b, 1), initial=1))[::-1] if shape else ()


def stacks(parts):
    """Equal boxes that follow one another at equal steps, in the tensor and in the staging memory, as one box with one
    more
    axis: one copy instead of many."""
    done: list[list[Part]] = []
    for part in parts:
        run = done[-1] if done else []
        if run and all(
            getattr(part, k) == getattr(run[0], k) for k in ("leaf", "size", "stride", "dtype", "add", "cast")
        ):
            step = part.offset - run[-1].offset, part.place - run[-1].place
            if min(step) > 0 and (
                len(run) == 1 or step == (run[1].offset - run[0].offset, run[1].place - run[0].place)
            ):
                run.append(part)
                continue
        done.append([part])
    return [run[0] if len(run) == 1 else _stacked(run) for run in done]


def _stacked(run) -> Part:
    a, b = run[:2]
    return replace(
        a,
        size=(len(run), *a.size),
        stride=(b.offset - a.offset, *a.stride),
        dense=((b.place - a.place) // a.dtype.itemsize, *a.dense),
    )
