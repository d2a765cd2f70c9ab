"""Boxes of tensors as strided memory: what is packed, sent and unpacked."""

from __future__ import annotations

import math
from dataclasses import dataclass
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


def dense(shape):
    """Strides of a contiguous tensor."""
    return tuple(accumulate(reversed(shape[1:]), lambda a, b: a * max(b, 1), initial=1))[::-1] if shape else ()
