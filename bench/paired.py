"""Paired timing: candidates run in turn inside one launch, so that noise hits all of them alike.

A sample is the time of ``inner`` calls between two barriers, as the slowest rank saw it. Ratios are taken sample by sample; the
interval is a 95 % bootstrap interval of their median.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path

import numpy as np
import torch


def sample(candidates, comm, *, rounds: int = 41, inner: int = 1) -> dict[str, np.ndarray]:
    """Seconds per call, the maximum over ranks, for each candidate and round. Fixed rounds: adaptive ones differ by rank."""
    names = list(candidates)
    times = np.zeros((len(names), rounds))
    for name in names:  # warm up: plans, communicators, pages
        for _ in range(3):
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
        from mpi4py import MPI

        comm.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
    return dict(zip(names, times))


def ratio(a, b, *, draws: int = 2000) -> tuple[float, float, float]:
    """Median of a / b by round, and its 95 % bootstrap interval."""
    quotients = a / b
    picks = np.random.default_rng(0).integers(0, len(quotients), (draws, len(quotients)))
    low, high = np.percentile(np.median(quotients[picks], axis=1), [2.5, 97.5])
    return float(np.median(quotients)), float(low), float(high)


def environment(ranks: int) -> dict:
    """What the numbers were taken on."""
    found = {"ranks": ranks, "cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(),
             "torch": torch.__version__, "torch_threads": torch.get_num_threads()}
    try:
        import mpi4py
        from mpi4py import MPI

        found["mpi4py"], found["mpi"] = mpi4py.__version__, MPI.Get_library_version().split("\n")[0].strip("\0 ")
    except ImportError:
        pass
    return found


def arguments(name: str, rounds: int, argv=None, **more):
    """The options all benchmarks share: ``--json DIRECTORY`` and ``--rounds N``; ``more``: help texts of required ones."""
    parser = argparse.ArgumentParser(name)
    parser.add_argument("--json", default=None, help="a directory for the results")
    parser.add_argument("--rounds", type=int, default=rounds)
    for option, text in more.items():
        parser.add_argument(f"--{option}", required=True, help=text)
    torch.set_num_threads(1)  # ranks share the cores
    return parser.parse_args(argv)


def report(rows, title: str, path: str | None, ranks: int) -> None:
    """Print rows (dicts with equal keys) as a table, and write them as JSON."""
    print(f"\n{title}")
    if rows:
        keys = list(rows[0])
        table = [keys, *[[_text(row[k]) for k in keys] for row in rows]]
        widths = [max(len(line[i]) for line in table) for i in range(len(keys))]
        for line in table:
            print("  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths))))
    if path:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps({"title": title, "environment": environment(ranks), "rows": rows}, indent=1) + "\n")


def _text(value) -> str:
    if isinstance(value, (tuple, list)):
        return f"{value[0]:.2f} [{value[1]:.2f}, {value[2]:.2f}]"
    return f"{value:.1f}" if isinstance(value, float) else str(value)
