"""Soak: ``python -m distdl run -n 4 tests/soak.py OPERATIONS [PARTITIONS]``, on 1 to 4 ranks.

Mixed operations over random partitions: maps and their adjoints, backward, forward mode, batches and split-phase calls.
Small integers as float64, so that sums are exact and every result can be compared with the simulated one by its bytes.
Printed ten times on the way, and checked: the checksums of the run and of the simulated one. At the end: over how many
different partitions of a tensor (at least PARTITIONS), operations per second, and how far memory and the numbers of
file descriptors and communicators have grown since half time.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import time
import zlib
from pathlib import Path

import torch
from torch.func import jvp, vmap

# What each cache of the library keeps, fewer than a user's thousand: full at once, so that what grows then is a leak.
CACHED = 64
_lru_cache, _shrunk = functools.lru_cache, 0


def _small(maxsize=128, typed=False):
    global _shrunk
    _shrunk += maxsize == 1024
    return _lru_cache(CACHED if maxsize == 1024 else maxsize, typed)


functools.lru_cache = _small
import distdl as dd  # noqa: E402
import distdl.functional as F  # noqa: E402

functools.lru_cache = _lru_cache
assert _shrunk > 10, "the library's caches were not found"

from fuzzing import BUILDERS, KINDS, draw  # noqa: E402
from registry import integers  # noqa: E402

MAPS = 500  # random ones at a time; others after a while
# Bytes that a rank may grow in the second half: arenas of the allocator, not a leak of 500 bytes per operation.
GROWTH = 48 * 2**20


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def descriptors() -> int:
    """Open files, sockets and pipes of this process."""
    return len(os.listdir("/proc/self/fd"))


def digest(side) -> int:
    """A number for a side of a plan: the side itself would keep all that it has worked out."""
    return zlib.crc32(repr(side).encode()) << 32 | zlib.adler32(repr(side).encode())


def mix(i, rank, y) -> int:
    """A number that depends on the operation, the rank and every byte of the result."""
    data = y.detach().contiguous().numpy().tobytes()
    return (zlib.crc32(data, zlib.crc32(f"{i} {rank} {tuple(y.shape)}".encode())) * 2654435761) % 2**61


def forward(A, x):
    return A(x)


def backward(A, x):
    y = A(x.requires_grad_())
    (g,) = torch.autograd.grad((2 * y).sum(), x)
    return g


def forward_mode(A, x):
    return jvp(A, (x,), (x,))[1]


def batch(A, x):
    return vmap(A)(torch.stack([x, 2 * x]))


def split_phase(A, x):
    pending = F.start(A, x)
    return F.wait(pending)


def doubled(plan, xs):
    return plan.simulate([torch.stack([x, 2 * x]) for x in xs])


def back(A, xs):
    ys = A.plan.simulate(xs)
    return A.adjoint.simulate([torch.full_like(y, 2) for y in ys])


# what a rank does, and what the same is with all ranks in one process; by the held or by the wanted side
OPERATIONS = [
    (forward, lambda A, xs: A.plan.simulate(xs)), (backward, back), (forward_mode, lambda A, xs: A.plan.simulate(xs)),
    (batch, lambda A, xs: doubled(A.plan, xs)), (split_phase, lambda A, xs: A.plan.simulate(xs)),
]  # fmt: skip


def population(turn, n):
    """Random maps: (map, every rank's held tensor, of both directions)."""
    rng, found = random.Random(turn), []
    cells = [(name, kind) for name in BUILDERS for kind in KINDS]
    while len(found) < MAPS:
        A = alone(rng) if n == 1 else drawn(rng, n, cells)
        for B in (A, A.T):
            held = B.plan.held
            found.append((B, [integers(held.local_shape(r), 7 * r + turn) for r in held.partition.ranks]))
    return found


def drawn(rng, n, cells):
    """A map of one of these cells; those of which there is none on ``n`` ranks go."""
    while True:
        cell = rng.choice(cells)
        case = draw(*cell, rng, n)
        if case is not None:
            return case.map
        cells.remove(cell)


def alone(rng):
    """A map of one rank with itself: no message, but everything else."""
    ndim = rng.randint(1, 3)
    L = dd.Layout(dd.Partition((1,) * ndim), [rng.randint(1, 40) for _ in range(ndim)])
    d, maps = rng.randrange(ndim), dd.maps
    width = [rng.randint(0, min(2, size)) for size in L.shape]
    return rng.choice(
        [
            lambda: maps.shift(L, d, rng.randint(-1, 1), rng.random() < 0.5),
            lambda: maps.halo_exchange(dd.HaloSpec(L, width, boundary=rng.choice(["zeros", "circular"]))),
            lambda: maps.repartition(L, L),
            lambda: maps.all_sum_reduce(L),
            lambda: maps.permute(L.partition, rng.choice([[], [(0, 0)]]), L.shape),
        ]
    )()


def main(total: int, partitions: int = 0) -> None:
    where = dd.world()
    n, me, rng, began = where.size, where.rank, random.Random(1), time.monotonic()
    ours = theirs = 0
    half = groups = files = None
    seen: set = set()
    turn, first, due, drawn = max(5_000, total // 50), 0, 0, 0
    for i in range(total):
        if i == due:
            maps, first, drawn = population(drawn, n), i, drawn + 1
            due = i + (len(maps) if len(seen) < partitions else turn)
        A, xs = maps[i - first if i - first < len(maps) else rng.randrange(len(maps))]
        run, simulated = OPERATIONS[rng.randrange(len(OPERATIONS))]
        seen.update(map(digest, (A.plan.held, A.plan.wanted)))
        held = A.plan.held.partition.ranks
        x = xs[held.index(me)].clone() if me in held else torch.zeros(A.in_shape, dtype=torch.float64)
        y = run(A, x)
        out = (A.plan.held if run is backward else A.plan.wanted).partition.ranks
        if me in out:
            ours = (ours + mix(i, me, y)) % 2**61
        if i % n == me:  # ranks share the work of simulating
            theirs = (theirs + sum(mix(i, r, y) for r, y in zip(out, simulated(A, [x.clone() for x in xs])))) % 2**61
        if i + 1 == total // 2:
            half, groups, files = resident(), len(where.host.groups), descriptors()
        if (i + 1) % max(total // 10, 1) == 0:
            sums = [sum(part) % 2**61 for part in zip(*dd.testing.gather_objects((ours, theirs)))]
            assert sums[0] == sums[1], (
                f"the checksums {sums[0]:x} and {sums[1]:x} (simulated) differ after {i + 1} operations"
            )
            if me == 0:
                print(
                    f"{i + 1} operations, checksum {sums[0]:x} as simulated, {time.monotonic() - began:.0f} s, "
                    f"{resident() / 2**20:.0f} MiB, {len(where.host.groups)} communicators, "
                    f"{descriptors()} descriptors, "
                    f"{len(seen)} partitions",
                    flush=True,
                )
    found = dd.testing.gather_objects((resident() - half, len(where.host.groups) - groups, descriptors() - files))
    if me == 0:
        told = (f"{grown / 2**20:+.1f} MiB, {c} communicators, {d} descriptors" for grown, c, d in found)
        print(f"{total / (time.monotonic() - began):.0f} operations per second on {n} ranks")
        print("growth in the second half, by rank: " + "; ".join(told))
    assert all(grown < GROWTH for grown, _, _ in found), f"memory grows: {found}"
    assert total < 10_000 or all(c == 0 for _, c, _ in found), f"communicators are made without end: {found}"
    assert all(d <= 0 for _, _, d in found), f"descriptors are opened without end: {found}"
    assert len(seen) >= partitions, f"{len(seen)} partitions"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*map(int, sys.argv[1:3]))
