"""Transports: what carries flat buffers between ranks. One small protocol; everything else is above it."""

from __future__ import annotations

from typing import Any, Protocol

log: list | None = None  # distdl.testing.count_messages puts a list here: (kind, peer or ranks, bytes)
observer: Any = None  # distdl.transport.checking.Observer while ranks check each other, or are watched

Buffer = tuple[int, int, int]  # peer rank, address of the first byte, number of bytes


class Transport(Protocol):
    """What :mod:`distdl.exchange` asks of an engine. Addresses must stay valid until :meth:`wait` returns."""

    rank: int
    size: int
    device_types: tuple[str, ...]  # which devices' memory it reads and writes; others are staged through the host

    def post(self, sends: list[Buffer], receives: list[Buffer]) -> Any:
        """Start sending and receiving; messages between two ranks keep their order."""

    def wait(self, handle) -> None:
        """Finish what :meth:`post` started. Raises TransportError when a message had another length than planned."""

    def all_reduce(self, tensor, ranks: tuple[int, ...]) -> None:
        """Sum a contiguous tensor over ``ranks`` (sorted) in place, with bitwise equal results."""

    def all_gather(self, data: bytes, ranks: tuple[int, ...]) -> list[bytes]:
        """Every rank's small message, in the order of ``ranks`` (sorted)."""

    def close(self) -> None:
        """Give back what the engine holds; collective where the engine's own is."""
