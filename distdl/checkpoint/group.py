"""The ranks of one save or load, and how they fail together."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from .._types import Place
from ..errors import CheckpointError, PartitionError
from ..partition import partition_of
from ..world import world

__all__ = ["Group", "Path"]
Path = str | bytes | os.PathLike[Any]


class Group:
    """The ranks of a call; ``purpose`` is its name, which goes along with what they exchange."""

    def __init__(self, purpose: str, path: Path, P: Place | None) -> None:
        self.purpose, self.partitions = purpose, P
        self.path: Any = path  # a text, where it is one at all
        self._is_path = isinstance(path, (str, bytes, os.PathLike))
        if self._is_path:
            self.path = os.fsdecode(path)
            self._is_path = "\0" not in self.path
        self.shown = self.path  # in errors: the first rank's, so that all say the same
        self.world = world() if P is None else world(partition_of(P).world)
        self.ranks = tuple(range(self.world.size)) if P is None else tuple(sorted(partition_of(P).ranks))
        if P is not None:
            self.world.check(partition_of(P))
        if self.world.rank not in self.ranks:
            raise PartitionError(
                "this rank is not among those of the call",
                expected=f"one of {self.ranks}",
                actual=f"rank {self.world.rank}",
                next_step="call it on the ranks of P only",
            )
        self.leads = self.world.rank == self.ranks[0]

    def step(self, job: Callable[[], Any], undo: Callable[[], None] = lambda: None) -> dict[int, Any]:
        """Run ``job`` on every rank; {rank: its result}, or one error on every rank, after ``undo``, where any
        failed."""
        cause = failure = result = None
        try:
            if not self._is_path:
                raise TypeError(f"expected a path, got {self.path!r}")
            result = job()
        except Exception as error:  # it is raised below, on every rank
            cause, failure = error, f"{type(error).__name__}: {error}"
        reports = self.world.all_gather((failure, result, self.path), self.ranks, self.purpose)
        self.shown = reports[self.ranks[0]][2]
        failures: dict[str, list[int]] = {}
        for r, (text, _, _) in reports.items():
            if text:
                failures.setdefault(text, []).append(r)
        if failures:
            undo()
            said = "; ".join(f"{self._name(ranks)}: {text}" for text, ranks in failures.items())
            raise self.error(said, "mend the cause named here and call again") from cause
        return {r: value for r, (_, value, _) in reports.items()}

    def _name(self, ranks: list[int]) -> str:
        """Ranks that say the same, in few words."""
        if len(ranks) == 1:
            return f"rank {ranks[0]}"
        if len(ranks) == len(self.ranks):
            return f"all {len(ranks)} ranks"
        return f"ranks {', '.join(map(str, ranks[:8]))}{f' and {len(ranks) - 8} more' * (len(ranks) > 8)}"

    def error(self, problem: str, next_step: str) -> CheckpointError:
        """The error of every rank."""
        return CheckpointError(
            problem,
            expected="success on every rank",
            actual=f"a failure for {self.shown!r}",
            next_step=next_step,
            partitions=self.partitions,
        )
