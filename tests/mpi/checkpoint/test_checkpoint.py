"""Checkpoints: saved on one partition, loaded on any other; a run goes on where it was; a failure on one rank is
everyone's."""

import errno
import os
import resource
import shutil
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from serial import randn

import distdl as dd
import distdl.functional as F
from distdl import checkpoint, nn

WORLD = dd.world()
RANK, N = WORLD.rank, WORLD.size
LAST = N - 1


@pytest.fixture
def folder():
    """One folder for all ranks (pytest's own are one for each), which holds nothing but checkpoints in the end."""
    path = Path(dd.testing.gather_objects(tempfile.mkdtemp() if RANK == 0 else None)[0])
    yield path
    dd.testing.gather_objects(None)  # all have finished
    agree(all(name.endswith(".safetensors") for name in os.listdir(path)), str(os.listdir(path)))
    if RANK == 0:
        shutil.rmtree(path)


def agree(ok, message=""):
    dd.testing.collective_assert(ok, message)


@contextmanager
def refused(*words, kind=dd.errors.CheckpointError):
    """Every rank raises, and all say the same."""
    with pytest.raises(kind) as caught:
        yield
    agree(all(word in str(caught.value) for word in words), str(caught.value))
    agree(len(set(dd.testing.gather_objects(str(caught.value)))) == 1, str(caught.value))


def grids(ndim):
    """Layout-makers over several partitions of this world, uneven and permuted and partial."""
    ones = (1,) * (ndim - 1)
    yield dd.Partition((N, *ones))
    yield dd.Partition((*ones, N), tuple(range(N))[::-1])
    yield dd.Partition((1, *ones), (LAST,))
    if N > 2:
        yield dd.Partition((*ones, N - 1), tuple(range(1, N)))
    if N == 4 and ndim > 1:
        yield dd.Partition((2, *ones[1:], 2), (3, 0, 2, 1))


def globals_():
    """Of many dtypes; uneven, empty on some ranks, without elements, without dims."""
    return {
        "a": randn(5, 7),
        "b.half": randn(3, 2, 5).bfloat16(),
        "c": (randn(7, 3) > 0),
        "d": torch.arange(2),
        "e": randn(0, 3),
        "f": torch.tensor(3.5),
        "g": randn(4, 6, 3).to(torch.complex64),
        "h": torch.arange(11, dtype=torch.uint8),
    }


def test_any_partition_to_any_other(folder):
    """Bitwise; and safetensors alone reads the global tensors."""
    tensors, path = globals_(), folder / "x.safetensors"
    one = dd.Partition((), (LAST,))
    for i, _ in enumerate(list(grids(2))):
        chosen = {
            k: [*grids(x.dim())][min(i, len([*grids(x.dim())]) - 1)] if x.dim() else one for k, x in tensors.items()
        }
        layouts = {k: dd.Layout(P, tensors[k].shape) for k, P in chosen.items()}
        if N == 2 or (N > 2 and i == 0):
            layouts["a"] = dd.Layout(dd.Partition((1, N)), (5, 7), (None, (0, 7, 0, 0)[:N]))
        blocks = {k: layouts[k].shard(x) for k, x in tensors.items()}
        strided = {k: x.flip(0).flip(0) if x.dim() else x for k, x in blocks.items()}
        checkpoint.save(path, strided, layouts, {"i": i, "lr": 0.1, "nested": [1, None, "é"]})
        alone = load_file(path)
        agree(
            alone.keys() == tensors.keys()
            and all(torch.equal(alone[k], x) and alone[k].dtype == x.dtype for k, x in tensors.items()),
            "safetensors alone reads something else",
        )
        for P in grids(3):
            turned = {"b.half": dd.Layout(P, (3, 2, 5)), "g": dd.Layout(P, (4, 6, 3))}
            turned |= {
                k: dd.Layout(dd.Partition(P.shape[:2], P.ranks), tensors[k].shape) for k in "ace" if P.shape[2] == 1
            }
            found, metadata = checkpoint.load(path, turned)
            agree(metadata == {"i": i, "lr": 0.1, "nested": [1, None, "é"]}, str(metadata))
            expected = {k: turned[k].shard(x) if k in turned else x for k, x in tensors.items()}
            agree(found.keys() == tensors.keys(), str(found.keys()))
            for k, x in expected.items():
                agree(torch.equal(found[k], x) and found[k].dtype == x.dtype, f"{k} over {P}")
                agree(
                    found[k].untyped_storage().nbytes() == x.numel() * x.element_size(),
                    f"{k}: more than the block is kept",
                )
        found, _ = checkpoint.load(path, {"a": dd.Layout(dd.Partition((N, 1)), (5, 7))}, names=["f"])
        agree(found.keys() == {"f", "a"}, str(found.keys()))


def test_files_of_safetensors_are_read(folder):
    path, x = folder / "x.safetensors", randn(6, 5)
    if RANK == 0:
        save_file({"w": x}, path)
    L = dd.Layout(dd.Partition((1, N)), x.shape)
    WORLD.all_gather(None, range(N))
    found, metadata = checkpoint.load(path, {"w": L})
    agree(torch.equal(found["w"], L.shard(x)) and metadata == {})


def test_stages_save_what_they_have(folder):
    """A pipeline: other names on other ranks."""
    path = folder / "x.safetensors"
    checkpoint.save(path, {f"stage{RANK}.w": torch.full((3,), float(RANK)), "all": torch.ones(2)})
    found, _ = checkpoint.load(path, names=[f"stage{LAST - RANK}.w"])
    agree(found[f"stage{LAST - RANK}.w"].tolist() == [LAST - RANK] * 3)
    agree(len(load_file(path)) == N + 1)


def test_some_ranks_alone(folder):
    """``P``: only its ranks call; the others do something else."""
    path, P = folder / "x.safetensors", dd.Partition((1,), (LAST,))
    if RANK == LAST:
        checkpoint.save(path, {"w": torch.arange(3)}, P=P)
        assert checkpoint.load(path, P=P)[0]["w"].tolist() == [0, 1, 2]
    else:
        with pytest.raises(dd.errors.PartitionError, match="not among those"):
            checkpoint.save(path, {"w": torch.arange(3)}, P=P)


def test_async(folder, monkeypatch):
    """What is saved is what was there at the call; the file is there after wait."""
    real, changed = os.pwrite, threading.Event()

    def late(*args):  # the thread's writes come after the change below
        assert threading.current_thread() is threading.main_thread() or changed.wait(60)
        return real(*args)

    monkeypatch.setattr(os, "pwrite", late)
    path, x = folder / "x.safetensors", randn(4 * N, 3)
    L = dd.Layout(dd.Partition((N, 1)), x.shape)
    w = L.shard(x).clone()
    pending = checkpoint.async_save(path, {"w": w, "s": (s := torch.ones(()))}, {"w": L}, {"step": 1})
    w.zero_()
    s.zero_()
    agree(not pending.done or RANK > 0)
    changed.set()
    agree(torch.equal(F.all_gather(w, L), torch.zeros_like(x)), "movements go on meanwhile")
    agree(not path.exists())
    pending.wait()
    agree(pending.done)
    found, _ = checkpoint.load(path)
    agree(torch.equal(found["w"], x) and found["s"].item() == 1)
    pending.wait()  # a second time: nothing


# ---------------------------------------------------------------- failures


@pytest.fixture
def kept(folder):
    """A file that must survive: (its path, a check that it has)."""
    path = folder / "x.safetensors"
    checkpoint.save(path, {"w": torch.arange(5.0)})
    before = path.read_bytes()
    yield path
    agree(path.read_bytes() == before, "the old file changed")


def big(value=1.0):
    L = dd.Layout(dd.Partition((N, 1)), (N * 1024, 16))
    return {"w": torch.full(L.local_shape(), value)}, {"w": L}


def test_full_disk_on_one_rank(kept, monkeypatch):
    real, count = os.pwrite, [0]

    def full(fd, data, offset):
        count[0] += 1
        if RANK == LAST and count[0] > (N == 1):  # the header, where there is one rank, still fits
            if count[0] % 2:
                return real(fd, data[:100], offset)  # a short write first
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with refused(f"rank {LAST}: OSError", "No space left"):
        checkpoint.save(kept, *big())
    count[0] = 0
    pending = checkpoint.async_save(kept, *big())
    with refused(f"rank {LAST}: OSError", "No space left"):
        pending.wait()


def test_size_limit_on_one_rank(kept):
    """The system itself refuses (EFBIG): on one rank only, or where the size is reserved."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limited in {0, LAST}:
        if limited == RANK:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024 * N - 4096, hard))
        try:
            with refused(f"rank {limited}: OSError", "File too large"):
                checkpoint.save(kept, *big())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_memory_for_the_copy(kept, monkeypatch):
    def broken(*args):
        raise MemoryError("no memory")

    if RANK == LAST:
        monkeypatch.setattr(checkpoint.writing, "copied", broken)
    with refused(f"rank {LAST}: MemoryError"):
        checkpoint.async_save(kept, *big())


@pytest.mark.parametrize("name", ["fsync", "replace", "posix_fallocate"])
def test_failing_calls(kept, monkeypatch, name):
    def broken(*args):
        raise OSError(errno.EIO, "Input/output error")

    who = LAST if name == "fsync" else 0
    if who == RANK:
        monkeypatch.setattr(os, name, broken)
    with refused(f"rank {who}: OSError", "Input/output error"):
        checkpoint.save(kept, *big())


def test_short_writes_are_completed(folder, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:1000], offset))
    tensors, layouts = big(2.0)
    checkpoint.save(folder / "x.safetensors", tensors, layouts)
    agree(torch.equal(load_file(folder / "x.safetensors")["w"], torch.full((N * 1024, 16), 2.0)))


@pytest.mark.mpi(2)
def test_copies_that_differ(kept):
    with refused("copies of one block differ", "'w'", str(list(range(N))), "dd.checkpoint.state(model)"):
        checkpoint.save(kept, {"w": torch.full((3,), float(RANK == LAST))})


@pytest.mark.mpi(2)
def test_disagreement(kept):
    L = dd.Layout(dd.Partition((N,)), (2 * N,))
    odd, w = RANK == LAST, torch.ones(2)
    with refused("disagree in the metadata"):
        checkpoint.save(kept, {"w": w}, metadata={"step": RANK})
    with refused("disagree in the path"):
        checkpoint.save(f"{kept}{RANK}", {"w": w})
    with refused("disagree in 'w'"):
        checkpoint.save(kept, {"w": w.double() if odd else w}, {"w": L})
    with refused("disagree in 'w'"):
        checkpoint.save(kept, {"w": torch.ones(2 + odd)})
    with refused("are not the whole", "'w'"):
        checkpoint.save(kept, {} if odd else {"w": w}, {} if odd else {"w": L})
    with refused(f"rank {LAST}: ValueError", "has shape (3,)"):
        checkpoint.save(kept, {"w": torch.ones(3) if odd else w}, {"w": L})
    overlapping = dd.Layout(dd.Partition((N,)), (2 * N,), ((*(2,) * (N - 2), 1, 3),))
    with refused("do not fit together", "'w'"):
        checkpoint.save(kept, {"w": torch.ones(3) if odd else w}, {"w": overlapping if odd else L})
    if N == 4:
        G = dd.Layout(dd.Partition((2, 2)), (2, 2))
        with refused("3 of 4 are there"):
            checkpoint.save(kept, {} if odd else {"w": torch.ones(1, 1)}, {} if odd else {"w": G})


def test_bad_input(kept):
    for tensors, options, words in (
            ({"w": torch.ones(2, dtype=torch.complex128)}, {}, "view_as_real"), ({"w": 3}, {}, "int"),
            ({"w": torch.ones(2)}, {"metadata": {"f": print}}, "JSON"),
            ({}, {"layouts": {"w": dd.Layout(dd.Partition((N,)), (N,))}}, "layouts without a tensor"),
            ({"w": torch.eye(2).to_sparse()}, {}, "sparse")):  # fmt: skip
        with refused(words):
            checkpoint.save(kept, tensors, **options)
    with refused("FileNotFoundError"):
        checkpoint.save(kept.parent / "missing" / "x", {"w": torch.ones(2)})
    with refused("got Linear; *dd.checkpoint.state(model) is a model's"):
        checkpoint.save(kept, torch.nn.Linear(2, 3))


def test_ranks_that_say_the_same_are_named_once(kept):
    """All of them, some, and one; every cause once."""
    every = "rank 0" if N == 1 else f"all {N} ranks"
    with refused(f"checkpoint.save: {every}: TypeError: expected {{name: tensor}}, got 'w': int; expected success"):
        checkpoint.save(kept, {"w": 3})
    others = ", ".join(map(str, range(1, N)))
    said = {1: "rank 0: ", 2: "rank 0: TypeError: expected {name: tensor}, got 'w': int; rank 1: "}.get(
        N, f"rank 0: TypeError: expected {{name: tensor}}, got 'w': int; ranks {others}: "
    )
    with refused(said):
        checkpoint.save(kept, {"w": 3 if RANK == 0 else "text"})


def test_bad_files(kept):
    P = dd.Partition((N,))
    with refused("No such file"):
        checkpoint.load(kept.parent / "missing")
    with refused("the file has no ['v']"):
        checkpoint.load(kept, {"v": dd.Layout(P, (5,))})
    with refused("has shape (5,) in the file"):
        checkpoint.load(kept, {"w": dd.Layout(P, (6,))})
    torn = kept.parent / "torn.safetensors"
    if RANK == 0:
        torn.write_bytes(kept.read_bytes()[:-3])
    with refused("SafetensorError"):
        checkpoint.load(torn)


def test_a_flipped_bit_is_every_ranks_error(folder, monkeypatch):
    """In whichever rank's part, and whoever reads it: pieces that several ranks write, read by another partition."""
    for module in (checkpoint.sums, checkpoint.format):
        monkeypatch.setattr(module, "PIECE", 48)  # a piece holds bytes of several ranks
    path, x, y = folder / "x.safetensors", randn(5, 7), torch.arange(9)
    for P, Q in zip(grids(2), [*grids(2)][1:]):
        L, M, K = dd.Layout(P, x.shape), dd.Layout(Q, x.shape), dd.Layout(dd.Partition((N,)), y.shape)
        checkpoint.save(path, {"x": L.shard(x), "y": K.shard(y)}, {"x": L, "y": K})
        good = path.read_bytes()
        start, second = len(good) - x.nbytes - y.nbytes, len(good) - y.nbytes
        for at in (30, start // 2, start - 20, start, start + 70, start + 200, second - 1, second, len(good) - 1):
            WORLD.all_gather(None, range(N))
            if RANK == 0:
                path.write_bytes(good[:at] + bytes([good[at] ^ 16]) + good[at + 1 :])
            WORLD.all_gather(None, range(N))
            with refused(*["'x' is damaged" if at < second else "'y' is damaged"] * (at >= start)):
                checkpoint.load(path, {"x": M, "y": K})
        found, _ = checkpoint.load(path, {"x": M, "y": K}, verify=False)
        agree(found["x"].shape == M.local_shape())
        WORLD.all_gather(None, range(N))
        if RANK == 0:
            path.write_bytes(good)
        WORLD.all_gather(None, range(N))
        found, _ = checkpoint.load(path, {"x": M, "y": K})
        agree(torch.equal(found["x"], M.shard(x)) and torch.equal(found["y"], K.shard(y)))


@pytest.mark.mpi(2)
def test_different_files(kept):
    """Another save between two ranks' reads must not give a mixture."""
    other = kept.parent / "y.safetensors"
    checkpoint.save(other, {"w": torch.zeros(5)})
    with refused("different files"):
        group = checkpoint.reading.Group("checkpoint.load", kept, None)
        group.path = other if RANK == LAST else kept
        try:
            checkpoint.reading.read(group, lambda *_: None, list)
        finally:
            group.path = kept


# ---------------------------------------------------------------- training runs


def network(P):
    """A convolutional network over (batch, 1, rows, columns); no bias before the norm, whose gradient would be
    noise."""
    torch.manual_seed(5)
    kind = {"dtype": torch.float64}
    return torch.nn.Sequential(
        nn.Conv2d(P, 2, 5, 3, padding=1, bias=False, **kind),
        nn.BatchNorm(P, 5, **kind),
        torch.nn.Tanh(),
        nn.Dropout(P, 0.2),
        nn.Conv2d(P, 5, 2, 3, padding=1, **kind),
    )


def perceptron(P):
    """Megatron's pair over (batch, model): column, then row."""
    torch.manual_seed(6)
    (_, k), kind = P.shape, {"dtype": torch.float64}
    column, row = (dd.Partition(shape, P.ranks) for shape in ((1, k, 1), (1, 1, k)))
    return torch.nn.Sequential(
        nn.Linear(column, 6, 7, x_layout="invariant", **kind),
        torch.nn.Tanh(),
        nn.Linear(row, 7, 3, y_layout="invariant", **kind),
    )


def run(model, optimizer, scheduler, loss, first, last):
    found = []
    for step in range(first, last):
        optimizer.zero_grad()
        value = loss(model, step)
        value.backward()
        optimizer.step()
        scheduler.step()
        found.append(value.item())
    return found


def trainer(make, P, kind):
    model = make(P)
    optimizer = kind(model.parameters(), lr=0.02)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def image_loss(P):
    def loss(model, step):
        x, y = randn(4, 2, 7, 5, seed=step), randn(4, 2, 7, 5, seed=step + 100)
        return F.dist_mse_loss(model(P.shard(x)), P.shard(y), P)

    return loss


def vector_loss(P):
    return lambda model, step: torch.nn.functional.mse_loss(model(randn(3, 6, seed=step)), randn(3, 3, seed=step + 100))


IMAGE = {
    1: [(1, 1, 1, 1)],
    2: [(1, 1, 2, 1), (2, 1, 1, 1), (1, 1, 1, 1)],
    3: [(3, 1, 1, 1), (1, 1, 2, 1), (1, 1, 1, 1)],
    4: [(2, 1, 2, 1), (1, 1, 4, 1), (1, 1, 1, 3), (2, 1, 1, 1), (1, 1, 1, 1)],
}
VECTOR = {1: [(1, 1)], 2: [(1, 2), (1, 1)], 3: [(1, 3), (1, 2), (1, 1)], 4: [(1, 4), (1, 2), (1, 3), (1, 1)]}
OPTIMIZERS = {"adam": torch.optim.Adam, "momentum": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)}


@pytest.mark.parametrize(
    "make, loss_of, shapes, kind",
    [
        (network, image_loss, IMAGE, "adam"),
        (perceptron, vector_loss, VECTOR, "adam"),
        (network, image_loss, IMAGE, "momentum"),
    ],
)
def test_another_number_of_ranks_continues_the_curve(folder, make, loss_of, shapes, kind):
    """Ten steps on all ranks, saved after four; the other six on fewer ranks and other grids: the same losses."""
    path, kind = folder / "x.safetensors", OPTIMIZERS[kind]
    first, *others = shapes[N]
    P = dd.Partition(first)
    model, optimizer, scheduler = trainer(make, P, kind)
    run(model, optimizer, scheduler, loss_of(P), 0, 4)
    checkpoint.save(path, *checkpoint.state(model, optimizer, rng=True, step=4, scheduler=scheduler.state_dict()))
    expected = run(model, optimizer, scheduler, loss_of(P), 4, 10)
    for shape in [first, *others]:
        Q = dd.Partition(shape)
        found = expected
        if Q.active:
            torch.manual_seed(1)
            model, optimizer, scheduler = trainer(make, Q, kind)
            with torch.no_grad():
                for p in model.parameters():
                    p.fill_(7)  # nothing is left of the fresh start
            told = checkpoint.restore(path, model, optimizer, rng=True, P=Q)
            scheduler.load_state_dict(told["scheduler"])
            found = run(model, optimizer, scheduler, loss_of(Q), told["step"], 10)
        agree(
            torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-10, atol=0),
            f"{found} over {Q} and {expected}",
        )
    agree(expected[-1] != expected[0], "nothing was learnt")


def test_the_serial_model(folder):
    """A perceptron split over all ranks, saved, is torch.nn's with its own names; and the way back."""
    path, P = folder / "x.safetensors", dd.Partition((1, N))
    model, optimizer, scheduler = trainer(perceptron, P, torch.optim.Adam)
    run(model, optimizer, scheduler, vector_loss(P), 0, 3)
    checkpoint.save(path, *checkpoint.state(model))
    serial = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()
    serial.load_state_dict(load_file(path))  # strict: nothing more, nothing less
    x = randn(3, 6)
    agree(torch.allclose(serial(x), model(x), rtol=1e-12, atol=1e-12))
    checkpoint.save(path, *checkpoint.state(model, optimizer, step=3))
    twin = torch.optim.Adam(serial.parameters(), lr=1.0)
    agree(checkpoint.restore(path, serial, twin) == {"step": 3})  # whole on every rank
    continued = run(serial, twin, torch.optim.lr_scheduler.ConstantLR(twin, 1.0), vector_loss(P), 3, 6)
    expected = run(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0), vector_loss(P), 3, 6)
    agree(
        torch.allclose(torch.tensor(continued), torch.tensor(expected), rtol=1e-10, atol=0),
        f"{continued} and {expected}",
    )
    with torch.no_grad():
        for p in serial.parameters():
            p.add_(1)
    checkpoint.save(path, *checkpoint.state(serial))
    checkpoint.restore(path, model)
    agree(torch.allclose(serial(x), model(x), rtol=1e-12, atol=1e-12))


def test_layers_know_their_layouts(folder):
    """Parameters and buffers of every kind of layer: saved from any split, equal to what one rank has."""
    path = folder / "x.safetensors"
    kinds = [
        (lambda P: nn.Conv1d(P, 4, 6, 3), [(1, 1, -1, 1), (1, -1, 1, 1)]),
        (lambda P: nn.BatchNorm(P, 5), [(1, -1, 1)]),
        (
            lambda P: nn.ConvTranspose1d(P, 4, 6, 3),
            [(1, -1, 1, 1), (1, 1, -1, 1), (1, -1, 1), *[(1, 2, 2, 1)] * (N == 4)],
        ),
        (lambda P: nn.Embedding(P, 9, 6), [(1, -1, 1)]),
        (lambda P: nn.LayerNorm(P, 5), [(1, -1)]),
    ]
    for make, split in [(make, split) for make, splits in kinds for split in splits]:
        torch.manual_seed(2)
        module = make(dd.Partition(tuple(N if n < 0 else n for n in split)))
        checkpoint.save(path, *checkpoint.state(module))
        torch.manual_seed(2)
        alone = make(dd.Partition(tuple(1 for _ in split), (RANK,)))
        found = load_file(path)
        agree(
            found.keys() == alone.state_dict().keys()
            and all(torch.equal(found[k], x) for k, x in alone.state_dict().items()),
            f"{module}: {found.keys()}",
        )


def test_ranks_outside(folder):
    """A rank outside the layers' partition brings nothing, and keeps what it has."""
    path, P = folder / "x.safetensors", dd.Partition((1, 1, 1, 1), (0,))
    model, optimizer, _ = trainer(network, P, torch.optim.Adam)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    if RANK:
        with torch.no_grad():
            for p in (*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())):
                p.fill_(float("nan"))
    checkpoint.save(path, *checkpoint.state(model, optimizer))
    agree(all(bool(torch.isfinite(x).all()) for x in load_file(path).values()), "junk was saved")
    checkpoint.restore(path, model, optimizer)
    agree(RANK == 0 or bool(torch.isnan(next(model.parameters())).all()))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def test_restore_changes_all_or_nothing(folder):
    path, P = folder / "x.safetensors", dd.Partition((1, 1, N, 1))
    model, optimizer, _ = trainer(network, P, torch.optim.Adam)
    checkpoint.save(path, *checkpoint.state(model))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    after = {k: v.clone() for k, v in model.state_dict().items()}
    with refused("groups"):
        checkpoint.restore(path, model, optimizer)
    with refused("no ['rng.cpu'", "rng.dropout.3"):
        checkpoint.restore(path, model, rng=True)
    with refused("no model has ['4.bias', '4.weight']"):
        checkpoint.restore(path, model[:4])
    with refused("the file has no ['5.weight']"):
        checkpoint.restore(path, torch.nn.Sequential(*model, torch.nn.PReLU()))
    with refused("shape"):
        checkpoint.restore(path, torch.nn.Sequential(*model[:4], torch.nn.Conv2d(5, 3, 3)))
    agree(all(torch.equal(v, after[k]) for k, v in model.state_dict().items()), "a failed load changed the model")
    checkpoint.restore(path, model)
    agree(all(torch.equal(v, before[k]) for k, v in model.state_dict().items()))


def test_generators(folder):
    path, model = folder / "x.safetensors", torch.nn.Linear(2, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1)
    torch.manual_seed(RANK)
    checkpoint.save(path, *checkpoint.state(model, rng=True))
    expected = torch.rand(3)
    checkpoint.restore(path, model, rng=True)
    agree(torch.equal(torch.rand(3), expected), "each rank its own, on as many ranks")
    if N > 1 and RANK == 0:
        with pytest.raises(dd.errors.CheckpointError, match="differed"):
            checkpoint.restore(path, model, rng=True, P=dd.Partition((1,)))
    torch.manual_seed(9)
    checkpoint.save(path, *checkpoint.state(model, rng=True))
    expected = torch.rand(3)
    if RANK == 0:
        checkpoint.restore(path, model, rng=True, P=dd.Partition((1,)))
        assert torch.equal(torch.rand(3), expected), "equal ones, on any number of ranks"


def test_what_cannot_be_saved():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD([*model.parameters(), torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(dd.errors.ShapeError, match="not the model's"):
        checkpoint.state(model, optimizer)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(dd.errors.ShapeError, match="another shape than its parameter"):
        checkpoint.state(model, optimizer)
    with pytest.raises(dd.errors.ShapeError, match="cannot be saved under its name"):
        checkpoint.state(torch.nn.ModuleDict({"rng": model}))
