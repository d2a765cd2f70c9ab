"""Training steps by ``dd.parallel`` against DistributedDataParallel, ZeroRedundancyOptimizer and fully_shard, in one
run.

``python -m distdl run -n 2 -m bench.bench_gpu_parallel``, one rank for each device; ``--device cpu`` takes MPI and gloo
instead of NCCL. A Transformer's blocks, AdamW, as many samples on each rank (trainers.py). All candidates of a group
begin with the same parameters; losses and gradients are compared with the first one's, then steps are timed in turn,
with the device idle and a
barrier between two candidates: theirs and our communicators are never in flight at once. ``device`` is the time between
two CUDA events around ``inner`` steps, ``wall`` that until the device is idle; milliseconds for one step, the slowest
rank's, medians over
the rounds. ``peak GB``: what a candidate had allocated at most in three steps. The group "timeline" says when each
bucket of gradients was reduced.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

import distdl as dd
import distdl.functional as F
from distdl import parallel as dp
from distdl.programs.bench.table import report

from .trainers import GROUPS, Task

COMM = MPI.COMM_WORLD
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}  # of the largest entry: sums are taken in another order


# ---------------------------------------------------------------- measuring


class Device:
    """A device's clock and memory; on the CPU the host's clock."""

    def __init__(self, kind):
        self.cuda = kind == "cuda"
        if self.cuda:
            torch.cuda.set_device(dd.Topology.discover().devices[0])
        self.device = torch.device(kind, torch.cuda.current_device()) if self.cuda else torch.device(kind)
        self.name = torch.cuda.get_device_name() if self.cuda else "CPU"

    def mark(self):
        """A moment of the current stream."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, first, second):
        """Between two moments, which have passed."""
        return first.elapsed_time(second) if self.cuda else (second - first) * 1e3

    def settle(self):
        """Everything that any rank has begun is done: no communicator is in use."""
        if self.cuda:
            torch.cuda.synchronize()
        COMM.Barrier()

    def allocated(self):
        """GB in use."""
        return torch.cuda.memory_allocated() / 1e9 if self.cuda else float("nan")

    def reset_peak(self):
        """Begin to note the peak."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def peak(self):
        """GB in use at most since then."""
        return torch.cuda.max_memory_allocated() / 1e9 if self.cuda else float("nan")


def measure(device, candidates, rounds, inner):
    """{name: (device ms, wall ms)} of a step, the slowest rank's, medians over the rounds."""
    names, times = list(candidates), np.zeros((len(candidates), 2, rounds))
    for k in range(rounds):
        for i in np.roll(range(len(names)), k):
            device.settle()
            start, begin = time.perf_counter(), device.mark()
            for _ in range(inner):
                candidates[names[i]]()
            end = device.mark()
            if device.cuda:
                torch.cuda.synchronize()
            times[i, :, k] = device.ms(begin, end) / inner, (time.perf_counter() - start) * 1e3 / inner
    device.settle()
    COMM.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
    return {name: tuple(float(t) for t in np.median(times[i], axis=1)) for i, name in enumerate(names)}


def checked(name, device, candidate, reference, dtype):
    """Three steps. Returns their losses with the first step's gradients, and how far off the reference's these are."""
    losses, grads = [], None
    for step in range(3):
        losses.append(candidate.gradients().clone())
        if step == 0 and candidate.whole:
            grads = [g.detach().cpu() for g in candidate.whole()]
        candidate.update()
    device.settle()
    losses = COMM.allreduce(np.array([float(x) for x in losses])) / COMM.size
    if reference is None or grads is None:
        return (losses, grads), None
    off = max(float((g - e).abs().max() / e.abs().max()) for g, e in zip(grads, reference[1], strict=True))
    off = COMM.allreduce(max(off, float(np.abs(losses / reference[0] - 1).max())), MPI.MAX)
    if not off < CLOSE[dtype]:
        raise SystemExit(f"{name} differs by {off}; losses {losses}, not {reference[0]}")
    return reference, off


def group(name, task, device, options, dtype):
    """Build, check and time one group's candidates; rows of the table."""
    made, facts, reference = {}, {}, None
    for candidate, build in GROUPS[name](task).items():
        if options.match and not any(word in candidate for word in options.match.split(",")):
            continue
        gc.collect()
        device.settle()
        before = device.allocated()
        one = made[candidate] = build()
        first, off = checked(candidate, device, one, reference, dtype)
        reference = reference or first
        device.settle()
        device.reset_peak()
        for _ in range(3):
            one.step()
        device.settle()
        facts[candidate] = {
            "peak GB": COMM.allreduce(device.peak() - before, MPI.MAX),
            "off": "-" if off is None else f"{off:.1e}",
        }
    times = measure(device, {k: c.step for k, c in made.items()}, options.rounds, options.inner)
    first = next(iter(times.values()))
    return [
        {
            "case": name,
            "dtype": str(dtype).removeprefix("torch."),
            "candidate": k,
            "device ms": on_device,
            "wall ms": wall,
            "wall / first": f"{wall / first[1]:.3f}",
            **facts[k],
        }
        for k, (on_device, wall) in times.items()
    ]


# ---------------------------------------------------------------- the timeline of one backward


def timeline(task, device, options):
    """(rows: when each bucket was reduced, from backward's begin on; rows: totals, overlapped and not)."""
    model, moments = task.model(), []
    exact = dp.hooks.all_reduce(task.P)

    def timed(bucket, state):  # runs where the bucket is reduced: on a device beside backward's stream
        begin = device.mark()
        summed = exact(bucket, state)
        moments.append((sum(g.nbytes for g in bucket), begin, device.mark()))
        return summed

    sync = dp.GradientSync(model.parameters(), task.P, hook=timed)

    def run(late):
        """(backward's end, the end of all, buckets) after backward's begin."""
        loss = task.loss(model(task.x)) / COMM.size
        moments.clear()
        device.settle()
        begin = device.mark()
        if late:
            with sync.no_sync():
                loss.backward()
        else:
            loss.backward()
        end = device.mark()
        sync.finish()
        done = device.mark()
        device.settle()
        for p in model.parameters():
            p.grad = None
        ms = device.ms
        return ms(begin, end), ms(begin, done), [(n, ms(begin, a), ms(begin, b)) for n, a, b in moments]

    runs = {late: [run(late) for _ in range(options.rounds + 2)][2:] for late in (False, True)}
    end, done, buckets = sorted(runs[False], key=lambda one: one[1])[options.rounds // 2]  # the median one
    hidden = [max(0.0, min(b, end) - a) / max(b - a, 1e-9) for _, a, b in buckets]
    rows = [
        {"bucket": i, "MB": n / 2**20, "begins ms": a, "ends ms": b, "backward ends ms": end, "hidden %": 100 * h}
        for i, ((n, a, b), h) in enumerate(zip(buckets, hidden))
    ]
    totals = []
    for late, found in runs.items():
        middle = [COMM.allreduce(statistics.median(one[k] for one in found), MPI.MAX) for k in (0, 1)]
        reducing = COMM.allreduce(statistics.median(sum(b - a for _, a, b in one[2]) for one in found), MPI.MAX)
        totals.append(
            {
                "case": "reduced after backward" if late else "reduced while backward runs",
                "backward ms": middle[0],
                "with all gradients ms": middle[1],
                "reducing ms": reducing,
            }
        )
    beside, after = totals  # in the second nothing was reduced meanwhile
    exposed = (beside["with all gradients ms"] - after["backward ms"]) / beside["reducing ms"]
    beside["hidden %"], after["hidden %"] = 100 * min(1.0, max(0.0, 1 - exposed)), None
    share = sum(h * (b - a) for h, (_, a, b) in zip(hidden, buckets)) / max(sum(b - a for _, a, b in buckets), 1e-9)
    if COMM.rank == 0:
        waits = "" if device.cuda else ", which waits for them"
        print(f"{100 * share:.1f} % of the reductions' time lies within backward{waits}")
    return rows, totals


def main(argv=None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser("bench_gpu_parallel")
    parser.add_argument("--json", default=None, help="a directory for the results")
    parser.add_argument("--only", default="data zero sharded timeline")
    parser.add_argument(
        "--match", default="", help="only candidates whose names hold one of these words, with commas between"
    )
    parser.add_argument(
        "--half-sums", default="float32", help="how sums of bfloat16 are taken: float32, or native as the peers do"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dtypes", default="bfloat16 float32")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=4096, help="on each rank")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--inner", type=int, default=3, help="steps of one sample")
    options = parser.parse_args(argv)
    if options.half_sums != "float32":
        dd.World(half_sums=options.half_sums)
    device = Device(options.device)
    torch.set_float32_matmul_precision("high")  # TensorFloat-32, for all candidates
    dp.export_rendezvous()
    dist.init_process_group("nccl" if device.cuda else "gloo", device_id=device.device if device.cuda else None)
    F.all_sum_reduce(torch.ones(1, device=device.device), dd.Partition((COMM.size,)))
    how = "" if options.half_sums == "float32" else "-native-sums"
    for dtype in (getattr(torch, name) for name in options.dtypes.split()):
        for name in options.only.split():
            task = Task.of(options, device.device, dtype)
            if name == "timeline":
                tables = dict(zip(("timeline", "overlap"), timeline(task, device, options)))
            else:
                tables = {name: group(name, task, device, options, dtype)}
            text, card = str(dtype).removeprefix("torch."), device.name.replace(" ", "-")
            size = f"{options.blocks} blocks of width {options.hidden}, {options.tokens} tokens on each rank"
            for what, rows in tables.items() if COMM.rank == 0 else ():
                path = (
                    f"{options.json}/gpu-parallel-{what}-{text}-{card}-n{COMM.size}{how}.json" if options.json else None
                )
                report(rows, f"{what}: {COMM.size} x {device.name}, {text}{how}, {size}", path, COMM.size)
            device.settle()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
