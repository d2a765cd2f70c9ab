"""The source of the peer kernels, compiled for the host: all that runs on a device but its own instructions."""

import ctypes
import random
import shutil
import subprocess
import threading

import fake_peer
import pytest
import torch
from fuzzing import BUILDERS, KINDS, draw, seed_of
from test_device_double import arranged
from test_peer import DTYPES, Ranks, numbers

from distdl.engine.peer import kernel

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
SUMS = {torch.float32: "float, 2", torch.bfloat16: "Brain, 4", torch.bool: "Truth, 8", torch.complex128: "double, 1"}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("host")
    here = kernel.Path(kernel.__file__)
    text = "".join(here.with_name(name).read_text() for name in ("lanes.cu", "boxes.cu", "sums.cu"))
    text += 'extern "C" void moves(const Movement* m, u32 blocks) { run(blocks, [=] { move_boxes(*m); }); }\n'
    for i, name in enumerate(SUMS.values()):
        text += f'extern "C" void sum{i}(const Sum* m, u32 blocks) {{ run(blocks, [=] {{ sum_all<{name}>(*m); }}); }}\n'
    header = here.parents[3] / "tests" / "host_cuda.h"
    (folder / "host.cpp").write_text(f'#include "{header}"\n{text}')
    options = [f"-D{key}={value}" for key, value in (kernel.OPTIONS | {"THREADS": "1u", "TEAM": "1u"}).items()]
    made = folder / "host.so"
    command = [
        "g++",
        "-O1",
        "-std=c++17",
        "-shared",
        "-fPIC",
        "-w",
        *options,
        folder / "host.cpp",
        "-o",
        made,
        "-lpthread",
    ]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(made))


class OnHost(Ranks):
    """Ranks whose kernels are the library's: all begin at once."""

    def __init__(self, library, nodes):
        self.library = library
        super().__init__(nodes)

    def mover(self, rank, base):
        make = self.movement if base is fake_peer.Mover else self.sum

        class Later(base):
            def __call__(own, *args):
                self.pending[rank].append(make(own, *args))
                self.moved += 1

        return Later

    def movement(self, own, addresses):
        table = own.table
        held = (ctypes.c_int64 * len(table.words))(*table.words)
        argument = kernel.Movement(movers=table.movers, table=ctypes.addressof(held))
        argument.base[: len(addresses)] = addresses
        return lambda: (held, self.library.moves(ctypes.byref(argument), table.movers + table.keepers))

    def sum(self, own, source, target):
        nbytes, dtype, me = own.how
        each = 2 if dtype.is_complex else 1
        argument = kernel.Sum(x=source, y=target, total=nbytes // dtype.itemsize * each, count=len(own.others), me=me)
        argument.aligned = (source | target) % 8 == 0
        own.blocks(source, target)  # counts
        for q, peer in enumerate(own.others):
            argument.there[q], argument.here[q] = own.boxes.pages(peer)
            argument.number[q] = own.boxes.sums[peer]
        function = getattr(self.library, f"sum{list(SUMS).index(dtype)}")
        return lambda: function(ctypes.byref(argument), 3)

    def run(self):
        def of_rank(kernels):
            for one in kernels:
                one()

        ranks = [threading.Thread(target=of_rank, args=(list(k),)) for k in self.pending.values()]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        for kernels in self.pending.values():
            kernels.clear()


def test_random_movements(library):
    ranks = OnHost(library, "aaab")
    for i, (name, kind) in enumerate((n, k) for n in BUILDERS for k in KINDS):
        case, dtype = draw(name, kind, random.Random(seed_of(name, kind, "source")), 4), DTYPES[i % len(DTYPES)]
        for plan in (case.map.plan, case.map.plan.T):
            xs = numbers(plan, dtype)
            wanted = plan.simulate(xs)
            got = ranks.moves(plan, [arranged(x, i % 4) for x in xs])
            assert all(torch.equal(a, b) for a, b in zip(got, wanted)), (name, kind)


@pytest.mark.parametrize("dtype", SUMS)
def test_small_sums(library, dtype):
    ranks = OnHost(library, "aaa")
    for count, at in ((1, 0), (7, 1), (5000, 0), (3001, 3), (3, 0)):
        xs = [(torch.randn(count + at) * 3).to(dtype)[at:] for _ in range(3)]
        ys = [torch.empty_like(x) for x in xs]
        for r, (x, y) in enumerate(zip(xs, ys)):
            ranks.transports[r].reach.sum((0, 1, 2), dtype, count)(x.data_ptr(), y.data_ptr())
        ranks.run()
        wide = [x.float() if dtype == torch.bfloat16 else x for x in xs]
        assert all(torch.equal(y, (wide[0] + wide[1] + wide[2]).to(dtype)) for y in ys)
