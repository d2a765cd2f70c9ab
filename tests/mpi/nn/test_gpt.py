"""A language model on data x sequence x tensor ranks, as one process trains it in plain torch."""

import copy
import functools
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import distdl as dd

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "notebooks"))

import gpt_model as gpt

N, RANK = dd.world().size, dd.world().rank
EXAMPLES, LENGTH, STEPS, CLIP = 3, 11, 20, 1.0
# (data, sequence, tensor): 3 examples, 11 rows and 3 heads of keys never divide over 2; 6 heads of queries over 4
GRIDS = {
    1: [(1, 1, 1)],
    2: [(1, 1, 2), (1, 2, 1), (2, 1, 1)],
    3: [(1, 3, 1), (1, 1, 3)],
    4: [(1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 1, 4)],
    8: [(2, 2, 2)],
}.get(N, [(1, N, 1)])


@functools.cache
def data():
    """(tokens, sizes): few steps make text of few letters."""
    tokens, _ = gpt.text()
    tokens = tokens[:4000]
    tokens = torch.unique(tokens, return_inverse=True)[1]
    return tokens, gpt.Sizes(int(tokens.max()) + 1)


@functools.cache
def serial():
    """(parameters before, losses, norms, parameters after) of one process."""
    torch.manual_seed(0)
    tokens, sizes = data()
    model = gpt.SerialGPT(sizes)
    before = copy.deepcopy(model.state_dict())
    losses, norms = gpt.steps(model, gpt.optimizer_of(model), tokens, 0, STEPS, EXAMPLES, LENGTH, CLIP)
    return before, losses, norms, model.state_dict()


def made(grid, ranks=None, order=None, **options):
    """(the distributed model with the serial one's first parameters, its optimizer)."""
    places = gpt.Places(dd.Partition(grid, ranks), EXAMPLES, LENGTH, order)
    model = gpt.GPT(places, data()[1], **options).load(serial()[0])
    return model, gpt.optimizer_of(model)


def trained(model, optimizer, first=0, last=STEPS):
    return gpt.steps(model, optimizer, data()[0], first, last, EXAMPLES, LENGTH, CLIP)


def differences(losses, norms, model, first=0):
    """What is not as in one process."""
    _, serial_losses, serial_norms, after = serial()
    pairs = [*zip(losses, serial_losses[first:]), *zip(norms, serial_norms[first:])]
    wrong = [f"step {i % len(losses) + first}: {a} for {b}" for i, (a, b) in enumerate(pairs) if abs(a - b) > 1e-10 * b]
    layouts = dd.nn.layouts(model)
    for name, p in model.named_parameters():
        whole = after[name]
        wished = whole[layouts[name].slices()] if name in layouts else whole
        if not torch.allclose(p.detach(), wished, rtol=1e-10, atol=1e-10 * float(whole.abs().max())):
            wrong.append(name)
    return wrong


def agree(wrong):
    dd.testing.collective_assert(not wrong, f"{wrong[:3]} and {len(wrong)} in all")


@pytest.mark.worlds(1, 2, 3, 4)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_trains_as_one_process_does(grid):
    """20 steps of AdamW, clipped by the norm of all gradients, in float64: losses, norms and parameters."""
    model, optimizer = made(grid)
    agree(differences(*trained(model, optimizer), model))
    _, losses, norms, _ = serial()
    assert max(norms) > CLIP > min(norms) and losses[-1] < 0.9 * losses[0], "some steps are clipped, and it learns"


@pytest.mark.mpi(3)
@pytest.mark.worlds(3, 4)
@pytest.mark.parametrize("options", [{"order": "zigzag"}, {"method": "ring"}, {"method": "heads"}], ids=str)
def test_ways_of_attention(options):
    """Rows dealt out in zigzag, keys that come one rank after the other, heads in the place of rows: the same steps."""
    model, optimizer = made({3: (1, 3, 1), 4: (2, 2, 1), 8: (2, 2, 2)}[N], **options)
    agree(differences(*trained(model, optimizer), model))


def test_nobody_has_the_whole():
    """Of weights, table and logits a tensor rank has its part; of the stream its rows."""
    grid, (tokens, _) = GRIDS[-1], data()
    model, _ = made(grid)
    places, t = model.places, grid[2]
    x, _ = gpt.batch(tokens, 0, EXAMPLES, LENGTH)
    logits = model(places.cut(x))
    assert logits.shape == (*places.tokens.local_shape(), model.classes.local_shape()[1])
    parts = dd.testing.gather_objects({name: p.numel() for name, p in model.named_parameters()})
    for name, p in serial()[0].items():
        line = [parts[places.P.rank_at((0, 0, i))][name] for i in range(t)]
        split = "norm" not in name and not name.endswith("down.bias")
        assert (sum(line) if split else line[0]) == p.numel(), name


@pytest.mark.skipif(N != 4, reason="its grids have 4 ranks")
def test_goes_on_elsewhere():
    """Seven steps on 2 x 2 ranks, saved; the rest on 4 tensor ranks, on one rank, and by plain torch, as if never
    interrupted."""
    folder = tempfile.mkdtemp() if RANK == 0 else ""
    path = Path(dd.testing.gather_objects(folder)[0]) / "run.safetensors"
    model, optimizer = made((1, 2, 2))
    trained(model, optimizer, 0, 7)
    dd.checkpoint.save(path, *dd.checkpoint.state(model, optimizer, step=7))
    for grid, ranks in (((1, 1, 4), None), ((1, 1, 1), (2,))):
        P, wrong = dd.Partition(grid, ranks), []
        if P.active:
            model, optimizer = made(grid, ranks)
            step = dd.checkpoint.restore(path, model, optimizer, P=P)["step"]
            wrong = differences(*trained(model, optimizer, step), model, step)
        agree(wrong)

    twin = gpt.SerialGPT(data()[1])
    optimizer = gpt.optimizer_of(twin)
    step = dd.checkpoint.restore(path, twin, optimizer)["step"]
    agree(differences(*trained(twin, optimizer, step), twin, step))
    assert {name for name in load_file(path) if not name.startswith("optimizer.")} == set(twin.state_dict())


def test_a_table_is_reduced_once():
    """The gradient of the tied table, that of its lookup and of its product, is one sum over data ranks; also where a
    rank has no example."""
    tokens, sizes = data()
    model, _ = made((N, 1, 1))
    x, y = gpt.batch(tokens, 0, EXAMPLES, LENGTH)
    loss = model.loss(model.places.cut(x), model.places.cut(y))
    table = model.embed.weight
    with dd.testing.count_messages() as sent:
        loss.backward()
    assert sum(m[2] == table.nbytes for m in sent) == (N > 1)
    twin = gpt.SerialGPT(sizes)
    twin.load_state_dict(serial()[0])
    twin.loss(x, y).backward()
    agree([] if torch.allclose(table.grad, twin.embed.weight.grad, rtol=1e-12, atol=1e-14) else ["the table"])


def test_modules_may_share_the_table():
    """torch's way to tie: one Parameter of two modules. Its gradient is the serial one, and counts once in the norm."""
    _, sizes = data()
    places = gpt.Places(dd.Partition((1, N, 1) if N < 4 else (1, N // 2, 2)), EXAMPLES, LENGTH)
    over, w = places.linear(places.columns, sizes.vocabulary, sizes.width), serial()[0]["embed.weight"]
    kind = {"dtype": torch.float64, "y_layout": "replicated", "x_layout": "invariant"}
    embed = dd.nn.Embedding(over, *w.shape, dtype=torch.float64, y_layout="invariant")
    out = dd.nn.Linear(over, sizes.width, sizes.vocabulary, bias=False, **kind)
    out.weight = embed.weight
    model = torch.nn.ModuleDict({"embed": embed, "out": out})
    rows = dd.nn.layouts(model)["embed.weight"].slices()
    with torch.no_grad():
        embed.weight.copy_(w[rows])
    x, y = gpt.batch(data()[0], 0, EXAMPLES, LENGTH)
    logits = out(embed(places.cut(x)).tanh()).transpose(1, 2)
    dd.functional.dist_cross_entropy(logits, places.cut(y), places.classes(sizes.vocabulary)).backward()
    twin = w.clone().requires_grad_()
    logits = torch.nn.functional.embedding(x, twin).tanh() @ twin.T
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
    wrong = [] if torch.allclose(embed.weight.grad, twin.grad[rows], rtol=1e-12, atol=1e-14) else ["the gradient"]
    norm = dd.parallel.clip_grad_norm_(model, 1.0, places.P)
    agree(wrong if abs(norm - twin.grad.norm()) < 1e-12 else [*wrong, f"the norm {norm} for {twin.grad.norm()}"])
