"""The engine of torch.distributed beside what one would write by hand with torch.distributed.

``python -m bench.bench_torch``: the host's own time, where torch's fake process group carries nothing.
``python -m distdl run --engine torch -n 2 bench/bench_torch.py``: over gloo; minima and medians of interleaved rounds.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time

import torch
import torch.distributed as dist

import distdl as dd
import distdl.functional as F

SIZES = (2**10, 2**18, 2**22)  # bytes


class Played:
    """A group of two ranks, the other of which sends whatever this one does."""

    def __init__(self, group):
        self.group, self.into = group, 0

    def recv(self, tensors, peer, tag):
        self.into = tensors[0].data_ptr()
        return self.group.recv(tensors, peer, tag)

    def send(self, tensors, peer, tag):
        if self.into:
            ctypes.memmove(self.into, tensors[0].data_ptr(), 24)  # what a message begins with
            self.into = 0
        return self.group.send(tensors, peer, tag)


def by_hand(x, peer, source=None):
    """What torch's documentation says."""
    y = torch.empty_like(x)
    ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, y, peer if source is None else source)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return y


def rounds(calls: dict, n: int, before=lambda: None) -> dict:
    """Microseconds of each call, {name: [of each round]}; a round makes all of them."""
    found = {name: [] for name in calls}
    for _ in range(n):
        for name, call in calls.items():
            before()
            start = time.perf_counter()
            call()
            found[name].append((time.perf_counter() - start) * 1e6)
    return found


def say(title: str, found: dict) -> None:
    """One line for each call."""
    for name, times in found.items():
        print(f"{title:>24}  {name:<28} min {min(times):8.1f}  median {statistics.median(times):8.1f} µs")


def host() -> None:
    """Own time per call, on a group that carries nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from distdl.engine import c10d

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    group = dist.group.WORLD
    meeting = c10d.Meeting(dist.HashStore(), (0, 1), 0, (0, 2))
    engine = c10d.TorchTransport(meeting)
    engine.met |= {1}
    engine.messages.group = Played(group)
    dd.World(transport=engine)
    P = dd.Partition((2,))
    for nbytes in SIZES:
        x = torch.ones(nbytes // 4)
        L = dd.Layout(P, (2 * x.numel(),))
        calls = {"batch_isend_irecv": lambda x=x: by_hand(x, 1), "F.shift": lambda x=x, L=L: F.shift(x, L, 0)}
        rounds(calls, 200)
        say(f"host, {nbytes} B", rounds(calls, 2000))
    os._exit(0)  # nobody is there to say goodbye to


def wire() -> None:
    """Over gloo, between the ranks of this job."""
    dist.init_process_group("gloo")
    world = dd.world()
    r, n = world.rank, world.size
    P = dd.Partition((n,))
    for nbytes in SIZES:
        x = torch.ones(nbytes // 4)
        L, total = dd.Layout(P, (n * x.numel(),)), x.clone()
        calls = {
            "batch_isend_irecv": lambda x=x: by_hand(x, (r + 1) % n, (r - 1) % n),
            "F.shift": lambda x=x, L=L: F.shift(x, L, 0),
            "all_reduce": lambda t=total: dist.all_reduce(t.fill_(1)),
            "F.all_sum_reduce": lambda x=x: F.all_sum_reduce(x, P),
        }
        rounds(calls, 20, dist.barrier)
        found = rounds(calls, 200, dist.barrier)
        if r == 0:
            say(f"gloo, {n} ranks, {nbytes} B", found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    wire() if "WORLD_SIZE" in os.environ else host()
