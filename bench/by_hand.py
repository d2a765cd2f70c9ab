"""A repartition between two ranks beside the least that mpi4py can do by hand: a Sendrecv, and a copy of what stays.

``python -m distdl run -n 2 bench/by_hand.py 32,512,2048 [core of rank 0,core of rank 1]``: rows to columns of n x n
float32, in turns of 30 calls within one process, microseconds of the slower rank (least / median) and their ratio. Run
it in an environment of each MPI, on idle cores; give the same core twice to see ranks that share one.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch
from mpi4py import MPI

import distdl as dd

COMM, TURNS = MPI.COMM_WORLD, 8


def memory(t: torch.Tensor) -> list:
    """A contiguous tensor for MPI."""
    return [MPI.buffer.fromaddress(t.data_ptr(), t.nbytes), MPI.BYTE]


def by_hand(x: torch.Tensor, n: int, rank: int):
    """The same as a call that knows all shapes beforehand."""
    half, other = n // 2, 1 - rank
    mine, theirs = (slice(r * half, (r + 1) * half) for r in (rank, other))

    def call() -> torch.Tensor:
        y, packed = torch.empty(n, half), x[:, theirs].contiguous()
        COMM.Sendrecv(memory(packed), other, 0, memory(y[theirs]), other, 0)
        y[mine] = x[:, mine]
        return y

    return call


def times(calls: dict, repeats: int, most: int) -> dict[str, list[float]]:
    """Seconds of each call, in turns, of the slower rank."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            y = None
            for i in range(most + 3):  # the first ones warm up
                COMM.Barrier()
                start = time.perf_counter()
                for _ in range(repeats):
                    y = call()
                if i >= 3:
                    found[name].append((time.perf_counter() - start) / repeats)
            del y
    return {name: [COMM.allreduce(t, MPI.MAX) for t in some] for name, some in found.items()}


def main(sizes: list[int], cores: list[int]) -> None:
    torch.set_num_threads(1)
    rank = COMM.rank
    if COMM.size != 2:
        raise SystemExit("run it on 2 ranks: python -m distdl run -n 2 bench/by_hand.py 32,512")
    if cores:
        os.sched_setaffinity(0, {cores[rank]})
    if rank == 0:
        print(MPI.Get_library_version().splitlines()[0].strip("\0"), f"cores {cores}" if cores else "")
    for n in sizes:
        rows, columns = dd.Layout(dd.Partition((2, 1)), (n, n)), dd.Layout(dd.Partition((1, 2)), (n, n))
        x, A = rows.shard(torch.randn(n, n)).clone(), dd.maps.repartition(rows, columns)
        calls = {"by hand": by_hand(x, n, rank), "distdl": lambda x=x, A=A: A(x)}
        dd.testing.collective_assert(torch.equal(*(call() for call in calls.values())), "other values than by hand")
        found = times(calls, 20 if n <= 128 else 1, 30 if n < 2048 else 10)
        if rank == 0:
            least, median = ({k: f(v) * 1e6 for k, v in found.items()} for f in (min, statistics.median))
            ratios = " / ".join(f"{some['distdl'] / some['by hand']:.2f}" for some in (least, median))
            print(
                f"{n:6}²",
                *(f"{k} {least[k]:.1f} / {median[k]:.1f} µs" for k in found),
                f"ratio {ratios}",
                sep="  ",
                flush=True,
            )


if __name__ == "__main__":
    main([int(n) for n in sys.argv[1].split(",")], [int(c) for c in (sys.argv[2:] or [""])[0].split(",") if c])
