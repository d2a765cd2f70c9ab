"""Other programs' files: the Hugging Face hub's safetensors into shards, and torch.distributed.checkpoint's folders."""

import io
import json
import os
import pickle
import shutil
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from serial import randn

import distdl as dd
from distdl import checkpoint
from distdl.checkpoint import dcp as ours
from distdl.checkpoint.sums import MARK

WORLD = dd.world()
RANK, N = WORLD.rank, WORLD.size


@pytest.fixture
def folder():
    """One folder for all ranks."""
    path = Path(dd.testing.gather_objects(tempfile.mkdtemp() if RANK == 0 else None)[0])
    yield path
    dd.testing.gather_objects(None)  # all have finished
    if RANK == 0:
        shutil.rmtree(path)


def agree(ok, message=""):
    dd.testing.collective_assert(ok, message)


@contextmanager
def refused(*words):
    """Every rank raises, and all say the same."""
    with pytest.raises(dd.errors.CheckpointError) as caught:
        yield
    agree(all(word in str(caught.value) for word in words), str(caught.value))
    agree(len(set(dd.testing.gather_objects(str(caught.value)))) == 1, str(caught.value))


def alone(job):
    """Something that rank 0 does for all."""
    if RANK == 0:
        job()
    dd.testing.gather_objects(None)


def tensors():
    return {
        "model.embed.weight": randn(11, 1030).float(),
        "model.0.bias": randn(7).bfloat16(),
        "model.0.weight": randn(7, 3, 5),
        "model.empty": randn(0, 4),
        "model.mask": randn(6, 4) > 0,
        "scale": torch.tensor(2.5),
    }


def rows(ndim):
    return dd.Partition((N, *(1,) * (ndim - 1)))


def columns(ndim):
    return dd.Partition((*(1,) * (ndim - 1), N), tuple(range(N))[::-1])


def layouts_of(X, grid):
    return {name: dd.Layout(grid(x.ndim), tuple(x.shape)) for name, x in X.items() if x.ndim}


def write_hub(folder, X):
    """As ``save_pretrained`` does: two files and an index."""
    names = sorted(X)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, some in files.items():
        save_file({name: X[name] for name in some}, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": {n: file for file, some in files.items() for n in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("grid", [rows, columns])
def test_hub_into_shards(folder, grid):
    """A folder, its index and single files; names by a function, a dictionary, a list; layouts by either."""
    X = tensors()
    layouts = layouts_of(X, grid)
    alone(lambda: write_hub(folder, X))
    alone(lambda: save_file(X, folder / "one.safetensors", {"note": "x"}))

    def same(found, names=None):
        for name, x in X.items():
            if names is None or name in names:
                block = found[name if names is None else names[name]]
                L = layouts.get(name)
                expected = x if L is None else L.shard(x)
                agree(block.dtype == x.dtype and torch.equal(block, expected), name)

    found, metadata = checkpoint.load_safetensors(folder, layouts)
    same(found)
    assert metadata == {"total_size": 1}
    same(checkpoint.load_safetensors(folder / "model.safetensors.index.json", layouts)[0])
    found, metadata = checkpoint.load_safetensors(folder / "one.safetensors", lambda name, shape: layouts.get(name))
    same(found)
    assert metadata == {"note": "x"}
    short = {name: name.removeprefix("model.") for name in X if name.startswith("model.")}
    by_short = {short[name]: L for name, L in layouts.items()}
    mapping = lambda name: short.get(name)
    found, _ = checkpoint.load_safetensors(folder, by_short, names=mapping)
    assert set(found) == set(short.values())
    same(found, short)
    tied = {"in": "model.embed.weight", "out": "model.embed.weight"}
    found, _ = checkpoint.load_safetensors(folder, {"in": layouts["model.embed.weight"]}, names=tied)
    agree(torch.equal(found["out"], X["model.embed.weight"]))
    same({"in": found["in"]}, {"model.embed.weight": "in"})
    assert set(checkpoint.load_safetensors(folder, names=["scale"])[0]) == {"scale"}


@pytest.fixture
def counted(monkeypatch):
    """How many bytes this rank reads."""
    read = []
    preadv, pread = os.preadv, os.pread

    def counting_v(fd, buffers, offset):
        read.append(preadv(fd, buffers, offset))
        return read[-1]

    def counting(fd, n, offset):
        found = pread(fd, n, offset)
        read.append(len(found))
        return found

    monkeypatch.setattr(os, "preadv", counting_v)
    monkeypatch.setattr(os, "pread", counting)
    return read


def test_only_the_boxes_are_read(folder, counted):
    """Headers and the rank's own bytes, exactly; where runs are near each other, what lies between them too."""
    X = {"wide": randn(64, 2048 * N), "narrow": randn(64, 8 * N), "other": randn(1000)}
    alone(lambda: write_hub(folder, X))
    looked = 8 + 8 + len(MARK)  # at the header's length, and whether it is one of ours
    head = {p.name: looked + 8 + int.from_bytes(p.read_bytes()[:8], "little") for p in folder.glob("*.safetensors")}
    of = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for grid, name in ((rows, "wide"), (columns, "wide"), (rows, "narrow")):
        L = dd.Layout(grid(2), tuple(X[name].shape))
        counted.clear()
        block = checkpoint.load_safetensors(folder, {name: L}, names=[name])[0][name]
        agree(torch.equal(block, L.shard(X[name])))
        agree(sum(counted) == head[of[name]] + block.numel() * 8, f"{name}: {sum(counted)}")
    L = dd.Layout(columns(2), tuple(X["narrow"].shape))
    counted.clear()
    block = checkpoint.load_safetensors(folder, {"narrow": L}, names=["narrow"])[0]["narrow"]
    agree(torch.equal(block, L.shard(X["narrow"])))
    span = (63 * 8 * N + 8) * 8
    agree(sum(counted) == head[of["narrow"]] + span and len(counted) == 4, f"{sum(counted)}, {len(counted)} reads")


def test_our_own_files_are_checked(folder):
    X = tensors()
    layouts = layouts_of(X, rows)
    path = folder / "own.safetensors"
    blocks = {name: layouts[name].shard(x) if name in layouts else x for name, x in X.items()}
    checkpoint.save(path, blocks, layouts, {"step": 3})
    found, metadata = checkpoint.load_safetensors(path, layouts)
    assert metadata == {"step": 3}
    agree(all(torch.equal(found[name], blocks[name]) for name in X))

    def damage():
        with open(path, "r+b") as file:
            file.seek(-3, os.SEEK_END)
            byte = file.read(1)
            file.seek(-3, os.SEEK_END)
            file.write(bytes([byte[0] ^ 1]))

    alone(damage)
    with refused("is damaged"):
        checkpoint.load_safetensors(path)
    checkpoint.load_safetensors(path, verify=False)


def test_hub_failures_are_everyones(folder):
    X = tensors()
    alone(lambda: write_hub(folder, X))
    with refused("No such file"):
        checkpoint.load_safetensors(folder / "none.safetensors")
    with refused("there is no ['nothing']", "there are"):
        checkpoint.load_safetensors(folder, {"nothing": dd.Layout(rows(1), (3,))} if RANK == N - 1 else None)
    with refused("has shape (7,) in the files, and (8,)"):
        checkpoint.load_safetensors(folder, {"model.0.bias": dd.Layout(rows(1), (8,))})
    with refused("several tensors the names ['same']"):
        checkpoint.load_safetensors(folder, names=lambda name: "same")

    def cut():
        file = folder / "model-00001-of-00002.safetensors"
        os.truncate(file, file.stat().st_size - 5)

    alone(cut)
    with refused("is damaged"):
        checkpoint.load_safetensors(folder)
    index = {"weight_map": {"a": "../x"}}
    alone(lambda: (folder / "model.safetensors.index.json").write_text(json.dumps(index)))
    with refused("outside of its folder"):
        checkpoint.load_safetensors(folder)
    for content, words in ((b"\xff" * 20, "no safetensors file"), (b"\x02" + bytes(7) + b"{x", "header is no JSON")):
        alone(lambda: (folder / "bad.safetensors").write_bytes(content))
        with refused(words):
            checkpoint.load_safetensors(folder / "bad.safetensors")


# ---------------------------------------------------------------- torch.distributed.checkpoint


def quiet(job, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        return job(*args, **kwargs)


@pytest.mark.parametrize("grid", [rows, columns])
def test_a_folder_that_torch_wrote(folder, grid):
    X = {**tensors(), "nested": {"w": randn(5, 4), "step": 3}, "complex": randn(3, 2).to(torch.complex128)}
    alone(lambda: quiet(dcp.save, X, checkpoint_id=folder / "theirs", no_dist=True))
    flat = {name: x for name, x in X.items() if name != "nested"} | {"nested.w": X["nested"]["w"]}
    layouts = layouts_of(flat, grid)
    found, _ = checkpoint.load_dcp(folder / "theirs", layouts)
    assert set(found) == set(flat)
    for name, x in flat.items():
        expected = layouts[name].shard(x) if name in layouts else x
        agree(found[name].dtype == x.dtype and torch.equal(found[name], expected), name)
    with refused("there is no ['nested.step']"):
        checkpoint.load_dcp(folder / "theirs", names=["nested.step"])


@pytest.mark.parametrize("grid", [rows, columns])
def test_a_folder_that_torch_reads(folder, grid):
    """Without a process group; and by any other layout of ours."""
    X = {**tensors(), "complex": randn(3, 2).to(torch.complex128)}
    layouts = layouts_of(X, grid)
    blocks = {name: layouts[name].shard(x) if name in layouts else x for name, x in X.items()}
    checkpoint.save_dcp(folder / "ours", blocks, layouts)
    assert os.listdir(folder) == ["ours"]
    theirs = {name: torch.full_like(x, 1) for name, x in X.items()}
    quiet(dcp.load, theirs, checkpoint_id=folder / "ours", no_dist=True)
    agree(all(torch.equal(theirs[name], x) for name, x in X.items()))
    other = layouts_of(X, columns if grid is rows else rows)
    found, _ = checkpoint.load_dcp(folder / "ours", other)
    agree(all(torch.equal(found[name], other[name].shard(x) if name in other else x) for name, x in X.items()))
    size = sum(p.stat().st_size for p in (folder / "ours").glob("*.distcp"))
    assert size < sum(x.nbytes for x in X.values()) + 3000 * N * len(X), "a block is written, not its whole tensor"


def test_dcp_failures_are_everyones(folder):
    L = dd.Layout(rows(1), (2 * N + 1,))
    x = randn(2 * N + 1)
    with refused("No such file"):
        checkpoint.load_dcp(folder / "none")
    checkpoint.save_dcp(folder / "a", {"x": L.shard(x)}, {"x": L})
    with refused("has something in it, and stays"):
        checkpoint.save_dcp(folder / "a", {"x": L.shard(x)}, {"x": L})
    if N > 1:
        with refused("copies of one block differ", "'x': [0"):
            checkpoint.save_dcp(folder / "b", {"x": x + RANK})
        with refused("do not fit together"):
            checkpoint.save_dcp(folder / "b", {"x": L.shard(x)} if RANK else {}, {"x": L} if RANK else {})
    with refused("FileNotFoundError"):
        checkpoint.save_dcp(folder / "no" / "b", {"x": L.shard(x)}, {"x": L})
    assert os.listdir(folder) == ["a"], "nothing is left of what failed"
    alone(lambda: os.truncate(folder / "a" / "__0_0.distcp", 100))
    with refused("rank 0" if N == 1 else f"all {N} ranks"):
        checkpoint.load_dcp(folder / "a")


def test_a_description_runs_nothing(folder):
    class Evil:
        def __reduce__(self):
            return os.system, ("echo evil",)

    alone(lambda: os.mkdir(folder / "a"))
    alone(lambda: (folder / "a" / ".metadata").write_bytes(pickle.dumps(Evil())))
    with refused("it would run", "system"):
        checkpoint.load_dcp(folder / "a")
    reader = ours._Metadata(io.BytesIO())
    for module, name in (
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "pickle"),
        ("torch.distributed.checkpoint.metadata", "dataclass"),
        ("builtins", "eval"),
    ):
        with pytest.raises(pickle.UnpicklingError, match="it would run"):
            reader.find_class(module, name)
