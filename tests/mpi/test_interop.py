"""DTensors as blocks over Layouts and back; torch's tensor parallelism and FSDP2 beside ours in one program."""

import os

import pytest
import torch
import torch.distributed as dist
from serial import randn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import distdl as dd
import distdl.functional as F
from distdl import interop

WORLD = dd.world()
RANK, SIZE = WORLD.rank, WORLD.size
pytestmark = [pytest.mark.mpi(2), pytest.mark.skipif(SIZE % 2 == 1, reason="grids of two columns")]


@pytest.fixture(scope="module", autouse=True)
def group():
    """torch.distributed over the same ranks, for this file."""
    before = dict(os.environ)
    dd.parallel.export_rendezvous()
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def line(group):
    return init_device_mesh("cpu", (SIZE,))


@pytest.fixture(scope="module")
def grid(group):
    """Two dims: 2×2 of four ranks, 1×2 of two."""
    return init_device_mesh("cpu", (SIZE // 2, 2), mesh_dim_names=("dp", "tp"))


def agree(ok, message=""):
    dd.testing.collective_assert(ok, message)


def test_partitions_and_meshes(grid):
    P = interop.partition(grid)
    assert dd.Partition((SIZE // 2, 2)) == P
    assert interop.partition(grid["tp"]) == dd.Partition((2,), (RANK // 2 * 2, RANK // 2 * 2 + 1))
    turned = dd.Partition((2, SIZE // 2), tuple(range(SIZE))[::-1])
    mesh = interop.device_mesh(turned, names=("a", "b"))
    assert interop.partition(mesh) == turned and mesh.mesh_dim_names == ("a", "b")
    assert tuple(mesh.get_coordinate()) == turned.index()
    with pytest.raises(dd.errors.PartitionError, match=r"one dim at least.*Partition\(\(1,\)\)"):
        interop.device_mesh(dd.Partition((), (0,)))


@pytest.mark.parametrize("n", range(12))
@pytest.mark.parametrize("p", range(1, 6))
def test_chunks_are_those_of_torch(n, p):
    theirs = [len(part) for part in torch.zeros(n).chunk(p)] if n else []
    assert interop.chunks(n, p) == (*theirs, *[0] * (p - len(theirs)))


def cases(mesh):
    """Placements and shapes: uneven, empty, several mesh dims on one tensor dim, copies."""
    for shape in ((10, 3), (2, 5), (0, 4), (7,), (1, 1, 9)):
        options = [Replicate(), *map(Shard, range(len(shape)))]
        for first in options:
            yield from (((first, second), shape) for second in options) if mesh.ndim == 2 else [((first,), shape)]


@pytest.mark.parametrize("which", ["line", "grid"])
def test_round_trip_is_the_identity_without_a_message(which, request):
    mesh = request.getfixturevalue(which)
    for placements, shape in cases(mesh):
        X = randn(*shape)
        t = distribute_tensor(X, mesh, placements)
        with dd.testing.count_messages() as sent:
            block, L = interop.from_dtensor(t)
            back = interop.to_dtensor(block, L, mesh)
            named = interop.to_dtensor(block, L, mesh, placements)
        agree(not sent and block.data_ptr() == back.to_local().data_ptr() == t.to_local().data_ptr(), str(placements))
        agree(torch.equal(block, L.shard(X)) and block.shape == L.local_shape(), f"{placements} {shape} {L}")
        agree(named.placements == placements and named.shape == t.shape and named.stride() == t.stride())
        agree(torch.equal(back.full_tensor(), X) and back.shape == t.shape and back.stride() == t.stride())
        assert (L, *interop.layout(t)[1:]) == interop.layout(mesh, placements, shape)


def test_splits():
    """torch's unevenness as splits, known without any group."""
    grid = dd.Partition((4,))
    assert interop._layout(grid, (0,), (10,))[0].sizes(0) == (3, 3, 3, 1)
    assert interop._layout(grid, (0,), (2,))[0].sizes(0) == (1, 1, 0, 0)
    grid = dd.Partition((2, 3))
    L, copies, summands = interop._layout(grid, (0, 0), (7,))
    assert L.sizes(0) == (2, 2, 0, 1, 1, 1) and copies.size == summands.size == 1
    L, copies, summands = interop._layout(grid, ("sum", 1), (4, 5))
    assert L.partition.shape == (1, 3) and L.sizes(1) == (2, 2, 1) and copies.size == 1
    column = RANK % 3 if RANK < 6 else 0
    assert summands == dd.Partition((2,), (column, column + 3))


@pytest.mark.parametrize("shape", [(10, 3), (2, 3), (7, 4)])
def test_gradients_are_serial(line, shape):
    """Of a loss of ours with respect to a DTensor, and of a loss of DTensor's with respect to a block of ours."""
    W, X = randn(*shape), randn(*shape, seed=1)
    serial = W.clone().requires_grad_()
    (serial**3 * X).sum().backward()
    P = dd.Partition((SIZE, 1))

    t = distribute_tensor(W, line, [Shard(0)]).requires_grad_()
    block, L = interop.from_dtensor(t)
    loss = F.invariant_sum((block**3 * L.shard(X)).sum(), P)
    loss.backward()
    agree(torch.allclose(t.grad.full_tensor(), serial.grad, rtol=1e-12), "through from_dtensor")

    block = L.shard(W).clone().requires_grad_()
    t = interop.to_dtensor(block, L, line)
    (t**3 * distribute_tensor(X, line, [Shard(0)])).sum().full_tensor().backward()
    agree(torch.allclose(block.grad, L.shard(serial.grad), rtol=1e-12), "through to_dtensor")

    H = torch.autograd.functional.hvp  # and twice: the operators of both engines between the two derivatives
    block, L = interop.from_dtensor(distribute_tensor(W, line, [Shard(0)]))
    f = lambda b: F.invariant_sum((interop.from_dtensor(interop.to_dtensor(b, L, line))[0] ** 3).sum(), P)
    if not interop._TWICE:
        with pytest.raises(dd.errors.DistdlError, match="loses second derivatives"):
            H(f, block.detach(), L.shard(X))
        return
    agree(torch.allclose(H(f, block.detach(), L.shard(X))[1], L.shard(6 * W * X), rtol=1e-12), "second derivative")


def test_second_derivatives_that_torch_would_lose(line, monkeypatch):
    """Older torch makes the gradient of a DTensor without its graph: an error, where there would be no second term."""
    monkeypatch.setattr(interop, "_TWICE", False)
    t = distribute_tensor(randn(7, 3), line, [Shard(0)]).requires_grad_()
    for twice in (True, False):
        loss = F.invariant_sum((interop.from_dtensor(t)[0] ** 3).sum(), dd.Partition((SIZE, 1)))
        if twice:
            with pytest.raises(dd.errors.DistdlError, match="loses second derivatives"):
                torch.autograd.grad(loss, t, create_graph=True)
        else:
            torch.autograd.grad(loss, t)


def test_copies_are_invariant(grid):
    """A replicated weight with data of each rank: marked varying, its gradient is the sum, and replicated again."""
    W, X = randn(4), randn(SIZE, 4, seed=2)
    t = distribute_tensor(W, grid, [Replicate(), Shard(0)]).requires_grad_()
    block, L = interop.from_dtensor(t)
    _, copies, summands = interop.layout(t)
    assert copies == dd.Partition((SIZE // 2,), tuple(range(RANK % 2, SIZE, 2))) and summands.size == 1
    whole = F.repartition(F.mark_varying(block, copies), L, L)
    rows = X[RANK // 2][L.slices()]
    F.invariant_sum((whole * rows).sum(), interop.partition(grid)).backward()
    expected = sum(X[i] for i in range(SIZE // 2))
    agree(torch.allclose(t.grad.full_tensor(), expected, rtol=1e-12))
    dd.testing.assert_copies(t.grad.to_local(), copies)


def test_summands(line):
    """Partial("sum") is this rank's summand; its sum on request, with the cotangent of the sum."""
    x = randn(3, seed=RANK).requires_grad_()
    t = DTensor.from_local(x, line, [Partial()])
    total = sum(randn(3, seed=r) for r in range(SIZE))
    with dd.testing.count_messages() as sent:
        block, L = interop.from_dtensor(t)
    assert not sent and torch.equal(block, x) and L.partition.ranks == (RANK,)
    assert interop.layout(t)[2] == dd.Partition((SIZE,))
    value, _ = interop.from_dtensor(t, summed=True)
    agree(torch.allclose(value, total, rtol=1e-12))
    (value**2).sum().backward()
    agree(torch.allclose(x.grad, 2 * total, rtol=1e-12))
    again = interop.to_dtensor(block, L, line, [Partial()])
    agree(torch.allclose(again.full_tensor(), total, rtol=1e-12))


def test_balanced_blocks_go_by_one_repartition(line):
    """10 over 4 are 3, 3, 2, 2 here, and 3, 3, 3, 1 there."""
    n = 2 * SIZE + 2 if SIZE > 2 else 3
    X = randn(n, 2)
    L = dd.Layout(dd.Partition((SIZE, 1)), (n, 2), ((1, n - 1), None) if SIZE == 2 else None)
    with pytest.raises(dd.errors.PartitionError, match=r"say another layout.*repartition=True"):
        interop.to_dtensor(L.shard(X), L, line)
    block = L.shard(X).clone().requires_grad_()
    with dd.testing.count_messages() as sent:
        t = interop.to_dtensor(block, L, line, repartition=True)
    target, _, _ = interop.layout(line, [Shard(0)], (n, 2))
    with dd.testing.count_messages() as alone:
        F.repartition(L.shard(X), L, target)
    assert sent == alone
    agree(bool(dd.testing.gather_objects(len(sent)) != [0] * SIZE))
    agree(torch.equal(t.full_tensor(), X) and t.placements == (Shard(0),))
    (t**2).sum().full_tensor().backward()
    agree(torch.allclose(block.grad, 2 * block.detach(), rtol=1e-12))
    columns = interop.to_dtensor(L.shard(X), L, line, [Shard(1)], repartition=True)
    agree(torch.equal(columns.full_tensor(), X) and columns.placements == (Shard(1),))


def test_what_no_layout_says(grid, line):
    """The error names a redistribution; which works."""
    x = DTensor.from_local(randn(4, seed=RANK), line, [Partial("max")])
    with pytest.raises(
        dd.errors.PartitionError, match=r"Partial\(max\).*redistribute\(placements=\[Replicate"
    ) as caught:
        interop.from_dtensor(x)
    t = eval(caught.value.next_step, {"t": x, "Replicate": Replicate, "Shard": Shard})
    block, _ = interop.from_dtensor(t)
    agree(torch.equal(block, torch.stack([randn(4, seed=r) for r in range(SIZE)]).amax(0)))
    with pytest.raises(dd.errors.PartitionError, match="one placement for each mesh dim"):
        interop.layout(grid, [Shard(0)], (4,))
    turned = dd.Layout(dd.Partition((SIZE,), tuple(range(SIZE))[::-1]), (2 * SIZE,))
    with pytest.raises(dd.errors.PartitionError, match="no placements over this mesh"):
        interop.to_dtensor(torch.zeros(2), turned, line)
    with pytest.raises(dd.errors.ShapeError, match="not this rank's block"):
        interop.to_dtensor(torch.zeros(3), interop.layout(line, [Shard(0)], (2 * SIZE,))[0], line)


def test_a_mesh_of_some_ranks(group):
    """Ranks outside of it hold nothing, and are told so by the layout."""
    P = dd.Partition((1,), (SIZE - 1,))
    mesh, X = interop.device_mesh(P), randn(5, 2)
    L = interop.layout(mesh, [Shard(0)], (5, 2))[0]
    assert dd.Layout(dd.Partition((1, 1), (SIZE - 1,)), (5, 2)) == L and L.active == P.active
    t = interop.to_dtensor(L.shard(X).clone(), L, mesh)
    block, M = interop.from_dtensor(t)
    assert M == L and block.shape == ((5, 2) if P.active else (0, 2))


# ---------------------------------------------------------------- torch's parallelism beside ours


class Model(torch.nn.Module):
    """Two layers; torch's tensor parallelism wants ``hidden`` to be a multiple of the ranks."""

    def __init__(self, hidden):
        super().__init__()
        self.up = torch.nn.Linear(6, hidden, dtype=torch.float64)
        self.down = torch.nn.Linear(hidden, 3, dtype=torch.float64)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def model(hidden=10):
    torch.manual_seed(0)
    return Model(hidden)


def serial_gradients(X, hidden=10):
    m = model(hidden)
    (m(X) ** 2).sum().backward()
    return {name: p.grad for name, p in m.named_parameters()}


def test_tensor_parallel_beside_ours(line):
    """One model by parallelize_module, and again by operators of ours on the very same blocks."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    X = randn(5, 6)
    expected = serial_gradients(X, 12)
    theirs = parallelize_module(model(12), line, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    (theirs(X) ** 2).sum().backward()
    P = dd.Partition((SIZE,))
    leaves = {name: p.detach().requires_grad_() for name, p in theirs.named_parameters()}
    blocks = {name: interop.from_dtensor(p)[0] for name, p in leaves.items()}
    hidden = torch.relu(torch.nn.functional.linear(F.mark_varying(X, P), blocks["up.weight"], blocks["up.bias"]))
    y = F.invariant_sum(hidden @ blocks["down.weight"].T, P) + blocks["down.bias"]
    (y**2).sum().backward()
    for name, p in theirs.named_parameters():
        agree(torch.allclose(p.grad.full_tensor(), expected[name], rtol=1e-10, atol=1e-12), f"theirs {name}")
        ours = leaves[name].grad
        agree(ours.placements == p.placements, f"{name}: {ours.placements}")
        agree(torch.allclose(ours.full_tensor(), expected[name], rtol=1e-10, atol=1e-12), f"ours {name}")


@pytest.mark.parametrize("rows", [1, SIZE, 2 * SIZE + 1])
def test_strides_of_a_cotangent(line, rows):
    """Transposed or expanded, and on some ranks only: the DTensor has its parameter's strides on every rank, so that
    none redistributes it alone."""
    t = distribute_tensor(randn(rows, 3), line, [Shard(0)]).requires_grad_()
    block, L = interop.from_dtensor(t)
    odd = randn(3, len(block), seed=RANK).T if RANK % 2 else torch.ones(()).expand(block.shape)
    (g,) = torch.autograd.grad(block, t, odd)
    agree(g.stride() == t.stride() and g.to_local().stride() == (3, 1), f"{g.stride()}, {g.to_local().stride()}")
    agree(torch.equal(g.to_local(), odd), str(g))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning", "ignore:.*reshard_after_forward:UserWarning")
def test_fsdp_beside_ours(line):
    """One model by fully_shard, and its sharded parameters as blocks that our all-gather makes whole."""
    from torch.distributed.fsdp import fully_shard

    X = randn(SIZE, 6)
    expected = serial_gradients(X)
    theirs = fully_shard(model(), mesh=line)
    (theirs(X[RANK : RANK + 1]) ** 2).sum().backward()
    P = dd.Partition((SIZE,))
    leaves = {name: p.detach().requires_grad_() for name, p in theirs.named_parameters()}
    whole = {}
    for name, p in leaves.items():
        block, L = interop.from_dtensor(p)
        whole[name] = F.all_gather(block, L)
    y = torch.func.functional_call(model(), whole, (X[RANK : RANK + 1],))
    F.invariant_sum((y**2).sum(), P).backward()
    for name, p in theirs.named_parameters():
        # FSDP takes the mean over ranks
        agree(torch.allclose(p.grad.full_tensor() * SIZE, expected[name], rtol=1e-10, atol=1e-12), f"theirs {name}")
        agree(torch.allclose(leaves[name].grad.full_tensor(), expected[name], rtol=1e-10, atol=1e-12), f"ours {name}")


@pytest.mark.mpi(4)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_both_at_once_need_one_redistribution(grid):
    """FSDP2 over tensor parallelism cuts one tensor dim from right to left; the error says what to redistribute to."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    m = parallelize_module(model(), grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(m, mesh=grid["dp"])
    weight = m.up.weight
    with pytest.raises(dd.errors.PartitionError, match=r"_StridedShard.*redistribute") as caught:
        interop.from_dtensor(weight)
    t = eval(caught.value.next_step, {"t": weight, "Replicate": Replicate, "Shard": Shard})
    block, L = interop.from_dtensor(t)
    agree(torch.equal(block, L.shard(model().up.weight)) and L.sizes(0) == (3, 2, 3, 2), str(L))
    block, L = interop.from_dtensor(m.down.weight)
    agree(torch.equal(block, L.shard(model().down.weight)) and L.partition.shape == (2, 2), str(L))
