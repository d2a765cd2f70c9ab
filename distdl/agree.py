"""Agreement: how operators called with bare partitions learn the global shape, and find out that ranks disagree.

One small all-gather among the ranks of a call carries each rank's view of it: operator, plain arguments (numbers,
texts), partitions, shapes, dtype, device kind, whether a gradient is wanted, or a local failure. All ranks see the same
of these, so all go on, or all raise the same error. :func:`resolve` is the only place where layouts are negotiated;
with a Layout, or a shape, nothing is.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from . import _torch
from .boxes import balanced
from .calls import public_call
from .engine import transport as _transport
from .errors import AgreementError, DistdlError, ShapeError
from .partition import Layout, Partition, as_layout, partition_of
from .signature import disagreement, names
from .ties import nothing
from .world import world


@dataclass(frozen=True)
class Proposal:
    """What one rank brings to a call.

    ``leaves``: (shape, dtype, device kind) of each tensor; ``tree``: their pytree in words, and one like it, of
    ``None``; ``told``: what else the call's ranks have to hear, which may differ.
    """

    op: str
    partitions: str
    arguments: str
    leaves: tuple
    grads: tuple[bool, ...]
    tangents: tuple[bool, ...]
    levels: tuple
    batches: tuple[int, ...]
    records: bool
    dual: bool
    tree: tuple[str, Any] | None = None
    failure: str | None = None
    told: Any = None


def _proposal(xs, active, places, ndim, tree, arguments, told, alone) -> Proposal:
    failure, leaves, grads, tangents, levels = None, [], [], [], set()
    op, plain_arguments = ("", "") if alone else public_call()  # nobody compares it then
    plain, kinds = not _torch.transforms_active(), dict(_torch.grad_levels())
    for x in xs:
        if not isinstance(x, torch.Tensor):
            failure = failure or (f"expected a tensor, got {type(x).__name__}" if active or x is not None else None)
            continue
        leaves.append((tuple(x.shape), str(x.dtype), x.device.type))
        smooth = x.is_floating_point() or x.is_complex()
        grads.append(smooth and x.requires_grad)
        tangents.append(plain and smooth and _torch.has_tangent(x))
        if smooth:
            tracked = sorted(level for level, kind in _torch.levels_of(x).items() if kind == "tracked")
            levels.add(tuple(f"{kinds[level]} {level}" for level in tracked))
        if active and ndim is not None and x.dim() != ndim:
            failure = failure or f"expected a tensor of {ndim} dims, got shape {tuple(x.shape)}"
    return Proposal(
        op,
        " -> ".join(str(p).splitlines()[0] for p in places),
        ", ".join(dict.fromkeys(filter(None, (plain_arguments, arguments)))),
        tuple(leaves),
        tuple(grads),
        tuple(tangents),
        tuple(sorted(levels)),
        tuple(size for _, size in _torch.vmap_levels()),
        torch.is_grad_enabled(),
        plain and _torch.forward_mode_active(),
        None if tree is None else _in_words(tree, len(xs)),
        failure,
        told,
    )


def _in_words(tree, n):
    frame = _torch.unflatten([None] * n, tree)
    try:
        pickle.dumps(frame)
    except Exception:  # a container that cannot travel: ranks outside then pass one of their own
        frame = None
    return tree.text, frame


def negotiate(xs, P, partitions=(), ndim=None, tree=None, arguments="", told=None):
    """Agree on a call among the ranks of ``P`` (which hold ``xs``, of the pytree ``tree``) and of ``partitions``;
    ``arguments``: whatever else must be equal, in words; ``told``: what goes along, of each rank its own.

    Returns ``(xs, tree, reports)``: the tensors, connected to the graph where any rank's are, with placeholders where
    this rank holds nothing; the holders' pytree; and the reports by rank (``None`` on a rank that takes no part).

    Raises:
        AgreementError: on every rank, when any rank reports a failure or differs.
    """
    places, partitions = (P, *partitions), (P, *[partition_of(p) for p in partitions])
    where = world(P.world)
    where.check(*partitions)
    ranks = tuple(sorted({r for p in partitions for r in p.ranks}))
    active = P.index(where.rank) is not None
    if where.rank not in ranks:
        return [x if isinstance(x, torch.Tensor) else torch.empty(0) for x in xs], tree, None
    mine = _proposal(xs, active, places, ndim, tree, arguments, told, len(ranks) == 1)
    reports = where.all_gather(mine, ranks, "an operator") if len(ranks) > 1 else {where.rank: mine}
    _compare(reports, P, partitions, where.rank)
    return _join(xs, active, reports, P), tree if active else _tree_of(reports[P.ranks[0]], tree), reports


def _tree_of(holder, tree):
    """The pytree that the holders have, whatever a rank that holds nothing passed; an equal one keeps its own order of
    keys."""
    told = holder.tree
    if told is not None and tree is not None and tree.text == told[0]:
        return tree
    return None if told is None else tree if told[1] is None else _torch.flatten(told[1])[1]


def _compare(reports, P, partitions, rank) -> None:
    def equal(what, values):
        if len(set(values.values())) > 1:
            raise AgreementError(**disagreement(what, values), partitions=partitions, rank=rank)

    equal("the operator called", {r: m.op for r, m in reports.items()})
    equal("the partitions", {r: m.partitions for r, m in reports.items()})
    equal("the arguments", {r: m.arguments for r, m in reports.items()})
    failures = {r: m.failure for r, m in reports.items() if m.failure}
    if failures:
        raise AgreementError(
            "not every rank's input fits",
            partitions=partitions,
            rank=rank,
            expected="a block on every rank",
            next_step="pass this rank's block on every rank of the partition",
            actual="; ".join(f"{names([r])}: {text}" for r, text in failures.items()),
        )
    holders = {r: reports[r] for r in P.ranks}
    equal("the number of tensors", {r: len(m.leaves) for r, m in holders.items()})
    equal("the pytree", {r: m.tree[0] if m.tree else "a tensor" for r, m in holders.items()})
    equal("the dtype", {r: ", ".join(leaf[1] for leaf in m.leaves) for r, m in holders.items()})
    equal("the device kind", {r: ", ".join(leaf[2] for leaf in m.leaves) for r, m in holders.items()})
    equal("the number of dims", {r: tuple(len(leaf[0]) for leaf in m.leaves) for r, m in holders.items()})
    equal("the batch sizes (vmap)", {r: m.batches for r, m in reports.items()})
    if any(m.records and any(m.grads) for m in reports.values()):
        equal("whether a graph is recorded", {r: m.records for r, m in reports.items()})
    if any(any(m.tangents) for m in reports.values()):
        equal("whether forward mode is on", {r: m.dual for r, m in reports.items()})
    if any(m.levels not in ((), ((),)) for m in reports.values()):
        # Inside torch.func connections cannot be joined from outside: a rank without one would send nothing back.
        equal("what torch.func differentiates", {r: m.levels for r, m in reports.items() if m.leaves})


def _join(xs, active, reports, P):
    holder = reports[P.ranks[0]]
    joined = []
    for i, (_, dtype, kind) in enumerate(holder.leaves):
        x = xs[i] if i < len(xs) else None
        if not isinstance(x, torch.Tensor):
            x = torch.empty(0)
        dtype = getattr(torch, dtype.removeprefix("torch."))
        if not active and (x.dtype != dtype or x.device.type != kind):
            x = nothing((0,), x, dtype=dtype).to(kind)
        if not _torch.transforms_active() and (x.is_floating_point() or x.is_complex()):
            wanted = torch.is_grad_enabled() and any(any(m.grads[i : i + 1]) for m in reports.values())
            pushed = any(any(m.tangents[i : i + 1]) for m in reports.values())
            x = _connected(x, wanted, pushed)
        joined.append(x)
    return joined


def _connected(x, wanted: bool, pushed: bool):
    """``x``, part of a graph and with a tangent where some rank's is: every rank's derivatives then make the same
    calls."""
    if not (wanted and not x.requires_grad) and not (pushed and not _torch.has_tangent(x)):
        return x
    if not pushed:
        return x.detach().requires_grad_()  # a leaf of this call
    primal, tangent = forward_ad.unpack_dual(x)
    if wanted and not primal.requires_grad:
        primal = primal.detach().requires_grad_()
    return forward_ad.make_dual(primal, torch.zeros_like(primal) if tangent is None else tangent)


def resolve(xs, P, shape=None, others=()):
    """The layouts of tensors ``xs``, one for each: ``(xs, layouts)``; layouts is ``None`` on a rank that takes no
    part."""
    xs, _, layouts = resolve_tree(xs, None, P, shape, others)
    return xs, layouts


def resolve_tree(xs, tree, P, shape=None, others=()):
    """The same for the leaves ``xs`` of a pytree ``tree``: ``(xs, the holders' tree, layouts)``.

    A Layout is taken as it is, and so are a partition and ``shape``. A bare partition is negotiated with the ranks of
    ``P`` and ``others`` (the call's other partitions): block sizes add up to the global shape, whatever they are.
    """
    if isinstance(P, Layout) or shape is not None:
        return xs, tree, [P if shape is None else as_layout(P, shape)] * len(xs)
    P = partition_of(P)
    xs, tree, reports = negotiate(xs, P, others, P.ndim, tree)
    if reports is None:
        return xs, tree, None
    holders = [(P.index(r), reports[r]) for r in P.ranks]
    return xs, tree, [_layout(P, [(c, m.leaves[i][0]) for c, m in holders]) for i in range(len(xs))]


def _layout(P, blocks) -> Layout:
    """The layout of blocks [(coordinates, shape)]."""
    splits = []
    for d in range(P.ndim):
        sizes: dict[int, int] = {}
        for coords, shape in blocks:
            if sizes.setdefault(coords[d], shape[d]) != shape[d]:
                raise AgreementError(
                    f"the blocks do not fit together in dim {d}",
                    partitions=P,
                    expected=f"size {sizes[coords[d]]} at index {coords[d]}",
                    actual=f"{shape[d]} on rank {P.rank_at(coords)}",
                    next_step="ranks with the same coordinate need blocks of the same size",
                )
        splits.append(tuple(sizes[c] for c in range(P.shape[d])))
    return Layout(P, tuple(sum(s) for s in splits), tuple(splits))


def block_sizes(own: int, P: Partition, dim: int, total: int | None) -> tuple[int, ...]:
    """Sizes of a parameter's blocks along partition dim ``dim``, of which this rank's is ``own``: balanced ones of
    ``total``, or, where that is ``None`` and the dim is split, what one small all-gather along it finds."""
    if total is not None or P.shape[dim] == 1:
        return balanced(own if total is None else total, P.shape[dim])
    fibre = P.along(dim)
    if fibre is None:  # all that is known here: what it passed as a first block
        return (own, *(0,) * (P.shape[dim] - 1))
    found = world(P.world).all_gather(own, fibre.ranks, "sizes of a parameter's blocks")
    return tuple(found[r] for r in fibre.ranks)


def alike(P) -> None:
    """Under ``dd.checking()`` compare the arguments of a call that sends no message: ranks that mean different ones
    would not notice."""
    if _transport.observer is not None:
        where = partition_of(P)
        _transport.observer.alike(world(where.world).watch, where)


def check_tensor(x, P) -> None:
    """Raise where ``x`` is not even a tensor, which a rank that takes no part passes too: its result has that dtype and
    device."""
    if not isinstance(x, torch.Tensor):
        raise ShapeError(
            "not a tensor",
            partitions=P,
            expected="a tensor on every rank",
            actual=type(x).__name__,
            next_step="ranks that hold nothing pass any tensor of the dtype and device that the others have",
        )


def outside_shape(x, P) -> tuple[int, ...]:
    """The shape of what a rank that takes no part gets, whatever x it passed: no element, and as many dims as its
    peers'; of a Layout the first block's sizes in all dims but the first."""
    if isinstance(P, Layout):
        return P.local_shape()
    ndim = partition_of(P).ndim
    return (0, *x.shape[1:]) if x.dim() == ndim else (0,) * max(ndim, 1)


def outside(xs, P=None):
    """What a rank that takes no part gets: zero-volume tensors that stay connected, see :func:`outside_shape`;
    ``None``: with as many dims as each of the tensors itself."""
    xs = [x if isinstance(x, torch.Tensor) else torch.empty(0) for x in xs]
    return [nothing((0, *x.shape[1:]) if P is None else outside_shape(x, P), x) for x in xs]


__all__ = [
    "DistdlError",
    "Proposal",
    "alike",
    "block_sizes",
    "check_tensor",
    "negotiate",
    "outside",
    "outside_shape",
    "resolve",
    "resolve_tree",
]

for _function in (alike, block_sizes, negotiate, resolve, resolve_tree):
    _torch.opaque(_function)
