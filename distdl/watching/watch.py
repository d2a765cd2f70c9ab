"""What a rank of a world has for finding out who waits for whom: its board, its side channel and its lookout. Made on
what the world's engine offers."""

from __future__ import annotations

from ..engine.transport import Transport
from .board import Board
from .lookout import Lookout
from .side import SideChannel


class Watch:
    """The board, the side channel and the lookout of one rank.

    Attributes:
        host: the world's engine for host memory.
        lookout: what the engine asks while it waits, see :class:`distdl.engine.transport.Waiting`.
    """

    def __init__(self, host: Transport, channel):
        self.host, self.rank, self.size = host, host.rank, host.size
        self.side, self.board = SideChannel(channel, host.rank), Board(host.rank, host.notice)
        self.lookout = Lookout(host, self.side, self.board)
        host.publish(self.board.notice)
        for rank in range(host.size):  # where others have published too: they can then be read when they are gone
            self.board.page(rank)

    def close(self) -> None:
        """This rank leaves its world; collective where the engine's own close is."""
        self.board.close()
        self.side.close()


def watch_of(host: Transport) -> Watch | None:
    """The watch of a world on this engine; ``None`` where there is nobody to watch, or no way."""
    channel = host.channel() if host.size > 1 else None
    return None if channel is None else Watch(host, channel)
