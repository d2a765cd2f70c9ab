"""make_fx and torch.func.linearize record movements; the raw operator alone refuses to be differentiated."""

import pytest
import torch
from registry import each_case, needs, randn
from torch.func import grad, jvp, linearize
from torch.fx.experimental.proxy_tensor import make_fx

import distdl as dd
import distdl.functional as F
from distdl import compiled
from distdl.errors import AgreementError
from distdl.testing import count_messages

CHOSEN = (
    "repartition_rows_to_columns",
    "repartition_disjoint",
    "halo_circular",
    "all_sum",
    "invariant_sum",
    "mark_varying",
    "broadcast_all",
    "all_gather_line",
    "shift_uneven",
)


def moves(graph_module):
    return [n for n in graph_module.graph.nodes if n.op == "call_function" and "distdl" in str(n.target)]


@each_case(lambda name: name in CHOSEN)
def test_make_fx(case):
    """The traced gradient shows both movements, runs again on other values, and sends what the function itself
    sends."""
    x, x2 = case.smooth(randn(case.shape, 1)), case.smooth(randn(case.shape, 2))
    f = grad(lambda x: case.loss(case.map(x.tanh())))
    with count_messages() as direct:
        wanted = f(x2)
    graph = make_fx(f)(x)
    assert len(moves(graph)) == (0 if case.map(x) is x else 2)
    with count_messages() as sent:
        got = graph(x2)
    assert torch.equal(got, wanted) and sent == direct


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch's own constant folding
@each_case(lambda name: name in CHOSEN)
def test_linearize(case):
    X, V = randn(case.shape, 1), randn(case.shape, 2)
    f = lambda x: case.map(x.tanh()).exp()
    y, push = linearize(f, case.smooth(X))
    wanted = jvp(f, (case.smooth(X),), (case.smooth(V),))
    assert torch.allclose(y, wanted[0]) and torch.allclose(push(case.smooth(V)), wanted[1], rtol=1e-12, atol=1e-12)


@needs(2)
def test_an_unused_movement_stays_in_the_graph():
    """FX must not drop a movement whose result is unused on one rank: the peers count on its messages."""
    n, r = dd.world().size, dd.world().rank
    P = dd.Partition((n,))

    def f(x):
        y = F.shift(x, P, 0)
        return x * 2 if r == 0 else y * 2

    graph = make_fx(f)(torch.ones(3))
    graph.graph.eliminate_dead_code()
    graph.recompile()
    assert len(moves(graph)) == 1
    assert graph(torch.full((3,), float(r))).tolist() == [2.0 * (r - 1) if r else 0.0] * 3


def raw():
    """A recorded movement, called as the bare operator."""
    P = dd.Partition((dd.world().size,))
    graph = make_fx(lambda x: F.shift(x, P, 0, periodic=False))(torch.ones(2))
    if not moves(graph):
        pytest.skip("a world of one rank moves nothing")
    name = moves(graph)[0].args[1]
    return lambda x: torch.ops.distdl.move([x], name)[0]


def test_raw_operator_has_no_silent_derivative():
    move = raw()
    x = torch.ones(2, dtype=torch.float64)
    move(x)
    for attempt in (
        lambda: move(x.clone().requires_grad_()),
        lambda: grad(lambda x: move(x).sum())(x),
        lambda: jvp(move, (x,), (x,)),
        lambda: grad(lambda x: jvp(move, (x,), (x,))[1].sum())(x),
    ):
        with pytest.raises((AgreementError, RuntimeError, NotImplementedError)):
            attempt()
    import torch.autograd.forward_ad as fwAD

    with fwAD.dual_level(), pytest.raises((AgreementError, RuntimeError, NotImplementedError)):
        move(fwAD.make_dual(x, x))


def test_raw_operator_is_silent_only_where_nothing_is_differentiated():
    move = raw()
    with torch.no_grad():
        move(torch.ones(2, requires_grad=True))


@pytest.mark.mpi(2)
@pytest.mark.skipif(not compiled.available, reason="this torch breaks its graph at every movement")
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_gradient():
    """More of it in test_compiled.py."""
    P = dd.Layout(dd.Partition((2, 1)), (4, 3)), dd.Layout(dd.Partition((1, 2)), (4, 3))
    f = grad(lambda x: (F.repartition(x.sin(), *P) ** 3).sum())
    x = P[0].shard(randn((4, 3), 1))
    with count_messages() as direct:
        wanted = f(x)
    compiled_f = torch.compile(f, backend="aot_eager", fullgraph=True)
    compiled_f(x)
    with count_messages() as sent:
        assert torch.equal(compiled_f(x), wanted)
    assert sent == direct


@pytest.mark.skipif(
    compiled.available or not hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy"),
    reason="movements stay in the graph (test_compiled.py); older torch warns, looking inside",
)
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # the compiler itself looks at it
def test_compile_breaks_its_graph_at_a_movement():
    """And does not look inside: no warnings, one break."""
    r, P = dd.world().rank, dd.Partition((dd.world().size,))

    def f(x):
        return (F.shift(x.sin(), P, 0).cos() * (r + 1)).sum()

    x = torch.arange(3.0, dtype=torch.float64) + r
    seen = []
    compiled = torch.compile(f, backend=lambda graph, _: seen.append(graph) or graph.forward)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    compiled(one).backward()
    f(other).backward()
    assert torch.equal(one.grad, other.grad)
    assert torch.equal(compiled(x), f(x)) and len(seen) >= 2
    with pytest.raises(Exception, match="a movement of distdl"):
        torch.compile(lambda x: F.shift(x.sin(), P, 0), backend="eager", fullgraph=True)(x)
