"""Tools to test distributed operators, your own included. All of them are collective: call them on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.func import jvp, vjp, vmap

from ._arguments import check_functions
from ._types import Dims, Place
from .calls import public
from .engine import transport as traffic
from .errors import InvariantError, PartitionError
from .held import holders, named
from .linear_map import LinearMap
from .pair import Pair
from .partition import partition_of
from .signature import fingerprint, names
from .world import world

__all__ = [
    "assert_copies",
    "check_grads",
    "check_map",
    "collective_assert",
    "count_messages",
    "dot_test",
    "gather_objects",
]


class Messages(list[tuple[str, Any, int]]):
    """What was sent: (kind, peer or group of ranks, bytes). Kinds: "send", the engine's collectives ("all_reduce",
    "all_gather", "reduce_scatter"; bytes are one rank's share), and "agree" (small all-gathers). Where several boxes
    make one message, each begins at a multiple of 64 bytes, and the gaps count."""

    def of(self, kind: str) -> list[tuple[str, Any, int]]:
        """Those of one kind."""
        return [m for m in self if m[0] == kind]

    @property
    def sends(self) -> int:
        """How many point-to-point messages this rank sent."""
        return len(self.of("send"))

    @property
    def bytes(self) -> int:
        """How many bytes of tensors this rank sent, or put into collectives."""
        return sum(size for kind, _, size in self if kind != "agree")


@contextmanager
def count_messages() -> Iterator[Messages]:
    """Count and list what this rank sends inside the block: ``with count_messages() as sent: ...; sent.sends``.
    It sends nothing itself, and no error is its own.

    Example:
        >>> A = dd.maps.roll(dd.Layout(dd.Partition((1,)), (3,)), 0, 1)
        >>> with dd.testing.count_messages() as sent:
        ...     y = A(torch.ones(3))
        ...
        >>> len(sent)  # of one rank none
        0
    """
    outer, inner = traffic.log, Messages()
    traffic.log = inner
    try:
        yield inner
    finally:
        traffic.log = outer
        if outer is not None:
            outer.extend(inner)


def gather_objects(value: Any, ranks: Sequence[int] | None = None, world_name: str = "default") -> list[Any]:
    """Every rank's (picklable) value, in the order of ``ranks`` (sorted; default: the whole world).

    Messages: one small all-gather of the pickled values; numbers, texts, small tensors of any shape.

    Raises:
        ShapeError: ranks that are not of the world.

    Example:
        >>> dd.testing.gather_objects("of this rank")
        ['of this rank']
    """
    where = world(world_name)
    ranks = tuple(range(where.size)) if ranks is None else tuple(ranks)
    if where.rank not in ranks:
        raise PartitionError(
            "this rank is none of those that gather",
            expected=f"ranks with {where.rank} among them",
            actual=ranks,
            next_step="call it on these ranks alone, or leave ranks out",
        )
    return list(where.all_gather(value, ranks, "gather_objects").values())


def collective_assert(condition: object, message: object = "", ranks: Sequence[int] | None = None) -> None:
    """Assert on all ranks together: when one fails, every rank raises, and the error says which and why.

    Messages: one small all-gather of a truth value and a text, of any shape of condition.

    Raises:
        AssertionError: on all of the ranks, where it is false on one of them.

    Example:
        >>> dd.testing.collective_assert(1 + 1 == 2, "every rank hears of it")
    """
    reports = gather_objects((bool(condition), str(message)), ranks)
    failed = {r: text for r, (ok, text) in zip(ranks or range(len(reports)), reports) if not ok}
    assert not failed, f"failed on {len(failed)} of {len(reports)} ranks: {failed}"


def assert_copies(tensors: Any, P: Place, dims: Dims = None) -> None:
    """Assert that what ranks hold as copies of one tensor is equal to the last bit, and say by name what is not.

    Args:
        tensors: a module (its parameters and buffers), or a pytree of tensors, such as a dictionary. Parameters of
            ``dd.nn`` know on which ranks they are copies, and of what blocks; all others are copies on every rank.
        P, dims: the ranks: the fibre along partition dims ``dims`` (None: all).

    Raises:
        InvariantError: on every rank: copies differ, or have other shapes or dtypes; or ranks have tensors of other
            names.

    Messages: one small all-gather of checksums.

    Example:
        >>> dd.testing.assert_copies(torch.ones(2), dd.Partition((1,)))
    """
    R = partition_of(P).along(dims)
    if R is None:
        return
    leaves, where = named(tensors), world(R.world)
    own: dict[str, tuple[tuple[int, ...], Any, str]] = {}  # {name: (block, its bits, how it shows)}
    for (name, t), how in zip(leaves.items(), holders(list(leaves.values()))):
        at = () if how is None else how.grid.index(where.rank)
        if at is not None and (how is None or how.split is not None):  # else no copy, or none that is known
            block = () if how is None else tuple(at[d] for d in how.split)
            ((_, bits, norm),) = fingerprint([t])
            own[name] = block, bits, f"{tuple(t.shape)} of {str(t.dtype).removeprefix('torch.')}, norm {norm:.17g}"
    everyone = where.all_gather((list(leaves), own), R.ranks, "assert_copies")
    faults: list[str] = []
    if len({tuple(names) for names, _ in everyone.values()}) > 1:
        faults.append(f"other names: { {r: names for r, (names, _) in everyone.items()} }")
    for name in sorted({name for _, have in everyone.values() for name in have}):
        values: dict[tuple[int, ...], dict[Any, list[int]]] = {}
        for r, (_, have) in everyone.items():
            if name in have:
                block, bits, shown = have[name]
                values.setdefault(block, {}).setdefault((bits, shown), []).append(r)
        faults += [
            f"{name}: " + ", ".join(f"{names(rs)} {shown}" for (_, shown), rs in copies.items())
            for copies in values.values()
            if len(copies) > 1
        ]
    if faults:
        raise InvariantError(
            "copies of one tensor differ",
            expected="bitwise equal copies",
            actual="; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if faults[5:] else ""),
            next_step="begin with equal values on all ranks, and apply equal updates to them: sums of gradients",
        )


def _random(shape: Sequence[int], dtype: torch.dtype, seed: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7919 * seed + rank)
    return torch.randn(shape, dtype=dtype, generator=generator, device="cpu")


def _ranks(A: LinearMap) -> tuple[int, ...]:
    ranks = {r for step in A.steps for r in step.ranks}
    return tuple(sorted(ranks)) or (A.world.rank,)


def _inner(pairs: Sequence[tuple[torch.Tensor, torch.Tensor, float]], ranks: Sequence[int]) -> list[complex]:
    """Global inner products of [(x, y, weight)], conj on the left."""
    local = [complex((x.conj() * y).sum().detach()) * weight for x, y, weight in pairs]
    return [sum(values) for values in zip(*gather_objects(local, ranks))]


def dot_test(A: LinearMap, *, dtype: torch.dtype = torch.float64, seed: int = 0, tol: float | None = None) -> float:
    """⟨A x, y⟩ = ⟨x, Aᴴ y⟩ for random, rank-dependent x and y, with the weights of A's domain and range.

    Returns the relative error. Raises AssertionError, on every rank, where it exceeds ``tol`` (default 1e-13 in float64
    and complex128, 1e-5 below).

    Messages: those of A and of A.T, and a small all-gather of the result.

    Raises:
        AssertionError: on every rank, where a rule is wrong.

    Example:
        >>> A = dd.maps.roll(dd.Layout(dd.Partition((1,)), (3,)), 0, 1)
        >>> dd.testing.dot_test(A) < 1e-12
        True
    """
    ranks, where = _ranks(A), A.world
    if where.rank not in ranks:
        return 0.0
    x, y = (_random(s, dtype, seed + i, where.rank) for i, s in enumerate((A.in_shape, A.out_shape)))
    if A.domain.kind == "invariant":
        x = A.T(y)  # the adjoint's range is the domain: this is how to draw an invariant tensor
    if A.range.kind == "invariant":
        y = A(x)
    Ax, Aty = A(x), A.T(y)
    domain, range_ = A.domain.weight, A.range.weight
    pairs = [(Ax, y, range_), (x, Aty, domain), (x, x, domain), (y, y, range_), (Ax, Ax, range_), (Aty, Aty, domain)]
    left, right, x2, y2, ax2, aty2 = _inner(pairs, ranks)
    scale = max(abs(ax2 * y2) ** 0.5, abs(x2 * aty2) ** 0.5)
    error = abs(left - right) / scale if scale else abs(left - right)
    if tol is None:
        tol = 1e-13 if dtype in (torch.float64, torch.complex128) else 1e-5
    assert error <= tol, (
        f"dot test of {A}: ⟨Ax, y⟩ = {left}, ⟨x, Aᴴy⟩ = {right}, relative error {error:.2e} > {tol:.0e}"
    )
    return error


def check_map(A: LinearMap, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
    """Everything that holds for a linear map, on every rank: shapes, linearity, the dot test, jvp and vjp, vmap equal
    to the loop, strided inputs, inputs left as they were, ``A.T.T == A``, and as many messages for a batch as for
    one.

    Messages: those of A and of A.T, and a small all-gather of the result.

    Raises:
        AssertionError: on every rank, where a rule is wrong.

    Example:
        >>> A = dd.maps.roll(dd.Layout(dd.Partition((1,)), (3,)), 0, 1)
        >>> dd.testing.check_map(A)  # says nothing: all is right
    """
    ranks, where = _ranks(A), A.world
    if where.rank not in ranks:
        return
    x, x2, y = (_random(s, dtype, seed + i, where.rank) for i, s in enumerate((A.in_shape, A.in_shape, A.out_shape)))
    if A.domain.kind == "invariant":
        x, x2 = A.T(y), A.T(3 * y)
    if A.range.kind == "invariant":
        y = A(_random(A.in_shape, dtype, seed + 3, where.rank))
    before = x.clone()
    with count_messages() as single:
        Ax = A(x)
    faults: list[str] = []

    def expect(ok: bool, what: str) -> None:
        if not ok:
            faults.append(what)

    close = {torch.float32: 1e-5, torch.complex64: 1e-5}.get(dtype, 1e-12)

    def same(a: torch.Tensor, b: torch.Tensor) -> bool:
        return a.shape == b.shape and torch.allclose(a, b, rtol=close, atol=close)

    expect(tuple(Ax.shape) == tuple(A.out_shape), f"shape {tuple(Ax.shape)} instead of {A.out_shape}")
    expect(same(A(x + 2 * x2), Ax + 2 * A(x2)), "not linear")
    expect(torch.equal(x, before), "changed its input")
    strided = torch.stack([x, x2], -1)[..., 0]
    expect(same(A(strided), Ax), "another result for a strided input")
    expect(A.T.T == A, "A.T.T is not A")
    expect(same(vjp(A, x)[1](y)[0], A.T(y)), "vjp is not the adjoint")
    expect(same(jvp(A, (x,), (x2,))[1], A(x2)), "jvp is not the map")
    with count_messages() as batched:
        both = vmap(A, in_dims=-1, out_dims=-1)(torch.stack([x, x2], -1))
    expect(same(both, torch.stack([Ax, A(x2)], -1)), "vmap differs from the loop")
    if not any(isinstance(step, Pair) for step in A.steps):
        expect(batched.sends == single.sends, f"{batched.sends} messages for a batch, {single.sends} for one")
    collective_assert(not faults, "; ".join(faults), ranks)
    dot_test(A, dtype=dtype, seed=seed)


def check_grads(
    f: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    *,
    order: int = 2,
    out_weight: float = 1.0,
    in_weight: float = 1.0,
    seed: int = 0,
    step: float = 1e-4,
    tol: float = 1e-6,
    ranks: Sequence[int] | None = None,
) -> None:
    """Compare derivatives of ``f`` (this rank's x -> this rank's y, float64) with each other and with finite
    differences.

    Order 1: ẏ = jvp against central differences, and ⟨ẏ, ȳ⟩ = ⟨ẋ, x̄⟩ for forward against reverse mode, over all ranks.
    Order 2: the same for x -> x̄, that is reverse and forward over reverse; and forward over forward against
    differences of jvp.

    Args:
        out_weight, in_weight: weight of this rank's copy in the inner products: 1, or 1/k for an invariant value on k
            ranks.
        step, tol: of the differences (relative to the largest entry).

    No messages but those of f; x of any shape.

    Raises:
        AssertionError: a derivative is wrong.

    Example:
        >>> dd.testing.check_grads(torch.sin, torch.ones(2, dtype=torch.float64))
    """
    where = world()
    ranks = tuple(range(where.size)) if ranks is None else tuple(ranks)
    x = x.detach()
    with torch.no_grad():
        y = f(x)
    v, u = (in_weight and _random(x.shape, x.dtype, seed + i, where.rank if in_weight == 1 else 0) for i in (1, 2))
    w = _random(y.shape, y.dtype, seed + 3, where.rank if out_weight == 1 else 0)

    def first(g: Callable[[torch.Tensor], Any], x: Any, v: Any, w: Any, weight: float, what: str) -> None:
        tangent = jvp(g, (x,), (v,))[1].detach()
        difference = ((g(x + step * v) - g(x - step * v)) / (2 * step)).detach()
        scale = max([1.0, *gather_objects(float(difference.abs().max()) if difference.numel() else 0.0, ranks)])
        error = float((tangent - difference).abs().max()) / scale if difference.numel() else 0.0
        collective_assert(error <= tol, f"{what}: jvp and differences differ by {error:.1e}", ranks)
        cotangent = vjp(g, x)[1](w)[0]
        forward, reverse = _inner([(tangent, w, weight), (v, cotangent, in_weight)], ranks)
        collective_assert(
            abs(forward - reverse) <= 1e-9 * max(1.0, abs(forward)),
            f"{what}: forward mode {forward} and reverse mode {reverse} differ",
            ranks,
        )

    first(f, x, v, w, out_weight, "order 1")
    if order > 1:
        first(lambda x: vjp(f, x)[1](w)[0], x, u, v, in_weight, "order 2, over reverse")
        first(lambda x: jvp(f, (x,), (v,))[1], x, u, w, out_weight, "order 2, over forward")


public({name: globals()[name] for name in __all__}, alike=False)
check_functions(globals(), __all__)
