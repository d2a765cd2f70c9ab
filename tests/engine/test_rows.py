"""Large boxes in short words, row by row: the kernel's own source, compiled for the host, in place of a device's."""

import contextlib
import ctypes
import shutil
import subprocess
import sys
from functools import cache
from types import SimpleNamespace

import fake_device
import pytest
import torch
from fake_device import Elsewhere, on_device
from test_device_double import moved, program_of

import distdl as dd
from distdl import _torch
from distdl.engine.fast import fused, rows
from distdl.engine.part import Part

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

HOST = """
struct Dim { unsigned int x, y; };
static Dim threadIdx, blockIdx, blockDim, gridDim;
#define __global__
%s
template <typename T> void call(void (*kernel)(const T*, T*, const long long*), void* from, void* to, void* table) {
    kernel((const T*)from, (T*)to, (const long long*)table);
}
extern "C" void run(int x, int y, int threads, void* from, void* to, void* table) {
    gridDim.x = x, gridDim.y = y, blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
            for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) call(%s, from, to, table);
}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A kernel of some source, by its name there."""
    folder = tmp_path_factory.mktemp("rows")

    @cache
    def library(code, name):
        made = folder / f"{library.cache_info().currsize}.so"
        made.with_suffix(".cpp").write_text(HOST % (code, name))
        command = ["g++", "-O1", "-shared", "-fPIC", "-w", made.with_suffix(".cpp"), "-o", made]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(made))

    return library


@pytest.fixture
def runs(compiled, monkeypatch):
    """On the fake device, where a box of 2 KiB is large: the words of what the kernel copied."""
    fake_device.install(monkeypatch, large=2**11)
    found = []

    class RawModule:
        def __init__(self, code, options, name_expressions):
            self.code, self.names = code, name_expressions

        def get_function(self, name):
            assert name in self.names
            library = compiled(self.code, name)
            (itemsize,) = (size for size, word in fused._TYPES.items() if name == f"copy_rows<{word}>")

            def run(grid, block, args):
                found.append(itemsize)
                library.run(*grid, *block, *map(ctypes.c_void_p, args))

            return run

    rows._kernel.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(RawModule=RawModule))
    tables = []
    monkeypatch.setattr(rows, "LARGE", 2**11)
    monkeypatch.setattr(rows, "available", lambda: True)
    monkeypatch.setattr(rows, "on_device", lambda table, device: tables.append(torch.tensor(table)) or tables[-1])
    monkeypatch.setattr(rows, "stream_of", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(_torch, "on_device", lambda index: contextlib.nullcontext())
    yield found
    rows._kernel.cache_clear()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_halos_of_the_last_dim(dtype, runs):
    """Forward the rows of the output are one element off, in the adjoint those of the input."""
    L = dd.Layout(dd.Partition((1, 1, 4)), (3, 8, 4 * 96 + 3))
    plan = dd.maps.halo_exchange(dd.HaloSpec(L, (0, 0, 1), boundary="circular")).plan
    for one in (plan, plan.T):
        xs = [(torch.randn(one.view(r).in_shape) * 9).to(dtype) for r in range(4)]
        wanted = one.simulate(xs)
        assert all(torch.equal(a, b) for a, b in zip(moved(one, xs), wanted)), one
        assert runs == [dtype.itemsize] * 4
        runs.clear()


def test_what_else_is_copied_by_torch(runs):
    """Rows in words of 16 bytes, short ones, small boxes, and what is added."""
    L = dd.Layout(dd.Partition((1, 4)), (64, 4 * 96))
    for width, count in (((0, 4), 0), ((0, 1), 1), ((1, 0), 0)):
        plan = dd.maps.halo_exchange(dd.HaloSpec(L, width, boundary="circular")).plan
        program = program_of(plan, [on_device(torch.ones(64, 96))])
        assert len(program.kept_moves) == count and len(program.kept) == 1 - count
    run = dd.Layout(dd.Partition((4,)), (4 * 5001,))  # one run on both sides
    plan = dd.maps.halo_exchange(dd.HaloSpec(run, (1,), boundary="circular")).plan
    program = program_of(plan, [on_device(torch.ones(5001))])
    assert not program.kept_moves and len(program.kept) == 1
    long = (2, rows._SEGMENTS * rows._SEGMENT + 1)
    there, here = (Part(0, long, (long[1] + gap, 1), 0, torch.float32) for gap in (3, 5))
    assert not rows.takes(here, there), "more blocks than a grid has"
    short, low = dd.Layout(dd.Partition((1, 4)), (640, 4 * 32)), dd.Layout(dd.Partition((1, 4)), (4, 4 * 96))
    for small in (short, low):
        plan = dd.maps.halo_exchange(dd.HaloSpec(small, (0, 1), boundary="circular")).plan
        assert not program_of(plan, [on_device(torch.ones(small.local_shape(0)))]).kept_moves
    columns = on_device(torch.ones(96, 64)).t().as_subclass(Elsewhere)
    plan = dd.maps.halo_exchange(dd.HaloSpec(L, (0, 1), boundary="circular")).plan
    plan.view(0).programs.clear()
    assert not program_of(plan, [columns]).kept_moves, "the elements of a row are not side by side"


@pytest.mark.parametrize("size, there, here", [
    ((3, 5, 2 * rows._SEGMENT + 77), None, None),  # rows of several warps
    ((2, 70), (73, 1), (75, 1)),
    ((2, 3, 4, 5, 65), (7800, 3, 1950, 390, 1), (70, 5600, 140, 16800, 1)),
])  # fmt: skip
def test_boxes(size, there, here, runs, monkeypatch):
    """Of many dims, of one, and rows longer than a warp copies."""
    monkeypatch.setattr(rows, "LARGE", 0)
    there, here = (s or (size[1] * (size[2] + 5), size[2] + 5, 1) for s in (there, here))
    source, to = (Part(0, size, s, at, torch.float32) for s, at in ((there, 3), (here, 2)))
    x = torch.randn(200000)
    y, wanted = torch.zeros(200000), torch.zeros(200000)
    assert rows.takes(to, source)
    rows.Rows(to, source, fake_device.CUDA)(y.data_ptr() + 8, x.data_ptr() + 12, to.nbytes)
    wanted.as_strided(size, here, 2).copy_(x.as_strided(size, there, 3))
    assert torch.equal(y, wanted) and runs == [4]
