"""``dd.trace``: a program's movements on any rank of any number of ranks, in one process, without sending any.

The program runs with tensors that have no numbers (torch's FakeTensorMode), through the same code as ever: only where a
movement would be handed to an engine a note is taken instead. So it works for every function, layer and transform.
"""

from __future__ import annotations

import copy
import inspect
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.utils import _pytree as pytree

from .._value import forget
from ..boxes import is_int
from ..calls import public
from ..engine import transport as traffic
from ..errors import DistdlError, PartitionError
from ..linear_map import LinearMap
from ..movement.halo import HaloSpec
from ..partition import Layout, Partition
from ..world import World, _worlds
from .program import Program
from .tracer import Counting, Tracer

__all__ = ["trace"]


def trace(
    f: Callable[..., Any],
    *args: Any,
    size: int | None = None,
    rank: int | str | Iterable[int] = 0,
    backward: bool = False,
) -> Program:
    """The movements of ``f(*args)`` on a rank of a world that need not be there: by one process, without MPI, and
    without a number computed. Collective on nothing: any process may ask, also one of a running job.

    Args:
        f: the program: a function, or a module. Its partitions are of the default world. Where it returns a function,
            the trace is of a call of that: what made it does not count.
        args: what it gets. A :class:`Layout`, or a pair (Layout, dtype), inside of pytrees too, stands for the rank's
            block (dtype: torch's default); tensors, and modules, are taken as every rank has them, and lose their
            numbers; all else is passed on. What ``f`` takes from elsewhere may be real, and is not changed; modules of
            the meta device are given as ``f``, or among the arguments.
        size: how many ranks the world has. Default: the largest rank that is named, and one: by the arguments, by what
            ``f`` refers to, and by what it moves (then it begins anew, in a larger world).
        rank: whose movements: a rank, or several; ``"classes"``: one of each kind: ranks that stand alike (at the
            beginning, at the end or inside) in each dim of each partition, and hold blocks of one shape.
        backward: run the backward pass of all results' sum too: gradients of what requires them, and where nothing
            does, of the blocks.

    Returns:
        A :class:`~distdl.forecast.program.Program`: print it, ask for its ``totals``, ``messages`` and
        ``cost(machine)``, or ``save`` it. Messages are those that MPI, the engine for CPUs, would send.

    Raises:
        PartitionError: no such rank; or partitions of another world.
        AgreementError: the program asks other ranks what only they know: a bare partition negotiates layouts.
        DistdlError: the numbers in tensors decide what the program does.

    Messages: none.

    Example:
        >>> L = dd.Layout(dd.Partition((4, 1)), (8, 8))
        >>> program = dd.trace(lambda x: F.repartition(x, L, dd.Partition((1, 4))), L)
        >>> program.size
        4
    """
    rank = rank if isinstance(rank, str) else _several(rank)
    if size is None:
        most = max((max(place.ranks) + 1 for place in _places((f, args))), default=1)
        while True:
            try:
                return _program(f, args, most, rank, backward, grows=True)
            except _Larger as larger:
                most = larger.size
    if not is_int(size) or size < 1:
        raise PartitionError(
            "no size of a world", expected="at least 1", actual=size, next_step="give the number of ranks"
        )
    return _program(f, args, size, rank, backward, grows=False)


class _Larger(Exception):
    """A movement of a rank that the world does not have."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


def _program(f: Any, args: Any, size: int, rank: Any, backward: bool, grows: bool) -> Program:
    events, sides = {}, {}
    if grows and isinstance(rank, tuple) and 0 not in rank:
        _run(f, args, 0, size, backward, grows)  # names the ranks that there are
    first = _ranks(rank, size)
    for r in first:
        tracer = _run(f, args, r, size, backward, grows)
        events[r] = tuple(tracer.events)
        sides.update(tracer.sides)
    if rank == "classes":
        for r in _classes(sides, size)[1:]:
            events[r] = tuple(_run(f, args, r, size, backward, grows).events)
    return Program(size, events)


def _several(rank: Any) -> tuple[Any, ...]:
    return tuple(rank) if isinstance(rank, Iterable) else (rank,)


def _ranks(rank: Any, size: int) -> tuple[int, ...]:
    several = (0,) if rank == "classes" else rank if isinstance(rank, tuple) else ()
    if not several or any(not is_int(r) or not 0 <= r < size for r in several):
        raise PartitionError(
            "no rank of the world",
            expected=f'0 .. {size - 1}, some of these, or "classes"',
            actual=rank,
            next_step="name ranks that there are, or give size=",
        )
    return tuple(map(int, several))


def _classes(sides: Iterable[Any], size: int) -> list[int]:
    """The first rank of each class, 0 among them."""
    found: dict[Any, int] = {}
    for r in range(size):
        key = []
        for side in sides:
            coords = side.partition.index(r)
            ends = coords and tuple((c > 0) + (c == n - 1 > 0) for c, n in zip(coords, side.partition.shape))
            key.append((ends, side.local_shape(r)))
        found.setdefault(tuple(key), r)
    return sorted(found.values())


# ---------------------------------------------------------------- one rank


def _run(f: Any, args: Any, rank: int, size: int, backward: bool, grows: bool) -> Tracer:
    tracer = Tracer(rank, size)
    with _world_of(tracer, grows), _aside(tracer), _fake() as mode:
        try:
            leaves = _traced(f, args, mode, tracer, backward and None)
            if backward and leaves is None:  # nothing requires a gradient: then the blocks do
                tracer.events.clear()
                _traced(f, args, mode, tracer, True)
        except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException) as error:
            raise DistdlError(
                "the numbers in tensors decide what this program does, and in a trace there are none",
                op="trace",
                expected="movements that follow from layouts and shapes",
                actual=f"{error.func} at {_asked(error)}, after {len(tracer.events)} events",
                next_step="trace the part that does not ask for numbers (.item(), bool(tensor), nonzero)",
            ) from error
    return tracer


def _asked(error: BaseException) -> str:
    """Where the numbers were asked for: the innermost line that is not of torch's tracer."""
    rows = [row for row in traceback.extract_tb(error.__traceback__) if not row.filename.startswith(_BELOW)]
    return f"{rows[-1].filename}:{rows[-1].lineno} in {rows[-1].name}"


_TORCH = os.path.dirname(torch.__file__)
_BELOW = (
    os.path.join(os.path.dirname(__file__), "tracer"),
    *(os.path.join(_TORCH, name) for name in ("_subclasses", "_ops", "utils", "_compile", "_dynamo")),
)


def _traced(f: Any, args: Any, mode: Any, tracer: Tracer, backward: bool | None) -> bool | None:
    """Run it once. ``backward``: ``False`` not at all, ``None`` of what requires gradients, ``True`` of blocks too;
    ``None`` is returned where there was nothing to go back from."""
    g, inputs = _faked((f, args), mode, tracer.engine.rank, backward is True)
    with Counting(tracer):
        found = g(*inputs)
        if inspect.isroutine(found):
            tracer.events.clear()
            found = found()
        results = [y for y in pytree.tree_leaves(found) if isinstance(y, torch.Tensor) and y.requires_grad]
        if backward is False:
            return True
        if results:
            torch.autograd.backward(results, [torch.ones_like(y) for y in results])
    return True if results else None


def _is_block(thing: Any) -> bool:
    pair = isinstance(thing, tuple) and len(thing) == 2 and isinstance(thing[1], torch.dtype)
    return isinstance(thing[0] if pair else thing, Layout)


def _faked(given: Any, mode: Any, rank: int, wanted: bool) -> Any:
    """The same with blocks in the place of layouts, and tensors without numbers."""
    memo: dict[int, Any] = {}

    def tensor(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in memo:
            fake = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, requires_grad=t.requires_grad, device="cpu")
            memo[id(t)] = torch.nn.Parameter(fake, t.requires_grad) if isinstance(t, torch.nn.Parameter) else fake
        return memo[id(t)]

    def one(thing: Any) -> Any:
        if _is_block(thing):
            L, dtype = thing if isinstance(thing, tuple) else (thing, torch.get_default_dtype())
            smooth = dtype.is_floating_point or dtype.is_complex
            return torch.empty(L.local_shape(rank), dtype=dtype, requires_grad=wanted and smooth)
        if isinstance(thing, torch.Tensor):
            return tensor(thing)
        if isinstance(thing, torch.nn.Module):
            for t in (*thing.parameters(), *thing.buffers()):
                memo[id(t)] = tensor(t)
            return copy.deepcopy(thing, memo)
        return thing

    return pytree.tree_map(one, given, is_leaf=_is_block)


@contextmanager
def _fake() -> Iterator[Any]:
    """Tensors without numbers. Real ones that the program finds elsewhere keep their gradients."""
    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    convert, seen = mode.fake_tensor_converter.from_real_tensor, {}

    def noted(mode: Any, t: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        if t.is_leaf and t.requires_grad:
            seen.setdefault(id(t), (t, t.grad))
        return convert(mode, t, *args, **keywords)

    vars(mode.fake_tensor_converter)["from_real_tensor"] = noted
    try:
        with mode, torch.random.fork_rng(devices=[]):
            yield mode
    finally:
        for t, grad in seen.values():
            t.grad = grad


@contextmanager
def _world_of(tracer: Tracer, grows: bool) -> Iterator[World]:
    """A world that this process alone knows of, in the place of the default one."""
    before = dict(_worlds)
    forget()

    def check(*partitions: Partition, **named: Any) -> None:
        most = max(max(P.ranks) for P in partitions) + 1
        if most > where.size:
            raise _Larger(most)
        World.check(where, *partitions, **named)

    try:
        where = World(transport=tracer.engine)
        if grows:
            vars(where)["check"] = check
        yield where
    finally:
        _worlds.clear()
        _worlds.update(before)
        forget()


@contextmanager
def _aside(tracer: Tracer) -> Iterator[None]:
    """While nobody else looks at movements."""
    before = traffic.log, traffic.observer, traffic.tracer, traffic.begun
    traffic.log, traffic.observer, traffic.tracer = None, None, tracer
    try:
        yield
    finally:
        traffic.log, traffic.observer, traffic.tracer, traffic.begun = before


# ---------------------------------------------------------------- the ranks that a program names


def _places(thing: Any, seen: set[int] | None = None, depth: int = 0) -> Iterator[Partition]:
    """The partitions that a program's arguments, and what it refers to, name."""
    seen = set() if seen is None else seen
    if id(thing) in seen or depth > 8:
        return
    seen.add(id(thing))
    if isinstance(thing, Partition):
        yield thing
    elif isinstance(thing, Layout):
        yield thing.partition
    elif isinstance(thing, HaloSpec):
        yield from (thing.in_layout.partition, thing.out_layout.partition)
    elif isinstance(thing, LinearMap):
        yield from (side.partition for plan in thing.plans for side in (plan.held, plan.wanted))
    else:
        for part in _parts(thing):
            yield from _places(part, seen, depth + 1)


def _parts(thing: Any) -> Iterable[Any]:
    if isinstance(thing, (tuple, list, set)):
        return thing if len(thing) < 1000 else ()
    if isinstance(thing, dict):
        return thing.values()
    if isinstance(thing, torch.nn.Module):
        return [v for m in thing.modules() for v in vars(m).values() if not isinstance(v, torch.nn.Module)]
    inner = getattr(thing, "__func__", None)
    if inner is not None:
        return inner, thing.__self__
    if hasattr(thing, "func") and hasattr(thing, "keywords"):  # a partial
        return thing.func, thing.args, thing.keywords
    if inspect.isfunction(thing) and (thing.__module__ or "").partition(".")[0] not in ("distdl", "torch"):
        found = inspect.getclosurevars(thing)
        wrapped = getattr(thing, "__wrapped__", None)
        return *found.nonlocals.values(), *found.globals.values(), thing.__defaults__, wrapped
    return ()


public({"trace": trace}, alike=False)
