"""Transports: what carries flat buffers between ranks. One small protocol; everything else is above it."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, SupportsIndex

log: list | None = None  # distdl.testing.count_messages puts a list here: (kind, peer or ranks, bytes)
observer: Any = None  # distdl.watching.observer.Observer while ranks check each other, or are watched
begun = 0  # movements, and small agreements, of this process

Buffer = tuple[
    int, int, SupportsIndex
]  # peer rank, address of the first byte, number of bytes (or an MPI type that knows it)


class Call(NamedTuple):
    """A movement as its messages name it: ``code`` stands for the plans and dtypes; ``peers`` send or receive
    something."""

    code: int
    peers: tuple[int, ...]
    op: str = "a movement"
    partitions: str = ""


class Transport(Protocol):
    """What :mod:`distdl.engine.exchange` asks of an engine. Addresses must stay valid until :meth:`wait` returns."""

    rank: int
    size: int
    device_types: tuple[str, ...]  # which devices' memory it reads and writes; others are staged through the host
    collectives: tuple[str, ...]  # the kinds that :meth:`collective` has; other plans go as messages
    sums: frozenset  # the torch dtypes that its sums know
    takes_types: (
        bool  # whether :meth:`post` takes an MPI type (fast.by_address.Strided) where it takes a number of bytes
    )
    chunk: int  # bytes of a message, at most: a longer one is cut into several, on both ends
    wide: bool  # whether sums of more than two float16 or bfloat16 are taken in float32

    def post(self, sends: list[Buffer], receives: list[Buffer], call: Call | None = None) -> Any:
        """Start sending and receiving; messages between two ranks keep their order. ``call``, the same on both ends,
        tells movements apart, see :class:`Call`."""

    def wait(self, handle) -> None:
        """Finish what :meth:`post` started. Raises TransportError when a message had another length than planned."""

    def abandon(self, handle, memory) -> None:
        """Nobody will wait for ``handle``: keep ``memory`` until the engine has done with it."""

    def collective(self, kind: str, source: int, target: int, count: int, dtype, ranks: tuple[int, ...]) -> Any:
        """Start one of :attr:`collectives` on contiguous memory, over ``ranks`` in this order; for :meth:`wait`.

        ``count`` elements of a torch ``dtype`` are each rank's share: "all_reduce" sums them (``source`` may be
        ``target``), with bitwise equal results; "all_gather" collects the shares in the order of ``ranks``;
        "reduce_scatter" sums ``len(ranks)`` shares, and each rank gets its own.
        """

    def all_gather(self, data: bytes, ranks: tuple[int, ...]) -> list[bytes]:
        """Every rank's small message, in the order of ``ranks`` (sorted)."""

    def close(self) -> None:
        """Give back what the engine holds; collective where the engine's own is."""
