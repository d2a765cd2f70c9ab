"""Checkpoints in one process: the format, files that run nothing, and a job that is killed while it saves."""

import itertools
import json
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import textwrap
import time
import zlib
from pathlib import Path

import pytest
import safetensors
import torch
from jobs import command, gone
from safetensors.torch import load, load_file, save_file

import distdl as dd
from distdl import checkpoint
from distdl.boxes import row_major
from distdl.checkpoint.format import DTYPES, Report, header, plan
from distdl.programs.launch import find_mpi

needs_mpi = pytest.mark.skipif(find_mpi() is None, reason="needs mpi4py and an MPI library")


def spread(layouts, ranks, dtype="float32"):
    """The reports of ``ranks`` that hold blocks of ``layouts``."""
    return {
        r: Report("x", "{}", f"token {r}", {k: (dtype, L.shape, L.box(r)) for k, L in layouts.items()})
        for r in range(ranks)
    }


def test_every_byte_of_every_box_has_its_place():
    """Random grids of four ranks: what they write, one after the other, is what safetensors reads back."""
    draw = random.Random(3)
    for case in range(150):
        grids = [
            g
            for n in (0, 1, 2, 3)
            for g in itertools.product((1, 2, 3, 4), repeat=n)
            if torch.tensor(g or 1).prod() <= 4
        ]
        tensors, layouts = {}, {}
        for name in "abc":
            grid = draw.choice(grids)
            shape = tuple(draw.choice((0, 1, 2, 3, 5, 7)) for _ in grid)
            ranks = draw.sample(range(4), int(torch.tensor(grid or 1).prod()))
            layouts[name] = dd.Layout(dd.Partition(grid, tuple(ranks)), shape)
            tensors[name] = torch.randn(shape)
        entries = plan(spread(layouts, 4))
        head = header(entries, '{"case": 1}', "token")
        assert not len(head) % 8
        written = bytearray(head + b"\xff" * max(e.end for e in entries.values()))
        seen = 0
        for name, rank in itertools.product(entries, range(4)):
            entry, box = entries[name], layouts[name].box(rank)
            if entry.writers.get(box) != rank:
                continue
            data, (size, offsets) = (
                layouts[name].shard(tensors[name], rank).contiguous().numpy().tobytes(),
                row_major(box, entry.shape),
            )
            for i, offset in enumerate(offsets):
                start = len(head) + entry.begin + 4 * offset
                written[start : start + 4 * size] = data[4 * i * size : 4 * (i + 1) * size]
                seen += 4 * size
        assert seen == len(written) - len(head), "a byte is written twice, or not at all"
        found = load(bytes(written))
        assert all(torch.equal(found[k], x) for k, x in tensors.items()), case


def test_copies_are_written_in_turn():
    """Eight tensors that four ranks hold: each writes two of them."""
    entries = plan(
        {r: Report("x", "{}", "", {f"w{i}": ("float32", (2,), ((0, 2),)) for i in range(8)}) for r in range(4)}
    )
    writers = [w for e in entries.values() for w in e.writers.values()]
    assert sorted(writers) == sorted([0, 1, 2, 3] * 2)


def test_every_dtype(tmp_path):
    tensors = {str(d): torch.arange(6).to(d).reshape(2, 3) for d in DTYPES}
    checkpoint.save(tmp_path / "x", tensors)
    found, expected = load_file(tmp_path / "x"), checkpoint.load(tmp_path / "x")[0]
    for k, x in tensors.items():
        for y in (found[k], expected[k]):
            assert y.dtype == x.dtype and torch.equal(y.reshape(-1).view(torch.uint8), x.reshape(-1).view(torch.uint8))
    conj, strided = torch.randn(3, 2, dtype=torch.complex64).conj(), torch.randn(4, 3).T
    checkpoint.save(
        tmp_path / "x", {"conj": conj, "neg": conj.imag, "strided": strided, "grad": strided.requires_grad_()}
    )
    found = load_file(tmp_path / "x")
    assert (
        torch.equal(found["conj"], conj)
        and torch.equal(found["neg"], conj.imag)
        and torch.equal(found["strided"], strided)
    )


def test_a_full_disk_leaves_the_old_file(tmp_path):
    """The system refuses to make the file as large as it must be: an error before anything is written, no file of ours
    stays."""
    path = tmp_path / "x"
    checkpoint.save(path, {"w": torch.ones(3)}, metadata={"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10000, limits[1]))
    try:
        with pytest.raises(dd.errors.CheckpointError, match="File too large") as caught:
            checkpoint.save(path, {"w": torch.ones(10000)}, metadata={"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(caught.value.__cause__, OSError) and "next step" in str(caught.value)
    assert os.listdir(tmp_path) == ["x"] and checkpoint.load(path)[1] == {"step": 1}


def test_a_save_that_nobody_waits_for(tmp_path):
    pending = checkpoint.async_save(tmp_path / "x", {"w": torch.ones(3)})
    with pytest.warns(RuntimeWarning, match="nobody waited"):
        pending.__del__()
    pending.wait()
    assert os.listdir(tmp_path) == ["x"]
    program = f"""
import torch, distdl as dd
dd.checkpoint.async_save({str(tmp_path / "lost")!r}, {{"w": torch.ones(3)}})
kept = dd.checkpoint.async_save({str(tmp_path / "kept")!r}, {{"w": torch.ones(3)}})
kept.wait()
"""
    (tmp_path / "program.py").write_text(program)
    start = command("run", "-n", 2) if find_mpi() else [sys.executable]
    done = subprocess.run([*start, tmp_path / "program.py"], capture_output=True, text=True, timeout=60, check=False)
    assert "nobody waited for a save" in done.stderr and str(tmp_path / "lost") in done.stderr, done.stderr
    assert str(tmp_path / "kept") not in done.stderr
    assert len(start) == 1 or done.returncode != 0, "the job must not pass for a good one"
    assert not (tmp_path / "lost").exists() and (tmp_path / "kept").exists()


def test_names_with_wildcards_and_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".x.other.saving").touch()  # another file's
    (tmp_path / ".[x]*.stale.saving").touch()  # left by a job that was killed
    checkpoint.save("[x]*", {"w": torch.ones(3)})
    assert sorted(os.listdir()) == [".x.other.saving", "[x]*"]
    assert checkpoint.load("[x]*")[0]["w"].tolist() == [1, 1, 1]


def test_temporary_files_by_their_exact_names(tmp_path):
    """A save to ``run`` leaves alone what is on its way to ``run.best``, and to ``run`` itself."""
    best = checkpoint.async_save(tmp_path / "run.best", {"w": torch.full((3,), 2.0)})
    same = checkpoint.async_save(tmp_path / "run", {"w": torch.full((3,), 3.0)})
    others = [".run.best.0123456789abcdef.saving", ".runx.0123456789abcdef.saving", "run.0123456789abcdef.saving"]
    for name in others:
        (tmp_path / name).touch()
    (tmp_path / ".run.0123456789abcdef.saving").touch()
    checkpoint.save(tmp_path / "run", {"w": torch.ones(3)})
    best.wait()
    assert load_file(tmp_path / "run.best")["w"].tolist() == [2, 2, 2] and load_file(tmp_path / "run")[
        "w"
    ].tolist() == [1, 1, 1]
    same.wait()
    assert load_file(tmp_path / "run")["w"].tolist() == [3, 3, 3]
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "run", "run.best"])


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(6.0)[::2][2:],
        torch.arange(6.0).as_strided((1,), (3,), 4),
        torch.arange(24.0).reshape(2, 3, 4)[1:, 2:, 3:],
        torch.arange(12.0).reshape(3, 4)[1:2, ::2],
        torch.arange(6).bfloat16().as_strided((1, 1), (5, 2), 3),
        torch.ones(3, 0)[:, ::2],
    ],
    ids=str,
)
def test_any_strides(tmp_path, x):
    """One element may have any stride, and is called contiguous."""
    checkpoint.save(tmp_path / "x", {"w": x})
    assert torch.equal(load_file(tmp_path / "x")["w"], x) and torch.equal(checkpoint.load(tmp_path / "x")[0]["w"], x)


def test_metadata_comes_back_with_its_keys(tmp_path):
    """A scheduler's milestones have numbers as keys."""
    weight = torch.nn.Parameter(torch.ones(3))
    made = lambda: torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([weight], 1.0), [2, 4])
    scheduler, again = made(), made()
    odd = {1: {2.5: [{None: "x", True: ()}]}, "distdl.items": [[1, 2]]}
    checkpoint.save(tmp_path / "x", {"w": weight}, metadata={"scheduler": scheduler.state_dict(), "odd": odd})
    _, metadata = checkpoint.load(tmp_path / "x")
    assert metadata["odd"] == {1: {2.5: [{None: "x", True: []}]}, "distdl.items": [[1, 2]]}
    again.load_state_dict(metadata["scheduler"])
    rates = []
    for one in (scheduler, again):
        for _ in range(5):
            one.optimizer.step()
            one.step()
            rates.append(one.get_last_lr()[0])
    assert rates[:5] == rates[5:] == pytest.approx([1.0, 0.1, 0.1, 0.01, 0.01])


def test_what_would_make_an_unreadable_file(tmp_path):
    """Names that are no text, what JSON cannot write (by its key), paths that are none: an error, and the old file
    stays."""
    path, w = tmp_path / "x", {"w": torch.ones(3)}
    checkpoint.save(path, w)
    before = path.read_bytes()
    for arguments, words in (
        (({"a\ud800": torch.ones(1)},), r"'a\ud800' is no valid text"),
        ((w, {}, {"a": [{"lr": torch.ones(())}]}), "metadata['a'][0]['lr']"),
        ((w, {}, {"a": {(1, 2): 3}}), "a key of metadata['a']"),
        ((w, {}, {"f": print}), "metadata['f'], a builtin"),
        ((w, {}, {"big": "x" * 100_000_000}), "the header would have"),
    ):
        with pytest.raises(dd.errors.CheckpointError) as caught:
            checkpoint.save(path, *arguments)
        assert words in str(caught.value), str(caught.value)[:500]
    os.mkfifo(tmp_path / "fifo")
    for bad in ("a\0b", 3, None, tmp_path / "fifo", tmp_path):
        with pytest.raises(dd.errors.CheckpointError):
            checkpoint.save(bad, w)
        with pytest.raises(dd.errors.CheckpointError):
            checkpoint.load(bad)
    assert path.read_bytes() == before and sorted(os.listdir(tmp_path)) == ["fifo", "x"]
    checkpoint.save(str(path).encode(), {'é€ \0\n"': torch.ones(1)}, metadata={"\ud800": "\udfff"})
    for bad in (tmp_path / ("n" * 300), path / "below"):  # nothing was made, so there is nothing to remove
        with pytest.raises(dd.errors.CheckpointError, match=r"too long|Not a directory"):
            checkpoint.save(bad, w)
    found, metadata = checkpoint.load(path)
    assert found.keys() == load_file(path).keys() == {'é€ \0\n"'} and metadata == {"\ud800": "\udfff"}


# ---------------------------------------------------------------- checksums


def small_pieces(monkeypatch, size):
    for module in (checkpoint.sums, checkpoint.format):
        monkeypatch.setattr(module, "PIECE", size)


@pytest.mark.parametrize("size", [7, 16, 64, 4096])
def test_parts_of_any_grid_add_up(monkeypatch, size):
    """Random blocks of random shapes: the sum of what ranks found is zlib's checksum of each piece."""
    small_pieces(monkeypatch, size)
    draw = random.Random(size)
    for _ in range(60):
        grid = tuple(draw.choice((1, 2, 3)) for _ in range(draw.randrange(4)))
        L = dd.Layout(dd.Partition(grid), tuple(draw.choice((0, 1, 2, 3, 5, 17)) for _ in grid))
        x = torch.randint(0, 255, L.shape, dtype=torch.uint8).to(draw.choice((torch.uint8, torch.int16, torch.float64)))
        data, found = x.numpy().tobytes(), []
        for rank in range(L.partition.size):
            block = checkpoint.writing.bytes_of(L.shard(x, rank))
            if block:
                n, offsets = row_major(L.box(rank), L.shape)
                found.append(
                    checkpoint.sums.parts(block, n * x.itemsize, [at * x.itemsize for at in offsets], len(data))
                )
        expected = "".join(f"{zlib.crc32(data[at : at + size]):08x}" for at in range(0, len(data), size))
        assert checkpoint.sums.whole(found, len(data)) == expected


def damaged(path, before):
    """(what, the damaged file): one flipped bit at each byte, shorter and longer files, exchanged and zeroed pieces."""
    draw, start = random.Random(4), 8 + int.from_bytes(before[:8], "little")
    for at in range(len(before)):
        for bit in range(8) if at < 64 else (draw.randrange(8),):
            yield at, before[:at] + bytes([before[at] ^ 1 << bit]) + before[at + 1 :]
    for n in (0, 1, 7, 8, 9, 100, start - 1, start, start + 1, len(before) - 1):
        yield -1, before[:n]
    for more in (b"\0", b" " * 8, before):
        yield -1, before + more
    a, b = before[start : start + 64], before[start + 64 : start + 128]
    yield -1, before[:start] + b + a + before[start + 128 :]
    yield -1, before[:start] + bytes(64) + before[start + 64 :]
    yield -1, before[:8] + bytes(start - 8) + before[start:]


def test_damage_anywhere_is_an_error(tmp_path, monkeypatch):
    """Every byte of the file, data (by the tensor's name) and header: no other value is ever returned."""
    small_pieces(monkeypatch, 64)
    path, draw = tmp_path / "x", torch.Generator().manual_seed(1)
    tensors = {"a.w": torch.randn(5, 7, generator=draw), "b": torch.randn(3, dtype=torch.float64, generator=draw),
               "c": torch.tensor(True), "e": torch.ones(0, 3),
               "d": torch.randint(0, 9, (130,), dtype=torch.uint8, generator=draw)}  # fmt: skip
    checkpoint.save(path, tensors, metadata={"step": 7, "note": "é"})
    before = path.read_bytes()
    start = 8 + int.from_bytes(before[:8], "little")
    owners = [
        name for name in sorted(tensors, key=lambda k: (-tensors[k].itemsize, k)) for _ in range(tensors[name].nbytes)
    ]
    assert len(owners) == len(before) - start
    for at, data in damaged(path, before):
        path.write_bytes(data)
        with pytest.raises(dd.errors.CheckpointError) as caught:
            checkpoint.load(path)
        assert at < start or f"'{owners[at - start]}' is damaged" in str(caught.value), (at, str(caught.value))
    path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    assert not torch.equal(checkpoint.load(path, verify=False)[0]["d"], tensors["d"]), "believed as it is"
    assert checkpoint.load(path, names=["b"])[0]["b"].tolist() == tensors["b"].tolist(), "not read, not checked"
    model = torch.nn.Linear(2, 2)
    checkpoint.save(path, *checkpoint.state(model))
    damage = path.read_bytes()
    path.write_bytes(damage[:-1] + bytes([damage[-1] ^ 1]))
    with pytest.raises(dd.errors.CheckpointError, match="is damaged"):
        checkpoint.restore(path, model)
    checkpoint.restore(path, model, verify=False)


def test_files_without_checksums_load_as_before(tmp_path):
    """Of distdl 0.1.0, of safetensors, and of another program that copied a file of ours with its metadata and other
    values."""
    path, x = tmp_path / "x", torch.arange(6.0)
    table = {"__metadata__": {"format": "pt", "distdl": '{"step": 3}', "distdl.save": "0"},
             "w": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}}  # fmt: skip
    head = json.dumps(table, separators=(",", ":")).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + x.numpy().tobytes())
    found, metadata = checkpoint.load(path)
    assert torch.equal(found["w"], x) and metadata == {"step": 3}
    checkpoint.save(path, {"w": x}, metadata={"step": 4})
    with safetensors.safe_open(path, "pt") as file:
        told = file.metadata()
    assert told["format"] == "pt" and len(told["distdl.crc32"].partition(":")[2]) == 8
    for order in (told, dict(reversed(told.items()))):
        save_file({"w": 2 * x.half(), "v": x}, path, order)
        found, metadata = checkpoint.load(path)
        assert torch.equal(found["w"], 2 * x.half()) and torch.equal(found["v"], x) and metadata == {"step": 4}


class Trap:
    def __reduce__(self):
        return os.mkdir, ("trapped",)


def test_reading_runs_nothing(tmp_path, monkeypatch):
    """Neither a pickle, nor torch's zip of pickles, nor one in the metadata is opened as such."""
    monkeypatch.chdir(tmp_path)
    Path("pickle").write_bytes(pickle.dumps(Trap()))
    torch.save({"w": Trap()}, "torch")
    safetensors.serialize_file({}, "metadata", {"distdl": pickle.dumps(Trap(), 0).decode()})
    safetensors.serialize_file({}, "list", {"distdl": "[1, 2]"})
    for name in ("pickle", "torch", "metadata", "list"):
        with pytest.raises(dd.errors.CheckpointError):
            checkpoint.load(name)
    assert not Path("trapped").exists()


def test_without_safetensors_files_can_be_written(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    checkpoint.save(tmp_path / "x", {"w": torch.ones(3)})
    with pytest.raises(dd.errors.CheckpointError, match=r"pip install distdl\[checkpoint\]"):
        checkpoint.load(tmp_path / "x")


def test_hyperparameters_come_back(tmp_path):
    """Also as tensors and tuples; and SGD without momentum, which has no state."""
    model = torch.nn.Linear(2, 3)
    for kind, options in (
        (torch.optim.Adam, {"lr": torch.tensor(0.25), "betas": (0.5, 0.75)}),
        (torch.optim.SGD, {"lr": 0.25}),
        (torch.optim.RMSprop, {"lr": 0.25, "centered": True}),
        (torch.optim.Adagrad, {"lr": 0.25}),
    ):
        optimizer = kind([{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.125}], **options)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        checkpoint.save(tmp_path / "x", *checkpoint.state(model, optimizer))
        other = kind([{"params": [model.weight]}, {"params": [model.bias]}], **{**options, "lr": options["lr"] * 2})
        assert checkpoint.restore(tmp_path / "x", model, other) == {}
        old, new = optimizer.state_dict(), other.state_dict()
        assert old["param_groups"] == new["param_groups"] and type(new["param_groups"][0]["lr"]) is type(options["lr"])
        torch.optim.lr_scheduler.ExponentialLR(
            other, 0.5, last_epoch=0
        )  # one that goes on: it asks for the initial rates
        assert old["state"].keys() == new["state"].keys()
        for i, values in old["state"].items():
            assert values.keys() <= new["state"][i].keys() | {k for k, v in values.items() if v is None}
            assert all(torch.equal(v, new["state"][i][k]) for k, v in values.items() if v is not None)


@pytest.mark.parametrize("saved, now", [(True, False), (False, True), (True, True)])
def test_a_devices_generator(tmp_path, monkeypatch, saved, now):
    """It comes back also where nothing has run on the device yet; a file of a run without a device has none, and is no
    error."""
    model, found = torch.nn.Linear(1, 1), []
    row = torch.arange(16, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: row)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: found.append(state))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: saved)
    checkpoint.save(tmp_path / "x", *checkpoint.state(model, rng=True))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: now)
    checkpoint.restore(tmp_path / "x", model, rng=True)
    assert len(found) == saved and all(torch.equal(state, row) for state in found)


def test_own_modules_with_layouts(tmp_path):
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.arange(4.0))

    L = dd.Layout(dd.Partition((1,)), (4,))
    checkpoint.save(tmp_path / "x", *checkpoint.state(Own(), layouts={"w": L}))
    own = Own()
    own.w.data.zero_()
    checkpoint.restore(tmp_path / "x", own, layouts={"w": L})
    assert own.w.tolist() == [0, 1, 2, 3]


# ---------------------------------------------------------------- kill -9

KILLED = """
import os, sys, time
import torch
import distdl as dd
world = dd.world()
open(f"pid{world.rank}", "w").write(str(os.getpid()))
L = dd.Layout(dd.Partition((1, 2)), (1000, 2000))
for step in range(1, 10**6):
    tensors = {name: torch.full(L.local_shape(), float(step)) for name in "ab"}
    layouts = {name: L for name in tensors}
    if sys.argv[1] == "async":
        dd.checkpoint.async_save("x.safetensors", tensors, layouts, {"step": step}).wait()
    else:
        dd.checkpoint.save("x.safetensors", tensors, layouts, {"step": step})
    open("saved", "w").write(str(step))
"""


@needs_mpi
@pytest.mark.parametrize("kind, who", [("sync", 0), ("async", 1)])
def test_killed_while_saving(tmp_path, kind, who):
    """The last file that was complete is there, whole; the next save to that path cleans up."""
    program, path = tmp_path / "program.py", tmp_path / "x.safetensors"
    program.write_text(textwrap.dedent(KILLED))
    left = attempt = 0
    while not left:  # until a kill has hit a save under way; mostly the first does
        attempt += 1
        assert attempt < 5, "never killed while saving"
        (tmp_path / "saved").unlink(missing_ok=True)
        job = subprocess.Popen(command("run", "-n", 2, program, kind), cwd=tmp_path, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
        try:
            until = time.monotonic() + 60
            while not (tmp_path / "saved").exists() and time.monotonic() < until:
                time.sleep(0.01)
            while not list(tmp_path.glob(".*.saving")) and time.monotonic() < until:
                pass
            pids = [(tmp_path / f"pid{r}").read_text() for r in range(2)]
            os.kill(int(pids[who]), signal.SIGKILL)
            job.communicate(timeout=60)
        finally:
            job.kill()
            job.communicate()
        assert job.returncode != 0 and gone(pids)
        left = len(list(tmp_path.glob(".*.saving")))
        tensors, metadata = checkpoint.load(path)
        assert metadata["step"] >= 1
        assert all(x.shape == (1000, 2000) and bool((x == metadata["step"]).all()) for x in tensors.values()), (
            "a torn file"
        )
    checkpoint.save(path, {"w": torch.ones(1)})
    assert not list(tmp_path.glob(".*.saving"))
