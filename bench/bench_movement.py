"""Movements against the same ones written by hand with mpi4py, and against a plain copy; and what transforms cost.

``python -m distdl run -n 2 -m bench.bench_movement``
"""

from __future__ import annotations

import numpy as np
import torch
from mpi4py import MPI

import distdl as dd
import distdl.functional as F

from .paired import arguments, ratio, report, sample


def bytes_of(t):
    """A contiguous tensor as an MPI buffer."""
    return [MPI.buffer.fromaddress(t.data_ptr(), t.numel() * t.element_size()), MPI.BYTE]


def hand_repartition(x, n, comm):
    """Rows to columns: pack each peer's columns, exchange, put their rows in place."""
    p, r = comm.size, comm.rank
    edges = np.cumsum([0, *dd.partition.balanced(n, p)])
    rows = edges[r + 1] - edges[r]
    y = torch.empty(n, rows, dtype=x.dtype)
    requests, packed = [], []
    for q in range(p):
        if q != r:
            requests.append(comm.Irecv(bytes_of(y[edges[q] : edges[q + 1]]), q))
    for q in range(p):
        block = x[:, edges[q] : edges[q + 1]]
        if q == r:
            y[edges[r] : edges[r + 1]] = block
        else:
            packed.append(block.contiguous())
            requests.append(comm.Isend(bytes_of(packed[-1]), q))
    MPI.Request.Waitall(requests)
    return y


def hand_halo(x, width, comm):
    """Rows in blocks: exchange ``width`` rows with both neighbours (dim -2), zeros beyond the edge."""
    p, r, m = comm.size, comm.rank, x.shape[-2]
    y = torch.empty(*x.shape[:-2], m + (r > 0) * width + (r < p - 1) * width, x.shape[-1], dtype=x.dtype)
    first = width if r > 0 else 0
    y[..., first : first + m, :] = x
    requests, strips = [], []
    for peer, mine, ghost in ((r - 1, x[..., :width, :], y[..., :width, :]), (r + 1, x[..., -width:, :], y[..., -width:, :])):
        if 0 <= peer < p:
            sent, got = mine.contiguous(), torch.empty(ghost.shape, dtype=x.dtype)
            requests += [comm.Irecv(bytes_of(got), peer), comm.Isend(bytes_of(sent), peer)]
            strips.append((ghost, got, sent))
    MPI.Request.Waitall(requests)
    for ghost, got, _ in strips:
        ghost.copy_(got)
    return y


def hand_all_reduce(x, comm):
    """A copy, summed in place."""
    y = x.clone()
    comm.Allreduce(MPI.IN_PLACE, [MPI.buffer.fromaddress(y.data_ptr(), y.numel() * 4), y.numel(), MPI.FLOAT])
    return y


def hand_broadcast(x, shape, comm):
    """A copy from rank 0."""
    y = x.clone() if comm.rank == 0 else torch.empty(shape)
    comm.Bcast(bytes_of(y))
    return y


def cases(comm):
    """(name, bytes of a shard, inner calls, {candidate: call})."""
    p, r = comm.size, comm.rank
    for n in (32, 512, 2048, 4096):
        A, B = dd.Layout(dd.Partition((p, 1)), (n, n)), dd.Layout(dd.Partition((1, p)), (n, n))
        x, inner = torch.randn(A.local_shape()), max(1, 2**18 // n**2 * 4)
        yield f"repartition {n}²", x.nbytes, inner, {
            "distdl": lambda x=x, A=A, B=B: F.repartition(x, A, B), "by hand": lambda x=x, n=n: hand_repartition(x, n, comm),
            "clone": lambda x=x: x.clone()}
    for shape in ((1, 4, 64, 64), (1, 16, 512, 512), (1, 32, 2048, 2048)):
        L = dd.Layout(dd.Partition((1, 1, p, 1)), shape)
        spec, x = dd.HaloSpec(L, (0, 0, 1, 0)), torch.randn(L.local_shape())
        yield f"halo {shape}, width 1", x.nbytes, 20 if x.numel() < 1e5 else 2, {
            "distdl": lambda x=x, s=spec: F.halo_exchange(x, s), "by hand": lambda x=x: hand_halo(x, 1, comm),
            "clone": lambda x=x: x.clone()}
    line, one = dd.Partition((p,)), dd.Partition((1,))
    for n in (256, 2**16, 2**22):
        x, inner = torch.randn(n), 50 if n < 1000 else 5 if n < 10**6 else 1
        yield f"all_sum_reduce {n}", x.nbytes, inner, {
            "distdl": lambda x=x: F.all_sum_reduce(x, line), "by hand": lambda x=x: hand_all_reduce(x, comm),
            "clone": lambda x=x: x.clone()}
        source = x if r == 0 else torch.empty(0)
        yield f"broadcast {n}", x.nbytes, inner, {
            "distdl": lambda x=source, n=n: F.broadcast(x, one, line, shape=(n,)),
            "by hand": lambda x=source, n=n: hand_broadcast(x, (n,), comm), "clone": lambda x=x: x.clone()}


def transform_cases(comm):
    """(name, inner calls, {candidate: call}): derivatives and batches as multiples of the forward call."""
    p = comm.size
    for n in (64, 1024):
        L = dd.Layout(dd.Partition((p, 1)), (n, n))
        spec, x = dd.HaloSpec(L, (1, 0)), torch.randn(L.local_shape())
        A, batch = dd.maps.halo_exchange(spec), torch.randn(8, *L.local_shape())
        y = A(x)
        yield f"halo {n}²", 10 if n < 100 else 2, {
            "forward": lambda A=A, x=x: A(x), "adjoint": lambda A=A, y=y: A.T(y),
            "jvp": lambda A=A, x=x: torch.func.jvp(A, (x,), (x,)), "vjp": lambda A=A, x=x, y=y: torch.func.vjp(A, x)[1](y),
            "vmap of 8": lambda A=A, b=batch: torch.func.vmap(A)(b), "loop of 8": lambda A=A, b=batch: [A(x) for x in b]}


def main(argv=None) -> None:
    """Print the tables on rank 0."""
    options = arguments("bench_movement", 41, argv)
    comm, rows = MPI.COMM_WORLD, []
    for name, nbytes, inner, candidates in cases(comm):
        times = sample(candidates, comm, rounds=options.rounds, inner=inner)
        rows.append({"movement": name, "shard, KiB": nbytes / 1024, "distdl, µs": float(np.median(times["distdl"])) * 1e6,
                     "by hand, µs": float(np.median(times["by hand"])) * 1e6,
                     "ratio to hand": ratio(times["distdl"], times["by hand"]),
                     "ratio to clone": ratio(times["distdl"], times["clone"])})
    multiples = []
    for name, inner, candidates in transform_cases(comm):
        times = sample(candidates, comm, rounds=options.rounds, inner=inner)
        multiples += [{"movement": name, "transform": k, "µs": float(np.median(t)) * 1e6, "multiple of forward":
                       ratio(t, times["forward"])} for k, t in times.items()]
    if comm.rank == 0:
        where = options.json and f"{options.json}/movement-n{comm.size}.json"
        report(rows, f"Movements, float32, {comm.size} ranks (medians; the slowest rank's time)", where, comm.size)
        where = options.json and f"{options.json}/transforms-n{comm.size}.json"
        report(multiples, f"Transforms of a movement, float32, {comm.size} ranks", where, comm.size)


if __name__ == "__main__":
    main()
