"""The one autograd Function of the library, and how a call goes through the levels of torch.func.

A *step* of a linear map is anything with ``T`` (its adjoint), ``ranks``, ``world`` and ``together(steps, xs,
recorded)``, which moves plain tensors. All its rules follow:

    reverse mode      x̄ = Aᵀ ȳ              jvp      ẏ = A ẋ
    double backward   Aᵀᵀ = A, again          vmap     A with one more axis that no partition splits

Both rules are calls of the same Function, so every nesting works. The *tie* keeps ranks together: if one rank's local
loss is linear, its cotangent is a constant, and without more that rank would drop out of the second derivative while
its peers wait for its messages. So the Function has one more output, an empty tensor ``s`` that depends on what y
depends on, and hands it to
Aᵀȳ and Aẋ as inputs: dependence, without a value. A derivative of any order then sends the same messages on every rank.
"""

from __future__ import annotations

from operator import attrgetter

import torch

from . import _torch
from .engine import transport as _transport
from .engine.operators import agree
from .errors import AgreementError, DistdlError


def apply(steps, xs, ties=(), pending=None, tied=None):
    """Apply ``steps[i]`` to ``xs[i]`` as one movement; the only way in to the Function. Returns the results and, last,
    the new tie, or ``None`` where it is a constant. All steps are of one kind over the same ranks.

    It goes from one transform to the next, the innermost first; ``tied`` (on the way): somebody will look at the tie.
    """
    if _transforms_active():
        if tied is None:
            xs, tied = _agree_on_batches(steps, xs, ties), bool(ties)
        transform = _torch.Transform()
        rule = _differentiated if transform.batch_size is None else _batched
        return rule(transform, steps, pending, xs, ties, tied)
    if (_grad_enabled() and any(map(_requires_grad, (*xs, *ties)))) or (
        _forward_mode_active() and _have_tangents(xs, ties)
    ):
        return _record((steps, pending, None), *xs, *ties)
    # Under torch.func a node around this call records it.
    return (*(steps[0].together(steps, xs, bool(tied)) if pending is None else pending.finish()), None)


_transforms_active, _grad_enabled = _torch.transforms_active, torch.is_grad_enabled
_requires_grad = attrgetter("requires_grad")
_forward_mode_active, _dispatch_modes = _torch.forward_mode_active, _torch.dispatch_modes


def _have_tangents(*groups) -> bool:
    return any(_torch.has_tangent(t) for tensors in groups for t in tensors)


def refuse_older_vmap(op, tensors) -> None:
    """torch's vmap from before torch.func, which autograd.grad still offers, gives a Function's rules tensors without
    memory."""
    if any(t is not None and _torch.of_older_vmap(t) for t in tensors):
        raise DistdlError(
            "torch's older vmap does not know custom Functions",
            op=str(op),
            expected="torch.func.vmap",
            actual="is_grads_batched=True, or torch.autograd.functional with vectorize=True",
            next_step="pull = torch.func.vjp(f, x)[1]; torch.func.vmap(pull)(cotangents), or dd.func.jacrev",
        )


_torch.opaque(apply)


_ties: dict = {}  # an empty tensor for each device


def _new_tie(x):
    if _dispatch_modes():  # one of the mode's own kind
        return x.new_empty(0, dtype=torch.float32)
    device = x.device
    if device not in _ties:
        with torch.inference_mode(False):
            _ties[device] = torch.empty(0, device=device)
    return _ties[device].detach()


class _Apply(_torch.SingleLevelFunction):
    """(y_1, ..., y_n, s) = (A_1 x_1, ..., A_n x_n, an empty tie), given x_1 ... x_n and any number of ties.

    ``call``: (the steps, a movement under way or ``None``, a transform or ``None``). Under torch.func one such node
    stands for one grad or jvp, and its forward goes on with what its tensors wrap: torch's own way there costs many
    times a small movement.
    """

    @staticmethod
    def forward(call, *args):
        steps, pending, transform = call
        xs = args[: len(steps)]
        if transform is None:
            return (*(steps[0].together(steps, xs, True) if pending is None else pending.finish()), _new_tie(xs[0]))
        return _further_out(transform, steps, pending, xs, args[len(steps) :], True)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *ys, s = output
        ctx.steps = inputs[0][0]
        ctx.set_materialize_grads(False)  # the tie's own would be made every time, for nothing
        ctx.save_for_backward(s)
        ctx.ys_like = [(y.shape, y.dtype, y.device) for y in ys]
        if _transport.tracer is not None:
            ctx.line = _transport.tracer.line()
        if _forward_mode_active():
            ctx.save_for_forward(s)
            ctx.xs_like = [(x.shape, x.dtype, x.device) for x in inputs[1 : len(ys) + 1]]

    @staticmethod
    def backward(ctx, *grads):
        refuse_older_vmap(ctx.steps[0], grads)
        steps, gs, places = _operands([A.T for A in ctx.steps], grads, ctx.ys_like)
        ties: tuple = ()
        if _grad_enabled() or _transforms_active() or _forward_mode_active():  # further derivatives may be taken
            ties = (_torch.unwrap_if_dead(ctx.saved_tensors[0]), *(t for t in grads[-1:] if t is not None))
        tracer = _transport.tracer
        *found, tie = apply(steps, gs, ties) if tracer is None else tracer.backward(ctx, apply, steps, gs, ties)
        return (None, *_placed(found, places, ctx.steps), *(tie,) * (len(ctx.needs_input_grad) - 1 - len(ctx.steps)))

    @staticmethod
    def jvp(ctx, _call, *tangents):
        refuse_older_vmap(ctx.steps[0], tangents)
        steps, ts, places = _operands(ctx.steps, tangents, ctx.xs_like)
        s = _torch.unwrap_if_dead(ctx.saved_tensors[0])
        ties = (s, *(t for t in tangents[len(ctx.steps) :] if t is not None))
        tracer = _transport.tracer
        *found, tie = apply(steps, ts, ties) if tracer is None else tracer.tangent(ctx, apply, steps, ts, ties)
        return (*_placed(found, places, ctx.steps), s.detach() if tie is None else tie)


def _operands(steps, given, like):
    """(steps, operands, their places): of a call's cotangents or tangents those that have derivatives. Integers have
    none, on any rank; a missing one is zero, ``like`` what it belongs to: (shape, dtype, device)."""
    if len(steps) == 1 and given[0] is not None and given[0].dtype == like[0][1]:
        return steps, given[:1], None
    operands = {}
    for i, (shape, dtype, device) in enumerate(like):
        if dtype.is_floating_point or dtype.is_complex:
            # Of numbers without dims torch makes float64 tangents, on some ranks only: what is sent has the primal's
            # dtype.
            operands[i] = torch.zeros(shape, dtype=dtype, device=device) if given[i] is None else given[i].to(dtype)
    return [steps[i] for i in operands], list(operands.values()), tuple(operands)


def _placed(found, places, steps):
    """The results of :func:`_operands`, one for each map of the call."""
    if places is None or len(places) == len(steps):
        return found
    results = dict(zip(places, found))
    return [results.get(i) for i in range(len(steps))]


_record = _Apply.apply  # type: ignore[attr-defined]


def _differentiated(transform, steps, pending, xs, ties, tied):
    """grad, vjp and jvp: a node of this transform, if it follows any operand."""
    xs, ties = [transform.lift(t) for t in xs], [transform.lift(t) for t in ties]
    if transform.differentiates((*xs, *ties)):
        return transform.record(_record, (steps, pending, transform), *xs, *ties)
    return _further_out(transform, steps, pending, xs, ties, tied)


def _further_out(transform, steps, pending, xs, ties, tied):
    """(*results, tie): the call outside of a grad, vjp or jvp, on what its tensors wrap."""
    inner = [transform.unwrap(t) for t in xs]
    with transform.outside():
        *ys, s = apply(steps, inner, [transform.unwrap(t) for t in ties], pending, tied)
        if s is None and tied:
            s = _new_tie(inner[0])
    return (*(transform.wrap(y) for y in ys), s if s is None else transform.wrap(s))


def _batched(transform, steps, pending, xs, ties, tied):
    """vmap: the batch is the first axis of every operand, and one more axis of the plan."""
    size, n = transform.batch_size, len(xs)
    args, dims = zip(*(transform.unbatch(t) for t in (*xs, *ties)))
    batched = any(d is not None for d in dims)
    if batched:
        xs = [x.expand(size, *x.shape) if d is None else x.movedim(d, 0) if d else x for x, d in zip(args[:n], dims)]
        args = (*xs, *(t if d is None else t.select(d, 0) for t, d in zip(args[n:], dims[n:])))
    with transform.outside():
        *ys, s = apply(steps, args[:n], args[n:], pending, tied)
        if batched and tied:
            # s is batched too: a rank whose cotangent is a constant then still runs this rule, as its peers do.
            s = (_new_tie(args[0]) if s is None else s).expand(size, 0)
    return (*(transform.batch(y) for y in ys), s if s is None else transform.batch(s)) if batched else (*ys, s)


def _agree_on_batches(steps, xs, ties):
    """Under vmap, give every operand each batch that some rank's has: a rank where nothing is batched would send
    messages of another size. One small all-gather, only while a vmap is active."""
    levels = _torch.vmap_levels()
    ranks, where = steps[0].ranks, steps[0].world
    if not levels or len(ranks) < 2 or where.rank not in ranks:
        return xs
    seen = _torch.batching_levels((*xs, *ties))
    mine = [(size, level in seen) for level, size in levels]
    if _dispatch_modes() and _torch.compiling():
        agree(xs[0], where, ranks, mine, steps[0])
        return xs
    theirs = list(where.all_gather(mine, ranks, "sizes of vmap").values())
    if theirs.count(mine) == len(theirs):
        return xs
    sizes = [tuple(size for size, _ in report) for report in theirs]
    if len(set(sizes)) > 1:
        raise AgreementError(
            "the ranks are inside different vmaps",
            op=str(steps[0]),
            rank=where.rank,
            expected="the same batch sizes on every rank",
            actual=dict(zip(ranks, map(list, sizes))),
            next_step="map over axes of one size on all ranks",
            partitions=steps[0].partitions,
        )
    for place, (level, size) in enumerate(levels):
        if any(report[place][1] for report in theirs) and not mine[place][1]:
            mask = _torch.batch_mask(level, size, xs[0].device)
            xs = [torch.where(mask, x, x) for x in xs]
    return xs
