"""Pipeline parallelism: a schedule is plain data, a simulator proves it, and one executor runs any of them.

Stage k is a function y = f_k(params_k, x). Over m micro-batches the network is the composition of stages and *hand-offs*, and a
hand-off is a repartition from one rank to another; its adjoint takes the cotangent back. So the gradient is, for each
micro-batch, one vjp per stage and the adjoint of each hand-off, in whatever order the schedule says:

    F(k, m)   y, pull = vjp(f_k, params_k, x)      then y  goes to stage k + 1 by A
    B(k, m)   (gradient, x̄) = pull(ȳ)              then x̄ goes to stage k - 1 by Aᵀ

**Order.** The simulator merges the devices' lists into one global order, and every rank goes through its part of that order: it
starts a send where it ran the task, and the matching receive where its peer did, whether or not it needs the message yet. Both
ends of every pair so meet their messages in one order, and even transfers that block (under ``dd.checking()``) cannot wait
in a circle: the earliest unfinished task of the order can always go on. Nothing is negotiated: shapes are given.

GPipe: Huang et al., arXiv:1811.06965. 1F1B: Narayanan et al., arXiv:1806.03377 (PipeDream-flush in arXiv:2006.09503).
Interleaved: Narayanan et al., arXiv:2104.04473, section 2.2.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from torch.func import vjp
from torch.utils._pytree import tree_map

from .. import _torch, maps
from ..errors import PartitionError
from ..functional import invariant_sum, nothing, start, tie, wait
from ..partition import Layout, Partition
from ..world import world

__all__ = ["Task", "Timeline", "pipeline", "schedule", "simulate"]


class Task(NamedTuple):
    """One piece of work: the forward ("F") or backward ("B") of micro-batch ``micro`` at ``stage``."""

    kind: str
    stage: int
    micro: int


def schedule(kind: str, stages: int, microbatches: int, chunks: int = 1) -> tuple[tuple[Task, ...], ...]:
    """What each device does, in order: plain data, which :func:`simulate` proves and :func:`pipeline` runs.

    Args:
        kind: ``"gpipe"`` (all forwards, then all backwards), ``"1f1b"`` (device s starts with min(p - s - 1, m) forwards, then does
            one forward and one backward in turn), ``"interleaved"`` (1F1B with ``chunks`` stages on each device).
        stages: p, the number of devices.
        microbatches: m. Any number; ``"interleaved"`` needs a multiple of p.
        chunks: v, for ``"interleaved"``. Stage k of the v·p stages lives on device k mod p.

    Returns:
        For each device a tuple of :class:`Task`. Any other table of this form may be used in its place.

    With equal stages, F taking 1 and B taking b, a step takes (m + p - 1)(1 + b), of which (p - 1)/(m + p - 1) is idle; interleaved,
    with chunks of 1/v of the work, (m + (p - 1)/v)(1 + b). Device s keeps the vjps of m (GPipe), min(p - s, m) (1F1B) or
    min(2(p - s - 1) + (v - 1)p + 1, vm) (interleaved, each of 1/v of a device's layers) micro-batches.

    Raises:
        PartitionError: an unknown kind, sizes below 1, or micro-batches that are no multiple of p.
    """
    p, m, v = stages, microbatches, chunks
    if kind not in ("gpipe", "1f1b", "interleaved") or min(p, m, v) < 1 or (kind != "interleaved" and v > 1):
        raise PartitionError("no such schedule", op="schedule", actual=(kind, p, m, v),
                             expected='"gpipe", "1f1b" or "interleaved", sizes >= 1; chunks > 1 only interleaved')
    if kind == "interleaved" and m % p:
        raise PartitionError("interleaved stages take groups of p micro-batches", op="schedule", actual=f"{m} micro-batches",
                             expected=f"a multiple of {p}", next_step="use 1f1b, or another number of micro-batches")
    table = []
    for s in range(p):
        warm = {"gpipe": m, "1f1b": p - s - 1, "interleaved": 2 * (p - s - 1) + (v - 1) * p}[kind]
        groups = [range(i, i + p) for i in range(0, m, p)] if kind == "interleaved" else [range(m)]
        ahead, back = ([Task(which, c * p + s, i) for group in groups for c in order for i in group]
                       for which, order in (("F", range(v)), ("B", range(v)[::-1])))  # fmt: skip
        warm = min(warm, len(ahead))
        steady = chain.from_iterable(zip(ahead[warm:], back))
        table.append((*ahead[:warm], *steady, *back[len(ahead) - warm :]))
    return tuple(table)


class Timeline(NamedTuple):
    """What :func:`simulate` found.

    Attributes:
        order: all tasks in one global order that respects every device's list and every dependence.
        spans: {task: (start, end)}.
        makespan: when the last task ends.
        live: for each device the largest number of micro-batches whose forward is done and whose backward is not.
        bubble: the idle share of all devices' time.
    """

    order: tuple[Task, ...]
    spans: dict
    makespan: float
    live: tuple[int, ...]
    bubble: float

    def __str__(self):
        """A row for each device; one column for each unit of time (whole-numbered costs)."""
        width = max(len(str(t.micro)) for t in self.order) + 2
        rows = [[" ." + " " * (width - 2)] * int(self.makespan) for _ in self.live]
        for task, (begin, end) in self.spans.items():
            cells = rows[task.stage % len(rows)]
            for at in range(int(begin), int(end)):
                cells[at] = f" {task.kind}{task.micro}".ljust(width) if at == begin else f" {'-' * (width - 1)}"
        return "\n".join("".join(cells).rstrip() for cells in rows)


def _needs(task: Task, last: int) -> list[Task]:
    """The tasks whose results ``task`` takes."""
    kind, k, i = task
    if kind == "F":
        return [Task("F", k - 1, i)] if k else []
    return [Task("F", k, i)] + ([Task("B", k + 1, i)] if k < last else [])


def _next(task: Task, last: int) -> Task | None:
    """The task, of another stage, that takes the result."""
    kind, k, i = task
    k += 1 if kind == "F" else -1
    return Task(kind, k, i) if 0 <= k <= last else None


def simulate(table, forward: float = 1, backward: float = 2) -> Timeline:
    """Run a schedule on paper: proof that it ends, how long it takes, and how much it keeps.

    Args:
        table: for each device a sequence of tasks, as :func:`schedule` returns; stage k lives on device k mod p.
        forward, backward: what one task costs, above 0.

    Raises:
        PartitionError: a task is missing, doubled, or on the wrong device; or the devices wait for each other in a circle.
    """
    p, tasks = len(table), Counter(Task(*t) for row in table for t in row)
    last, count = max((t.stage for t in tasks), default=-1), 1 + max((t.micro for t in tasks), default=-1)
    every = {Task(kind, k, i) for kind in "FB" for k in range(last + 1) for i in range(count)}
    astray = [t for d, row in enumerate(table) for t in row if Task(*t).stage % p != d]
    wrong = astray + sorted(every - tasks.keys()) + [t for t in tasks if tasks[t] > 1 or t not in every]
    if wrong or not tasks or (last + 1) % p:
        raise PartitionError("not a schedule", op="simulate", actual=f"{last + 1} stages; astray, missing or doubled: {wrong[:3]}",
                             expected=f"each F and B of {last + 1} stages x {count} micro-batches once, on device stage mod {p}")
    spans: dict[Task, tuple] = {}
    rows, clock, live, peak = [list(row) for row in table], [0] * p, [0] * p, [0] * p
    places, moved = [0] * p, True
    while moved:
        moved = False
        for d, row in enumerate(rows):
            while places[d] < len(row) and all(n in spans for n in _needs(Task(*row[places[d]]), last)):
                task = Task(*row[places[d]])
                begin = max([clock[d], *(spans[n][1] for n in _needs(task, last))])
                clock[d] = begin + (forward if task.kind == "F" else backward)
                spans[task] = begin, clock[d]
                live[d] += 1 if task.kind == "F" else -1
                peak[d] = max(peak[d], live[d])
                places[d], moved = places[d] + 1, True
    stuck = {d: Task(*row[at]) for d, (row, at) in enumerate(zip(rows, places)) if at < len(row)}
    if stuck:
        raise PartitionError("this schedule never ends", op="simulate", expected="an order in which every task can run",
                             actual="; ".join(f"device {d} waits before {tuple(t)}" for d, t in stuck.items()))
    order = tuple(sorted(spans, key=lambda t: (spans[t][1], t.stage % p)))
    makespan = max(clock)
    busy = sum(end - begin for begin, end in spans.values())
    return Timeline(order, spans, makespan, tuple(peak), 1 - busy / (p * makespan))


def pipeline(table, stages, loss, P: Partition, shapes, dtype=None):
    """A training step over the ranks of ``P`` by any schedule: the value and gradient of the sequential network.

    Args:
        table: a schedule for P.size devices; device d is the d-th rank of ``P``. It is simulated here, so that a schedule that would
            hang is an error at once.
        stages: the functions f_k(params_k, x) -> y, one for each stage. A rank calls its own ones only. They may hold movements among
            the ranks of *other* dims of a grid (tensor or spatial parallelism).
        loss: a function of the last stage's output and the number i of the micro-batch, 0-dim: its share of the whole loss. Shares are
            added, so micro-batches of any size, empty ones too, count exactly when sums are divided by the whole batch's count.
        P: the pipeline's ranks; of a grid ``P.along(dim)``.
        shapes: a function (stage k, micro-batch i) -> shape of the output of f_k, for all stages but the last: nothing is negotiated.
        dtype: dtype of the activations. Default: that of the first parameter of every rank.

    Returns:
        ``step(params, inputs) -> (value, grads)``. ``params`` is {stage: any pytree of floating tensors} for this rank's stages, and
        ``grads`` has the same form; ``inputs`` is a list of the micro-batches on the first stage's rank (any dtype), and ignored
        elsewhere. ``value`` is the sum of the shares, invariant over P. Where k ranks of a data dim run a pipeline each, reduce once:
        ``F.all_sum_reduce(grads, P.along(data))``.

    Messages: for each micro-batch y of each stage but the last, and as many elements of ȳ back; one all-reduce of one number, the
    loss (in float32, or wider). A send to a peer is waited for before the next one to it. ``step`` is a pure function: under torch.func
    it has derivatives (its ``jvp`` gives Hessian-vector products), and there transfers are waited for at once. Elsewhere parameters
    that require gradients are detached.

    Raises:
        PartitionError: the table is no schedule, never ends, or does not fit P and stages. ShapeError: an output of another shape.
    """
    order, p, last = simulate(table).order, P.size, len(stages) - 1
    planned = len(table), 1 + max(t.stage for t in order)
    if planned != (p, last + 1):
        raise PartitionError("the schedule does not fit", op="pipeline", partitions=P, expected=f"{p} devices, {last + 1} stages",
                             actual=f"{planned[0]} devices, {planned[1]} stages", next_step="schedule(kind, P.size, m)")

    def home(stage):
        return P.ranks[stage % p]

    @lru_cache(maxsize=None)
    def handoff(k, i):
        """The map that takes micro-batch i from stage k to its successor."""
        shape = tuple(shapes(k, i))
        here, there = (Partition((1,) * len(shape), (home(s),), P.world) for s in (k, k + 1))
        return maps.repartition(Layout(here, shape), there)

    def function_of(k, i, dtype):
        """Stage k for micro-batch i; the last one ends with the loss."""
        return (lambda w, x: loss(stages[k](w, x), i).to(dtype)) if k == last else stages[k]

    def step(params, inputs=None):
        rank, pure = world(P.world).rank, _torch.transforms_active()  # pure: something differentiates this step
        mine = {k for k in range(last + 1) if home(k) == rank}
        if params.keys() != mine:
            raise PartitionError("params are not those of this rank's stages", op="pipeline", partitions=P, rank=rank,
                                 expected=f"stages {sorted(mine)}", actual=f"stages {sorted(params)}")
        params = {k: w if pure else tree_map(torch.Tensor.detach, w) for k, w in params.items()}
        leaves = _torch.flatten(params)[0]
        anchor = nothing((0,), *leaves, dtype=dtype) if leaves else torch.empty(0, dtype=dtype)
        total = anchor.sum().to(torch.promote_types(anchor.dtype, torch.float32))
        pulls: dict = {}
        grads: dict = {}
        inbox: dict = {}  # for each task to come, the transfer of what it takes
        outbox: dict = {}  # for each peer, the last transfer to it
        unused = []  # what is left here of what was sent: no element, but a dependence

        def take(box, key):
            return box.pop(key) if pure else wait(box.pop(key))

        def forward(task):
            k, i = task.stage, task.micro
            f = function_of(k, i, total.dtype)
            if k == 0:
                y, pulls[k, i] = vjp(lambda w: f(w, inputs[i]), params[k])
            else:
                y, pulls[k, i] = vjp(f, params[k], take(inbox, task))
            return y

        def backward(task):
            k, i = task.stage, task.micro
            cotangent = total.new_ones(()) if k == last else take(inbox, task)
            with torch.set_grad_enabled(pure and torch.is_grad_enabled()):  # torch records the pullback too, unless told not to
                g, *x_bar = pulls.pop((k, i))(cotangent)
            grads[k] = tree_map(torch.add, grads[k], g) if k in grads else g
            return x_bar[0] if k else None

        for task in order:
            to, y = _next(task, last), None
            if home(task.stage) == rank:
                y = (forward if task.kind == "F" else backward)(task)
            if to is None:
                total = total + y if y is not None else total
            elif rank in (home(task.stage), home(to.stage)):
                A = handoff(task.stage, task.micro) if task.kind == "F" else handoff(to.stage, task.micro).T
                box, key = (inbox, to) if home(to.stage) == rank else (outbox, home(to.stage))
                if key in outbox:
                    unused.append(take(outbox, key))
                transfer = start(A, nothing((0,), anchor) if y is None else y)
                box[key] = wait(transfer) if pure else transfer
        unused += [take(outbox, peer) for peer in list(outbox)]
        if pure:  # whatever is differentiated next, every rank's messages stay part of it
            total = tie(total, *unused)
            grads = tree_map(lambda g: tie(g, total, *unused), grads)
        return invariant_sum(total, P), {k: grads[k] for k in params}

    return step
