"""A movement on plain tensors: straight to the executor, or as the operator ``distdl::move``, which tracers record."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from .. import _torch
from ..errors import ShapeError
from . import transport as traffic
from .exchange import Aside, Exchange
from .exchange import begin as begin_exchange
from .operators import traced
from .ranges import ranged


def checked(steps, xs):
    """``xs`` as plain memory, also where they come out of a grad or jvp that has ended.

    Raises:
        ShapeError: something is no dense tensor, or comes out of a vmap that has ended; or they lie on several devices.
    """
    if len({x.device for x in xs}) > 1:
        raise ShapeError(
            "the tensors of one movement lie on different devices",
            op=str(steps[0]),
            rank=steps[0].world.rank,
            expected=f"all on {xs[0].device}",
            actual=", ".join(str(x.device) for x in xs),
            partitions=steps[0].partitions,
            next_step="move them to one device, or in two calls",
        )
    xs = [_torch.unwrap_if_dead(x) if _of_torch_func(x) else x for x in xs]
    for x in xs:
        if x.layout is not _strided or x.is_quantized or _of_torch_func(x):
            found = "a quantized one" if x.is_quantized else str(x.layout)
            raise ShapeError(
                "only dense tensors can be moved",
                op=str(steps[0]),
                rank=steps[0].world.rank,
                expected=_strided,
                actual="one example of a vmap that has ended" if _of_torch_func(x) else found,
                partitions=steps[0].partitions,
                next_step="x.to_dense(), or move a sparse tensor's parts; move a batch inside its vmap, or after it",
            )
    return xs


_strided, _of_torch_func = torch.strided, _torch.of_torch_func
is_plain, dispatch_modes, profiler = _torch.is_plain, _torch.dispatch_modes, _torch.profiler


def plans_of(steps):
    """The plans of steps that go as one set of messages."""
    return tuple(step.plan for step in steps)


def engine_for(steps, xs, recorded):
    """The engine that moves plain tensors ``xs`` by ``steps``, watched where somebody watches; ``recorded``: a graph
    holds the adjoint."""
    first = steps[0]
    engine = first.world.transport(xs[0], first.ranks)
    observer = traffic.observer
    return engine if observer is None else observer.movement(first.world.watch, engine, steps, xs, recorded)


def together(steps, xs, recorded):
    """Move tensors ``xs`` by ``steps``, of one kind over the same ranks, as one set of messages; returns fresh
    tensors."""
    if traffic.tracer is not None:
        return traffic.tracer.moved(steps, checked(steps, xs), recorded)
    traffic.begun += 1
    step, x = steps[0], xs[0]
    if len(steps) > 1 or not is_plain(x):
        xs = checked(steps, xs)
        if not all(map(is_plain, xs)):
            return traced(steps, xs)
    if dispatch_modes():
        return traced(steps, xs)
    if profiler._is_profiler_enabled or traffic.observer is not None:
        return _seen(steps, xs, engine_for(steps, xs, recorded))
    plans = (step.plan,) if len(steps) == 1 else plans_of(steps)
    return Exchange(plans, xs, step.world.transport(x, step.ranks)).finish()


def _seen(steps, xs, engine):
    """The same, while torch's profiler or an observer looks."""
    plans = plans_of(steps)
    with ranged(plans, xs, engine) if profiler._is_profiler_enabled else nullcontext():
        ys = Exchange(plans, xs, engine).finish()
    engine.ended()
    return ys


def begin(steps, xs):
    """Start to move tensors ``xs`` by ``steps``, as :func:`together` does, while this rank works: ``(what is under way,
    the tensors that a graph's node is made of)``. Under way is nothing (``None``) where torch.func, or a tracer, has to
    see the whole movement at once."""
    if _torch.transforms_active() or dispatch_modes():
        return None, xs
    xs = checked(steps, xs)
    if not all(map(is_plain, xs)):
        return None, xs
    traffic.begun += 1
    engine = engine_for(steps, xs, torch.is_grad_enabled() and any(x.requires_grad for x in xs))
    moving = begin_exchange(plans_of(steps), [x.detach() for x in xs], engine)
    engine.pause()
    # On a side stream the gradient is joined where the node's inputs are, after what stands in between.
    return moving, [x.view_as(x) for x in xs] if isinstance(moving, Aside) else xs
