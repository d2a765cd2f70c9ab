"""Paired timing: candidates run in turn inside one launch, so that noise hits all of them alike.

A sample is the time of ``inner`` calls between two barriers, as the slowest rank saw it. Ratios are taken sample by
sample; the interval is a 95 % bootstrap interval of their median.
"""

from __future__ import annotations

import os
import platform
import sys
import time

import numpy as np
import torch

from ...world import world


class Ranks:
    """The ranks of the default world, whichever engine carries it, by the names that MPI gives them."""

    def __init__(self) -> None:
        self.world = world()
        self.rank, self.size = self.world.rank, self.world.size

    def allgather(self, value) -> list:
        """What every rank has, in their order."""
        return [*self.world.all_gather(value, range(self.size), "bench").values()]

    def Barrier(self) -> None:
        """Wait for all of them."""
        self.allgather(None)


def sample(candidates, comm, *, rounds: int = 41, inner: int = 1, warmup: int = 3) -> dict[str, np.ndarray]:
    """Seconds per call, the maximum over ranks, for each candidate and round. Fixed rounds: adaptive ones differ by
    rank. ``comm``: :class:`Ranks`, or a communicator of mpi4py; ``None`` for one process."""
    names = list(candidates)
    times = np.zeros((len(names), rounds))
    for name in names:  # warm up: plans, communicators, pages
        for _ in range(warmup):
            candidates[name]()
    for round_ in range(rounds):
        for k in range(len(names)):
            i = (k + round_) % len(names)
            call = candidates[names[i]]
            if comm is not None:
                comm.Barrier()
            start = time.perf_counter()
            for _ in range(inner):
                call()
            times[i, round_] = (time.perf_counter() - start) / inner
    if comm is not None:
        times = np.max(comm.allgather(times), axis=0)
    return dict(zip(names, times))


def bootstrapped(values, draws: int = 2000, seed: int = 0) -> np.ndarray:
    """Medians of ``draws`` samples drawn from ``values`` with replacement."""
    values = np.asarray(values)
    picks = np.random.default_rng(seed).integers(0, len(values), (draws, len(values)))
    return np.median(values[picks], axis=1)


def ratio(a, b, *, draws: int = 2000) -> tuple[float, float, float]:
    """Median of a / b by round, and its 95 % bootstrap interval."""
    quotients = np.asarray(a) / np.asarray(b)
    low, high = np.percentile(bootstrapped(quotients, draws), [2.5, 97.5])
    return float(np.median(quotients)), float(low), float(high)


def environment(ranks: int) -> dict:
    """What the numbers were taken on."""
    cores = os.cpu_count()
    found = {
        "ranks": ranks,
        "cores": cores,
        "oversubscribed": ranks > cores,
        "load": [round(x, 1) for x in os.getloadavg()],
        "processor": _processor(),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
    }
    if "mpi4py.MPI" in sys.modules:  # else some other engine carries the ranks, and MPI is not started for this
        import mpi4py
        from mpi4py import MPI

        found["mpi4py"], found["mpi"] = mpi4py.__version__, MPI.Get_library_version().split("\n")[0].strip("\0 ")
    return found


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    except OSError:
        return platform.processor() or "unknown"
