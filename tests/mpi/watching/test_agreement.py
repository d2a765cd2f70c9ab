"""Ranks that disagree get the same kind of error on every rank, naming rank and difference: never a hang (case 37)."""

import contextlib
import time
from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch
from registry import here, needs, raises_everywhere
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap
from torch.utils._pytree import tree_leaves

import distdl as dd
import distdl.functional as F
from distdl import _torch
from distdl.engine import transport
from distdl.errors import AgreementError, DistdlError, ShapeError

pytestmark = needs(2)


def world():
    n = dd.world().size
    return n, dd.world().rank, dd.Partition((n,)), dd.Partition((n, 1)), dd.Partition((1, n))


def test_blocks_do_not_fit():
    n, r, P, rows, columns = world()
    x = torch.ones(2, 3 + (r == n - 1))
    raises_everywhere(AgreementError, lambda: F.repartition(x, rows, columns), f"rank {n - 1}", "dim 1", "3", "4")
    raises_everywhere(DistdlError, lambda: F.all_gather(x, rows, 0), "dim 1")
    raises_everywhere(DistdlError, lambda: F.sum_reduce(x, P, dd.Partition((1,))), f"rank {n - 1}")


def test_dtype():
    n, r, P, rows, columns = world()
    x = torch.ones(2, 3, dtype=torch.float32 if r else torch.float64)
    for call in (
        lambda: F.repartition(x, rows, columns),
        lambda: F.all_gather(x, rows),
        lambda: F.permute(x, P, [(0, 1)]),
        lambda: F.sum_reduce(x, P, dd.Partition((1,))),
        lambda: F.gather(x, rows),
    ):
        raises_everywhere(AgreementError, call, "dtype", "rank 0: torch.float64", "torch.float32")


def test_operator():
    n, r, P, rows, columns = world()
    x = torch.ones(2, 3)
    raises_everywhere(AgreementError, lambda: F.repartition(x, rows, columns) if r else F.all_gather(x, rows),
                      "operator", "rank 0: all_gather", "repartition")  # fmt: skip


def test_partitions():
    n, r, P, rows, columns = world()
    x = torch.ones(2, 3)
    raises_everywhere(AgreementError, lambda: F.repartition(x, rows, columns if r else rows), "partitions")


def test_number_of_tensors_and_dims():
    n, r, P, rows, columns = world()
    x = torch.ones(2, 3)
    raises_everywhere(AgreementError, lambda: F.repartition([x] * (2 if r else 1), rows, columns), "number of tensors")
    raises_everywhere(AgreementError, lambda: F.permute(x if r else x[0], P, [(0, 1)]), "number of dims")


def test_a_local_failure_travels():
    """What only one rank can see is raised on all: a tensor of another ndim, or no tensor at all."""
    n, r, P, rows, columns = world()
    for mine, *words in ((torch.ones(2), "rank 0", "2 dims"), (None, "rank 0", "NoneType")):
        raises_everywhere(AgreementError, lambda: F.repartition(torch.ones(2, 3) if r else mine, rows, columns), *words)


def test_requires_grad_is_joined():
    """Case 38: one rank's input does not require grad; with plain backward every rank's output is connected all the
    same."""
    n, r, P, rows, columns = world()
    for call, shape in ((lambda x: F.repartition(x, rows, columns), (2, n)), (lambda x: F.all_gather(x, rows), (2, 3)),
                        (lambda x: F.permute(x, P, [(0, 1), (1, 0)]), (2,)),
                        (lambda x: F.gather(x, rows), (1, 2)),
                        (lambda x: F.sum_reduce(x, P, dd.Partition((1,))), (2,))):  # fmt: skip
        x = torch.ones(shape, dtype=torch.float64, requires_grad=r == n - 1)
        y = call(x)
        assert y.requires_grad
        (y**2).sum().backward()
        assert (x.grad is not None) == (r == n - 1)
        with torch.no_grad():
            assert not call(x).requires_grad


def test_placeholder_without_grad():
    """An inactive rank passes an ordinary zero-volume tensor: backward completes."""
    n, r, P, rows, columns = world()
    src, dst = dd.Partition((1, 1)), dd.Partition((1, n))
    x = torch.ones(2, n, dtype=torch.float64, requires_grad=True) if r == 0 else torch.zeros(0, n)
    y = F.repartition(x, src, dst)
    assert y.requires_grad and y.dtype == torch.float64
    ((r + 1) * y.sum()).backward()
    if r == 0:
        assert torch.equal(x.grad, torch.arange(1.0, n + 1).expand(2, n).double())


def test_requires_grad_inside_torch_func():
    """There connections cannot be joined: a difference is an error on every rank."""
    n, r, P, rows, columns = world()
    fixed = torch.ones(2, n, dtype=torch.float64)

    def f(x):
        return F.repartition(x if r else fixed, rows, columns).sum()

    raises_everywhere(AgreementError, lambda: grad(f)(fixed), "torch.func")
    raises_everywhere(AgreementError, lambda: jvp(f, (fixed,), (fixed,)), "torch.func")
    connected = lambda x: F.repartition(x if r else fixed + 0 * x, rows, columns).pow(2).sum()
    assert torch.equal(grad(connected)(fixed), 2 * fixed if r else 0 * fixed)


def test_shape_changes_on_one_rank_only():
    """Case 23: global size 10 -> 11 on 2 ranks between two calls."""
    n, r, P, rows, columns = world()
    for size in (5 * n, 5 * n + 1, 5 * n):
        L = dd.Layout(P, (size,))
        X = torch.arange(float(size))
        assert torch.equal(F.all_gather(L.shard(X), P), X)
        assert torch.equal(F.gather(L.shard(X), P), X) or r > 0


def test_errors_do_not_spoil_the_next_call():
    n, r, P, rows, columns = world()
    for _ in range(3):
        x = torch.ones(2, 3, dtype=torch.float64 if r else torch.int8)
        raises_everywhere(AgreementError, lambda: F.repartition(x, rows, columns))
        assert F.all_sum_reduce(torch.ones(1), P).item() == n


@pytest.fixture
def impatient(monkeypatch, request):
    """Ranks look after a quarter of a second, not five, for messages that should not be there."""
    if request.config.getoption("--engine") != "mpi":
        pytest.skip("NCCL has no tags: dd.checking() does it")
    from distdl.watching.lookout import Lookout

    monkeypatch.setattr(Lookout, "patience", 0.25)
    monkeypatch.setattr(Lookout, "interval", 0.05)
    with unchecked():
        yield


@contextlib.contextmanager
def unchecked():
    before, transport.observer = transport.observer, None
    try:
        yield
    finally:
        transport.observer = before


def in_order(*calls):
    for call in calls:
        call()


def all_raise(first, second, *words):
    """Rank 0 makes two calls, the others the same in the opposite order: one error on every rank, that names both."""
    r = dd.world().rank
    with pytest.raises(AgreementError) as caught:
        in_order(*(first, second)[:: -1 if r else 1])
    text = str(caught.value)
    words = ("the ranks are in different calls", "rank 0: ", "; rank ", "test_agreement.py", *words)
    assert all(w in text for w in words), text


def test_calls_in_another_order(impatient):
    """Messages of one size: without tags of the plan each rank would take the other call's for its own (both were
    wrong)."""
    n, r, P, rows, columns = world()
    L, x, u = dd.Layout(P, (2 * n,)), torch.tensor([1.0, 2.0]) + 10 * r, torch.ones(2, requires_grad=True)
    f, g = (torch.tensor([1.0, 2.0], dtype=d) for d in (torch.float32, torch.int32))
    calls = {
        "shift": lambda: F.shift(x, L, 0), "all_gather": lambda: F.all_gather(x, L),
        "halo_exchange": lambda: F.halo_exchange(x, dd.HaloSpec(L, 2, boundary="circular")),
    }  # fmt: skip
    if n < 4:  # else the last rank has all that it needs
        calls["shift, float"], calls["shift, int"] = lambda: F.shift(f, P, 0), lambda: F.shift(g, P, 0)
    if n == 2:  # else some ranks have no part in one of the two, or need not wait
        calls["gather"], calls["permute"] = lambda: F.gather(x, L), lambda: F.permute(x, L, [(0, 1)])
        calls["broadcast"] = lambda: F.broadcast(x, dd.Partition((1,)), P, shape=(2,))
    for a, b in (("shift", "gather"), ("all_gather", "shift"), ("broadcast", "shift"), ("halo_exchange", "all_gather"),
                 ("shift", "permute"), ("shift, float", "shift, int")):  # fmt: skip
        if a in calls and b in calls:
            for first, second in ((a, b), (b, a)):
                all_raise(calls[first], calls[second], *(f"{name.partition(',')[0]} over" for name in (first, second)))
                assert torch.equal(calls["shift"](), x + (10 * (n - 1) if r == 0 else -10)), (
                    "and the next call is right"
                )
    y, z = F.shift(u, L, 0), F.all_gather(u, L)
    all_raise(lambda: y.sum().backward(), lambda: z.sum().backward(), "shift.T", "all_gather.T")


def test_ranks_that_take_no_part_hear_of_it(impatient):
    n, r, P, rows, columns = world()
    if n < 3:
        pytest.skip("needs 3 ranks")
    Q, x = dd.Partition((2,)), torch.ones(2)
    calls = [lambda: F.shift(x, Q, 0), lambda: F.all_gather(x, dd.Layout(Q, (4,)))]
    text = r"rank 0: shift over Partition\(\(2,\)\), torch.float32, now in .*; rank 1: all_gather"
    with pytest.raises(AgreementError, match=text):
        in_order(*(calls[:: -1 if r else 1] if r < 2 else []), lambda: F.all_gather(x, dd.Layout(P, (2 * n,))))
    assert F.shift(x * r, P, 0).tolist() == [(r - 1.0) % n] * 2


def test_a_rank_that_skips_a_call(impatient):
    """It caught an error of its own: those that miss its message hear of it, with its cause, and all are together
    again."""
    n, r, P, rows, columns = world()
    L, x = dd.Layout(P, (2 * n,)), torch.full((2,), float(r))
    for _ in range(2):
        with pytest.raises(ShapeError if r == 1 else AgreementError, match=r"expected \(2,\), got \(1,\)"):
            F.all_gather(x[: 1 if r == 1 else 2], L)
        assert F.shift(x, L, 0).tolist() == [(r - 1.0) % n] * 2
    with pytest.raises(ShapeError):  # on all ranks: nobody waits
        F.shift(x[:1], L, 0)
    if r == 0:
        time.sleep(1)  # longer than the others' patience: what is left of calls that all gave up is no fault
    assert F.shift(x, L, 0).tolist() == [(r - 1.0) % n] * 2


def test_tags_fit_every_mpi():
    from distdl.watching.lookout import tag_bits

    for most in (32767, 2**19 - 1, 2**20 - 1, 2**24 - 1, 2**28, 2**31 - 1):
        eras, numbers, plans = tag_bits(most)
        assert min(eras, numbers - 4, plans - 6) > 0 and (1 << eras + numbers + plans) - 1 <= most


def test_another_dtype(impatient):
    """A promise broken (no negotiation, another dtype on one rank): an error that names both, not garbage, whatever the
    sizes."""
    n, r, P, rows, columns = world()
    for mine, others in ((torch.float32, torch.float64), (torch.float64, torch.float32), (torch.int32, torch.float32)):
        text = f"rank 0: all_gather over .*, {mine}, now in .*: all_gather over .*, {others}, now in"
        with pytest.raises(AgreementError, match=text):
            F.all_gather(torch.ones(4, dtype=mine if r == 0 else others), dd.Layout(P, (4 * n,)))
    assert F.shift(torch.full((2,), float(r)), P, 0).tolist() == [(r - 1.0) % n] * 2


def test_wait_twice():
    n, r, P, rows, columns = world()
    pending = F.start(dd.maps.shift(P, 0, 1, True, (2,)), torch.ones(2))
    F.wait(pending)
    with pytest.raises(ShapeError, match="already"):
        F.wait(pending)


def test_pytrees():
    """Containers must be the same; a rank that holds nothing gets the holders'."""
    n, r, P, rows, columns = world()
    x = torch.ones(2, n)
    for mine in ({"b": x, "c": x}, [x, x], [], x):
        others = {"a": x, "b": x} if isinstance(mine, dict) else (x, x)
        raises_everywhere(AgreementError, lambda: F.repartition(others if r else mine, rows, columns), "rank 0: ")
    for nothing in (None, [], torch.zeros(3)):
        y = F.scatter(nothing if r else {"a": torch.arange(n), "b": torch.ones(n)}, P)
        assert y["a"].tolist() == [r] and y["b"].tolist() == [1]


Pair = namedtuple("Pair", "second first")


def container(kind, values, backwards):
    """{name: value} as that kind of container, its keys in one of two orders; a namedtuple's fields stay where they
    are."""
    names = list(values)[:: -1 if backwards else 1]
    if kind == "nested":
        return [{"q": {k: {k: values[k]} for k in names}}, *[values["b"]] * 2]
    if kind == "mixed keys":
        keys = {"a": 1, "b": "x", "c": (2, "y"), "d": torch.float32}
        return {keys[k]: values[k] for k in names}
    if kind is Pair:
        return Pair(values["b"], {k: values[k] for k in names})
    return kind(list, {k: values[k] for k in names}) if kind is defaultdict else kind((k, values[k]) for k in names)


@pytest.mark.parametrize("kind", [dict, OrderedDict, defaultdict, Pair, "nested", "mixed keys"])
def test_order_of_keys(kind):
    """Leaves are matched by their keys: rank 0 has them in another order. Every movement that takes a pytree, with
    shapes of its own and with equal ones, with a Layout, a shape or nothing; and its adjoint. The result has this
    rank's order."""
    n, r, P, rows, columns = world()
    L = dd.Layout(P, (2 * n,))
    tall, wide = dd.Layout(rows, (2 * n, n)), dd.Layout(columns, (2 * n, n))
    calls = {
        "all_sum_reduce": (lambda x: F.all_sum_reduce(x, P), (2,)),
        "shift": (lambda x: F.shift(x, P, 0), (2,)),
        "shift, layout": (lambda x: F.shift(x, L, 0), (2,)),
        "permute": (lambda x: F.permute(x, P, [(0, 1), (1, 0)]), (2,)),
        "mark_varying": (lambda x: F.mark_varying(x, P), (2,)),
        "invariant_sum": (lambda x: F.invariant_sum(x, P), (2,)),
        "reduce_scatter": (lambda x: F.reduce_scatter(x, P), (2 * n,)),
        "all_gather": (lambda x: F.all_gather(x, P), (2,)),
        "all_gather, layout": (lambda x: F.all_gather(x, L), (2,)),
        "scatter": (lambda x: F.scatter(x, P, shape=(2 * n,)), (2 * n,)),
        "gather, layout": (lambda x: F.gather(x, L), (2,)),
        "broadcast": (lambda x: F.broadcast(x, dd.Partition((1,)), P), (3,)),
        "sum_reduce": (lambda x: F.sum_reduce(x, P, dd.Partition((1,)), shape=(3,)), (3,)),
        "repartition": (lambda x: F.repartition(x, tall, wide), (2, n)),
        "bare": (lambda x: F.repartition(x, rows, columns), (2, n)),
        "halo": (lambda x: F.halo_exchange(x, dd.HaloSpec(L, 1, boundary="circular")), (2,)),
    }
    for name, (call, shape) in calls.items():
        mine = 1 if name == "mark_varying" else r + 1  # it takes equal copies
        values = {k: torch.full(shape, 10.0**i * mine, requires_grad=True) for i, k in enumerate("abcd")}
        given = container(kind, values, r == 0)
        found = call(given)
        assert type(found) is type(given), name
        if isinstance(given, dict):
            assert list(found) == list(given), f"{name}: this rank's own order"
        ours = container(kind, {k: call(v) for k, v in values.items()}, r == 0)
        pairs = list(zip(tree_leaves(found), tree_leaves(ours), strict=True))
        assert all(torch.equal(a, b) for a, b in pairs), name
        sum((a * a).sum() for a, _ in pairs).backward()  # a key's cotangent is the same on all ranks that share it
        grads = {k: v.grad.clone() for k, v in values.items()}
        for v in values.values():
            v.grad = None
        sum((b * b).sum() for _, b in pairs).backward()
        assert all(torch.equal(v.grad, grads[k]) for k, v in values.items()), name


def test_words_for_pytrees():
    """The same for equal containers; a dictionary's keys, not their order, make the difference."""
    one = _torch.flatten({"b": 1, "a": [2, {3: 4, 2.5: 5}]})
    assert one[0] == [2, 5, 4, 1] and one[1].text == _torch.flatten({"a": [0, {2.5: 0, 3: 0}], "b": 0})[1].text
    assert one[1].text != _torch.flatten({"b": 1, "c": [2, {3: 4, 2.5: 5}]})[1].text
    for tree in ([], {}, (None, [1]), Pair(1, {"b": 2, "a": 3}), OrderedDict(b=1, a=2), {frozenset("ba"): 1, None: 2}):
        leaves, structure = _torch.flatten(tree)
        assert _torch.unflatten(leaves, structure) == tree
        assert _torch.unflatten_as_given(_torch.as_given(leaves, structure), structure) == tree
    keys = [object(), object()]  # nothing to sort them by: as they stand
    assert _torch.flatten({keys[1]: 1, keys[0]: 2})[0] == [1, 2]


def test_arguments():
    n, r, P, rows, columns = world()
    raises_everywhere(
        AgreementError, lambda: F.permute(torch.ones(1), P, [(0, 1)] if r else [(1, 0)]), "arguments", "pairs"
    )
    raises_everywhere(AgreementError, lambda: F.all_gather(torch.ones(2, 2), rows, 0 if r else 1), "arguments", "dims")


def test_transforms_on_some_ranks():
    n, r, P, rows, columns = world()
    x = torch.ones(2, n, dtype=torch.float64)

    def f(x):
        return F.repartition(x, rows, columns).sum()

    raises_everywhere(AgreementError, lambda: f(x) if r else vmap(f)(torch.stack([x, x])), "vmap", "rank 0: (2,)")
    raises_everywhere(
        AgreementError, lambda: jvp(f, (x,), (x,)) if r else grad(f)(x), "torch.func", "rank 0: (('Grad 1',),)"
    )
    with torch.set_grad_enabled(r > 0):
        raises_everywhere(AgreementError, lambda: f(x.clone().requires_grad_()), "graph is recorded", "rank 0: False")
        assert f(x) == 2 * n  # where no rank would record anything it does not matter
    with forward_ad.dual_level() if r else torch.enable_grad():
        raises_everywhere(
            AgreementError, lambda: f(forward_ad.make_dual(x, x) if r else x), "forward mode", "rank 0: False"
        )
        some = [forward_ad.make_dual(x, x) if r else x, x]  # of two tensors one has a tangent
        raises_everywhere(AgreementError, lambda: F.repartition(some, rows, columns), "forward mode", "rank 0: False")


def test_tangents_are_joined():
    """Dual numbers on one rank only, with and without a graph on another."""
    n, r, P, rows, columns = world()
    for graph in (False, True):
        x = torch.ones(2, n, dtype=torch.float64, requires_grad=graph and r == 1)
        with forward_ad.dual_level():
            y, t = forward_ad.unpack_dual(
                F.repartition(forward_ad.make_dual(x, 3 * x.detach()) if r == 0 else x, rows, columns)
            )
            assert y.requires_grad == graph
            assert torch.equal(t, torch.tensor([3.0] * 2 + [0.0] * (2 * n - 2), dtype=torch.float64)[:, None])


def test_ranks_in_different_agreements():
    """One asks for block sizes, another one gathers objects: neither may take the other's answer for its own."""
    n, r, P = here()
    if n == 1:
        return
    channels = dd.Layout(dd.Partition((1, n, 1)), (1, n, 3))
    others = (
        lambda: dd.testing.gather_objects(r),
        lambda: F.dist_conv(torch.ones(1, 1, 3), torch.ones(1, n, 1), channels),
    )
    for other, text in zip(others, ("gather_objects", "sizes of a parameter's blocks")):
        call = (lambda: F.repartition(torch.ones(1), P, P.take(0, 0, keepdim=True))) if r == 0 else other
        with pytest.raises(AgreementError, match=f"rank 0: repartition; ranks? [0-9, ]+: {text}"):
            call()
