"""Every exception that distdl raises on bad input: one sentence naming the call, what was expected, what came, what to
do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .calls import of_error

__all__ = [
    "AbsenceError",
    "AgreementError",
    "CheckpointError",
    "DistdlError",
    "InvariantError",
    "PartitionError",
    "RankError",
    "ShapeError",
    "SolverError",
    "TransportError",
]

# Which rank am I in the world of that name? And for None: in the default one, or None where that does not run. world.py
# gives the answer.
rank_of: dict[str, Callable[[str | None], int | None]] = {"source": lambda world: None}
# Who is told of an error that may be this rank's alone: see world.py.
_heard_by: dict[str, Callable[[DistdlError], None]] = {"local": lambda error: None}


def set_rank_source(source: Callable[[str | None], int | None]) -> None:
    """Set the function ``world name -> this process's rank``, of partitions and of errors; see :data:`rank_of`."""
    rank_of["source"] = source


def set_listener(listener: Callable[[DistdlError], None]) -> None:
    """Set the function that is told of every error which may be raised on this rank alone, when it is made."""
    _heard_by["local"] = listener


class DistdlError(Exception):
    """Base of distdl's errors.

    Attributes ``op``, ``partitions``, ``expected``, ``actual``, ``rank`` and ``next_step`` hold the parts of the
    message; a part that does not apply is ``None``. ``rank`` is where the error was raised, also where the message does
    not name it, as every rank has the same one.
    """

    # whether a rank finds this by itself, while its peers may be on their way into the call that it leaves
    _local = False

    def __init__(
        self,
        problem: str,
        *,
        op: str | None = None,
        partitions: Any = None,
        expected: Any = None,
        actual: Any = None,
        rank: int | None = None,
        next_step: str | None = None,
    ) -> None:
        if op is None:  # the public call on the stack, and its partitions
            op, places = of_error()
            partitions = places if partitions is None else partitions
        self.problem, self.op, self.partitions = problem, op, partitions
        self.expected, self.actual, self.rank, self.next_step = expected, actual, rank, next_step
        if rank is None:
            self.rank = rank_of["source"](None)
        parts = [f"{op}: {problem}" if op else problem]
        if expected is not None or actual is not None:
            parts.append(f"expected {expected}, got {actual}")
        if rank is not None:
            parts.append(f"on rank {rank}")
        if partitions is not None:
            parts.append(f"partitions: {_one_line(partitions)}")
        if next_step is not None:
            parts.append(f"next step: {next_step}")
        super().__init__("; ".join(parts))
        if self._local:
            _heard_by["local"](self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross processes (dd.launch); the default would call __init__ with the joined message only.
        return _rebuild, (type(self), self.args, self.__dict__.copy())


def _one_line(value: Any) -> str:
    """A partition without its drawing, or several with arrows."""
    if isinstance(value, (tuple, list)):
        return " -> ".join(map(_one_line, value))
    return str(value).splitlines()[0] if str(value) else ""


def _rebuild(cls: type[DistdlError], args: tuple[Any, ...], state: dict[str, Any]) -> DistdlError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


class PartitionError(DistdlError, ValueError):
    """A partition, layout or halo that cannot exist, or that does not fit the call or the world."""

    _local = True


class ShapeError(DistdlError, ValueError):
    """A local tensor whose shape, dtype or device does not fit the call."""

    _local = True


class AgreementError(DistdlError, RuntimeError):
    """Ranks that should do the same thing do not; raised on every rank of the call."""


class AbsenceError(AgreementError):
    """Under ``dd.checking()``: a rank did not come to a movement within the time limit; raised on every rank that
    waited."""


class InvariantError(AgreementError):
    """Under ``dd.checking()``: the copies of one invariant value, cotangent or tangent differ; raised on every rank of
    the call, with the rule of the cotangent convention that was broken."""


class CheckpointError(DistdlError, RuntimeError):
    """A checkpoint cannot be written or read as asked; raised on every rank of the call. The file that was there before
    stays as it was."""


class TransportError(DistdlError, RuntimeError):
    """The transport cannot do what is asked, or a message arrived with another length than planned."""


class SolverError(DistdlError, RuntimeError):
    """An iteration of :mod:`distdl.solve` cannot go on: numbers that are not finite, or an operator that is not what
    the method asks for; raised on every rank of the call."""


class RankError(DistdlError, RuntimeError):
    """A rank of a launched function failed; the message names it and ends with its traceback."""

    def __init__(self, problem: str, *, traceback: str = "", **parts: Any) -> None:
        super().__init__(problem, **parts)
        if traceback:
            self.args = (f"{self.args[0]}\n\n{traceback}",)
