"""``dd.suggest``: which partition a program would be fastest on, by what its traces cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..boxes import is_int
from ..calls import public
from ..errors import PartitionError
from ..functional import repartition
from ..partition import Layout, Partition, partition_of
from .machines import Machine
from .program import Program
from .trace import trace

__all__ = ["Suggestion", "grids", "suggest", "suggest_chain"]


@dataclass(frozen=True, repr=False)
class Suggestion:
    """One way to lay a program over ranks.

    Attributes:
        seconds: what it costs.
        partitions: the partition, or those of a chain's layers in order.
        programs: the traces that were priced.
    """

    seconds: float
    partitions: tuple[Partition, ...]
    programs: tuple[Program, ...]

    @property
    def partition(self) -> Partition:
        """The partition, or that of the first layer."""
        return self.partitions[0]

    def __repr__(self) -> str:
        return f"{1e3 * self.seconds:.3g} ms on {' -> '.join(str(P.shape) for P in self.partitions)}"


def grids(ranks: int, ndim: int) -> list[tuple[int, ...]]:
    """Every shape of a grid of so many ranks and dims."""
    if ndim == 0:
        return [()] if ranks == 1 else []
    return [(n, *rest) for n in range(1, ranks + 1) if ranks % n == 0 for rest in grids(ranks // n, ndim - 1)]


def suggest(
    f: Callable[[Partition], Any],
    candidates: int | Iterable[Any],
    *,
    ndim: int = 2,
    machine: Machine | None = None,
    size: int | None = None,
    backward: bool = False,
) -> list[Suggestion]:
    """Partitions by the predicted time of a program on them, the fastest first. One process, no message.

    Args:
        f: ``f(P)`` runs the program on P, with tensors that it makes (they have no numbers); or it returns a function
            of no arguments, which is the program: then what prepares it does not count.
        candidates: partitions, or their shapes; or a number of ranks: all grids of so many, of ``ndim`` dims.
        machine: on which it is to run (default: ``dd.machines.cluster``).
        size: of the world. Default: the largest rank of a candidate, and one.
        backward: as in :func:`distdl.trace`.

    Returns:
        A list of :class:`Suggestion`; of equal times those that come first among the candidates stay first. A candidate
        on which the program is refused (:class:`~distdl.errors.DistdlError`) is an error, not left out.

    Raises:
        PartitionError: no candidates.

    Example:
        >>> def step(P):
        ...     return F.dist_sum(F.uniform(dd.Layout(P, (8, 8)), 1), P, 0)
        ...
        >>> len(dd.suggest(step, 4))
        3
    """
    found = []
    for P in _candidates(candidates, ndim):
        program = trace(f, P, size=_size(size, P), rank="classes", backward=backward)
        found.append(Suggestion(program.cost(machine), (P,), (program,)))
    return sorted(found, key=lambda s: s.seconds)


def suggest_chain(
    layers: Sequence[Callable[[torch.Tensor, Layout], Any]],
    shape: Sequence[int],
    candidates: int | Iterable[Any],
    *,
    machine: Machine | None = None,
    size: int | None = None,
    dtype: torch.dtype = torch.float32,
    backward: bool = False,
    first: Partition | Layout | None = None,
) -> Suggestion:
    """The cheapest partitions of layers that follow one another, the repartitions between them priced: a shortest path
    over (layer, partition).

    Args:
        layers: ``layer(x, L) -> (y, M)``: from a block of layout L to one of layout M.
        shape: the global shape of the first one's x.
        candidates: for the inputs of all layers: as in :func:`suggest`, of as many dims as ``shape``; for an input of
            another number of dims all grids of that many.
        machine, size, backward: as there; ``dtype``: that of x.
        first: where x lies before (default: where it suits best, for nothing).

    Returns:
        A :class:`Suggestion` of one partition for each layer, and its traces in order: layers, and the repartitions
        that move anything.

    Raises:
        PartitionError: no layers, no candidates, or layers that do not say where their results lie.

    Example:
        >>> found = dd.suggest_chain([lambda x, L: (x.cumsum(1), L)] * 2, (64, 64), [(2, 1), (4, 1)])
        >>> [P.shape for P in found.partitions]
        [(4, 1), (4, 1)]
    """
    layers = list(layers)
    if not layers:
        raise PartitionError("no layers", expected="layers", actual=layers, next_step="give one function for each")
    given = _candidates(candidates, len(tuple(shape)))
    ranks = max(P.size for P in given)
    machine = Machine() if machine is None else machine

    def here(P: Partition) -> int:
        return max(_size(size, Q) for Q in (P, *given))

    def moved(L: Layout, to: Layout) -> Program:
        def move(x: torch.Tensor) -> torch.Tensor:
            return repartition(x, L, to)

        return trace(move, (L, dtype), size=here(to.partition), rank="classes", backward=backward)

    start = None if first is None else Layout(partition_of(first), tuple(shape))
    # where tensors may lie: {layout: (seconds so far, partitions, programs)}
    states: dict[Layout | None, tuple[float, tuple[Partition, ...], tuple[Program, ...]]] = {start: (0.0, (), ())}
    for layer in layers:
        sizes = tuple(shape) if None in states else next(iter(states)).shape
        fitting = [P for P in given if P.ndim == len(sizes)] or [Partition(g) for g in grids(ranks, len(sizes))]
        following: dict[Layout | None, tuple[float, tuple[Partition, ...], tuple[Program, ...]]] = {}
        for P in fitting:
            L = Layout(P, sizes)
            out: list[Layout] = []
            program = trace(_noting(layer, L, out), (L, dtype), size=here(P), rank="classes", backward=backward)
            own, best = program.cost(machine), None
            for M, (seconds, partitions, programs) in states.items():
                between = () if M is None or M == L else (moved(M, L),)
                total = seconds + own + sum(p.cost(machine) for p in between)
                if best is None or total < best[0]:
                    best = total, (*partitions, P), (*programs, *between, program)
            if best is not None and (out[-1] not in following or best[0] < following[out[-1]][0]):
                following[out[-1]] = best
        states = following
    seconds, partitions, programs = min(states.values(), key=lambda state: state[0])
    return Suggestion(seconds, partitions, programs)


def _noting(layer: Callable[..., Any], L: Layout, out: list[Layout]) -> Callable[[torch.Tensor], Any]:
    """The layer as a function of x; where its result lies goes to ``out``."""

    def run(x: torch.Tensor) -> Any:
        found = layer(x, L)
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Layout):
            raise PartitionError(
                "a layer of a chain says where its result lies",
                op="suggest_chain",
                partitions=L,
                expected="(y, its Layout)",
                actual=type(found).__name__,
                next_step="let layer(x, L) return both, for example y, F.conv_layout(L, ...)",
            )
        out.append(found[1])
        return found[0]

    return run


def _size(size: int | None, P: Partition) -> int:
    return max(P.ranks) + 1 if size is None else size


def _candidates(given: int | Iterable[Any], ndim: int) -> list[Partition]:
    several: Any = given
    several = grids(several, ndim) if is_int(several) else several
    listed = isinstance(several, Iterable)
    found = [P if isinstance(P, Partition) else Partition(P) for P in several] if listed else []
    if not found:
        raise PartitionError(
            "nothing to choose from" if listed else "no candidates",
            expected="partitions, shapes of grids, or a number of ranks",
            actual=given,
            next_step="suggest(f, 4), or suggest(f, [(4, 1), (2, 2), (1, 4)])",
        )
    return found


public({"suggest": suggest, "suggest_chain": suggest_chain}, alike=False)
