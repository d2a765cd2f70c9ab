"""Pipelines of 1 to 4 ranks against the sequential network on MNIST digits: loss, gradients, 20 steps, bytes,
transforms."""

import sys
import weakref

import pytest
import torch
import torch.nn.functional as tf
from serial import randn
from torch.func import grad, grad_and_value, jvp, vjp

import distdl as dd
from distdl import parallel
from distdl.programs import demo

RANK = dd.world().rank
SIZE = min(dd.world().size, 4)
P = dd.Partition((SIZE,))
KINDS = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
MICRO = {1: (5, 0, 3, 2), 2: (5, 0, 3, 2), 3: (4, 1, 0, 2, 2, 1), 4: (5, 0, 3, 2)}[
    SIZE
]  # uneven, one empty; a multiple of SIZE
N = sum(MICRO)
ENDS = [sum(MICRO[:i]) for i in range(len(MICRO) + 1)]


def widths(stages):
    """Features between the stages, uneven: 784 pixels, ..., 10 digits."""
    return [784, *(9 + 2 * (k % 3) for k in range(stages - 1)), 10]


def network(stages):
    """(initial parameters, stage functions): tanh layers, the last one linear."""
    w = widths(stages)
    params = {
        k: {"w": randn(w[k + 1], w[k], seed=k) / w[k] ** 0.5, "b": 0.1 * randn(w[k + 1], seed=k)} for k in range(stages)
    }
    layer = lambda p, x: tf.linear(x.flatten(1), p["w"], p["b"])
    return params, [lambda p, x: layer(p, x).tanh()] * (stages - 1) + [layer]


def digits(step):
    images, labels = DIGITS
    rows = slice(step * N, (step + 1) * N)
    return images[rows], labels[rows]


HERE = torch.get_default_device()  # --engine=cuda makes it the rank's device
IMAGES, LABELS = demo.load_digits(400)
DIGITS = IMAGES.to(HERE).double(), LABELS.to(HERE)


def serial_loss(stages):
    _, functions = network(stages)

    def loss(params, step):
        x, y = digits(step)
        for k, f in enumerate(functions):
            x = f(params[k], x)
        return tf.cross_entropy(x, y)

    return loss


def pipelined(kind, table=None):
    """(this rank's parameters, params, step number -> loss and gradients)."""
    stages = SIZE * KINDS.get(kind, 1)
    params, functions = network(stages)
    table = table or parallel.schedule(kind, SIZE, len(MICRO), KINDS[kind])

    def run(params, number):
        x, y = digits(number)
        targets = y.split(MICRO)
        loss = lambda out, i: tf.cross_entropy(out, targets[i], reduction="sum") / N
        shapes = lambda k, i: (MICRO[i], widths(stages)[k + 1])
        step = parallel.pipeline(table, functions, loss, P, shapes, dtype=torch.float64)
        return step(params, x.split(MICRO) if RANK == 0 else None)

    return {k: p for k, p in params.items() if P.active and k % SIZE == RANK}, run


def close(a, b):
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-10, atol=1e-10 * float(b.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_sequential_network_for_20_steps(kind):
    stages = SIZE * KINDS[kind]
    mine, run = pipelined(kind)
    theirs, faults = network(stages)[0], []
    for number in range(20):
        loss, grads = run(mine, number)
        wanted, reference = grad_and_value(serial_loss(stages))(theirs, number)
        if P.active:
            assert loss.shape == () and grads.keys() == mine.keys()
            faults += [number] * (not close(loss, reference))
            faults += [(number, k, n) for k in mine for n in "wb" if not close(grads[k][n], wanted[k][n])]
        mine = {k: {n: p[n] - 0.5 * grads[k][n] for n in p} for k, p in mine.items()}
        theirs = {k: {n: p[n] - 0.5 * wanted[k][n] for n in p} for k, p in theirs.items()}
    faults += [(k, n) for k in mine for n in "wb" if not close(mine[k][n], theirs[k][n])]
    assert all(float((p["b"] - network(stages)[0][k]["b"]).abs().max()) > 0.01 for k, p in theirs.items()), (
        "every layer learns"
    )
    dd.testing.collective_assert(not faults, str(faults[:3]))


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_and_messages(kind):
    """Each stage but the last sends its output, each but the first its input's cotangent: nothing else but one
    all-reduce."""
    stages, w = SIZE * KINDS[kind], widths(SIZE * KINDS[kind])
    mine, run = pipelined(kind)
    with dd.testing.count_messages() as sent:
        run(mine, 0)
    rows = [n for n in MICRO if n]  # an empty micro-batch sends nothing
    elements = [n * w[k + 1] for k in mine for n in rows if k < stages - 1 and SIZE > 1]
    elements += [n * w[k] for k in mine for n in rows if k > 0 and SIZE > 1]
    assert sorted(size for _, _, size in sent.of("send")) == sorted(8 * n for n in elements)
    assert [m for m in sent if m[0] != "send"] == ([("all_reduce", P.ranks, 8)] if P.active and SIZE > 1 else [])


def test_live_micro_batches(monkeypatch):
    """The executor keeps as many pullbacks as the simulator says, no more: each rank counts its own."""
    pipeline = sys.modules["distdl.parallel.pipeline"]  # parallel.pipeline is the function
    kept, peak = weakref.WeakSet(), [0]

    def counting(f, *primals):
        y, pull = vjp(f, *primals)
        kept.add(pull)
        peak[0] = max(peak[0], len(kept))
        return y, pull

    monkeypatch.setattr(pipeline, "vjp", counting)
    for kind, chunks in KINDS.items():
        peak[0] = 0
        mine, run = pipelined(kind)
        run(mine, 0)
        if P.active:
            assert peak[0] == parallel.simulate(parallel.schedule(kind, SIZE, len(MICRO), chunks)).live[RANK], kind
            assert not kept


def test_a_table_written_by_hand():
    """Any table will do: this one takes micro-batches in another order on every device, and backward last to first."""
    m = len(MICRO)
    order = [*range(1, m, 2), *range(0, m, 2)]
    table = [[*(("F", s, i) for i in order), *(("B", s, i) for i in reversed(order))] for s in range(SIZE)]
    mine, run = pipelined("by hand", table=table)
    loss, grads = run(mine, 0)
    wanted, reference = grad_and_value(serial_loss(SIZE))(network(SIZE)[0], 0)
    if P.active:
        assert close(loss, reference) and all(close(grads[k][n], wanted[k][n]) for k in mine for n in "wb")


@pytest.mark.parametrize("kind", ["1f1b", "interleaved"])
def test_hessian_vector_products(kind):
    """The step is a pure function: forward and reverse over its gradient, on every rank, equal the serial ones."""
    stages = SIZE * KINDS[kind]
    mine, run = pipelined(kind)
    everything = network(stages)[0]
    tangents = {k: {n: randn(*p[n].shape, seed=30 + k) for n in p} for k, p in everything.items()}
    my_tangents = {k: tangents[k] for k in mine}
    wanted = jvp(lambda p: grad(serial_loss(stages))(p, 0), (everything,), (tangents,))[1]
    if not P.active:
        return
    (loss, _), (slope, found) = jvp(lambda p: run(p, 0), (mine,), (my_tangents,))
    gradient = grad(serial_loss(stages))(everything, 0)
    assert close(slope, sum((gradient[k][n] * tangents[k][n]).sum() for k in everything for n in "wb"))
    assert all(close(found[k][n], wanted[k][n]) for k in mine for n in "wb")
    (reverse,) = vjp(lambda p: run(p, 0)[1], mine)[1](my_tangents)
    assert all(close(reverse[k][n], wanted[k][n]) for k in mine for n in "wb")


@pytest.mark.parametrize("kind", KINDS)
def test_transfers_have_one_order_in_derivatives(kind):
    """Each one depends on the one before, so that no rank's autograd can take them in another order than its peers."""
    mine, run = pipelined(kind)

    def behind(node, seen):
        for further, _ in node.next_functions:
            if further is not None and further not in seen:
                seen.add(further)
                behind(further, seen)
        return seen

    def step(params):
        _, grads = run(params, 0)
        ends = [t.grad_fn for t in torch.utils._pytree.tree_leaves(grads)]
        nodes = {node for end in ends for node in {end, *behind(end, set())} if "_Apply" in node.name()}
        further = {node: behind(node, set()) for node in nodes}
        assert all(a is b or a in further[b] or b in further[a] for a in nodes for b in nodes)
        counts.append(len(nodes))
        return grads

    counts: list = []
    vjp(step, mine)
    if P.active and SIZE > 1:
        assert counts[0] > len(MICRO)


def test_under_checking():
    """Transfers that block change nothing: the order of tasks is one order for all."""
    for kind in KINDS:
        mine, run = pipelined(kind)
        loss, grads = run(mine, 0)
        with dd.checking():
            again, checked = run(mine, 0)
        assert torch.equal(loss, again) and all(torch.equal(grads[k][n], checked[k][n]) for k in mine for n in "wb")


def test_modules_parameters_and_dtypes():
    """Parameters that require gradients are detached; float32 activations, and a loss summed in float32 for bfloat16
    ones."""
    for dtype, wide in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32)):
        params, functions = network(SIZE)
        mine = {
            k: {n: t.to(dtype).requires_grad_() for n, t in params[k].items()} for k in params if P.active and k == RANK
        }
        targets = digits(0)[1].split(MICRO)
        step = parallel.pipeline(
            parallel.schedule("1f1b", SIZE, len(MICRO)),
            functions,
            lambda out, i: tf.cross_entropy(out, targets[i], reduction="sum") / N,
            P,
            lambda k, i: (MICRO[i], widths(SIZE)[k + 1]),
            dtype,
        )
        loss, grads = step(mine, digits(0)[0].to(dtype).split(MICRO))
        if P.active:
            assert loss.dtype == wide and grads[RANK]["w"].dtype == dtype
            assert not loss.requires_grad and not grads[RANK]["b"].requires_grad
            assert abs(float(loss) - float(serial_loss(SIZE)(params, 0))) < 0.05


def test_stages_without_parameters():
    """A stage may be a plain function; the first one too."""
    stages = [lambda p, x: x.flatten(1).sin(), *[lambda p, x: x * 2] * (SIZE - 1)]
    step = parallel.pipeline(
        parallel.schedule("gpipe", SIZE, 1), stages, lambda y, i: y.sum(), P, lambda k, i: (3, 784), torch.float64
    )
    loss, grads = step({k: {} for k in range(SIZE) if k == RANK}, [DIGITS[0][:3]])
    if P.active:
        assert close(loss, 2 ** (SIZE - 1) * DIGITS[0][:3].sin().sum()) and grads == {RANK: {}}


def test_errors():
    table = parallel.schedule("gpipe", SIZE, 2)
    with pytest.raises(dd.errors.PartitionError, match=f"{SIZE + 1} stages"):
        parallel.pipeline(table, [None] * (SIZE + 1), None, P, None)
    with pytest.raises(dd.errors.PartitionError, match="devices"):
        parallel.pipeline(table, [None] * SIZE, None, dd.Partition((SIZE + 1,)), None)
    if P.active:
        with pytest.raises(dd.errors.PartitionError, match="this rank's stages"):
            parallel.pipeline(table, [None] * SIZE, None, P, None)({RANK + 1: {}})
    if RANK == 0:  # before anything is sent
        ready = parallel.pipeline(
            table, [lambda p, x: x.half()] * SIZE, lambda y, i: y.sum(), P, lambda k, i: (3,), torch.float64
        )
        for inputs in (None, [HERE], [HERE] * 3):
            with pytest.raises(dd.errors.PartitionError, match="one input for each micro-batch; expected 2 inputs"):
                ready({0: {}}, inputs)
        if SIZE > 1:
            with pytest.raises(
                dd.errors.ShapeError, match=r"another dtype; expected torch\.float64, got torch\.float16.*stage 0"
            ):
                ready({0: {}}, [torch.ones(3)] * 2)
    if SIZE > 1:
        with pytest.raises(dd.errors.PartitionError, match="never ends"):
            parallel.pipeline([row[::-1] for row in table], [None] * SIZE, None, P, None)
