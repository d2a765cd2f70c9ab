"""Programs of several ranks in one process: what users call, under transforms, without MPI."""

import pickle
import random

import pytest
import torch
from fuzzing import BUILDERS, KINDS, PAIRS, Spmd, compare, draw, seed_of
from one_process import Recorded, every_rank, returned
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

import distdl as dd
import distdl.functional as F
from distdl import compiled, ties
from distdl.engine import transport
from distdl.errors import AgreementError, DistdlError, PartitionError, ShapeError
from distdl.movement.gathers import gathered_dims


def rank():
    return dd.world().rank


def one_case(name, kind, pair, **transport):
    """Faults of one random case on 4 ranks, in each of its spellings."""
    seed = seed_of(name, kind, pair)
    spelling = random.Random(seed).randrange(4)

    def program():
        case = draw(name, kind, random.Random(seed), 4)
        calls = [case.map, *case.calls.values()]
        return compare(case, pair, Spmd(case, calls[spelling % len(calls)], seed), torch.float64, seed)

    return returned(every_rank(4, program, **transport))


@pytest.mark.parametrize("name", BUILDERS)
def test_random_movement(name):
    i = list(BUILDERS).index(name)
    # Boxes that share a message have gaps between them, so some would never settle; no chain here is longer than this.
    assert not any(one_case(name, KINDS[i % 3], list(PAIRS)[i % 9], rounds=8))


ALL = ("all_reduce", "all_gather", "reduce_scatter")


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_sum_reduce"])
def test_random_movement_by_collectives(name):
    """As an engine that has a collective for each of them would run it."""
    for kind, pair in zip(KINDS, ("grad∘grad", "jvp∘vmap", "vmap∘grad")):
        assert not any(one_case(name, kind, pair, collectives=ALL))


def spread(x, how):
    """x with other strides."""
    if how == "rows" and x.dim() == 2:
        return x.T.contiguous().T
    if how == "gaps":
        return torch.cat([x, x], -1)[..., : x.shape[-1]]
    return torch.stack([x, x], -1)[..., 0] if how == "apart" else x


@pytest.mark.parametrize(
    "shape, how", [((4, 6), "dense"), ((4, 6), "rows"), ((4, 6), "apart"), ((2, 3), "rows"), ((2, 6), "gaps")]
)
@pytest.mark.parametrize("dims", [0, 1, (0, 1)])
def test_equal_blocks_are_one_collective(dims, shape, how):
    """In the order of the blocks, staged only where memory is not as the engine needs it; also batched, and of every
    dtype."""
    P = dd.Partition((2, 3), (3, 5, 1, 0, 4, 2))
    L = dd.Layout(P, shape)
    X = torch.arange(float(torch.Size(shape).numel())).reshape(shape)

    def program():
        A = dd.maps.all_gather(L, dims)
        y = (1 + rank()) * spread(torch.arange(float(torch.Size(A.out_shape).numel())).reshape(A.out_shape), how)
        with dd.testing.count_messages() as sent:
            found = [
                A(spread(L.shard(X), how)),
                A.T(y),
                A(spread(L.shard(X).int(), how)),
                vmap(A)(spread(torch.stack([L.shard(X), -L.shard(X)]), how)),
                A.T(y.bfloat16()),
            ]
        return [f.tolist() for f in found], [(k, who, n) for k, who, n in sent if k != "agree"]

    def by_messages():
        gathered = P.dims(dims)
        whole = X[tuple(slice(None) if d in gathered else s for d, s in enumerate(L.slices()))]
        ones = torch.arange(float(whole.numel())).reshape(whole.shape)
        cut = tuple(s if d in gathered else slice(None) for d, s in enumerate(L.slices()))
        total = (sum(1 + r for r in P.along(dims).ranks) * ones)[cut]
        return [t.tolist() for t in (whole, total, whole.int(), torch.stack([whole, -whole]), total.bfloat16())]

    found = returned(every_rank(6, program, collectives=ALL, sums=Recorded.sums | {torch.bfloat16}))
    for r, ((values, sent), wanted) in enumerate(zip(found, every_rank(6, by_messages))):
        assert values[:4] == wanted[:4], (r, values)
        assert torch.allclose(torch.tensor(values[4]), torch.tensor(wanted[4]), rtol=2e-2)
        group = P.along(dims, r).ranks
        kinds = [k for k, who, _ in sent if who == group]
        assert kinds[:4] == ["all_gather", "reduce_scatter", "all_gather", "all_gather"], sent


def test_collectives_stage_no_more_than_they_must():
    """Whole blocks of rows lie side by side already; columns, and strided blocks, are gathered in scratch memory."""

    def program():
        def scratch(A, x):
            A(x)
            program = next(iter(A.plan.view(rank()).programs.values()))
            A.plan.view(rank()).programs.clear()
            return program.kind, program.staging

        rows, columns = dd.Layout(dd.Partition((3, 1)), (6, 4)), dd.Layout(dd.Partition((1, 3)), (4, 6))
        x, y = rows.shard(torch.ones(6, 4)), torch.ones(6, 4)
        P, Q = dd.maps.all_gather(rows, 0), dd.maps.all_gather(columns, 1)
        return [
            scratch(P, x),
            scratch(P, spread(x, "apart")),
            scratch(P.T, y),
            scratch(P.T, spread(y, "apart")),
            scratch(Q, columns.shard(torch.ones(4, 6)).contiguous()),
            scratch(Q, columns.shard(torch.ones(4, 6))),
            scratch(Q.T, torch.ones(4, 6)),
        ]

    gather, scatter = "all_gather", "reduce_scatter"
    for found in returned(every_rank(3, program, rounds=2, collectives=ALL)):
        assert found == [
            (gather, 0),
            (gather, 64),
            (scatter, 0),
            (scatter, 128),
            (gather, 128),
            (gather, 192),
            (scatter, 128),
        ]


def test_what_is_no_collective_goes_as_messages():
    """An engine without the collective, two tensors at once, an empty batch, one rank alone, and halves whose sum is
    widened."""
    L = dd.Layout(line(), (6,))

    def all_of(call, n=3, **transport):
        def program():
            with dd.testing.count_messages() as sent:
                y = call(dd.maps.all_gather(L), L.shard(torch.arange(6.0)))
            return y.tolist(), sorted({k for k, _, _ in sent})

        return returned(every_rank(n, program, **{"collectives": ALL, **transport}))

    def sum_of(values):
        return lambda A, x: A.T(torch.full((6,), values[rank()]).bfloat16())

    whole, sums = list(map(float, range(6))), Recorded.sums | {torch.bfloat16}
    assert all_of(lambda A, x: A(x), collectives=("all_reduce",)) == [(whole, ["send"])] * 3
    assert all_of(lambda A, x: A(x), collectives=("all_gather",)) == [(whole, ["all_gather"])] * 3
    assert all_of(lambda A, x: F.all_gather((x, -x), L)[0], rounds=3) == [(whole, ["send"])] * 3
    assert all_of(lambda A, x: vmap(A)(x.expand(0, 2))) == [([], ["agree"])] * 3
    lonely = dd.Layout(dd.Partition((1, 1)), (2, 2))
    assert all_of(lambda A, x: dd.maps.all_gather(lonely)(torch.ones(2, 2)), n=1) == [([[1.0, 1.0], [1.0, 1.0]], [])]
    pair = dd.Layout(dd.Partition((2,)), (4,))
    found = all_of(lambda A, x: dd.maps.all_gather(pair)(torch.arange(2.0)))
    assert [kinds for _, kinds in found] == [["all_gather"], ["all_gather"], []]
    # 256 + 1 + 1 in bfloat16 is 256: what the engine adds itself stays so, what the library adds is 258
    many = (256.0, 1.0, 1.0)
    assert all_of(sum_of(many)) == all_of(sum_of(many), sums=sums) == [([258.0, 258.0], ["send"])] * 3
    assert all_of(sum_of(many), half_sums="native") == [([256.0, 256.0], ["send"])] * 3, "an engine without the dtype"
    native = all_of(sum_of(many), half_sums="native", sums=sums)
    assert [kinds for _, kinds in native] == [["reduce_scatter"]] * 3


# ---------------------------------------------------------------- maps as values


def line(n=3):
    return dd.Partition((n,))


def test_a_map_on_every_rank():
    """Shapes, activity, ranks and plans as each rank sees them; a rank outside passes anything."""

    def program():
        A = dd.maps.repartition(dd.Layout(dd.Partition((2,), (2, 0)), (5,)), dd.Layout(line(), (5,), ((0, 1, 4),)))
        x = (
            torch.arange(5.0)[:3]
            if rank() == 2
            else torch.arange(3.0, 5.0)
            if rank() == 0
            else torch.full((2, 2), torch.nan)
        )
        y = A(x)
        return (
            A.in_shape,
            A.out_shape,
            A.active,
            A.T.active,
            A.ranks,
            A.plans == (A.plan,),
            A.T.T is A,
            A.T.T == A,
            y.tolist(),
            A.is_identity,
            A.T.steps[0].transposed,
            str(A),
            str(A.T),
        )

    a, b, c = returned(every_rank(3, program))
    assert a[:5] == ((2,), (0,), True, True, (0, 1, 2)) and a[8] == []
    assert b[:4] == ((0,), (1,), False, True) and b[8] == [0.0]
    assert c[:4] == ((3,), (4,), True, True) and c[8] == [1.0, 2.0, 3.0, 4.0]
    for found in (a, b, c):
        assert found[5] and found[6] and found[7] and not found[9] and found[10] and found[11] != found[12]
    L = dd.Layout(line(1), (3,))
    assert dd.maps.repartition(L, L) is dd.maps.repartition(L, L) and dd.maps.repartition(L, L).plans == ()


def test_maps_travel():
    """Pickled, a map is its plans: what it found out on this rank stays here."""

    def program():
        A = dd.maps.all_gather(dd.Layout(line(), (6,)))
        y = A(torch.full((2,), float(rank())))
        again = pickle.loads(pickle.dumps(A))
        return again == A and "world" not in vars(again) and torch.equal(again(torch.full((2,), float(rank()))), y)

    assert returned(every_rank(3, program)) == [True] * 3


def test_an_identity_returns_its_input_and_others_fresh_memory():
    def program():
        L, x = dd.Layout(line(), (6,)), torch.ones(2)
        alias = dd.maps.repartition(L, L)(x)
        fresh = dd.maps.all_gather(L)(x)
        return alias is x, fresh.data_ptr() != x.data_ptr() and fresh.tolist() == [1.0] * 6

    assert returned(every_rank(3, program)) == [(True, True)] * 3


def test_wrong_input_is_refused():
    def shape():
        dd.maps.all_gather(dd.Layout(line(), (6,)))(torch.ones(3))

    def far():
        dd.maps.all_gather(dd.Layout(line(4), (8,)))(torch.ones(2))

    for found in every_rank(3, shape):
        assert isinstance(found, ShapeError) and (found.expected, found.actual) == ((2,), (3,)) and found.next_step
        assert found.op == "all_gather" and found.partitions == "Partition((3,))" and found.rank in (0, 1, 2)
    for word in ("x", None):
        for found in every_rank(3, lambda word=word: dd.maps.gather(dd.Layout(dd.Partition((2,)), (6,)))(word)):
            assert isinstance(found, ShapeError) and found.actual == type(word).__name__ and found.next_step
    for found in every_rank(3, lambda: dd.maps.gather(dd.Layout(line(), (6,)), 2)(torch.ones(3))):
        assert found.partitions == "Partition((3,)) -> Partition((1,), ranks=(2,))"
    for found in every_rank(3, far):
        assert isinstance(found, PartitionError) and "the world has 3 ranks" in str(found) and "-n 4" in str(found)


@pytest.mark.parametrize("make, words", [
    (lambda P, L: dd.maps.all_sum_reduce(L), "blocks of different sizes"),
    (lambda P, L: dd.maps.invariant_sum(dd.Layout(dd.Partition((2, 2)), (4, 3)), None, (1,)), "over dim 1"),
    (lambda P, L: dd.maps.repartition(L, dd.Partition((2, 1))), "another number of dims"),
    (lambda P, L: dd.maps.repartition(L, dd.Layout(P, (4,))), "different global shapes"),
    (lambda P, L: F.all_gather(torch.ones(1, 1), P, None, shape=(2, 2)), "another number of dims"),
    (lambda P, L: F.all_gather(torch.ones(1, 1), P, {2: 0}, shape=(2, 2)), "dims do not fit"),
    (lambda P, L: F.all_gather(torch.ones(1, 1), P, {-3: 0}, shape=(2, 2)), "dims do not fit"),
    (lambda P, L: F.all_gather(torch.ones(1, 1), P, {0: 0, 1: 0}, shape=(2, 2)), "dims do not fit"),
    (lambda P, L: dd.maps.permute(P, ((0, 2),), (1,)), "not a permutation"),
    (lambda P, L: dd.maps.permute(P, ((2, 0),), (1,)), "not a permutation"),
    (lambda P, L: dd.maps.permute(P, ((0, 1), (1, 1)), (1,)), "not a permutation"),
    (lambda P, L: dd.maps.broadcast(P, dd.Partition((3,)), (1,)), "do not broadcast"),
    (lambda P, L: dd.maps.broadcast(dd.Partition((1, 1)), P, (1,)), "do not broadcast"),
    (lambda P, L: dd.maps.broadcast(dd.Partition((2, 3)), dd.Partition((2, 2)), (1,)), "do not broadcast"),
    (lambda P, L: dd.maps.shift(P, 0, 1.5, shape=(1,)), "must be an integer"),
    (lambda P, L: dd.maps.shift(P, 1, shape=(1,)), "no dim 1"),
    (lambda P, L: dd.maps.halo_exchange(L), "not a HaloSpec"),
])  # fmt: skip
def test_maps_that_cannot_be(make, words):
    P = dd.Partition((2,))
    with pytest.raises(PartitionError, match=words) as caught:
        make(P, dd.Layout(P, (5,)))
    assert caught.value.op and (caught.value.actual is not None or caught.value.partitions is not None)


def test_equal_arguments_give_the_same_map():
    """However they are spelt; and what is no key is an error that names the call, not Python's TypeError."""
    P, M = dd.Partition((2, 3)), dd.maps
    L = dd.Layout(P, (4, 6))
    assert M.shift(P, 0, shape=(3,)) is M.shift(P, 0, 1, True, (3,)) is M.shift(where=P, dim=0, shape=(3,))
    assert M.gather(L) is M.gather(L, root=0) and M.roll(L, 1, by=2) is M.roll(L, 1, 2)
    assert M.repartition(L, dd.Partition((3, 2))) is M.repartition(L, P_out=dd.Partition((3, 2)))
    assert M.all_gather(L, [0]) is M.all_gather(L, 0) and M.all_sum_reduce(L) is not M.invariant_sum(L)
    for op, call in (
        ("all_sum_reduce", lambda: M.all_sum_reduce(P, (3,), [0])),
        ("repartition", lambda: M.repartition(L, P_out=[2, 3])),
        ("shift", lambda: F.shift(torch.ones(1), P, [0])),
        ("halo_exchange", lambda: M.halo_exchange({"left": 1})),
    ):
        with pytest.raises(PartitionError, match="must be hashable") as caught:
            call()
        assert caught.value.op == op and "tuple" in caught.value.next_step
    with pytest.raises(TypeError, match="dim"):
        M.shift(P)


def test_what_dims_may_be():
    P = dd.Partition((2, 3))
    pairs = gathered_dims
    assert pairs(P, 2, None) == {0: 0, 1: 1} and pairs(P, 2, -1) == {1: 1}
    assert pairs(P, 3, {-1: 0, 0: 1}) == {2: 0, 0: 1}
    assert pairs(P, 2, {-2: -1}) == {0: 1} and pairs(P, 2, ()) == {}
    L = dd.Layout(dd.Partition((2, 1)), (5, 1))
    A = dd.maps.all_sum_reduce(L, None, 1)
    with pytest.raises(PartitionError):
        dd.maps.all_sum_reduce(L, None, 1.0)
    assert A.plan.view(0).out_shape == (3, 1) and dd.maps.all_sum_reduce(L, None, -1).plan == A.plan
    B = dd.maps.gathering(P, (4, 7), {1: 1, 0: 0}, {0: (1, 3), 1: (0, 3, 4)})
    assert (
        B.plan.view(5).in_shape == (3, 4) and B.plan.view(0).in_shape == (1, 0) and B.plan.view(0).out_shape == (4, 7)
    )
    assert dd.maps.gathering(P, (4, 7), {0: 1}).plan.view(2).in_shape == (1, 7)


def test_shift_and_permute_to_the_edge():
    """Where nothing arrives are zeros of the own shape, on either end; permuted scalars, vectors, and shapes by
    rank."""
    L = dd.Layout(line(), (6,), ((1, 2, 3),))
    for offset, wanted in (
        (-1, [[1, 2], [3, 4, 5], [0, 0, 0]]),
        (1, [[0], [0], [1, 2]]),
        (-2, [[3, 4, 5], [0, 0], [0, 0, 0]]),
        (3, [[0], [0, 0], [0, 0, 0]]),
    ):
        got = dd.maps.shift(L, 0, offset, False).simulate([torch.arange(6)[a:b] for a, b in L.blocks(0)])
        assert [y.tolist() for y in got] == wanted
    swap = ((0, 2), (2, 0))
    for shape, wanted in (((), [2, 0, 0]), ((1,), [[2], [0], [0]]), ([(1,), (2,), (3,)], [[2, 2, 2], [0, 0], [0]])):
        shapes = shape if isinstance(shape, list) else [shape] * 3
        got = dd.maps.permute(line(), swap, shape).simulate([torch.full(s, float(r)) for r, s in enumerate(shapes)])
        assert [y.tolist() for y in got] == wanted
    assert dd.maps.scatter(L).plan.held.partition.ranks == dd.maps.gather(L).plan.wanted.partition.ranks == (0,)


def test_a_composition_is_one_on_every_rank_or_on_none():
    """Ranks in another order have the same blocks, and a rank outside another placeholder. Where blocks differ all
    ranks say so: of themselves if they can, else of the first."""
    first = dd.Layout(dd.Partition((1, 2), (2, 0)), (3, 3))
    second = dd.Layout(dd.Partition((1, 2), (0, 2)), (3, 3), (None, (1, 2)))
    swapped = dd.Layout(dd.Partition((1, 2), (0, 2)), (3, 3), (None, (2, 1)))
    one_more = dd.Layout(dd.Partition((1, 3), (2, 0, 1)), (3, 3), (None, (2, 1, 0)))

    def program():
        A, said = dd.maps.roll(first, 0, 1), []
        C = dd.maps.roll(second, 0, 1) @ A
        for L in (swapped, one_more):
            with pytest.raises(PartitionError, match="do not compose") as caught:
                dd.maps.roll(L, 0, 1) @ A
            said.append(int(str(caught.value).partition("on rank ")[2][0]))
        double = dd.linear_map(lambda x: 2 * x, lambda y: 2 * y, A.out_shape, A.out_shape)
        wrong = dd.linear_map(lambda x: 2 * x, lambda y: 2 * y, (4, 4), (4, 4))
        for left, right in ((wrong, A), (A, wrong), (wrong, double)):
            with pytest.raises(PartitionError, match="do not compose"):
                left @ right
        y = (A @ double @ A)(torch.full(A.in_shape, 1.0 + rank()))
        return C.in_shape, said, y.sum().item()

    found = returned(every_rank(3, program))
    assert [shape for shape, _, _ in found] == [(3, 1), (0, 2), (3, 2)]
    assert [said for _, said, _ in found] == [[0, 1], [0, 1], [2, 1]]
    assert [total for *_, total in found] == [6.0, 0.0, 36.0]


def test_chains():
    def program():
        L, M = dd.Layout(line(), (4,)), dd.Layout(line(), (4,), ((0, 4, 0),))
        A, B = dd.maps.repartition(L, M), dd.maps.all_gather(M)
        C = B @ A
        x = L.shard(torch.arange(4.0))
        assert C.in_shape == A.in_shape and C.out_shape == (4,) and C.plans == (*A.plans, *B.plans)
        assert C.T.T == C and C.T.steps == B.T.steps + A.T.steps and (B @ A).T == A.T @ B.T
        assert (dd.maps.reduce_scatter(L) @ C).steps == C.steps + dd.maps.reduce_scatter(L).steps
        assert (C @ dd.maps.repartition(L, L)).steps == dd.maps.repartition(L, L).steps + A.steps + B.steps
        three = dd.maps.reduce_scatter(L) @ C
        assert (three.in_shape, three.out_shape) == (A.in_shape, A.in_shape) and three.world is dd.world()
        total = dd.maps.invariant_sum(line(), (4,)) @ C
        assert (total.domain.kind, total.range.kind, total.T.domain.kind, total.T.range.kind) == (
            "varying", "invariant", "invariant", "varying")  # fmt: skip
        assert C.world is dd.world() and C.domain.kind == C.range.kind == "varying"
        for left, right in ((A, B), (dd.maps.all_gather(L), dd.maps.invariant_sum(line(), (4,)))):
            with pytest.raises(PartitionError, match="do not compose"):
                left @ right
        return C(x).tolist(), C.T(torch.ones(4)).tolist()

    assert [y for y, _ in returned(every_rank(3, program))] == [[0.0, 1.0, 2.0, 3.0]] * 3
    assert [g for _, g in every_rank(3, program)] == [[3.0, 3.0], [3.0], [3.0]]
    L, M = dd.Layout(line(), (4,)), dd.Layout(line(), (4,), ((0, 4, 0),))
    shards = (dd.maps.all_gather(M) @ dd.maps.repartition(L, M)).simulate(
        [torch.arange(4.0)[a:b] for a, b in L.blocks(0)]
    )
    assert [y.tolist() for y in shards] == [[0.0, 1.0, 2.0, 3.0]] * 3


def test_what_a_map_says_of_itself():
    """Its ranks, sorted, whether anything moves, and the names of its plans, those of its adjoint too."""

    def program():
        P, back = dd.Partition((2,), (1, 0)), dd.Partition((2,), (0, 1))
        L = dd.Layout(P, (5,))
        there, stays = dd.maps.repartition(L, back), dd.maps.repartition(L, L)
        assert stays.is_identity is (stays @ stays).is_identity is True
        assert there.is_identity is (there @ stays).is_identity is False
        assert dd.maps.permute(dd.Partition((2,), (8, 1)), [(8, 1)], (3,)).ranks == (1, 8) and there.ranks == (0, 1)
        of_all, of_one = (dd.linear_map(torch.clone, torch.clone, (3,), (3,), ranks=ranks) for ranks in ((), (1,)))
        assert of_all.active is True and of_one.active is (dd.world().rank == 1)
        assert there.T.T is there and there.steps[0].T.T is there.steps[0]
        move = there.steps[0]
        assert (move.plan.named[0], move.adjoint.named[0]) == ("repartition", "repartition.T")
        assert (move.T.plan.named[0], str(move.T)) == ("repartition.T", "repartition.T")

    returned(every_rank(2, program))
    known = "_torchdynamo_inline" if compiled.available else "_torchdynamo_disable"
    assert vars(dd.LinearMap.__call__)[known], "torch.compile does not look inside a call"


def test_weights_of_the_invariant_pair():
    A, B = dd.maps.mark_varying(line(), (2,)), dd.maps.invariant_sum(line(), (2,))
    assert (A.domain.kind, A.domain.copies, A.domain.weight, A.range.kind) == ("invariant", 3, 1 / 3, "varying")
    assert (B.domain.weight, B.range.kind, B.range.weight) == (1.0, "invariant", 1 / 3)
    assert A.plans == () and A.T.plans == (A.adjoint,) and not A.is_identity and A.T == A.T.T.T


# ---------------------------------------------------------------- a user's own pair


def test_own_pair_and_its_faults():
    def double(x):
        return 2 * x

    A = dd.linear_map(double, double, (3,), (3,))
    x = torch.arange(3.0)
    assert torch.equal(A(x), 2 * x) and torch.equal(A.T(x), 2 * x) and A.T.T == A and A.plans == () and A.ranks == ()
    assert torch.equal(vmap(A)(torch.stack([x, x])), torch.stack([2 * x, 2 * x]))
    assert vmap(A)(torch.empty(0, 3)).shape == (0, 3)
    assert torch.equal(vmap(vmap(A))(torch.ones(2, 2, 3)), 2 * torch.ones(2, 2, 3))
    with pytest.raises(ShapeError, match=r"wrong shape.*each rank alone"):
        A(torch.ones(4))
    with pytest.raises(ShapeError, match=r"wrong shape.*ranks \(0, 2\)"):
        dd.linear_map(double, double, (3,), (3,), ranks=(2, 0))(torch.ones(4))
    with pytest.raises(ShapeError, match="returned another shape"):
        dd.linear_map(lambda x: x[:2], double, (3,), (3,))(x)
    same = dd.linear_map(lambda x: x, lambda x: x, (3,), (3,))
    y = same(x)
    assert y.data_ptr() != x.data_ptr() and torch.equal(y, x), "a result of its own"
    seen = []
    B = dd.linear_map(lambda x: seen.append(x.dim()) or 2 * x, double, (3,), (3,), batched=True)
    vmap(B)(torch.ones(2, 3))
    vmap(dd.linear_map(B.steps[0].forward, double, (3,), (3,)))(torch.ones(2, 3))
    assert seen == [2, 1, 1], "one by one, unless it says that it takes batches"
    assert (A @ A)(x).tolist() == [0.0, 4.0, 8.0] and "double" in str(A)


# ---------------------------------------------------------------- dependence without a value


def test_nothing_and_tie():
    x = torch.tensor([1.0, torch.nan], requires_grad=True)
    z = torch.ones(2, dtype=torch.complex64, requires_grad=True)
    with pytest.raises(ShapeError, match="has elements"):
        F.nothing((2,), x)
    for others in ((x,), (z.real, z), (torch.ones(1), x), (torch.ones(1), torch.ones(1), x)):
        assert (
            F.nothing((0,), torch.ones(3), *others).requires_grad and not F.nothing((0,), torch.ones(3)).requires_grad
        )
    empty = F.nothing((0, 2), x, z)
    assert (
        empty.shape == (0, 2) and empty.requires_grad and F.nothing((0,), x, dtype=torch.float64).dtype == torch.float64
    )
    value = torch.tensor(3.0)
    assert F.tie(value) is value and F.tie(value, torch.tensor(1)) is value
    tied = F.tie(value, x, z)
    tied.backward()
    assert tied.item() == 3 and tied.shape == () and x.grad.tolist() == [0.0, 0.0] and z.grad.tolist() == [0, 0]


# ---------------------------------------------------------------- ranks that disagree


@pytest.mark.parametrize("n", [2, 3])
def test_one_rank_has_no_batch(n):
    """Under vmap a rank whose input is not batched gets the batch that its peers have."""

    def program():
        L = dd.Layout(line(n), (n,))
        A = dd.maps.all_gather(L)
        c, xs = torch.ones(1), torch.arange(2.0).reshape(2, 1) + 10 * rank()
        return vmap(lambda x: A(x) if rank() else A(c) + 0 * x)(xs).tolist()

    assert returned(every_rank(n, program)) == [[[1.0, 10.0, 20.0][:n], [1.0, 11.0, 21.0][:n]]] * n


def test_where_no_rank_has_a_batch_none_travels():
    def program():
        A, xs = dd.maps.all_gather(dd.Layout(line(), (3,))), torch.ones(5, 3)
        with dd.testing.count_messages() as sent:
            vmap(lambda x: A(torch.ones(1)) + x)(xs)
        return [bytes for kind, _, bytes in sent if kind == "send"]

    assert returned(every_rank(3, program)) == [[4, 4]] * 3


def test_own_pair_of_several_ranks():
    """It may hold movements; its ranks agree on batches. Named in any order."""

    def program():
        L = dd.Layout(line(), (3,))
        A = dd.maps.all_gather(L)
        B = dd.linear_map(lambda x: 2 * A(x), lambda y: 2 * A.T(y), (1,), (3,), ranks=(2, 0, 1))
        c, xs = torch.ones(1), torch.arange(2.0).reshape(2, 1) + 10 * rank()
        return B.ranks, B.world is dd.world(), vmap(lambda x: B(x) if rank() else B(c) + 0 * x)(xs).tolist()

    assert returned(every_rank(3, program)) == [((0, 1, 2), True, [[2.0, 20.0, 40.0], [2.0, 22.0, 42.0]])] * 3


def test_vmaps_of_different_sizes():
    def program():
        A = dd.maps.all_gather(dd.Layout(line(), (3,)))
        return vmap(A)(torch.ones(2 + (rank() == 1), 1))

    for r, found in enumerate(every_rank(3, program)):
        assert isinstance(found, AgreementError) and "different vmaps" in str(found) and found.rank == r
        assert found.actual == {0: [2], 1: [3], 2: [2]} and found.next_step and found.expected


def test_a_linear_loss_on_one_rank():
    """Second derivatives send the same messages on every rank, whatever the local loss is: the tie."""

    def program():
        L = dd.Layout(line(), (3,))
        A = dd.maps.all_gather(L)
        f = lambda x: A(x.sin()).sum() if rank() else (A(x.sin()) ** 2).sum()
        x = L.shard(torch.arange(3.0, dtype=torch.float64))
        hvp = jvp(grad(f), (x,), (torch.ones_like(x),))[1]
        y = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(y), y, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), y)
        return hvp, h

    X = torch.arange(3.0, dtype=torch.float64)
    expected = jvp(grad(lambda X: 2 * X.sin().sum() + (X.sin() ** 2).sum()), (X,), (torch.ones_like(X),))[1]
    for r, found in enumerate(returned(every_rank(3, program))):
        assert all(torch.allclose(t, expected[r : r + 1]) for t in found)


# ---------------------------------------------------------------- traces, and what an observer is told


def around():
    """A movement of one rank alone that is not the identity."""
    return dd.maps.halo_exchange(dd.HaloSpec(dd.Partition((1,)), (3,), 1, boundary="circular"))


class Observer:
    """In place of the one that checks: notes of each movement whether a graph holds its adjoint, and whether it is
    being traced."""

    tracing = False

    def __init__(self):
        self.seen = []

    def movement(self, host, transport, maps, xs, recorded):
        self.seen.append((str(maps[0]), recorded, self.tracing))
        return transport


def test_an_observer_is_told(monkeypatch):
    A, x, observer = around(), torch.ones(3), Observer()
    monkeypatch.setattr(transport, "observer", observer)

    def told(call):
        observer.seen.clear()
        call()
        return observer.seen

    assert told(lambda: A(x)) == [("halo_exchange", False, False)]
    y = x.clone().requires_grad_()
    assert told(lambda: A(y).sum().backward()) == [("halo_exchange", True, False), ("halo_exchange.T", False, False)]
    with torch.no_grad():
        assert told(lambda: A(y)) == [("halo_exchange", False, False)]
    graph = []
    assert told(lambda: graph.append(make_fx(A)(x))) == [("halo_exchange", False, True)] and not observer.tracing
    assert told(lambda: graph[0](x)) == [("halo_exchange", False, False)]


def test_traces():
    """A movement stays where its result is unused; alone it has no derivative; a user's own pair is traced through."""
    A, x = around(), torch.ones(3)

    def unused(x):
        A(x)
        return 2 * x

    graph = make_fx(unused)(x)
    graph.graph.eliminate_dead_code()
    (move,) = [n for n in graph.graph.nodes if n.target is torch.ops.distdl.move.default]
    for others in ({"requires_grad": True}, {}):
        xs = [x, torch.ones(3, **others)]
        pairs = [xs, xs[::-1]]
        if others:
            for pair in pairs:
                with pytest.raises(AgreementError, match="no derivative of its own"):
                    torch.ops.distdl.move(pair, f"{move.args[1]}; {move.args[1]}")
        else:
            for place in range(2):
                with pytest.raises(AgreementError, match="no derivative of its own"):
                    jvp(
                        lambda t, k=place: torch.ops.distdl.move([x, t][:: 1 if k else -1], move.args[1])[0], (x,), (x,)
                    )
    with torch.no_grad():
        assert torch.ops.distdl.move([x.clone().requires_grad_()], move.args[1])[0].tolist() == [1.0] * 5
    own = dd.linear_map(lambda x: 2 * x, lambda x: 2 * x, (3,), (3,))
    assert make_fx(own)(x)(torch.arange(3.0)).tolist() == [0.0, 2.0, 4.0]


@pytest.mark.parametrize("dims", [(0, None), (None, 1), (1, 0)])
def test_traces_under_vmap(dims):
    """The batch is one more axis of the recorded movement: in any place, and of any of its tensors."""

    def program():
        L = dd.Layout(line(), (6,))
        graph = make_fx(lambda x, y: F.all_gather((x, y), L))(torch.ones(2), torch.ones(2))
        args = [torch.arange(8.0).reshape(4, 2) + 10 * rank() + i for i in range(2)]
        args = [a[0] if d is None else a.T if d else a for a, d in zip(args, dims)]
        found = vmap(graph, in_dims=dims)(*args)
        each = [tuple(a if d is None else a.select(d, k) for a, d in zip(args, dims)) for k in range(4)]
        return [f.tolist() for f in found], [
            torch.stack(rows).tolist() for rows in zip(*(F.all_gather(pair, L) for pair in each))
        ]

    for found, wanted in returned(every_rank(3, program, rounds=3)):
        assert found == wanted


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, lambda x: torch.quantize_per_tensor(x, 1.0, 0, torch.qint8)])
def test_only_dense_memory_is_moved(make):
    """A sparse tensor's values, or a quantized one's integers, alone are no tensor: refused on every rank."""
    for found in every_rank(3, lambda: F.all_sum_reduce(make(torch.eye(3)), line())):
        assert isinstance(found, ShapeError) and "only dense" in str(found) and found.next_step and found.op


# ---------------------------------------------------------------- the executor


def test_the_actual_layout_is_named():
    sparse = refused(lambda: dd.maps.gather(dd.Layout(line(), (6,)))(torch.ones(2).to_sparse()))
    assert sparse.actual == "torch.sparse_coo"


def refused(program, n=3):
    """The error that ``program`` raises on every rank, the same but for the rank."""
    found = every_rank(n, program)
    assert all(isinstance(one, DistdlError) and one.next_step and one.expected is not None for one in found), found
    assert len({one.problem for one in found}) == 1
    return found[0]


def test_what_can_have_a_gradient():
    dtypes = torch.float16, torch.float64, torch.complex64, torch.int64, torch.bool
    smooth = [ties.is_smooth(torch.ones(2, dtype=dtype)) for dtype in dtypes]
    assert smooth == [True, True, True, False, False] and ties.is_smooth(1.0) is ties.is_smooth(None) is False


def test_tensors_of_one_movement_lie_on_one_device():
    for n in (1, 2):
        xs = [torch.ones(2), *(torch.ones(2, device="meta") for _ in range(n))]
        assert refused(lambda xs=xs: F.all_gather(xs, dd.Layout(line(), (6,)))).actual == ", ".join(
            ["cpu"] + ["meta"] * n
        )


class Guarded(torch.Tensor):
    """A class whose operators know no movement."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return NotImplemented

    @staticmethod
    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)


def test_a_class_with_operators_of_its_own():
    """Its memory is not its own: the movement goes to its operators, or is refused, also beside plain tensors."""
    L = dd.Layout(line(), (6,))
    assert "a class with operators of its own" in str(refused(lambda: dd.maps.all_gather(L)(Guarded(torch.ones(2)))))
    for pair in ([Guarded(torch.ones(2)), torch.ones(2)], [torch.ones(2), Guarded(torch.ones(2))]):
        assert "Guarded" in str(refused(lambda pair=pair: F.all_gather(pair, L)).actual)
    two = every_rank(3, lambda: dd.maps.all_gather(L)(TwoTensor(torch.ones(2), torch.zeros(2))).b)
    assert all(b.tolist() == [0.0] * 6 for b in two)


def test_what_is_left_of_an_ended_transform():
    """Of grad or jvp a plain tensor, also among others; of vmap one example, which is refused."""
    L = dd.Layout(line(), (6,))

    def kept(transform, *lead):
        left = []
        transform(lambda x: (left.append(2 * x), x.sum())[1])(torch.full((*lead, 2), 3.0 + rank()))
        return left[0]

    def program():
        tracked, own = kept(grad), torch.ones(2)
        ys = F.all_gather([own, tracked, 2 * own], L)
        return [dd.maps.all_gather(L)(tracked).tolist(), *(y.tolist() for y in ys)]

    doubled = [6.0, 6.0, 8.0, 8.0, 10.0, 10.0]
    assert returned(every_rank(3, program, rounds=3)) == [[doubled, [1.0] * 6, doubled, [2.0] * 6]] * 3
    assert "a vmap that has ended" in refused(lambda: dd.maps.all_gather(L)(kept(vmap, 3))).actual


@pytest.mark.parametrize("call, error, words", [
    (lambda P, f: F.tie(1.0, torch.ones(1)), ShapeError, "not a tensor"),
    (lambda P, f: F.tie(torch.ones(1), None), ShapeError, "not a tensor"),
    (lambda P, f: F.nothing((0,), "x"), ShapeError, "not a tensor"),
    (lambda P, f: F.nothing((0,)), ShapeError, "a placeholder of what"),
    (lambda P, f: dd.linear_map(f, f, (1.5,), (1,)), ShapeError, "sequences of integers"),
    (lambda P, f: dd.linear_map(f, f, (1,), (1,), ranks=3), ShapeError, "sequences of integers"),
    (lambda P, f: dd.linear_map(f, None, (1,), (1,)), ShapeError, "must be functions"),
    (lambda P, f: dd.linear_map(1, f, (1,), (1,)), ShapeError, "must be functions"),
    (lambda P, f: dd.linear_map(f, f, (1,), (1,)) @ f, PartitionError, "not a linear map"),
    (lambda P, f: P.dims("0"), PartitionError, "dims?"),
    (lambda P, f: P.dims(0.5), PartitionError, "dims?"),
    (lambda P, f: P.shard([1, 2]), ShapeError, "."),
    (lambda P, f: dd.Layout((2,), (3,)), PartitionError, "not a partition"),
    (lambda P, f: dd.Layout(P, 3), PartitionError, "not a global shape"),
    (lambda P, f: dd.Layout(P, (3,), ((1, 2.0),)), PartitionError, "splits"),
    (lambda P, f: dd.Layout(P, (3,), (("1", 2),)), PartitionError, "splits"),
    (lambda P, f: F.all_sum_reduce(torch.ones(1), 3), PartitionError, "not a partition"),
    (lambda P, f: dd.maps.repartition(P, P), PartitionError, "global shape"),
    (lambda P, f: dd.maps.gather(P), PartitionError, "global shape"),
])  # fmt: skip
def test_arguments_of_other_types(call, error, words):
    with pytest.raises(error, match=words) as caught:
        call(dd.Partition((2,)), lambda x: 2 * x)
    assert caught.value.next_step and caught.value.actual is not None


@pytest.mark.parametrize("call", [
    lambda x, P: F.dist_layer_norm(x, P, (4,)), lambda x, P: F.dist_rms_norm(x, P, (4,)), lambda x, P: F.dist_sum(x, P),
    lambda x, P: F.dist_max(x, P, 0), lambda x, P: F.dist_mse_loss(x, x, P, reduction="none"),
    lambda x, P: F.dist_pad(x, P, (1, 1)), lambda x, P: F.dist_cross_entropy(x, None, P),
    lambda x, P: F.dist_linear(x, torch.ones(2, 4), dd.Partition((1, 1, 2))),
    lambda x, P: F.dist_max_pool(x, dd.Layout(dd.Partition((1, 1, 2)), (1, 1, 4)), 2),
    lambda x, P: F.dist_conv(x, torch.ones(1, 1, 3), dd.Partition((1, 1, 1, 2))),
], ids=range(10))  # fmt: skip
@pytest.mark.parametrize("given", [None, {"x": 1}], ids=["nothing", "a dictionary"])
def test_a_rank_outside_passes_a_tensor(call, given):
    """Its result has that tensor's dtype and device."""
    found = every_rank(3, lambda: call(given, dd.Layout(dd.Partition((2, 1)), (6, 4))))[2]
    assert isinstance(found, ShapeError) and "not a tensor" in str(found), found
    assert found.actual == type(given).__name__ and found.next_step


def test_split_phase_of_a_chain_takes_the_first_input():
    def program():
        L, M = dd.Layout(line(), (6,)), dd.Layout(dd.Partition((1,)), (6,))
        A = dd.maps.repartition(L, M).T @ dd.maps.repartition(L, M)
        return F.wait(F.start(A, L.shard(torch.arange(6.0)))).tolist()

    assert returned(every_rank(3, program)) == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


def test_a_pytree_is_one_set_of_messages():
    def program():
        L = dd.Layout(dd.Partition((3, 1)), (3, 1))
        with dd.testing.count_messages() as sent:
            trees = F.all_gather({"a": torch.full((1, 1), float(rank())), "b": [torch.full((1, 1), rank())]}, L, 0)
            sums = F.all_sum_reduce((torch.ones(2), torch.ones(1, 2), torch.full((1,), 2, dtype=torch.int64)), line())
        return (
            trees["a"].flatten().tolist(),
            trees["b"][0].flatten().tolist(),
            [s.tolist() for s in sums],
            sent.sends,
            len(sent.of("all_reduce")),
            sent.bytes,
            [b for k, _, b in sent if k == "all_reduce"],
        )

    for found in returned(every_rank(3, program, rounds=3)):
        assert found == ([0.0, 1.0, 2.0], [0, 1, 2], [[3.0, 3.0], [[3.0, 3.0]], [6]], 2, 2, 2 * (64 + 8) + 24, [16, 8])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_half_precision_is_summed_in_single(dtype):
    def program():
        x = torch.full((1,), 1.0 if rank() else 256.0, dtype=dtype)
        P = dd.Partition((5,))
        return (
            F.all_sum_reduce(x, P),
            F.sum_reduce(x, P, dd.Partition((1,), (2,)), shape=(1,)),
            dd.maps.all_sum_reduce(P, (1,)),
            F.all_sum_reduce((x, x.double()), P),
            F.reduce_scatter((x.expand(5), x.expand(5).double()), P),
        )

    results = returned(every_rank(5, program, rounds=4))
    assert [y.item() for y, *_ in results] == [260.0] * 5 and results[2][1].item() == 260.0
    assert all(y.dtype == dtype for y, *_ in results)
    for _, _, _, *pairs in results:  # beside what needs no wider type
        assert [(y.item(), y.dtype) for pair in pairs for y in pair] == [(260.0, dtype), (260.0, torch.float64)] * 2
    simulated = results[0][2].plan.simulate([torch.full((1,), v, dtype=dtype) for v in (256.0, 1, 1, 1, 1)])
    assert [y.item() for y in simulated] == [260.0] * 5 and simulated[0].dtype == dtype


# a number from which the next one that the type has is 2 away: with 1 added twice, one after the other, it stays as it
# is
LACKING = {"float8_e4m3fn": 16, "float8_e4m3fnuz": 16, "float8_e5m2": 8, "float8_e5m2fnuz": 8, "float8_e8m0fnu": 2,
           "complex32": 2048, "uint16": 40000, "uint32": 2**31, "uint64": 2**40}  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name, first", [pair for pair in LACKING.items() if hasattr(torch, pair[0])])
def test_sums_that_torch_lacks(name, first):
    """Exact where the sum itself can be represented."""
    dtype = getattr(torch, name)

    def program():
        x = torch.full((2,), 1.0 if rank() else first, dtype=torch.float64).to(dtype)
        y = F.all_sum_reduce(x, line()), dd.maps.broadcast(dd.Partition((1,)), line(), (2,)).T(x)
        return [t.to(torch.complex64 if dtype.is_complex else torch.float64).tolist() for t in y], {t.dtype for t in y}

    for r, (values, dtypes) in enumerate(returned(every_rank(3, program))):
        assert dtypes == {dtype} and values == [[first + 2.0] * 2, [] if r else [first + 2.0] * 2]


@pytest.mark.parametrize("how", ["dense", "rows", "gaps", "apart"])
def test_all_reduces(how):
    """Alone and beside others, wherever the memory lies; inputs stay as they are; nothing is sent for nothing."""

    def program():
        x = spread((1.0 + rank()) * torch.arange(6.0).reshape(2, 3), how)
        before = x.clone()
        with dd.testing.count_messages() as sent:
            found = [F.all_sum_reduce(x, line()), *F.all_sum_reduce((x, x.int(), x[1], -x), line())]
            found.append(F.all_sum_reduce(x[:0], line()))
        return [f.tolist() for f in found], torch.equal(x, before), [n for kind, _, n in sent if kind == "all_reduce"]

    total = 6 * torch.arange(6.0).reshape(2, 3)
    wanted = [t.tolist() for t in (total, total, total.int(), total[1], -total, total[:0])]
    assert returned(every_rank(3, program)) == [(wanted, True, [24, 60, 24])] * 3


def test_lazy_tensors_and_odd_strides():
    """Conjugates, negatives, expanded and transposed inputs, with more strides than are remembered, and large
    messages."""

    def program():
        L = dd.Layout(dd.Partition((3, 1)), (6, 4))
        A = dd.maps.repartition(L, dd.Partition((1, 3)))
        X = torch.arange(24.0).reshape(6, 4) * (1 + 2j)
        x = L.shard(X)
        found = [A(x.conj()), A(x.T.contiguous().T), A(torch.imag(x.conj())), A(x[:1, :1].expand(2, 4))]
        for stride in range(1, 70):
            wide = torch.zeros(2, 4, stride)
            wide[..., 0] = x.real
            found.append(A(wide[..., 0]))
        batch = vmap(A)(x.real.expand(5000, 2, 4))
        return *found, batch[0], batch[-1], vmap(A)(x.real.expand(0, 2, 4)).shape

    X = torch.arange(24.0).reshape(6, 4) * (1 + 2j)
    M = dd.Layout(dd.Partition((1, 3)), (6, 4))
    for r, found in enumerate(returned(every_rank(3, program))):
        conj, transposed, imag, expanded, *rest, shape = found
        part = M.shard(X, r)
        assert torch.equal(conj, part.conj()) and torch.equal(transposed, part) and torch.equal(imag, -part.imag)
        assert torch.equal(expanded, X[::2, :1].repeat_interleave(2, 0).expand_as(part))
        assert all(torch.equal(y, part.real) for y in rest) and shape == (0, *part.shape)


def test_split_phase_overlaps():
    def program():
        L = dd.Layout(line(), (3,))
        A, B = dd.maps.all_gather(L), dd.maps.shift(L, 0)
        x = torch.full((1,), float(rank()), requires_grad=True)
        first, second = F.start(A, x), F.start(B, x)
        y = F.wait(second) + F.wait(first).sum()
        y.sum().backward()
        with pytest.raises(ShapeError, match="already waited"):
            F.wait(first)
        return y.item(), x.grad.item()

    assert returned(every_rank(3, program)) == [(5.0, 4.0), (3.0, 4.0), (4.0, 4.0)]


def test_transports_are_told_the_truth():
    """A message of another length is an error, also between ranks of one process."""

    def program():
        L = dd.Layout(line(), (3,))
        return dd.maps.all_gather(L)(torch.ones(1, dtype=torch.float64 if rank() else torch.float32))

    assert any(isinstance(found, dd.errors.TransportError) for found in every_rank(3, program))


def test_fake_tensors_go_through_derivatives():
    """Shapes without values, and without messages: the tie too is of the mode's own kind."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    def program():
        A = dd.maps.all_gather(dd.Layout(line(), (5,)))
        with dd.testing.count_messages() as sent, FakeTensorMode():
            x = torch.ones(A.in_shape)
            slope = jvp(grad(lambda x: A(x.sin()).sin().sum()), (x,), (x,))[1]
            stacked = vmap(A)(torch.ones(4, *A.in_shape))
        return isinstance(slope, FakeTensor), tuple(slope.shape) == A.in_shape, tuple(stacked.shape), sent.bytes

    assert returned(every_rank(3, program)) == [(True, True, (4, 5), 0)] * 3


def test_integers_beside_differentiable_tensors():
    """They travel forward in the same messages, and the gradient's messages leave them out."""

    def program():
        L = dd.Layout(line(2), (2,))
        x, i = torch.ones(1, requires_grad=True), torch.full((1,), rank())
        y, j = F.all_gather((x, i), L)
        with dd.testing.count_messages() as sent:
            ((rank() + 1) * y).sum().backward()
        return j.tolist(), x.grad.item(), sent.bytes

    assert returned(every_rank(2, program, rounds=4)) == [([0, 1], 3.0, 4)] * 2


def test_only_the_batch_that_some_rank_has_is_sent():
    """Of two vmaps around a movement, one that batches the operand of one rank, and one that batches nobody's."""

    def program():
        A, x = dd.maps.all_gather(dd.Layout(line(2), (4,))), torch.arange(2.0) + rank()
        with dd.testing.count_messages() as sent:
            y = vmap(lambda a: vmap(lambda b: A(x if rank() else a * x) + b)(torch.arange(5.0)))(torch.arange(3.0))
        return y[2, 4].tolist(), tuple(y.shape), [n for kind, _, n in sent if kind == "send"]

    assert returned(every_rank(2, program)) == [([4.0, 6.0, 5.0, 6.0], (3, 5, 4), [24])] * 2


def test_a_tangent_beside_tensors_without():
    """torch's own forward mode: the tangent travels, in whichever place, and the others get none, or zero."""
    import torch.autograd.forward_ad as fwAD

    def program():
        L, x, found = dd.Layout(line(2), (4,)), torch.arange(2.0) + rank(), []
        for place in range(2):
            with fwAD.dual_level():
                pair = [x, x + 1]
                pair[place] = fwAD.make_dual(x, x * x)
                tangents = [fwAD.unpack_dual(y).tangent for y in F.all_gather(tuple(pair), L)]
                other = tangents[1 - place]
                found.append((tangents[place].tolist(), other is None or not other.any()))
        return found

    assert returned(every_rank(2, program, rounds=4)) == [[([0.0, 1.0, 1.0, 4.0], True)] * 2] * 2


def test_the_older_vmap_is_refused():
    """It would hand tensors without memory to the movement."""

    def program():
        x = torch.ones(2, requires_grad=True)
        y = F.all_gather(x, dd.Layout(line(2), (4,)))
        with pytest.raises(dd.errors.DistdlError, match=r"torch\.func\.vmap") as caught:
            torch.autograd.grad(y, x, torch.eye(4), is_grads_batched=True)
        gather = dd.maps.all_gather(dd.Layout(line(2), (4,)))
        with pytest.raises(dd.errors.DistdlError, match=r"torch\.func\.vmap"):
            torch.autograd.functional.jacobian(gather, torch.ones(2), vectorize=True, strategy="forward-mode")
        return caught.value.next_step is not None, "all_gather" in str(caught.value) or "reduce_scatter" in str(
            caught.value
        )

    assert returned(every_rank(2, program)) == [(True, True)] * 2


def test_broadcast_of_shapes_that_differ_by_rank():
    def program():
        x = torch.full((1 + rank(),), float(rank()))
        return F.broadcast(x, dd.Partition((2, 1), (0, 1)), dd.Partition((2, 2))).tolist()

    assert returned(every_rank(4, program)) == [[0.0], [0.0], [1.0, 1.0], [1.0, 1.0]]
