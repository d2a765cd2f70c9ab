"""Linear maps between distributed tensors, and the one autograd Function of the library.

A :class:`LinearMap` is a pair of plans: what it does, and what its adjoint does. All its rules follow:

    reverse mode      x̄ = Aᵀ ȳ              jvp      ẏ = A ẋ
    double backward   Aᵀᵀ = A, again          vmap     A with one more axis that no partition splits

Both rules are calls of the same Function, so every nesting works. The *tie* keeps ranks together: if one rank's local loss is
linear, its cotangent is a constant, and without more that rank would drop out of the second derivative while its peers wait
for its messages. So the Function has one more output, an empty tensor ``s`` that depends on what y depends on, and hands it to
Aᵀȳ and Aẋ as inputs: dependence, without a value. A derivative of any order then sends the same messages on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from operator import index as as_int

import torch

from . import _torch, run, transport
from .errors import AgreementError, DistdlError, PartitionError, ShapeError
from .plan import Plan
from .ties import nothing
from .world import world


@dataclass(frozen=True)
class Space:
    """One side of a map. *Varying*: copies are distinct components. *Invariant*: one value stored ``copies`` times, whose
    inner product counts it once, so that each copy weighs 1/copies."""

    copies: int = 1

    @property
    def kind(self) -> str:
        """``"varying"`` or ``"invariant"``."""
        return "varying" if self.copies == 1 else "invariant"

    @property
    def weight(self) -> float:
        """Weight of one copy in the inner product."""
        return 1 / self.copies


VARYING = Space()


@dataclass(frozen=True)
class LinearMap:
    """A linear map and its adjoint, between the products of the ranks' local tensors (arXiv:2006.03108, section 2).

    Call it with this rank's tensor (shape :attr:`in_shape`; ignored where the rank holds nothing) to get this rank's result
    (shape :attr:`out_shape`). ``A.T`` is the adjoint, ``A.T.T == A``, and ``B @ A`` the composition.

    Attributes:
        name: the movement's name; shown in errors and by ``count_messages``.
        plan, adjoint: what ``A(x)`` and ``A.T(y)`` do.
        domain, range: whether inputs and outputs are varying or invariant.
        transposed: whether this is the adjoint of the movement that ``name`` says.
    """

    name: str
    plan: Plan
    adjoint: Plan
    domain: Space = VARYING
    range: Space = VARYING
    transposed: bool = False

    @cached_property
    def world(self):
        """The world of the map's ranks."""
        return world(self.plan.held.partition.world)

    @cached_property
    def in_shape(self) -> tuple[int, ...]:
        """Shape of this rank's input."""
        return self.plan.view(self.world.rank).in_shape

    @cached_property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of this rank's output."""
        return self.plan.view(self.world.rank).out_shape

    @cached_property
    def active(self) -> bool:
        """Whether this rank holds some of the input."""
        return self.plan.held.partition.index(self.world.rank) is not None

    @cached_property
    def is_identity(self) -> bool:
        """Whether the map and its adjoint leave every rank's tensor as it is."""
        return self.plan.is_identity() and self.adjoint.is_identity()

    @cached_property
    def _fits(self) -> bool:
        held, wanted = self.plan.held.partition, self.plan.wanted.partition
        return held.world == wanted.world and max(self.plan.ranks) < self.world.size

    @cached_property
    def _single(self):
        return (self,)

    @cached_property
    def _plans(self):
        return (self.plan,)

    @cached_property
    def T(self) -> LinearMap:
        """The adjoint."""
        other = LinearMap(self.name, self.adjoint, self.plan, self.range, self.domain, not self.transposed)
        other.__dict__["T"] = self
        return other

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that a call runs, in order; a map that moves nothing has none."""
        return () if self.plan.is_identity() else (self.plan,)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part, sorted."""
        return self.plan.ranks

    def __call__(self, x):
        """Apply the map to this rank's tensor. Returns fresh memory, unless the map is the identity on every rank.

        Raises:
            ShapeError: ``x`` is not a tensor of shape :attr:`in_shape` (where this rank holds something).
        """
        x = self.operand(x)
        return x if self.is_identity else apply(self._single, (x,))[0]

    def operand(self, x):
        """``x`` as what this rank puts in: checked, or a placeholder where it holds nothing."""
        if not self._fits:
            self.world.check(str(self), self.plan.held.partition, self.plan.wanted.partition)
        if not isinstance(x, torch.Tensor):
            raise ShapeError("not a tensor", op=str(self), partitions=self.partitions,
                             expected=f"a tensor of shape {self.in_shape}", actual=type(x).__name__, rank=self.world.rank,
                             next_step="ranks that hold nothing pass any tensor of the dtype and device that the others have")
        if self.active:
            if x.shape != self.in_shape:
                raise ShapeError("the local tensor has the wrong shape", op=str(self), partitions=self.partitions,
                                 expected=self.in_shape, actual=tuple(x.shape), rank=self.world.rank,
                                 next_step="pass this rank's block: layout.shard(x_global) or layout.local_shape()")
        elif x.shape != self.in_shape:
            x = nothing(self.in_shape, x)
        return x

    def __matmul__(self, other) -> LinearMap | Chain:
        return Chain(maps_of(other) + maps_of(self))

    def simulate(self, shards):
        """All ranks in this process: blocks in the order of the held partition to blocks in the order of the wanted."""
        return self.plan.simulate(shards)

    @property
    def partitions(self) -> str:
        """Source and destination, for messages."""
        held, wanted = (str(s.partition).splitlines()[0] for s in (self.plan.held, self.plan.wanted))
        return held if held == wanted else f"{held} -> {wanted}"

    def __str__(self):
        return self.name + (".T" if self.transposed else "")

    def __repr__(self):
        return f"LinearMap({self}: {self.in_shape} -> {self.out_shape}, {self.domain.kind} -> {self.range.kind})"

    def __getstate__(self):
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class UserMap:
    """A user's own pair, see :func:`linear_map`."""

    forward: Callable
    backward: Callable
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    batched: bool
    world_name: str = "default"
    domain: Space = VARYING
    range: Space = VARYING

    plans: tuple[Plan, ...] = ()

    @property
    def world(self):
        """The world of :attr:`ranks`."""
        return world(self.world_name)

    @property
    def partitions(self) -> str:
        """Its ranks, for messages."""
        return f"ranks {self.ranks}" if self.ranks else "each rank alone"

    @property
    def T(self) -> UserMap:
        """The adjoint."""
        return replace(self, forward=self.backward, backward=self.forward, in_shape=self.out_shape,
                       out_shape=self.in_shape, domain=self.range, range=self.domain)

    def __call__(self, x):
        return apply((self,), (self.operand(x),))[0]

    def operand(self, x):
        """``x``, checked."""
        if not isinstance(x, torch.Tensor) or x.shape != self.in_shape:
            raise ShapeError("the local tensor has the wrong shape", op=str(self), expected=self.in_shape,
                             actual=tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__,
                             partitions=self.partitions, next_step="pass a tensor of the map's in_shape, batched by vmap only")
        return x

    def __matmul__(self, other) -> Chain:
        return Chain(maps_of(other) + maps_of(self))

    def __str__(self):
        return f"linear_map({getattr(self.forward, '__name__', 'forward')})"

    def run(self, x):
        """The pair's forward on a tensor with any number of leading batch axes."""
        lead = x.shape[: x.dim() - len(self.in_shape)]
        if not lead or self.batched:
            y = self.forward(x)
        elif 0 in lead:
            y = x.new_empty((*lead, *self.out_shape))
        else:
            flat = x.reshape(-1, *self.in_shape)
            y = torch.stack([self.forward(one) for one in flat]).reshape(*lead, *self.out_shape)
        if not isinstance(y, torch.Tensor) or y.shape != (*lead, *self.out_shape):
            raise ShapeError("the map returned another shape", op=str(self), expected=(*lead, *self.out_shape),
                             actual=tuple(y.shape) if isinstance(y, torch.Tensor) else type(y).__name__, partitions=self.partitions,
                             next_step="let the function return out_shape, after the batch axes that it was given")
        return y.clone() if y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() else y


def linear_map(forward, adjoint, in_shape, out_shape, *, ranks=(), batched: bool = False) -> UserMap:
    """A user's own linear map and its adjoint, with every transform.

    Args:
        forward: this rank's part of y = A x, from a tensor of ``in_shape`` to one of ``out_shape``. Must be linear, and run
            the same movements on every rank.
        adjoint: x = Aᴴ y (for real entries Aᵀ); check the pair with ``dd.testing.dot_test``.
        in_shape, out_shape: this rank's local shapes.
        ranks: the ranks that exchange messages inside, if any; they then agree on batches under vmap.
        batched: both functions take any number of leading batch axes. Otherwise a batch runs one by one.
    """
    try:
        first, last, members = (tuple(map(as_int, numbers)) for numbers in (in_shape, out_shape, ranks))
    except TypeError:
        raise ShapeError("shapes and ranks must be sequences of integers", op="linear_map", expected="integers",
                         actual=(in_shape, out_shape, ranks), next_step="linear_map(f, fT, (3,), (2,), ranks=(0, 1))") from None
    if not callable(forward) or not callable(adjoint):
        raise ShapeError("forward and adjoint must be functions", op="linear_map", expected="two functions of a tensor",
                         actual=(forward, adjoint), next_step="linear_map(lambda x: 2 * x, lambda y: 2 * y, (3,), (3,))")
    return UserMap(forward, adjoint, first, last, tuple(sorted(members)), batched)


@dataclass(frozen=True)
class Chain:
    """A composition: ``maps`` in the order in which they run."""

    maps: tuple

    def __post_init__(self):
        for a, b in zip(self.maps, self.maps[1:]):
            if a.out_shape != b.in_shape or a.range.kind != b.domain.kind:
                raise PartitionError("these maps do not compose", op=f"{b} @ {a}", rank=b.world.rank,
                                     expected=f"{b.domain.kind} {b.in_shape}", actual=f"{a.range.kind} {a.out_shape}",
                                     partitions=[a.partitions, b.partitions],
                                     next_step="put a map between them: repartition, or mark_varying for an invariant value")

    @property
    def T(self) -> Chain:
        """The adjoint: the adjoints in reverse order."""
        return Chain(tuple(m.T for m in reversed(self.maps)))

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans, in the order in which they run."""
        return tuple(p for m in self.maps for p in m.plans)

    in_shape = property(lambda self: self.maps[0].in_shape, doc="This rank's input shape.")
    out_shape = property(lambda self: self.maps[-1].out_shape, doc="This rank's output shape.")
    domain = property(lambda self: self.maps[0].domain, doc="Kind of the input.")
    range = property(lambda self: self.maps[-1].range, doc="Kind of the output.")
    world = property(lambda self: self.maps[0].world, doc="The world of the maps.")
    operand = property(lambda self: self.maps[0].operand, doc="See :meth:`LinearMap.operand`.")

    def __call__(self, x):
        for m in self.maps:
            x = m(x)
        return x

    def __matmul__(self, other) -> Chain:
        return Chain(maps_of(other) + maps_of(self))

    def simulate(self, shards):
        """All ranks in this process, one map after the other."""
        for m in self.maps:
            shards = m.simulate(shards)
        return shards


def maps_of(A) -> tuple:
    """The maps that A runs, in order: itself, or a chain's."""
    if not isinstance(A, (LinearMap, UserMap, Chain)):
        raise PartitionError("not a linear map", op="@", expected="a map of dd.maps or dd.linear_map", actual=type(A).__name__,
                             partitions=None, next_step="B @ A composes maps; apply one to a tensor by A(x)")
    return A.maps if isinstance(A, Chain) else (A,)


# ---------------------------------------------------------------- running maps, with and without a graph


def apply(maps, xs, ties=(), pending=None, tied=None):
    """Apply ``maps[i]`` to ``xs[i]`` as one movement; the only way in to the Function. Returns the results and, last, the new tie,
    or ``None`` where it is a constant. All maps are of one kind over the same ranks.

    It goes from one transform to the next, the innermost first; ``tied`` (on the way): somebody will look at the tie.
    """
    if _transforms_active():
        if tied is None:
            xs, tied = _agree_on_batches(maps, xs, ties), bool(ties)
        transform = _torch.Transform()
        rule = _differentiated if transform.batch_size is None else _batched
        return rule(transform, maps, pending, xs, ties, tied)
    if (_grad_enabled() and _require_grad(xs, ties)) or (_forward_mode_active() and _have_tangents(xs, ties)):
        return _record((maps, pending, None), *xs, *ties)
    return (*_run(maps, xs, pending, bool(tied)), None)  # under torch.func a node around this call records it


_transforms_active, _grad_enabled = _torch.transforms_active, torch.is_grad_enabled
_forward_mode_active, _dispatch_modes, _is_plain = _torch.forward_mode_active, _torch.dispatch_modes, _torch.is_plain


def _require_grad(*groups) -> bool:
    for tensors in groups:
        for t in tensors:
            if t.requires_grad:
                return True
    return False


def _have_tangents(*groups) -> bool:
    return any(_torch.has_tangent(t) for tensors in groups for t in tensors)


def _run(maps, xs, pending, recorded):
    """The movement itself, on plain tensors; ``recorded``: a graph holds its adjoint."""
    transport.begun += 1
    if pending is not None:
        return pending.finish()
    ordinary = len(xs) == 1 and _is_plain(xs[0])  # nearly always
    if not ordinary:
        xs = run.checked(maps, xs)
    if type(maps[0]) is UserMap:
        return [m.run(x) for m, x in zip(maps, xs)]
    traced = _dispatch_modes() or not (ordinary or all(map(_is_plain, xs)))
    return run.traced(maps, xs) if traced else run.plain(maps, xs, recorded)


def _refuse_older_vmap(op, tensors) -> None:
    """torch's vmap from before torch.func, which autograd.grad still offers, gives a Function's rules tensors without memory."""
    if any(t is not None and _torch.of_older_vmap(t) for t in tensors):
        raise DistdlError("torch's older vmap does not know custom Functions", op=str(op), expected="torch.func.vmap",
                          actual="is_grads_batched=True, or torch.autograd.functional with vectorize=True",
                          next_step="pull = torch.func.vjp(f, x)[1]; torch.func.vmap(pull)(cotangents), or dd.func.jacrev")


for _function in (LinearMap.__call__, UserMap.__call__, apply):
    _torch.opaque(_function)


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

    ``call``: (the maps, a movement under way or ``None``, a transform or ``None``). Under torch.func one such node stands for one
    grad or jvp, and its forward goes on with what its tensors wrap: torch's own way there costs many times a small movement.
    """

    @staticmethod
    def forward(call, *args):
        maps, pending, transform = call
        xs = args[: len(maps)]
        if transform is None:
            return (*_run(maps, xs, pending, True), _new_tie(xs[0]))
        return _further_out(transform, maps, pending, xs, args[len(maps) :], True)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *ys, s = output
        ctx.maps = inputs[0][0]
        ctx.set_materialize_grads(False)  # the tie's own would be made every time, for nothing
        ctx.save_for_backward(s)
        ctx.ys_like = [(y.shape, y.dtype, y.device) for y in ys]
        if _forward_mode_active():
            ctx.save_for_forward(s)
            ctx.xs_like = [(x.shape, x.dtype, x.device) for x in inputs[1 : len(ys) + 1]]

    @staticmethod
    def backward(ctx, *grads):
        _refuse_older_vmap(ctx.maps[0], grads)
        maps, gs, places = _operands([A.T for A in ctx.maps], grads, ctx.ys_like)
        ties: tuple = ()
        if _grad_enabled() or _transforms_active() or _forward_mode_active():  # further derivatives may be taken
            ties = (_torch.unwrap_if_dead(ctx.saved_tensors[0]), *(t for t in grads[-1:] if t is not None))
        *found, tie = apply(maps, gs, ties)
        return (None, *_placed(found, places, ctx.maps), *(tie,) * (len(ctx.needs_input_grad) - 1 - len(ctx.maps)))

    @staticmethod
    def jvp(ctx, _call, *tangents):
        _refuse_older_vmap(ctx.maps[0], tangents)
        maps, ts, places = _operands(ctx.maps, tangents, ctx.xs_like)
        s = _torch.unwrap_if_dead(ctx.saved_tensors[0])
        *found, tie = apply(maps, ts, (s, *(t for t in tangents[len(ctx.maps) :] if t is not None)))
        return (*_placed(found, places, ctx.maps), s.detach() if tie is None else tie)


def _operands(maps, given, like):
    """(maps, operands, their places): of a call's cotangents or tangents those that have derivatives. Integers have none, on any
    rank; a missing one is zero, ``like`` what it belongs to: (shape, dtype, device)."""
    if len(maps) == 1 and given[0] is not None and given[0].dtype == like[0][1]:
        return maps, given[:1], None
    operands = {}
    for i, (shape, dtype, device) in enumerate(like):
        if dtype.is_floating_point or dtype.is_complex:
            # Of numbers without dims torch makes float64 tangents, on some ranks only: what is sent has the primal's dtype.
            operands[i] = torch.zeros(shape, dtype=dtype, device=device) if given[i] is None else given[i].to(dtype)
    return [maps[i] for i in operands], list(operands.values()), tuple(operands)


def _placed(found, places, maps):
    """The results of :func:`_operands`, one for each map of the call."""
    if places is None or len(places) == len(maps):
        return found
    results = dict(zip(places, found))
    return [results.get(i) for i in range(len(maps))]


_record = _Apply.apply  # type: ignore[attr-defined]


def _differentiated(transform, maps, pending, xs, ties, tied):
    """grad, vjp and jvp: a node of this transform, if it follows any operand."""
    xs, ties = [transform.lift(t) for t in xs], [transform.lift(t) for t in ties]
    if transform.differentiates((*xs, *ties)):
        return transform.record(_record, (maps, pending, transform), *xs, *ties)
    return _further_out(transform, maps, pending, xs, ties, tied)


def _further_out(transform, maps, pending, xs, ties, tied):
    """(*results, tie): the call outside of a grad, vjp or jvp, on what its tensors wrap."""
    inner = [transform.unwrap(t) for t in xs]
    with transform.outside():
        *ys, s = apply(maps, inner, [transform.unwrap(t) for t in ties], pending, tied)
        if s is None and tied:
            s = _new_tie(inner[0])
    return (*(transform.wrap(y) for y in ys), s if s is None else transform.wrap(s))


def _batched(transform, maps, pending, xs, ties, tied):
    """vmap: the batch is the first axis of every operand, and one more axis of the plan."""
    size, n = transform.batch_size, len(xs)
    args, dims = zip(*(transform.unbatch(t) for t in (*xs, *ties)))
    batched = any(d is not None for d in dims)
    if batched:
        xs = [x.expand(size, *x.shape) if d is None else x.movedim(d, 0) if d else x for x, d in zip(args[:n], dims)]
        args = (*xs, *(t if d is None else t.select(d, 0) for t, d in zip(args[n:], dims[n:])))
    with transform.outside():
        *ys, s = apply(maps, args[:n], args[n:], pending, tied)
        if batched and tied:
            # s is batched too: a rank whose cotangent is a constant then still runs this rule, as its peers do.
            s = (_new_tie(args[0]) if s is None else s).expand(size, 0)
    return (*(transform.batch(y) for y in ys), s if s is None else transform.batch(s)) if batched else (*ys, s)


def _agree_on_batches(maps, xs, ties):
    """Under vmap, give every operand each batch that some rank's has: a rank where nothing is batched would send messages of
    another size. One small all-gather, only while a vmap is active."""
    levels = _torch.vmap_levels()
    ranks, where = maps[0].ranks, maps[0].world
    if not levels or len(ranks) < 2 or where.rank not in ranks:
        return xs
    seen = _torch.batching_levels((*xs, *ties))
    mine = [(size, level in seen) for level, size in levels]
    theirs = list(where.all_gather(mine, ranks, "sizes of vmap").values())
    if theirs.count(mine) == len(theirs):
        return xs
    sizes = [tuple(size for size, _ in report) for report in theirs]
    if len(set(sizes)) > 1:
        raise AgreementError("the ranks are inside different vmaps", op=str(maps[0]), rank=where.rank,
                             expected="the same batch sizes on every rank", actual=dict(zip(ranks, map(list, sizes))),
                             next_step="map over axes of one size on all ranks", partitions=maps[0].partitions)
    for place, (level, size) in enumerate(levels):
        if any(report[place][1] for report in theirs) and not mine[place][1]:
            mask = _torch.batch_mask(level, size, xs[0].device)
            xs = [torch.where(mask, x, x) for x in xs]
    return xs
