"""Memory of gloo's messages, as tensors."""

from __future__ import annotations

import ctypes

import torch

from ..._distributed import plain_memory

HEAD = 24  # bytes: the message's length plus one, the number of its movement, and its own among those to that rank
_CUTS = 64  # tensors that a slot remembers


class Slot:
    """Memory for the beginning of a message, of ``room`` bytes after its head."""

    __slots__ = ("address", "cuts", "memory", "room", "words")

    def __init__(self, room: int):
        self.room, self.cuts = room, {}
        self.memory = (ctypes.c_uint8 * (HEAD + room))()
        self.address, self.words = ctypes.addressof(self.memory), memoryview(self.memory).cast("B").cast("q")

    def first(self, nbytes: int) -> list:
        """[a tensor of the head and so many bytes]."""
        found = self.cuts.get(nbytes)
        if found is None:
            if len(self.cuts) > _CUTS:
                self.cuts.clear()
            with plain_memory():
                found = self.cuts[nbytes] = [torch.frombuffer(self.memory, dtype=torch.uint8, count=HEAD + nbytes)]
        return found


def tensor_at(address: int, nbytes: int, dtype=torch.uint8):
    """Memory as a tensor, which does not own it."""
    with plain_memory():
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=dtype)
