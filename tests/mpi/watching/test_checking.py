"""Under dd.checking() a disagreement is one error on every rank, naming ranks, operators and lines; and nothing else
changes."""

import time

import pytest
import torch
from registry import needs, raises_everywhere, randn
from torch.func import grad, hessian, vmap

import distdl as dd
import distdl.functional as F
from distdl.engine import transport
from distdl.errors import AbsenceError, AgreementError, DistdlError, InvariantError
from distdl.testing import collective_assert, count_messages, gather_objects

pytestmark = needs(2)
N, R = dd.world().size, dd.world().rank
P = dd.Partition((N,))


@pytest.fixture(autouse=True)
def checked():
    with dd.checking(timeout=60):  # time enough for a loaded machine: what differs is found at once
        yield


def test_results_graphs_and_messages_stay():
    rows, columns = dd.Layout(dd.Partition((N, 1)), (2 * N + 1, 3)), dd.Layout(dd.Partition((1, N)), (2 * N + 1, 3))
    spec = dd.HaloSpec(rows, 1, boundary="circular")

    def f(x, w):
        y, h = F.repartition(x.sin(), rows, columns.partition), F.halo_exchange(x * F.mark_varying(w, P), spec)
        return F.invariant_sum((h**2).sum() + (y**3).sum() * F.shift(y.sum(), P, 0), P)

    def everything():
        x, w = rows.shard(randn(rows.shape, 1)).requires_grad_(), randn((3,), 2).requires_grad_()
        with count_messages() as sent:
            loss = f(x, w)
            first = torch.autograd.grad(loss, (x, w), create_graph=True)
            second = torch.autograd.grad(first[0].square().sum(), (x, w))
            batch = vmap(lambda x: F.all_gather(x, rows, 0))(torch.stack([x.detach()] * 2))
        return [loss, *first, *second, batch], list(sent)

    inside, outside = everything(), unchecked(everything)
    assert all(torch.equal(a, b) and a.requires_grad == b.requires_grad for a, b in zip(inside[0], outside[0]))
    assert inside[1] == outside[1]


def unchecked(call):
    before, transport.observer = transport.observer, None
    try:
        return call()
    finally:
        transport.observer = before


def test_a_late_rank_is_waited_for():
    if R == 0:
        time.sleep(0.5)
    assert F.shift(torch.tensor([float(R)]), P, 0).item() == (R - 1) % N


# ---------------------------------------------------------------- case 37: ranks disagree


def test_operator():
    x = torch.ones(2, 2)
    words = (
        "the operator called",
        "rank 0: all_sum_reduce at ",
        "shift at ",
        "test_checking.py:",
        "in <lambda>",
        f"on rank {R}",
    )
    text = raises_everywhere(AgreementError, lambda: F.shift(x, P, 0) if R else F.all_sum_reduce(x, P), *words)
    said = gather_objects(text.replace(f"on rank {R}", ""))
    assert len(set(said)) == 1, "the same sentence on every rank"


def test_error_has_its_parts():
    try:
        F.shift(torch.ones(2), P, 0) if R else F.all_sum_reduce(torch.ones(2), P)
    except AgreementError as error:
        parts = [error.op, error.partitions, error.expected, error.actual, error.next_step]
        collective_assert(all(parts) and error.rank == R, str(parts))


@pytest.mark.parametrize(("shape", "dtype", "words"), [
    ((4 if R else 3,), torch.float32, ("the layouts or shapes", "local (3,) -> (3,)", "local (4,) -> (4,)")),
    ((3,), torch.float64 if R else torch.float32, ("the dtype", "torch.float32 at", "torch.float64 at")),
], ids=["shape", "dtype"])  # fmt: skip
def test_shape_and_dtype_without_negotiation(shape, dtype, words):
    for call in (F.shift, F.all_sum_reduce, F.invariant_sum, F.mark_varying):
        args = (P, 0) if call is F.shift else (P,)
        raises_everywhere(AgreementError, lambda: call(torch.ones(shape, dtype=dtype), *args), *words)


def test_direction_partitions_and_pytrees():
    x, rows, columns = (
        torch.ones(2, 2),
        dd.Layout(dd.Partition((N, 1)), (2 * N, 2)),
        dd.Layout(dd.Partition((1, N)), (2, 2 * N)),
    )
    A, B = dd.maps.repartition(rows, columns.partition), dd.maps.all_sum_reduce(P, (2, 2))
    raises_everywhere(
        AgreementError, lambda: (A if R else A.T)(torch.ones((A if R else A.T).in_shape)), "repartition.T"
    )
    raises_everywhere(AgreementError, lambda: F.all_sum_reduce(x, P if R else dd.Partition((N, 1))), "the partitions")
    raises_everywhere(AgreementError, lambda: F.all_sum_reduce([x] * (1 if R else 2), P), "the number of tensors")
    assert torch.equal(B(x), N * x), "no error spoils the next call"


def layers():
    """name: (what the ranks but one call, what that one calls, words of the error)."""
    L, rows = dd.Layout(P, (2 * N,)), dd.Layout(dd.Partition((N, 1)), (2 * N, 3))
    x, y, target, w = randn((2,), R), randn((2, 3), R), torch.zeros(2, dtype=torch.int64), torch.ones(3)
    image, pixels = dd.Layout(dd.Partition((N, 1, 1)), (N, 3, 4)), randn((1, 3, 4), R)

    def batch(**others):
        return F.dist_batch_norm(pixels, image, torch.zeros(3), w, w, w, **others)

    return {
        "sum, norm": (lambda: F.dist_sum(x, L), lambda: F.dist_norm(x, L), "dist_sum at"),
        "max, min": (lambda: F.dist_max(x, L), lambda: F.dist_min(x, L), "dist_min at"),
        "mean, sum": (lambda: F.dist_mean(x, P), lambda: F.dist_sum(x, P), "dist_mean at"),
        "ord": (lambda: F.dist_norm(x, L, ord=1), lambda: F.dist_norm(x, L), "ord=1"),
        "correction": (lambda: F.dist_var(x, L), lambda: F.dist_var(x, L, correction=0), "correction=0"),
        "losses": (lambda: F.dist_mse_loss(x, x, L), lambda: F.dist_l1_loss(x, x, L), "dist_l1_loss at"),
        "reduction": (lambda: F.dist_mse_loss(x, x, L), lambda: F.dist_mse_loss(x, x, L, "sum"), "reduction='sum'"),
        "label_smoothing": (lambda: F.dist_cross_entropy(y, target, rows),
                            lambda: F.dist_cross_entropy(y, target, rows, label_smoothing=0.5), "label_smoothing=0.5"),
        "eps": (lambda: F.dist_layer_norm(x, L, 2 * N), lambda: F.dist_layer_norm(x, L, 2 * N, eps=1e-3), "eps=0.001"),
        "momentum": (lambda: batch(training=True), lambda: batch(training=True, momentum=0.2), "momentum=0.2"),
        "eps without messages": (batch, lambda: batch(eps=0.25), "eps=0.25"),
        "dropout's p": (lambda: F.dist_dropout(x, L, 0.5, 1), lambda: F.dist_dropout(x, L, 0, 1), "p=0,"),
        "dropout's seed": (lambda: F.dist_dropout(x, L, 0.5, 1), lambda: F.dist_dropout(x, L, 0.5, 2), "seed=2"),
        "bare, ord": (lambda: F.dist_norm(x, P, ord=1), lambda: F.dist_norm(x, P), "ord=1"),
    }  # fmt: skip


def test_layers_and_their_arguments():
    """Another layer, or another plain argument, on one rank: an error that names it, also where no message is sent."""
    for name, (call, other, word) in layers().items():
        words = ("the function called" if word.endswith(" at") else "the arguments", word, "test_checking.py:")
        for odd in (0, N - 1):
            text = raises_everywhere(AgreementError, other if odd == R else call, *words)
            assert f"rank {odd}: " in text, name
        call()  # the same everywhere


def test_the_same_arguments_spelt_otherwise():
    """Lists and tuples, 1 and 1.0, are one value; tensors, and what a rank leaves out, may differ."""
    L, x = dd.Layout(dd.Partition((N, 1)), (2 * N, 3)), randn((2, 3), R)
    assert F.dist_sum(x, L, [0, 1] if R else (0, 1), keepdim=False).shape == ()
    F.dist_layer_norm(x, L, [3] if R else (3,), torch.ones(3) if R else None, eps=1 if R else 1.0)
    F.scatter(torch.ones(2 * N, 3) if R == 0 else None, dd.Partition((N, 1)))
    y = F.scatter({"b": torch.ones(N), "a": torch.zeros(N)} if R == 0 else None, P)
    assert y["a"] == 0 and y["b"] == 1


def test_containers():
    x = torch.ones(2)
    for mine, others in (([x], {"a": x}), ({"a": x}, {"b": x}), ([[x], x], [x, x]), ((x, x), [x, x])):
        for call in (F.all_sum_reduce, F.mark_varying, lambda t, P: F.shift(t, dd.Layout(P, (2 * N,)), 0)):
            raises_everywhere(AgreementError, lambda: call(others if R else mine, P), "the pytree")
    assert F.shift({"b": x, "a": 2 * x} if R else {"a": 2 * x, "b": x}, P, 0)["a"].tolist() == [2, 2]


def test_an_error_of_one_rank_is_told_at_once():
    """With its cause, long before the limit of 60 s; on all ranks of the call; and the next call is right."""
    L, x = dd.Layout(P, (2 * N,)), torch.full((2,), float(R))
    calls = {
        "wrong shape": (lambda odd: F.shift(x[: 1 if odd else 2], L, 0), "expected (2,), got (1,)"),
        "wrong argument": (lambda odd: F.shift(x, L, 4 if odd else 0), "no dim 4"),
        "in a layer": (lambda odd: F.dist_layer_norm(x, L, 2 * N + odd), "normalized_shape"),
        "no tensor": (lambda odd: F.all_sum_reduce([None] if odd else [x], P), "NoneType"),
        "a map": (lambda odd: dd.maps.all_sum_reduce(P, (2,))(x[: 1 if odd else 2]), "got (1,)"),
    }  # fmt: skip
    for call, cause in calls.values():
        for odd in (0, N - 1):
            start = time.monotonic()
            words = () if odd == R else (f"rank {odd} left this call", "by an error of its own")
            raises_everywhere(DistdlError, lambda: call(odd == R), cause, "test_checking.py:" if words else "", *words)
            assert time.monotonic() - start < 20
            assert F.shift(x, L, 0).tolist() == [(R - 1.0) % N] * 2
    with pytest.raises(dd.errors.ShapeError):  # on all ranks: nobody is told of anything
        F.shift(x[:1], L, 0)
    assert F.all_sum_reduce(x, P)[0] == N * (N - 1) / 2


def test_batches():
    x = torch.ones(4, 2)
    raises_everywhere(AgreementError, lambda: vmap(lambda x: F.shift(x, P, 0))(x[: 3 if R else 4]), "vmaps")
    A = dd.maps.shift(P, 0, 1, True, (2,))
    from distdl.linear_map import apply

    raises_everywhere(
        AgreementError, lambda: apply(A.steps, (x[: 3 if R else 4],)), "the batch sizes (vmap)", "(4,)", "(3,)"
    )


def test_adjoints_are_compared_too():
    y = F.shift(torch.ones(3, requires_grad=True), P, 0)
    z = F.all_gather(torch.ones(1, requires_grad=True), P)
    raises_everywhere(AgreementError, lambda: (y if R else z).sum().backward(), "shift.T at", "all_gather.T at")


def test_movement_against_agreement():
    """One rank negotiates, the others move."""
    x, rows, columns = torch.ones(1, 3), dd.Partition((N, 1)), dd.Partition((1, N))
    raises_everywhere(AgreementError, lambda: F.shift(x, P, 0) if R else F.repartition(x, rows, columns),
                      "rank 0: agreement for repartition at", "shift at")  # fmt: skip


def test_a_rank_that_never_comes():
    """Those that wait name it, what it last completed and where, and where the others are; it hears of it when it
    comes."""
    F.shift(torch.ones(1), P, 0)
    if R == N - 1:
        time.sleep(2.5)
    with dd.checking(timeout=1 if R < N - 1 else 60):
        text = raises_of(lambda: F.all_sum_reduce(torch.ones(1), P))
    others = "rank 0 is" if N == 2 else f"ranks {', '.join(map(str, range(N - 1)))} are"
    words = (
        f"rank {N - 1} did not come within 1 s",
        f"rank {N - 1} is outside of any movement, last completed shift over",
        "test_checking.py:",
        f"{others} in all_sum_reduce at",
    )
    collective_assert(all(w in text for w in words), text)


def raises_of(call):
    with pytest.raises(AbsenceError) as caught:
        call()
    return str(caught.value)


# ---------------------------------------------------------------- the cotangent convention


def squares():
    x = torch.tensor([1.0 + R], requires_grad=True)
    return x, F.invariant_sum((x**2).sum(), P)


def test_rule_one():
    """A varying value is multiplied into an invariant one."""
    x, loss = squares()
    words = "rule 1", "invariant_sum.T", "rank 0: norm 1; rank 1: norm 2"
    raises_everywhere(InvariantError, lambda: (loss * (R + 1)).backward(), *words)
    raises_everywhere(
        InvariantError, lambda: grad(lambda x: F.invariant_sum(x**2, P) * (R + 1))(x.detach()[0]), "rule 1"
    )
    assert x.grad is None


def test_rule_two():
    x, loss = squares()
    words = "rule 2", "rank 0: norm 1", "gave it the cotangent 0"
    raises_everywhere(InvariantError, lambda: (loss if R == 0 else 0 * loss).backward(), *words)


def test_a_loss_scale_of_ones_own():
    x, loss = squares()
    raises_everywhere(InvariantError, lambda: (loss * (2.0**15 if R else 2.0**16)).backward(), "rule 3")


def test_parameters_that_drifted():
    w = torch.tensor([1.0, 1.0 + 1e-7 * R])
    raises_everywhere(InvariantError, lambda: F.mark_varying(w, P), "copies of an invariant value differ", "rule 1")


def test_one_bit_is_a_difference_but_the_sign_of_zero_is_none():
    for good in (
        torch.tensor([0.0 if R else -0.0]),
        torch.tensor([float("nan")]),
        torch.tensor([1 + 2j]),
        torch.tensor([True]),
    ):
        F.mark_varying(good, P)
    g = torch.tensor([1.0, 2.0])
    bad = torch.stack([g, g.flip(0)])[min(R, 1)]
    raises_everywhere(InvariantError, lambda: F.mark_varying(bad, P), "but other entries")


def test_right_programs_pass():
    x, loss = squares()
    loss.backward()
    assert x.grad.item() == 2 * (R + 1)
    w = torch.tensor(3.0)
    assert grad(lambda w: F.invariant_sum(F.mark_varying(w, P) * (R + 1), P))(w).item() == sum(range(1, N + 1))
    H = hessian(lambda w: F.invariant_sum((F.mark_varying(w, P) * (R + 1)) ** 2, P))(w)
    assert H.item() == 2 * sum(k * k for k in range(1, N + 1))


# ---------------------------------------------------------------- divergent graphs


def branch(wrong, *words, error=DistdlError):
    """``wrong()`` is an error on every rank: those that take part in no movement find it in the next one."""

    def call():
        wrong()
        gather_objects("next")

    raises_everywhere(error, call, *words)


def test_requires_grad_on_some_ranks_only():
    """With a Layout nothing is joined: backward is an error that says which rank recorded nothing, and where."""
    L = dd.Layout(P, (2 * N,))
    y = F.shift(torch.ones(2, requires_grad=R == 0), L, 0)
    assert y.requires_grad == (R == 0)
    branch(
        lambda: y.sum().backward() if R == 0 else None,
        "rank 0: shift.T",
        "agreement",
        "recorded no graph for shift at",
        "test_checking.py:",
    )


def test_no_grad_on_one_rank():
    x = torch.ones(2, requires_grad=True)
    with torch.set_grad_enabled(R > 0):
        y = F.all_sum_reduce(x, P)
    words = "all_sum_reduce.T", "rank 0 recorded no graph for all_sum_reduce", "torch.no_grad"
    branch(lambda: y.sum().backward() if R else None, *words)


def test_output_unused_on_one_rank():
    """Case 38: an error that names the rank, and right with F.tie."""

    def loss(x, tie):
        y = F.shift(x, P, 0)
        if R == 0:
            return F.tie(x**2, y) if tie else x**2
        return y**3

    x = torch.tensor(1.0 + R)
    branch(lambda: grad(lambda x: loss(x, False))(x), "rank 0: agreement", "shift.T")
    mine = 2 * x if R == 0 else 0.0
    sent = 3 * x**2 if (R + 1) % N else 0.0  # rank r + 1 cubes what this rank sent
    assert grad(lambda x: loss(x, True))(x) == mine + sent


def test_exception_in_one_rank_s_backward():
    x = torch.ones(2, requires_grad=True)
    y = F.shift(x, P, 0)
    z = 2 * y

    def fail(g):
        raise ValueError("broken")

    if R == 0:
        z.register_hook(fail)
        with pytest.raises(ValueError, match="broken"):
            z.sum().backward()
        branch(lambda: None, "rank 0: agreement", "shift.T")
    else:
        branch(lambda: z.sum().backward(), "rank 0: agreement", "shift.T")


def test_data_dependent_branch_and_early_stop():
    x = torch.tensor(float(R))
    branch(lambda: F.all_sum_reduce(x, P) if x > 0 else None, "rank 0: agreement", "all_sum_reduce at")
    branch(lambda: [F.shift(x, P, 0) for _ in range(2 if R else 1)], "rank 0: agreement", "shift at")


def test_zero_volume_input_without_grad():
    """Joined without a Layout; inside torch.func an error on every rank, and right with F.nothing."""
    one, last = dd.Partition((1,)), dd.Partition((1,), (N - 1,))
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    y = F.repartition(w**2 if R == 0 else torch.empty(0), one, last)
    if R in (0, N - 1):  # the others take no part
        assert y.requires_grad
        (3 * y.sum()).backward()
    assert R or torch.equal(w.grad, 6 * w)

    def loss(w, x):
        y = F.repartition(x, one, last)
        return (y * w).sum() if N - 1 == R else F.nothing((0,), y).sum()

    if R in (0, N - 1):
        with pytest.raises(AgreementError, match=r"torch\.func"):
            grad(lambda w: loss(w, w**2 if R == 0 else torch.empty(0)))(w.detach())
    g = grad(lambda w: loss(w, w**2 if R == 0 else F.nothing((0,), w)))(w.detach())
    wanted = {0: 2 * w**2, N - 1: w**2}.get(R, 0 * w)
    assert torch.equal(g, wanted.detach())


def test_frozen_branch_on_some_ranks():
    """Rank 0's parameters are frozen: its movement is joined without a Layout, and tied to the input with one."""
    v = torch.full((1, 2), 2.0, requires_grad=R > 0)
    y = F.all_gather(v * 3, dd.Partition((N, 1)))
    assert y.requires_grad
    y.sum().backward()
    assert R == 0 or v.grad.tolist() == [[3.0 * N] * 2]

    x = torch.ones(2, requires_grad=True)
    y = F.shift(F.tie(v.detach()[0], x) if R == 0 else v[0] * x, dd.Layout(P, (2 * N,)), 0)
    y.sum().backward()
    assert x.grad.tolist() == ([0.0] * 2 if R == 0 else [2.0] * 2)


def test_remat_where_one_rank_drops_an_output():
    def region(x, tie):
        y = F.shift(x.sin(), P, 0)
        if R == 0:
            return F.tie(2 * x, y) if tie else 2 * x
        return y.exp()

    x = torch.tensor([0.3], requires_grad=True)
    dd.remat(lambda x: region(x, True))(x).sum().backward()
    plain = x.detach().clone().requires_grad_()
    region(plain, True).sum().backward()
    assert torch.equal(x.grad, plain.grad)
    branch(
        lambda: (x**2 if R == 0 else dd.remat(lambda x: region(x, False))(x)).sum().backward(),
        "rank 0: agreement",
        "shift at",
    )


def test_remat_on_a_rank_without_data():
    L = dd.Layout(P, (1,))
    x = torch.full(L.local_shape(), 0.5, requires_grad=True)
    f = dd.remat(lambda x: F.invariant_sum(F.shift(x, L, 0).exp().sum(), P))
    f(x).backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("kind", ["linear", "zero", "empty"])
def test_second_derivatives_with_an_unequal_loss(kind):
    """Case 38: one rank's loss is linear, zero or empty."""

    def loss(x):
        y = F.all_sum_reduce(x, P)
        if R == 0:
            return (y**3).sum()
        return {"linear": 2 * y.sum(), "zero": 0 * y.sum(), "empty": F.nothing((0,), y).sum()}[kind]

    x = randn((2,), R)
    total = F.all_sum_reduce(x, P)
    H = hessian(loss)(x)
    # every rank takes its own basis vector at the same time: the sum over ranks of H v with v = N e_k
    assert torch.allclose(H, torch.diag(6 * total * N))


# ---------------------------------------------------------------- other ways in


def test_users_pairs_subsets_and_split_phase():
    A = dd.maps.all_sum_reduce(P, (3,))
    B = dd.linear_map(A, A, (3,), (3,), ranks=P.ranks)
    assert torch.equal(B(torch.ones(3)), torch.full((3,), float(N)))
    if R < 2:
        Q = dd.Partition((2,))
        C = dd.maps.shift(Q, 0, 1, True, (1,))
        a, b = F.start(C, torch.tensor([1.0 + R])), F.start(C, torch.tensor([5.0 + R]))
        assert (F.wait(a).item(), F.wait(b).item()) == (2.0 - R, 6.0 - R)


def test_switching_on_and_off():
    outer = transport.observer
    with dd.checking(timeout=3):
        assert transport.observer.timeout == 3
        try:
            with dd.checking(timeout=4):
                assert transport.observer.timeout == 4
                raise KeyError
        except KeyError:
            assert transport.observer.timeout == 3
    assert transport.observer is outer
