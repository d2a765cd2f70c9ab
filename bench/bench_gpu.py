"""Movements of CUDA tensors against hand-written NCCL, torch.distributed, DTensor and plain device copies, in one run.

``python -m distdl run -n 2 -m bench.bench_gpu``, one rank for each device. A sample is ``inner`` calls, enqueued while
it is
still busy with something else: ``device`` is the time between two CUDA events around them, without the host's share,
``host`` the time until they had returned; a program that does little else between calls sees the larger one. As the
slowest rank saw it; microseconds, medians over the rounds.
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

import distdl as dd
import distdl.functional as F
from distdl.programs.bench.table import report

COMM = MPI.COMM_WORLD


def measure(candidates, rounds=11, inner=20):
    """{name: (device µs, host µs)} per call, the maximum over ranks of the medians over rounds."""
    names, times = list(candidates), np.zeros((len(candidates), 2, rounds))
    block = torch.ones(6144, 6144, device="cuda")  # 9 ms or so: a head start for the host
    for name in names:
        for _ in range(4):
            candidates[name]()
    for k in range(rounds):
        for i in np.roll(range(len(names)), k):
            call = candidates[names[i]]
            torch.cuda.synchronize()
            COMM.Barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.mm(block, block)
            start = time.perf_counter()
            begin.record()
            for _ in range(inner):
                call()
            end.record()
            host = time.perf_counter() - start
            torch.cuda.synchronize()
            times[i, :, k] = begin.elapsed_time(end) * 1e3 / inner, host * 1e6 / inner
    COMM.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
    return {name: tuple(np.median(t, axis=1)) for name, t in zip(names, times)}


def rows_of(name, nbytes, found, ours="distdl"):
    """Table rows: every candidate's times, and its ratio to ours."""
    base = found[ours]
    return [
        {
            "case": name,
            "MB": nbytes / 2**20,
            "candidate": candidate,
            "device": float(device),
            "host": float(host),
            "device / ours": f"{device / base[0]:.2f}",
            "slower of both / ours": f"{max(device, host) / max(base):.2f}",
        }
        for candidate, (device, host) in found.items()
    ]


class Hand:
    """Hand-written NCCL: a communicator of all ranks, and grouped messages."""

    def __init__(self):
        from cupy.cuda import nccl

        self.nccl = nccl
        unique = COMM.bcast(nccl.get_unique_id())
        self.comm = nccl.NcclCommunicator(COMM.size, unique, COMM.rank)

    def exchange(self, sends, receives):
        """Contiguous tensors to and from peers."""
        stream = torch.cuda.current_stream().cuda_stream
        self.nccl.groupStart()
        for peer, t in sends:
            self.comm.send(t.data_ptr(), t.nbytes, self.nccl.NCCL_UINT8, peer, stream)
        for peer, t in receives:
            self.comm.recv(t.data_ptr(), t.nbytes, self.nccl.NCCL_UINT8, peer, stream)
        self.nccl.groupEnd()

    def all_reduce(self, x, y, kind="NCCL_FLOAT32"):
        """y = the sum of all x."""
        self.comm.allReduce(
            x.data_ptr(),
            y.data_ptr(),
            x.numel(),
            getattr(self.nccl, kind),
            self.nccl.NCCL_SUM,
            torch.cuda.current_stream().cuda_stream,
        )

    def all_gather(self, x, y):
        """y = all x."""
        self.comm.allGather(
            x.data_ptr(), y.data_ptr(), x.nbytes, self.nccl.NCCL_UINT8, torch.cuda.current_stream().cuda_stream
        )

    def reduce_scatter(self, x, y):
        """y = this rank's part of the sum."""
        self.comm.reduceScatter(
            x.data_ptr(),
            y.data_ptr(),
            y.numel(),
            self.nccl.NCCL_FLOAT32,
            self.nccl.NCCL_SUM,
            torch.cuda.current_stream().cuda_stream,
        )


def halos(hand):
    """Width 1: one, two and three split dims; ghosts from the edges' neighbours are absent ("none")."""
    p, r = COMM.size, COMM.rank
    for shape in ((1, 16, 64), (16, 256, 256), (32, 1024, 1024), (64, 4096, 1024)):
        L = dd.Layout(dd.Partition((1, p, 1)), shape)
        spec, x = dd.HaloSpec(L, (0, 1, 0)), torch.randn(L.local_shape(), device="cuda")
        first, last = int(r > 0), int(r < p - 1)

        def by_hand(send, x=x, first=first, last=last):
            y = x.new_empty(x.shape[0], x.shape[1] + first + last, x.shape[2])
            y[:, first : first + x.shape[1]] = x
            near = [(r - 1, x[:, :1].contiguous(), y[:, :1])] * first + [
                (r + 1, x[:, -1:].contiguous(), y[:, -1:])
            ] * last
            got = [torch.empty_like(strip) for _, strip, _ in near]
            send([(q, strip) for q, strip, _ in near], [(q, t) for (q, _, _), t in zip(near, got)])
            for (_, _, ghost), t in zip(near, got):
                ghost.copy_(t)
            return y

        found = measure(
            {
                "distdl": lambda x=x, spec=spec: F.halo_exchange(x, spec),
                "NCCL by hand": lambda f=by_hand: f(hand.exchange),
                "torch.distributed P2P": lambda f=by_hand: f(batched),
                "clone": lambda x=x: x.clone(),
            }
        )
        yield from rows_of(f"halo {shape}, dim 1", x.nbytes, found)
    grid = {2: (2, 1, 1), 4: (2, 2, 1)}.get(p, (p, 1, 1))
    for n in (32, 128, 256):
        L = dd.Layout(dd.Partition((1, 1, *grid)), (1, 8, n, n, n))
        spec, x = dd.HaloSpec(L, (0, 0, 1, 1, 1), boundary="circular"), torch.randn(L.local_shape(), device="cuda")
        found = measure({"distdl": lambda x=x, spec=spec: F.halo_exchange(x, spec), "clone": lambda x=x: x.clone()})
        yield from rows_of(f"halo (1, 8, {n}³) over {grid}, circular, corners", x.nbytes, found)


def batched(sends, receives):
    """The same messages by torch.distributed."""
    ops = [dist.P2POp(dist.isend, t, q) for q, t in sends] + [dist.P2POp(dist.irecv, t, q) for q, t in receives]
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()


def repartitions(hand):
    """Rows to columns, and a 3-D slab to a pencil."""
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    p, r = COMM.size, COMM.rank
    mesh = init_device_mesh("cuda", (p,))
    shapes = [(n, n) for n in (64, 1024, 4096, 8192, 16384)] + [(256, 256, 256), (512, 512, 512)]
    for shape in shapes:
        rest = (1,) * (len(shape) - 2)
        A, B = dd.Layout(dd.Partition((p, 1, *rest)), shape), dd.Layout(dd.Partition((1, p, *rest)), shape)
        x = torch.randn(A.local_shape(), device="cuda")
        d = DTensor.from_local(x, mesh, [Shard(0)])
        n, m = shape[1] // p, x.shape[0]

        def by_hand(x=x, n=n, m=m):
            y = x.new_empty(m * p, n, *x.shape[2:])
            packed = [(q, x[:, q * n : (q + 1) * n].contiguous()) for q in range(p) if q != r]
            y[r * m : (r + 1) * m] = x[:, r * n : (r + 1) * n]
            hand.exchange(packed, [(q, y[q * m : (q + 1) * m]) for q in range(p) if q != r])
            return y

        found = measure(
            {
                "distdl": lambda x=x, A=A, B=B: F.repartition(x, A, B),
                "NCCL by hand": by_hand,
                "DTensor.redistribute": lambda d=d: d.redistribute(mesh, [Shard(1)]),
                "clone": lambda x=x: x.clone(),
            },
            inner=20 if x.numel() < 2**24 else 5,
        )
        yield from rows_of("repartition " + " x ".join(map(str, shape)), x.nbytes, found)


def collectives(hand):
    """Sums and gathers, against the engine's own call alone."""
    p = COMM.size
    line = dd.Partition((p,))
    for n in (2**10, 2**18, 2**22, 2**24, 2**26):
        inner = 20
        x = torch.randn(n, device="cuda")
        y, part, whole = torch.empty_like(x), x[: n // p].clone(), dd.Layout(line, (n,))
        small = torch.empty_like(part)
        found = measure(
            {
                "distdl": lambda x=x: F.all_sum_reduce(x, line),
                "NCCL": lambda x=x, y=y: hand.all_reduce(x, y),
                "torch.distributed": lambda y=y: dist.all_reduce(y),
            },
            inner=inner,
        )
        yield from rows_of(f"all_sum_reduce {n}", x.nbytes, found)
        found = measure(
            {
                "distdl": lambda x=part, L=whole: F.all_gather(x, L),
                "NCCL": lambda x=part, y=y: hand.all_gather(x, y),
                "torch.distributed": lambda x=part, y=y: dist.all_gather_into_tensor(y, x),
            },
            inner=inner,
        )
        yield from rows_of(f"all_gather {n}", x.nbytes, found)
        found = measure(
            {
                "distdl": lambda x=x, L=whole: F.reduce_scatter(x, L),
                "NCCL": lambda x=x, y=small: hand.reduce_scatter(x, y),
                "torch.distributed": lambda x=x, y=small: dist.reduce_scatter_tensor(y, x),
            },
            inner=inner,
        )
        yield from rows_of(f"reduce_scatter {n}", x.nbytes, found)
    uneven, x = dd.Layout(line, (2**24 + 1,)), torch.randn(2**24 + 1, device="cuda")
    mine, half = uneven.shard(x).clone(), x.bfloat16()
    found = measure(
        {"distdl": lambda: F.all_gather(mine, uneven), "its adjoint": lambda: F.reduce_scatter(x, uneven)}, inner=5
    )
    yield from rows_of("all_gather, uneven, 2^24 + 1", x.nbytes, found)
    found = measure(
        {"distdl": lambda: F.all_sum_reduce(half, line), "NCCL in bfloat16": lambda: dist.all_reduce(half)}, inner=5
    )
    yield from rows_of("all_sum_reduce 2^24, bfloat16 summed in float32", half.nbytes, found)


def mlp():
    """A column -> row block, bfloat16, 4096 tokens, 8192 -> 32768 -> 8192, forward and backward; with sequence
    parallelism too."""
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    p, tokens, width, inner = COMM.size, 4096, 8192, 32768
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    column = dd.Layout(dd.Partition((1, p, 1)), (tokens, inner, width))
    row = dd.Layout(dd.Partition((1, 1, p)), (tokens, width, inner))
    w1, w2 = ((0.01 * torch.randn(s, **kind)).requires_grad_() for s in ((inner // p, width), (width, inner // p)))
    x = torch.randn(tokens, width, **kind, requires_grad=True)
    part = x.detach()[: tokens // p].clone().requires_grad_()

    def use(y):
        y.backward(
            y.detach()
        )  # needs the result, as a loss does: one that nobody reads would be summed beside all else

    def ours():
        h = F.dist_linear(x, w1, column, x_layout="invariant", y_layout="replicated")
        use(F.dist_linear(h.relu(), w2, row, x_layout="replicated", y_layout="invariant"))

    def sequence():
        h = F.dist_linear(part, w1, column, x_layout="sharded", x_dim=0)
        use(F.dist_linear(h.relu(), w2, row, y_layout="sharded", y_dim=0))

    net = torch.nn.Sequential(
        torch.nn.Linear(width, inner, bias=False), torch.nn.ReLU(), torch.nn.Linear(inner, width, bias=False)
    )
    net = parallelize_module(
        net.to(**kind), init_device_mesh("cuda", (p,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    found = measure(
        {"distdl": ours, "distdl, sequence parallel": sequence, "parallelize_module": lambda: use(net(x))},
        rounds=7,
        inner=3,
    )
    yield from rows_of("MLP 8192 -> 32768 -> 8192, bf16, forward + backward", x.nbytes, found)


CONVOLUTIONS = (
    (1, 32, 64, 64, 64),
    (1, 32, 128, 128, 128),
    (1, 32, 256, 256, 256),
    (1, 64, 1024, 1024),
    (1, 64, 4096, 4096),
)


def problem(shape):
    """3 x 3 (x 3), as many channels out as in, bfloat16, slabs of the first spatial dim: (layout, x, weights,
    cotangent, the serial convolution, one rank's share of x with its halos, the padding that is left to it)."""
    L = dd.Layout(dd.Partition((1, 1, COMM.size, *(1,) * (len(shape) - 3))), shape)
    kind, c, n = {"device": "cuda", "dtype": torch.bfloat16}, shape[1], len(shape) - 2
    x, w = (
        torch.randn(L.local_shape(), **kind, requires_grad=True),
        torch.randn(c, c, *(3,) * n, **kind, requires_grad=True),
    )
    grown = torch.randn(1, c, x.shape[2] + 2, *shape[3:], **kind, requires_grad=True)
    serial = torch.nn.functional.conv3d if n == 3 else torch.nn.functional.conv2d
    return L, x, w, torch.randn(L.local_shape(), **kind), serial, grown, (0, *(1,) * (n - 1))


def convolution():
    """With the halo first, and with overlap, against one device alone on its share with its halos, forward + backward
    and forward
    alone: from which block on is overlap faster?"""
    for shape in CONVOLUTIONS:
        L, x, w, g, serial, grown, padding = problem(shape)

        def alone(serial=serial, grown=grown, w=w, padding=padding):
            return serial(grown, w, padding=padding)

        calls = {
            "distdl": lambda x=x, w=w, L=L: F.dist_conv(x, w, L, padding=1, overlap=False),
            "distdl, overlap": lambda x=x, w=w, L=L: F.dist_conv(x, w, L, padding=1, overlap=True),
            "one device, its share and halos": alone,
        }
        large = {"rounds": 7, "inner": 3} if x.nbytes >= 2**28 else {}
        found = measure({name: lambda call=call, g=g: call().backward(g) for name, call in calls.items()}, **large)
        yield from rows_of(f"convolution {shape}, forward + backward", x.nbytes, found)
        with torch.no_grad():
            found = measure(calls, **large)
        yield from rows_of(f"convolution {shape}, forward", x.nbytes, found)


def beside(spans, others) -> float:
    """For how long, while one of ``spans`` lasts, one of ``others`` does: pairs (begin, end)."""
    cuts = sorted({t for span in (*spans, *others) for t in span})

    def covered(a, b, some):
        return any(begin <= a and b <= end for begin, end in some)

    return sum(b - a for a, b in pairwise(cuts) if covered(a, b, spans) and covered(a, b, others))


def spans_row(case, what, spans, others):
    """When these first begin and last end, how long they take, and how much of that passes beside the others; µs."""
    begin, end = min((a for a, _ in spans), default=0.0), max((b for _, b in spans), default=0.0)
    return {
        "case": case,
        "what": what,
        "begins": float(begin),
        "ends": float(end),
        "takes": float(sum(b - a for a, b in spans)),
        "beside the others": float(beside(spans, others)),
    }


def events_of(x, w, strips, serial, rounds=21):
    """Medians of when the strips and the block's convolution begin and end, by events on the two streams, as this rank
    saw it."""
    from distdl.engine.side_stream import side_stream

    side, block, times = side_stream(x.device).stream, torch.ones(6144, 6144, device="cuda"), []
    for _ in range(rounds):
        torch.cuda.synchronize()
        COMM.Barrier()
        zero, *marks = (torch.cuda.Event(enable_timing=True) for _ in range(5))
        torch.mm(block, block)  # a head start for the host
        zero.record()
        side.wait_stream(torch.cuda.current_stream())
        marks[0].record(side)
        pending = F.start(tuple(strips.values()), (x,) * len(strips))
        marks[1].record(side)
        marks[2].record()
        serial(x, w, padding=1)
        marks[3].record()
        F.wait(pending)
        torch.cuda.synchronize()
        times.append([zero.elapsed_time(mark) * 1e3 for mark in marks])
    a, b, c, d = np.median(times[1:], axis=0)
    return [(a, b)], [(c, d)]


def kernels_of(call):
    """(what the stream of NCCL's kernels does, what the others do) in one call, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    COMM.Barrier()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        torch.mm(torch.ones(6144, 6144, device="cuda"), torch.ones(6144, 6144, device="cuda"))
        torch.cuda._sleep(10**7)
        call()
        torch.cuda.synchronize()
    kernels = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    start = max((e.time_range.end for e in kernels if "spin" in e.name.lower()), default=0)  # _sleep's
    kernels = [e for e in kernels if e.time_range.start >= start]
    streams = {e.device_resource_id for e in kernels if "nccl" in e.name.lower()}
    parts: tuple[list, list] = ([], [])
    for e in kernels:
        parts[e.device_resource_id not in streams].append((e.time_range.start - start, e.time_range.end - start))
    return parts


def timeline():
    """Do the strips travel while the block is convolved? Rank 0's own times: those of events, and those of all kernels
    of a whole call of each kind. Where everything happens on one stream, nothing is beside anything."""
    for shape in CONVOLUTIONS:
        L, x, w, g, serial, _, _ = problem(shape)
        spec = dd.HaloSpec.window(L, None, (3,) * (len(shape) - 2), padding=1)
        with torch.no_grad():
            travelling, working = events_of(x, w, dd.maps.halo_strips(spec), serial)
        case = f"convolution {shape}"
        yield spans_row(case, "events: strips", travelling, working)
        yield spans_row(case, "events: block", working, travelling)
        for overlap in (False, True):
            how = "overlap" if overlap else "window first"
            y = [F.dist_conv(x, w, L, padding=1, overlap=overlap) for _ in range(3)][-1]
            y.backward(g, retain_graph=True)
            for name, call in {
                "forward": lambda x=x, w=w, L=L, o=overlap: F.dist_conv(x, w, L, padding=1, overlap=o),
                "backward": lambda y=y, g=g: y.backward(g, retain_graph=True),
            }.items():
                travelling, working = kernels_of(call)
                yield spans_row(case, f"{how}, {name}: NCCL's stream", travelling, working)
                yield spans_row(case, f"{how}, {name}: other streams", working, travelling)


def start_nccl() -> None:
    """torch's process group, of one device for each rank."""
    torch.cuda.set_device(COMM.rank % torch.cuda.device_count())
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533", RANK=str(COMM.rank), WORLD_SIZE=str(COMM.size))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))


def main(argv=None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser("bench_gpu")
    parser.add_argument("--json", default=None, help="a directory for the results")
    parser.add_argument("--only", default="halos repartitions collectives mlp convolution timeline")
    parser.add_argument(
        "--half-sums", default="float32", help="how sums of bfloat16 are taken: float32, or native as the peers do"
    )
    options = parser.parse_args(argv)
    if options.half_sums != "float32":
        dd.World(half_sums=options.half_sums)
    start_nccl()
    hand = Hand()
    parts = {
        "halos": lambda: halos(hand),
        "repartitions": lambda: repartitions(hand),
        "collectives": lambda: collectives(hand),
        "mlp": mlp,
        "convolution": convolution,
        "timeline": timeline,
    }
    for name in options.only.split():
        rows = list(parts[name]())
        if COMM.rank == 0:
            card = torch.cuda.get_device_name().replace(" ", "-")
            how = "" if options.half_sums == "float32" else "-native-sums"
            path = f"{options.json}/gpu-{name}-{card}-n{COMM.size}{how}.json" if options.json else None
            report(rows, f"{name}: {COMM.size} x {torch.cuda.get_device_name()}, microseconds{how}", path, COMM.size)
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
