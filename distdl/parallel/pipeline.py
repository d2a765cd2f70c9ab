"""Pipeline parallelism: one executor for any schedule (see schedules.py), from explicit forward and adjoint hand-offs.

Stage k is a function y = f_k(params_k, x). Over m micro-batches the network is the composition of stages and
*hand-offs*, and a hand-off is a repartition from one rank to another; its adjoint takes the cotangent back. So the
gradient is, for each micro-batch, one vjp per stage and the adjoint of each hand-off, in whatever order the schedule
says:

    F(k, m)   y, pull = vjp(f_k, params_k, x)      then y  goes to stage k + 1 by A
    B(k, m)   (gradient, x̄) = pull(ȳ)              then x̄ goes to stage k - 1 by Aᵀ

**Order.** :func:`simulate` merges the devices' lists into one global order, and every rank goes through its part of
that order: it starts a send where it ran the task, and the matching receive where its peer did, whether or not it needs
the message yet. Both ends of every pair so meet their messages in one order, and even transfers that block (under
``dd.checking()``) cannot wait in a circle: the earliest unfinished task of the order can always go on. Nothing is
negotiated: shapes are given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.func import vjp
from torch.utils._pytree import tree_map

from .. import _torch, maps
from .._types import Device
from ..errors import PartitionError, ShapeError
from ..functional import invariant_sum, nothing, start, tie, wait
from ..linear_map import LinearMap
from ..partition import Layout, Partition
from ..world import world
from .schedules import Task, simulate, successor

__all__ = ["pipeline"]


def pipeline(
    table: Sequence[Sequence[Task | tuple[str, int, int]]],
    stages: Sequence[Callable[[Any, Any], Any]],
    loss: Callable[[Any, int], torch.Tensor],
    P: Partition,
    shapes: Callable[[int, int], Sequence[int]],
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> Callable[..., tuple[torch.Tensor, dict[int, Any]]]:
    """A training step over the ranks of ``P`` by any schedule: the value and gradient of the sequential network.

    Args:
        table: a schedule for P.size devices; device d is the d-th rank of ``P``. It is simulated here, so that one that
            would hang is an error at once.
        stages: the functions f_k(params_k, x) -> y, one for each stage; a rank calls its own ones. They may hold
            movements among the ranks of *other* dims of a grid (tensor or spatial parallelism).
        loss: a function of the last stage's output and the micro-batch's number i, 0-dim: its share of the whole loss.
            Shares are added, so that micro-batches of any size, empty ones too, count exactly where sums are divided by
            the whole count.
        P: the pipeline's ranks; of a grid ``P.along(dim)``.
        shapes: a function (stage k, micro-batch i) -> shape of the output of f_k, for all stages but the last: nothing
            is negotiated.
        dtype: dtype of the activations. Default: that of the first parameter of every rank.
        device: device of the activations; the same kind on all ranks. Default: that of the first parameter or, where a
            rank's stages have none, of the inputs, or torch's default device.

    Returns:
        ``step(params, inputs) -> (value, grads)``. ``params`` is {stage: any pytree of floating tensors} for this
        rank's stages, and ``grads`` has the same form; ``inputs`` is a list of the micro-batches (any dtype) on the
        first stage's rank, and ignored elsewhere. ``value`` is the sum of the shares, invariant over P. Where the ranks
        of a data dim run a pipeline each, reduce once, after the step: ``F.all_sum_reduce(grads, P.along(data))``.

    Messages: for each micro-batch y of each stage but the last, and as many elements of ȳ back; one all-reduce of one
    number, the loss (in float32, or wider). A send to a peer is waited for before the next one to it. ``step`` is a
    pure function: under torch.func it has derivatives (its ``jvp`` gives Hessian-vector products), and there transfers
    are waited for at once. Elsewhere parameters that require gradients are detached.

    Raises:
        PartitionError: the table is no schedule, never ends, or does not fit P and stages; params of other stages than
            this rank's; more or fewer inputs than micro-batches. ShapeError: an output of another shape or dtype.

    Example:
        >>> table, stage = dd.parallel.schedule("gpipe", 1, 2), lambda w, x: w * x
        >>> step = dd.parallel.pipeline(table, [stage], lambda y, i: y.sum(), dd.Partition((1,)), lambda k, i: (2,))
        >>> step({0: torch.tensor(3.0)}, [torch.ones(2), torch.ones(2)])
        (tensor(12.), {0: tensor(4.)})
    """
    order, p, last = simulate(table).order, P.size, len(stages) - 1
    planned, count = (len(table), 1 + max(t.stage for t in order)), 1 + max(t.micro for t in order)
    if planned != (p, last + 1):
        raise PartitionError(
            "the schedule does not fit",
            expected=f"{p} devices, {last + 1} stages",
            actual=f"{planned[0]} devices, {planned[1]} stages",
            next_step="schedule(kind, P.size, m)",
        )

    def home(stage: int) -> int:
        return P.ranks[stage % p]

    @cache
    def handoff(k: int, i: int) -> LinearMap:
        """The map that takes micro-batch i from stage k to its successor."""
        shape = tuple(shapes(k, i))
        source, target = (Partition((1,) * len(shape), (home(s),), P.world) for s in (k, k + 1))
        return maps.repartition(Layout(source, shape), target)

    def function_of(k: int, i: int, dtype: torch.dtype) -> Callable[[Any, Any], Any]:
        """Stage k for micro-batch i; the last one ends with the loss."""
        return (lambda w, x: loss(stages[k](w, x), i).to(dtype)) if k == last else stages[k]

    def step(
        params: dict[int, Any], inputs: Sequence[torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, dict[int, Any]]:
        rank, pure = world(P.world).rank, _torch.transforms_active()  # pure: something differentiates this step
        own = {k for k in range(last + 1) if home(k) == rank}
        if params.keys() != own:
            raise PartitionError(
                "params are not those of this rank's stages",
                rank=rank,
                expected=f"stages {sorted(own)}",
                actual=f"stages {sorted(params)}",
                next_step="pass {stage: parameters} for the stages of this rank: rank r of p has r, r + p, ...",
            )
        if 0 in own and (inputs is None or len(inputs) != count):
            raise PartitionError(
                "one input for each micro-batch",
                rank=rank,
                expected=f"{count} inputs",
                actual="None" if inputs is None else len(inputs),
                next_step="split the batch: x.split(sizes)",
            )
        params = {k: w if pure else tree_map(torch.Tensor.detach, w) for k, w in params.items()}
        leaves = _torch.flatten(params)[0]
        if leaves:
            anchor = nothing((0,), *leaves, dtype=dtype)
        else:
            anchor = torch.empty(0, dtype=dtype, device=inputs[0].device if device is None and 0 in own else device)
        total = anchor.sum().to(torch.promote_types(anchor.dtype, torch.float32))
        pulls: dict[tuple[int, int], Any] = {}  # the pullback of each stage and micro-batch that is live
        grads: dict[int, Any] = {}
        inbox: dict[Any, Any] = {}  # for each task to come, the transfer of what it takes
        outbox: dict[Any, Any] = {}  # for each peer, the last transfer to it
        before: Any = anchor  # the last transfer's result
        unused: list[torch.Tensor] = []  # what this rank keeps of what was sent: no element, but a dependence

        def take(box: dict[Any, Any], key: Any) -> torch.Tensor:
            arrived: torch.Tensor = box.pop(key) if pure else wait(box.pop(key))
            return arrived

        def forward(task: Task) -> torch.Tensor:
            k, i = task.stage, task.micro
            f = function_of(k, i, total.dtype)
            if k == 0:
                both: Any = vjp(lambda w: f(w, inputs[i]), params[k])
            else:
                both = vjp(f, params[k], take(inbox, task))
            pulls[k, i] = both[1]
            y: torch.Tensor = both[0]
            return y

        def backward(task: Task) -> torch.Tensor | None:
            k, i = task.stage, task.micro
            cotangent = total.new_ones(()) if k == last else take(inbox, task)
            # torch records the pullback too, unless this is off
            with torch.set_grad_enabled(pure and torch.is_grad_enabled()):
                g, *x_bar = pulls.pop((k, i))(cotangent)
            grads[k] = tree_map(torch.add, grads[k], g) if k in grads else g
            return x_bar[0] if k else None

        for task in order:
            to = successor(task, last)
            y = (forward if task.kind == "F" else backward)(task) if home(task.stage) == rank else None
            if to is None:
                total = total + y if y is not None else total
            elif rank in (home(task.stage), home(to.stage)):
                A = handoff(task.stage, task.micro) if task.kind == "F" else handoff(to.stage, task.micro).T
                box, key = (inbox, to) if home(to.stage) == rank else (outbox, home(to.stage))
                if key in outbox:
                    unused.append(take(outbox, key))
                if y is not None and y.dtype != anchor.dtype:
                    raise ShapeError(
                        "a stage's output has another dtype",
                        rank=rank,
                        actual=y.dtype,
                        expected=anchor.dtype,
                        next_step=f"let stage {task.stage} return it, or pass dtype=",
                    )
                sent = nothing((0,), anchor) if y is None else y
                # In derivatives independent transfers come in autograd's order: by numbers that each thread counts for
                # itself, so not in one order on all ranks where a device's thread takes part. So none of them is
                # independent.
                transfer = start(A, tie(sent, before) if pure else sent)
                box[key] = before = wait(transfer) if pure else transfer
        unused += [take(outbox, peer) for peer in list(outbox)]
        if pure:  # whatever is differentiated next, every rank's messages stay part of it
            total = tie(total, *unused)
            grads = tree_map(lambda g: tie(g, total, *unused), grads)
        return invariant_sum(total, P), {k: grads[k] for k in params}

    return step
