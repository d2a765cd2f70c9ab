"""Transports: what carries flat buffers between ranks. One protocol; everything else is above it, and a new engine is
one file.

An engine knows no board, no lookout and no watchdog: a world makes these (:mod:`distdl.watching.watch`) on what the
engine offers, a :class:`Channel` for small messages and a look at messages that nobody expects, and gives it a
:class:`Waiting`.
"""

from __future__ import annotations

import platform
from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple, Protocol, SupportsIndex

from ..errors import TransportError

log: list | None = None  # distdl.testing.count_messages puts a list here: (kind, peer or ranks, bytes)
observer: Any = None  # distdl.watching.observer.Observer while ranks check each other, or are watched
tracer: Any = None  # distdl.forecast.tracer.Tracer while a program is traced: it notes movements, and none runs
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


class Waiting(Protocol):
    """Who is asked while an engine waits, and what its tags say: for each movement ``numbers[peer]`` goes up by
    ``step``, ``recent[peer]`` gets the :class:`Call`, and a tag is ``number & wrap | mark | code & codes``."""

    interval: float  # seconds of waiting from one look to the next
    numbers: Any  # {peer: number}
    recent: Any  # {peer: deque of calls}
    step: int
    wrap: int
    mark: int
    codes: int
    era: int  # numbers begin anew in each, and tags after some: the two tell movements of a pair apart for good

    def look(self, call: Call, mark: int, waited: float, missing: list[int]) -> None:
        """A rank has waited so long for ``call``, and messages of the ranks ``missing`` are not here; ``mark`` was in
        their tags. Raises what ends the wait."""


class Channel(Protocol):
    """Small messages beside those of movements, to any rank at any time, in order between two ranks."""

    def send(self, peer: int, kind: int, data: bytes) -> Any:
        """Send a message, and go on; for :meth:`sent`."""

    def sent(self, messages: list) -> bool:
        """Whether the other ends have, or certainly get, these messages (what :meth:`send` returned)."""

    def arrived(self) -> list[tuple[int, int, bytes]]:
        """(rank, kind, data) of every message that has come since."""

    def close(self) -> None:
        """Give back what it holds; collective where the engine's own close is. What nobody has read is lost."""


class Reach(Protocol):
    """The ranks (``rank in reach``) to which an engine moves boxes by itself, from where they lie to where they belong.
    Whether a rank is one of them is the same on both ends."""

    leaves: int  # tensors of a movement, at most: others go as messages
    plain: Any  # the engine without it, where that must be ready for the same movements (for CUDA graphs); or None

    def __contains__(self, rank: int) -> bool: ...

    def takes(self, parts: list) -> bool:
        """Whether it moves a message of these :class:`distdl.engine.part.Part`, which has the same sizes on both
        ends."""

    def bind(self, program: Any, xs: list) -> Any:
        """A function (inputs, outputs, staging memory) that moves all that ``program.straight`` says, for tensors that
        lie as ``xs`` do."""


class DeviceEngines(Protocol):
    """The engines of a world for the memory of one CUDA device of this process."""

    @property
    def index(self) -> int:
        """The device's number."""

    def get(self, ranks: tuple[int, ...]) -> Transport | None:
        """The engine for a movement among ``ranks`` (sorted); ``None``: it must be staged through the host."""

    def close(self) -> None:
        """Give back what they hold; collective where that is."""


class Transport(Protocol):
    """What the library asks of an engine: :mod:`distdl.engine.exchange` moves by it, :mod:`distdl.world` makes and ends
    it. Addresses must stay valid until :meth:`wait` returns.

    Of what need not be overridden, the default is that of an engine that has nothing of the kind.
    """

    rank: int
    size: int
    device_types: tuple[str, ...]  # which devices' memory it reads and writes; others are staged through the host
    # The kinds that :meth:`collective` has; other plans go as messages. "small all_gather": of few bytes only.
    collectives: tuple[str, ...]
    sums: frozenset  # the torch dtypes that its sums know
    takes_types: (
        bool  # whether :meth:`post` takes an MPI type (fast.by_address.Strided) where it takes a number of bytes
    )
    chunk: int  # bytes of a message, at most: a longer one is cut into several, on both ends
    tags: int  # the largest one that a message can have; 0: it has none
    wide: bool  # whether sums of more than two float16 or bfloat16 are taken in float32; see :meth:`serve`
    reach: Reach | None = None  # to whom it moves boxes without messages

    # ------------------------------------------------------------ movements

    @abstractmethod
    def post(self, sends: list[Buffer], receives: list[Buffer], call: Call | None = None, memory: Any = None) -> Any:
        """Start sending and receiving; messages between two ranks keep their order.

        Args:
            call: the same on both ends; tells movements apart.
            memory: the tensors in which these addresses lie, (inputs, outputs, staging memory or ``None``): for an
                engine that needs tensors rather than addresses.
        """

    @abstractmethod
    def wait(self, handle: Any) -> None:
        """Finish what :meth:`post` started. Raises TransportError when a message had another length than planned."""

    def pause(self) -> None:
        """This rank does something else between :meth:`post` and :meth:`wait`."""
        return

    def ended(self) -> None:
        """The movement's result is there: told while an observer, or torch's profiler, looks."""
        return

    @abstractmethod
    def abandon(self, handle: Any, memory: Any) -> None:
        """Nobody will wait for ``handle``, or a wait for it has failed: keep ``memory`` until the engine has done with
        it."""

    @abstractmethod
    def collective(self, kind: str, source: int, target: int, count: int, dtype, ranks: tuple[int, ...]) -> Any:
        """Start one of :attr:`collectives` on contiguous memory, over ``ranks`` in this order; for :meth:`wait`.

        ``count`` elements of a torch ``dtype`` are each rank's share: "all_reduce" sums them (``source`` may be
        ``target``), with bitwise equal results; "all_gather" collects the shares in the order of ``ranks``;
        "reduce_scatter" sums ``len(ranks)`` shares, and each rank gets its own.
        """

    @abstractmethod
    def all_gather(self, data: bytes, ranks: tuple[int, ...]) -> list[bytes]:
        """Every rank's small message, in the order of ``ranks`` (sorted)."""

    # ------------------------------------------------------------ what a world asks

    def serve(self, wide: bool, waiting: Waiting | None) -> None:
        """Once, before the first movement: how sums of halves are taken, and who is asked while this rank waits
        (``None``: nobody)."""
        self.wide = wide

    def channel(self) -> Channel | None:
        """A channel to all ranks, made now; ``None``: this engine has none, and its ranks can neither check nor watch
        each other."""
        return None

    def publish(self, notice: bytes) -> None:
        """Let the other ranks read this, from now on or from when they ask; collective only where the engine's start
        is."""
        return

    def notice(self, rank: int) -> bytes | None:
        """What ``rank`` has published; ``None``: nothing, so far."""
        return None

    def peek(self, peer: int) -> int | None:
        """The tag of the next message from ``peer`` that nobody here has asked for; ``None``: there is none, or this
        engine cannot know."""
        return None

    def discard(self, peer: int, tag: int) -> None:
        """Take the message that :meth:`peek` has shown, and forget it."""
        return

    def on_device(self) -> Transport:
        """The same engine for memory of CUDA devices, which it reads by itself. Raises TransportError where it
        cannot."""
        raise TransportError(
            "this engine cannot read CUDA memory",
            op="World(cuda='mpi')",
            rank=self.rank,
            expected="an MPI library built with CUDA support",
            actual=type(self).__name__,
            next_step="set DISTDL_CUDA to nccl, or to staged",
        )

    def engines_on(self, world, index: int) -> DeviceEngines:
        """The engines for CUDA device ``index`` of a world on this engine: NCCL by CuPy, whose ranks meet by this one's
        small messages."""
        from .nccl import engines_on

        return engines_on(world, index)

    def node(self) -> Hashable:
        """What tells this process's node from others: equal on ranks that can share memory; collective where the
        engine's start is."""
        return platform.node()

    def job(self) -> tuple[int, int]:
        """This process's number among all that the launcher has started, and how many these are; the world may be some
        of them."""
        return self.rank, self.size

    def abort(self, code: int = 1, cause: str = "") -> None:
        """End every rank of the job; ``cause`` is for those that can still be told."""
        raise SystemExit(code)

    @abstractmethod
    def close(self) -> None:
        """Give back what the engine holds; collective where the engine's own is."""


# ---------------------------------------------------------------- what engines refuse alike


def no_sum(library: str, kind: str, rank: int, dtype: Any, known: Iterable[Any]) -> TransportError:
    """A collective of a dtype that the library has no sum of."""
    return TransportError(
        f"{library} cannot sum this dtype",
        op=kind,
        rank=rank,
        actual=dtype,
        expected=f"one of {sorted(map(str, known))}",
        next_step="convert it first",
    )


def another_length(rank: int, peer: int, expected: int, actual: int) -> TransportError:
    """A message that is not as long as the plan has it."""
    return TransportError(
        "a message has another length than planned",
        op="exchange",
        rank=rank,
        expected=f"{expected} bytes from rank {peer}",
        actual=f"{actual} bytes",
        next_step="give every rank the same layouts and dtype; where blocks differ in size, pass a Layout",
    )


class Unwatched:
    """A :class:`Waiting` where nobody watches: tags count the movements of each pair, and a wait has no end."""

    interval = float("inf")
    step, wrap, mark, codes, era = 1, 2**15 - 1, 0, 0, 0  # every MPI offers at least these tags

    def __init__(self) -> None:
        self.numbers: dict[int, int] = defaultdict(int)
        self.recent: dict[int, deque] = defaultdict(lambda: deque(maxlen=0))

    def look(self, call: Call, mark: int, waited: float, missing: list[int]) -> None:
        return None
