"""What checking and the watchdog's board cost: ``python -m distdl run -n 2 -m bench.bench_checking``."""

from __future__ import annotations

import numpy as np
import torch
from mpi4py import MPI

import distdl as dd
import distdl.functional as F
from distdl import transport
from distdl.transport.checking import Observer

from .paired import arguments, ratio, report, sample


def under(observer, call):
    """``call`` while ``observer`` is on."""

    def run():
        transport.observer = observer
        call()
        transport.observer = None

    return run


def main(argv=None) -> None:
    """Print the table on rank 0."""
    options = arguments("bench_checking", 41, argv)
    comm, rows = MPI.COMM_WORLD, []
    P, x, loss = dd.Partition((comm.size,)), torch.ones(16), torch.ones(16, requires_grad=True)
    mine, all_of_them = bytearray(256), bytearray(256 * comm.size)
    cases = {"shift, 64 bytes": lambda: F.shift(x, P, 0), "all_sum_reduce, 64 bytes": lambda: F.all_sum_reduce(x, P),
             "invariant_sum, forward + backward": lambda: F.invariant_sum(loss, P).sum().backward()}
    for name, call in cases.items():
        times = sample({"off": under(None, call), "watched": under(Observer(), call), "checked": under(Observer(60), call),
                        "allgather": lambda: comm.Allgather(mine, all_of_them)}, comm, rounds=options.rounds, inner=20)
        best = {k: float(np.min(t)) * 1e6 for k, t in times.items()}
        rows.append({"call": name, **{f"{k}, µs": t for k, t in best.items()}, "checked - off, µs": best["checked"] - best["off"],
                     "checked / off": ratio(times["checked"], times["off"])})
    if comm.rank == 0:
        where = options.json and f"{options.json}/checking-n{comm.size}.json"
        report(rows, f"Checking, {comm.size} ranks (best of {options.rounds} samples; the slowest rank's time)", where, comm.size)


if __name__ == "__main__":
    main()
