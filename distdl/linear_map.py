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

import torch

from . import _torch, exchange
from . import transport as _transport
from .errors import AgreementError, DistdlError, PartitionError, ShapeError
from .plan import Plan
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
        return max(self.plan.ranks) < self.world.size

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
        return x if self.is_identity else apply(self._single, (x,))[0]

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
        if not isinstance(x, torch.Tensor) or x.shape != self.in_shape:
            raise ShapeError("the local tensor has the wrong shape", op=str(self), expected=self.in_shape,
                             actual=tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__,
                             partitions=self.partitions, next_step="pass a tensor of the map's in_shape, batched by vmap only")
        return apply((self,), (x,))[0]

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
        if y.shape != (*lead, *self.out_shape):
            raise ShapeError("the map returned another shape", op=str(self), expected=(*lead, *self.out_shape),
                             actual=tuple(y.shape), partitions=self.partitions,
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
    return UserMap(forward, adjoint, tuple(in_shape), tuple(out_shape), tuple(sorted(ranks)), batched)


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
    return A.maps if isinstance(A, Chain) else (A,)


# ---------------------------------------------------------------- running maps, with and without a graph


def apply(maps, xs, ties=(), pending=None):
    """Apply ``maps[i]`` to ``xs[i]`` as one movement; the only way in to the Function. Returns the results and, last, the new tie,
    or ``None`` where no derivative will be taken. All maps are of one kind over the same ranks.
    """
    if _transforms_active():
        xs = _agree_on_batches(maps, xs, ties)
        vmap = _torch.innermost_vmap()
        if vmap is not None:
            return _apply_under_vmap(vmap, maps, xs, ties, pending)
        return _Apply.apply(maps, pending, len(xs), *xs, *ties)
    if _forward_mode_active() or (_grad_enabled() and _require_grad(xs, ties)):
        return _fast_apply(maps, pending, len(xs), *xs, *ties)
    return [*_run(maps, xs, pending), None]


_transforms_active, _grad_enabled = _torch.transforms_active, torch.is_grad_enabled
_forward_mode_active, _dispatch_modes = _torch.forward_mode_active, _torch.dispatch_modes


def _require_grad(*groups) -> bool:
    for tensors in groups:
        for t in tensors:
            if t.requires_grad:
                return True
    return False


def _run(maps, xs, pending=None, recorded=False):
    """The movement itself, on plain tensors; ``recorded``: a graph holds its adjoint."""
    if pending is not None:
        return pending.finish()
    return traced_move(maps, xs) if _dispatch_modes() else run_plain(maps, xs, recorded)


def run_plain(maps, xs, recorded=False):
    """Move plain tensors, outside any trace."""
    first = maps[0]
    if any(x.layout is not torch.strided or x.is_quantized for x in xs):
        raise ShapeError("only dense tensors can be moved", op=str(first), rank=first.world.rank, expected=torch.strided,
                         actual=[str(x.layout) for x in xs], next_step="x.to_dense(), or move a sparse tensor's parts")
    if type(first) is UserMap:
        return [m.run(x) for m, x in zip(maps, xs)]
    plans = first._plans if len(maps) == 1 else tuple(m.plan for m in maps)
    transport = first.world.transport(xs[0], first.plan.ranks)
    if _transport.observer is not None:
        transport = _transport.observer.movement(first.world.host, transport, maps, xs, recorded)
    return exchange.run(plans, xs, transport)


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


class _Apply(torch.autograd.Function):
    """(y_1, ..., y_n, s) = (A_1 x_1, ..., A_n x_n, an empty tie), given x_1 ... x_n and any number of ties."""

    @staticmethod
    def forward(maps, pending, n, *args):
        xs = args[:n]
        return (*_run(maps, xs, pending, True), _new_tie(xs[0]))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.maps, n = inputs[0], inputs[2]
        ctx.n, ctx.ties = n, len(inputs) - 3 - n
        # Integer tensors have no derivative, on any rank; the rules then move the others only.
        ctx.smooth = [i for i in range(n) if inputs[3 + i].is_floating_point() or inputs[3 + i].is_complex()]
        ctx.save_for_backward(output[n])
        if _transforms_active() or _forward_mode_active():
            ctx.save_for_forward(output[n])

    @staticmethod
    def backward(ctx, *grads):
        smooth = ctx.smooth
        _refuse_older_vmap(ctx.maps[0], grads)
        ties: tuple = ()
        if _grad_enabled() or _transforms_active() or _forward_mode_active():  # further derivatives may be taken
            ties = (_torch.unwrap_if_dead(ctx.saved_tensors[0]), grads[-1])
        *found, tie = apply([ctx.maps[i].T for i in smooth], [grads[i] for i in smooth], ties)
        x_grads = [None] * ctx.n
        for i, g in zip(smooth, found):
            x_grads[i] = g
        return (None, None, None, *x_grads, *(tie,) * ctx.ties)

    @staticmethod
    def jvp(ctx, _maps, _pending, _n, *tangents):
        _refuse_older_vmap(ctx.maps[0], tangents)
        s = _torch.unwrap_if_dead(ctx.saved_tensors[0])
        ties = (s, *tangents[ctx.n :])
        *found, tie = apply([ctx.maps[i] for i in ctx.smooth], [tangents[i] for i in ctx.smooth], ties)
        y_tangents = [None] * ctx.n
        for i, t in zip(ctx.smooth, found):
            y_tangents[i] = t
        return (*y_tangents, tie)

    @staticmethod
    def vmap(info, in_dims, maps, pending, n, *args):
        size = info.batch_size
        xs, ties = _with_batch(size, args, in_dims[3:], n)
        *ys, s = apply(maps, xs, ties)
        # s is batched too: a rank whose cotangent is a constant then still runs this rule, as its peers do.
        return (*ys, (_new_tie(xs[0]) if s is None else s).expand(size, 0)), (0,) * (n + 1)


def _with_batch(size, args, dims, n):
    """Operands with the batch as their first axis, and one tie of each batch of ties: the batch is one more axis of the plan."""
    xs = [x.expand(size, *x.shape) if d is None else x.movedim(d, 0) for x, d in zip(args[:n], dims)]
    return xs, [t if d is None else t.select(d, 0) for t, d in zip(args[n:], dims[n:])]


def _apply_under_vmap(vmap, maps, xs, ties, pending):
    """The vmap rule where vmap is the innermost transform: torch's general way to it costs many times a small movement."""
    level, size, n = vmap.level(), vmap.batch_size(), len(xs)
    args, dims = zip(*(_torch.unwrap_batched(t, level) for t in (*xs, *ties)))
    with vmap.lower():
        if all(d is None for d in dims):
            return apply(maps, xs, ties, pending)
        *ys, tie = apply(maps, *_with_batch(size, args, dims, n))
        if ties:
            ys.append((_new_tie(args[0]) if tie is None else tie).expand(size, 0))
    ys = [_torch.add_batch_dim(y, 0, level) for y in ys]
    return ys if ties else [*ys, None]


_fast_apply = _torch.fast_apply(_Apply)


def _agree_on_batches(maps, xs, ties):
    """Under vmap, give every operand each batch that some rank's has: torch skips the vmap rule where nothing is batched, and
    such a rank would send messages of another size. One small all-gather, only while a vmap is active."""
    levels = _torch.vmap_levels()
    ranks, where = maps[0].ranks, maps[0].world
    if not levels or len(ranks) < 2 or where.rank not in ranks:
        return xs
    seen: dict[int, str] = {}
    for x in (*xs, *ties):
        seen.update(_torch.levels_of(x))
    mine = [(size, seen.get(level) == "batched") for level, size in levels]
    theirs = where.all_gather(mine, ranks, "sizes of vmap").values()
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


# ---------------------------------------------------------------- dependence without a value


def _flat(t):
    """``t`` in one dim; not ``reshape(-1)``, which cannot tell the size inside a vmap over nothing."""
    return t.reshape(t.numel())


def _hooks(tensors):
    """Empty views of the differentiable ones among ``tensors``, of two dims: torch.cat's gradient for an empty tensor of one dim is
    a constant, which would cut it off in the second derivative."""
    for t in tensors:
        if t.is_complex():
            t = torch.view_as_real(t.resolve_conj())
        if t.is_floating_point():
            yield _flat(t)[:0].unsqueeze(1)


def nothing(shape, *tensors, dtype=None):
    """A tensor without elements that depends on ``tensors``: a placeholder that stays part of the graph.

    Args:
        shape: its shape; one size at least must be 0. ``F.nothing((0,), y).sum()`` is a rank's connected zero loss.
        tensors: what it depends on; the first gives dtype and device.
        dtype: another dtype.

    Raises:
        ShapeError: the shape has elements.
    """
    if 0 not in shape:
        raise ShapeError("this shape has elements", op="nothing", expected="a size 0", actual=tuple(shape),
                         next_step="give a shape with a 0 in it, such as (0,)")
    first, *others = tensors
    empty = tie(_flat(first)[:0], *others)
    return (empty if dtype is None else empty.to(dtype)).reshape(shape)


def tie(value, *tensors):
    """``value``, made to depend on ``tensors`` without changing, not even where they hold NaN.

    For outputs that this rank, or only some ranks, do not use: the peers of an operator whose output is dropped wait for a
    backward that never comes. ``F.tie(loss, unused)`` makes it come, with cotangent zero.
    """
    hooks = [h.to(value.dtype) for h in _hooks(tensors)]
    return torch.cat([_flat(value).unsqueeze(1), *hooks]).reshape(value.shape) if hooks else value


# ---------------------------------------------------------------- the movement as a torch operator, for tracing

_library = torch.library.Library("distdl", "DEF")
_library.define("move(Tensor[] xs, str movement) -> Tensor[]")
_traced: dict[str, tuple] = {}


def traced_move(maps, xs):
    """The movement as the operator ``distdl::move``, which make_fx and linearize record."""
    if isinstance(maps[0], UserMap):
        return [m.run(x) for m, x in zip(maps, xs)]
    name = "; ".join(f"{m} {m.plan.digest}" for m in maps)
    _traced[name] = tuple(maps)
    observer = _transport.observer
    if observer is None:
        return torch.ops.distdl.move(list(xs), name)
    before, observer.tracing = observer.tracing, True
    try:
        return torch.ops.distdl.move(list(xs), name)
    finally:
        observer.tracing = before


def _move_real(xs, movement):
    return run_plain(_traced[movement], xs)


def _move_fake(xs, movement):
    maps = _traced[movement]
    return [x.new_empty((*x.shape[: x.dim() - len(m.in_shape)], *m.out_shape)) for m, x in zip(maps, xs)]


def _move_autograd(xs, movement):
    # Alone the operator would have gradient zero and tangent zero, silently: only the Function above may call it.
    if (torch.is_grad_enabled() and any(x.requires_grad for x in xs)) or any(_torch.has_tangent(x) for x in xs):
        raise AgreementError("distdl::move has no derivative of its own", op="move", actual=movement,
                             next_step="call the map (or the function in distdl.functional) instead",
                             expected="a tensor without gradient and tangent")
    with _torch.below_autograd():
        return torch.ops.distdl.move(xs, movement)


def _move_vmap(info, in_dims, xs, movement):
    # A pullback of linearize, or any trace, under vmap: the batch is one more leading axis of the plans.
    given = [x.expand(info.batch_size, *x.shape) if d is None else x.movedim(d, 0) for x, d in zip(xs, in_dims[0])]
    ys = torch.ops.distdl.move(given, movement)
    return ys, [0] * len(ys)


for _key in ("CPU", "CUDA"):
    _library.impl("move", _move_real, _key)
_library.impl("move", _move_autograd, "Autograd")
torch.library.register_fake("distdl::move", _move_fake, lib=_library)
torch.library.register_vmap("distdl::move", _move_vmap, lib=_library)
torch.fx.node.has_side_effect(torch.ops.distdl.move.default)  # its messages count, also where its output is not used
