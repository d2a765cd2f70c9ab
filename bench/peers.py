"""Who else can do it: the same movement by hand over mpi4py and over torch.distributed (gloo), DTensor, pylops-mpi.

A peer is a function of a case that returns a call, or None where it cannot do that case; ``@peer(name, *ops)`` adds it.
Its result is compared with ours once, before anything is timed.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
from mpi4py import MPI

import distdl as dd
from distdl.boxes import balanced
from distdl.programs.bench.cases import COLLECTIVES, REDUCING

COMM = MPI.COMM_WORLD
PEERS: dict[str, list] = {}


def peer(name: str, *ops: str):
    """Register a peer of these operators."""

    def add(make):
        for op in ops:
            PEERS.setdefault(op, []).append((name, make))
        return make

    return add


def add_peers(case) -> None:
    """Give a case every peer that can do it, each checked against ours."""
    ours = case.calls["distdl"]()
    for name, make in PEERS.get(case.result.op, ()):
        call = make(case)
        able = COMM.allreduce(call is not None, MPI.LAND)  # all ranks or none
        if not able:
            continue
        theirs = call()
        close = ours.dtype.itemsize >= 4
        same = ours.numel() == theirs.numel() and torch.allclose(
            theirs.reshape(ours.shape), ours, rtol=1e-5 if close else 0.05, atol=1e-4 if close else 0.1
        )
        dd.testing.collective_assert(same, f"{name} computes something else than {case.result.name}")
        case.calls[name] = call


def buffer(t):
    """A contiguous tensor as bytes for MPI."""
    return [MPI.buffer.fromaddress(t.data_ptr(), t.nbytes), MPI.BYTE]


KINDS = {torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE, torch.complex64: MPI.C_FLOAT_COMPLEX}


class Mpi:
    """mpi4py, its buffer functions."""

    def can(self, case) -> bool:
        return case.result.op not in REDUCING or case.operands["x"].dtype in KINDS  # MPI cannot add bfloat16

    def exchange(self, sends, receives) -> None:
        """(peer, tag, contiguous tensor) to and from."""
        requests = [COMM.Irecv(buffer(t), q, tag) for q, tag, t in receives]
        MPI.Request.Waitall(requests + [COMM.Isend(buffer(t), q, tag) for q, tag, t in sends])

    def numbers(self, t):
        return [MPI.buffer.fromaddress(t.data_ptr(), t.nbytes), KINDS[t.dtype]]

    def all_sum_reduce(self, y, n):
        COMM.Allreduce(MPI.IN_PLACE, self.numbers(y))

    def sum_reduce(self, y, n):
        if COMM.rank == 0:
            COMM.Reduce(MPI.IN_PLACE, self.numbers(y))
        else:
            COMM.Reduce(self.numbers(y), None)

    def broadcast(self, y, n):
        COMM.Bcast(buffer(y))

    def all_gather(self, y, x):
        COMM.Allgather(buffer(x), buffer(y))

    def reduce_scatter(self, y, x):
        COMM.Reduce_scatter_block(self.numbers(x), self.numbers(y))

    def scatter(self, y, x):
        COMM.Scatter(buffer(x) if COMM.rank == 0 else None, buffer(y))

    def gather(self, y, x):
        COMM.Gather(buffer(x), buffer(y) if COMM.rank == 0 else None)


class Gloo:
    """torch.distributed with gloo."""

    def can(self, case) -> bool:
        return case.operands["x"].dtype != torch.complex64

    def exchange(self, sends, receives) -> None:
        works = [dist.irecv(t, q, tag=tag) for q, tag, t in receives] + [
            dist.isend(t, q, tag=tag) for q, tag, t in sends
        ]
        for work in works:
            work.wait()

    def all_sum_reduce(self, y, n):
        dist.all_reduce(y)

    def sum_reduce(self, y, n):
        dist.reduce(y, 0)

    def broadcast(self, y, n):
        dist.broadcast(y, 0)

    def all_gather(self, y, x):
        dist.all_gather_into_tensor(y, x)

    def reduce_scatter(self, y, x):
        dist.reduce_scatter_tensor(y, x)

    def scatter(self, y, x):
        dist.scatter(y, list(x.chunk(COMM.size)) if COMM.rank == 0 else None, 0)

    def gather(self, y, x):
        dist.gather(x, list(y.chunk(COMM.size)) if COMM.rank == 0 else None, 0)


def start_gloo() -> None:
    """The process group, once; over the loopback device unless the environment says otherwise."""
    if dist.is_initialized():
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    folder = COMM.bcast(tempfile.mkdtemp() if COMM.rank == 0 else None)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", COMM.size), rank=COMM.rank, world_size=COMM.size
    )
    if COMM.rank == 0:  # not before: other groups, such as a device mesh's, meet in the same file
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


def by_hand(name: str, engine) -> None:
    """Register everything that one engine can do."""

    @peer(name, *COLLECTIVES)
    def collective(case):
        op, x, count, n = (case.result.op, *(case.operands[k] for k in ("x", "count", "n")))
        if (
            not engine.can(case)
            or n != COMM.size
            or (count % n and op in ("all_gather", "reduce_scatter", "gather", "scatter"))
        ):
            return None
        root = COMM.rank == 0
        if op == "shift":

            def call():
                y = torch.empty_like(x)
                if n == 1:
                    return y.copy_(x)
                engine.exchange([((COMM.rank + 1) % n, 0, x)], [((COMM.rank - 1) % n, 0, y)])
                return y

        elif op in ("all_sum_reduce", "sum_reduce", "broadcast"):

            def call():
                y = x.clone() if root or op != "broadcast" else x.new_empty(count)
                getattr(engine, op)(y, n)
                return y if root or op != "sum_reduce" else y[:0]

        else:
            wide = op == "all_gather" or (op == "gather" and root)

            def call():
                y = x.new_empty(count if wide else 0 if op == "gather" else count // n)
                getattr(engine, op)(y, x)
                return y

        return call

    @peer(name, "halo")
    def halo(case):
        x, L, widths, boundary, A = (case.operands[k] for k in ("x", "layout", "widths", "boundary", "map"))
        if not engine.can(case) or boundary not in ("none", "circular") or L.partition.size != COMM.size:
            return None
        return lambda: hand_halo(x, L.partition, widths, boundary == "circular", engine.exchange)

    @peer(name, "repartition")
    def repartition(case):
        x, A, B = (case.operands[k] for k in ("x", "A", "B"))
        return (lambda: hand_repartition(x, A, B, engine.exchange)) if engine.can(case) else None


def hand_halo(x, P, widths, circular, exchange):
    """Dim by dim, corners by way of the earlier dims: two messages for each split dim."""
    at, P_shape = P.index(), P.shape
    wraps = [circular and w > 0 for w in widths]
    low = [w if w and (wrap or i > 0) else 0 for w, wrap, i in zip(widths, wraps, at)]
    high = [w if w and (wrap or i < p - 1) else 0 for w, wrap, i, p in zip(widths, wraps, at, P_shape)]
    y = x.new_empty([lo + n + hi for lo, n, hi in zip(low, x.shape, high)])
    region = [slice(lo, lo + n) for lo, n in zip(low, x.shape)]
    y[tuple(region)] = x
    for d, w in enumerate(widths):
        if not w:
            continue

        def strip(start, d=d, w=w):
            return y[(*region[:d], slice(start, start + w), *region[d + 1 :])]

        first, last = region[d].start, region[d].stop
        ways = [(-1, first, last, high[d], low[d]), (+1, last - w, 0, low[d], high[d])]  # my near rows go down, then up
        sends, receives, ghosts = [], [], []
        for tag, (step, near, ghost, comes, goes) in enumerate(ways):
            to, source = (P.rank_at((*at[:d], (at[d] + s) % P_shape[d], *at[d + 1 :])) for s in (step, -step))
            if P_shape[d] == 1:
                strip(ghost).copy_(strip(near))
                continue
            if goes:
                sends.append((to, tag, strip(near).contiguous()))
            if comes:
                got = torch.empty(strip(ghost).shape, dtype=x.dtype)
                receives.append((source, tag, got))
                ghosts.append((strip(ghost), got))
        exchange(sends, receives)
        for ghost, got in ghosts:
            ghost.copy_(got)
        region[d] = slice(0, y.shape[d])
    return y


def hand_repartition(x, A, B, exchange):
    """Every pair of boxes that meet: pack, exchange, put in place (received there where it is contiguous)."""
    rank, sends, receives, places = COMM.rank, [], [], []
    mine, wanted = A.box(), B.box()
    y = x.new_empty(B.local_shape())
    for q in range(COMM.size):
        if mine and B.box(q) and (common := meet(mine, B.box(q))):
            block = x[inside(common, mine)]
            if q == rank:
                y[inside(common, wanted)] = block
            else:
                sends.append((q, 0, block.contiguous()))
        if wanted and q != rank and A.box(q) and (common := meet(A.box(q), wanted)):
            place = y[inside(common, wanted)]
            got = place if place.is_contiguous() else torch.empty(place.shape, dtype=x.dtype)
            receives.append((q, 0, got))
            if got is not place:
                places.append((place, got))
    exchange(sends, receives)
    for place, got in places:
        place.copy_(got)
    return y


def meet(a, b):
    """The common part of two boxes, or None."""
    common = [(max(lo, low), min(hi, high)) for (lo, hi), (low, high) in zip(a, b)]
    return common if all(lo < hi for lo, hi in common) else None


def inside(box, where):
    """Slices of ``box`` in a block that begins where ``where`` does."""
    return tuple(slice(lo - start, hi - start) for (lo, hi), (start, _) in zip(box, where))


@peer("DTensor", "repartition")
def dtensor(case):
    """DTensor.redistribute from one split dim to another, even blocks (what DTensor moves by all-to-all)."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    x, A, B = (case.operands[k] for k in ("x", "A", "B"))
    n, ways = COMM.size, []
    for L in (A, B):
        split = [d for d, p in enumerate(L.partition.shape) if p > 1]
        even = all(s % p == 0 for s, p in zip(L.shape, L.partition.shape))
        if L.partition.size != n or len(split) > 1 or not even or x.dtype == torch.complex64:
            return None
        ways.append([Shard(split[0])] if split else [Replicate()])
    mesh = init_device_mesh("cpu", (n,))
    d = DTensor.from_local(x, mesh, ways[0], run_check=False)
    return lambda: d.redistribute(mesh, ways[1]).to_local()


@peer("pylops-mpi", "halo")
def pylops(case):
    """MPIHalo, which zero-fills the outer edge; its arrays are NumPy's."""
    x, L, widths, boundary = (case.operands[k] for k in ("x", "layout", "widths", "boundary"))
    if MISSING.get("pylops-mpi") or boundary != "zeros" or L.partition.size != COMM.size or x.dtype == torch.bfloat16:
        return None
    import numpy as np
    import pylops_mpi

    operator = pylops_mpi.MPIHalo(L.shape, widths, L.partition.shape, dtype=x.numpy().dtype)
    sizes = [(int(np.prod(L.local_shape(r))),) for r in L.partition.ranks]
    array = pylops_mpi.DistributedArray(
        global_shape=sum(n for (n,) in sizes), local_shapes=sizes, dtype=x.numpy().dtype
    )
    array[:] = x.numpy().ravel()
    return lambda: torch.from_numpy(operator.matvec(array).local_array)


@peer("mpi4py-fft", "rfftn", "dctn")
def mpi4py_fft(case):
    """Its plan, made once; arrays are its own, and stay."""
    x, L = (case.operands[k] for k in ("x", "layout"))
    if MISSING.get("mpi4py-fft") or x.dtype != torch.float64:
        return None
    from mpi4py_fft import PFFT, newDistArray
    from mpi4py_fft.fftw import dctn, idctn

    axes = tuple(range(L.ndim))
    kinds = {(d,): (dctn, idctn) for d in axes} if case.result.op == "dctn" else None
    slabs = {} if kinds is None else {"axes": tuple((d,) for d in axes), "transforms": kinds}
    plan = PFFT(COMM, L.shape, **{"axes": axes, **slabs}, dtype="d", grid=L.partition.shape)
    u, spectrum = newDistArray(plan, False), newDistArray(plan, True)
    if u.shape != L.local_shape():
        return None
    u[:] = x.numpy()
    return lambda: torch.from_numpy(plan.forward(u, spectrum, normalize=False).view())


@peer("gloo", "rfftn")
def by_all_to_all(case):
    """A slab by torch.fft and one all-to-all."""
    x, L = (case.operands[k] for k in ("x", "layout"))
    if L.partition.shape[0] != COMM.size:
        return None
    halved = x.dim() == 2  # then the dim that ranks turn to is half a spectrum
    rows, me = L.sizes(0), COMM.rank
    y_sizes = balanced(L.shape[1] // 2 + 1 if halved else L.shape[1], COMM.size)

    def call():
        y = torch.fft.rfftn(x, dim=tuple(range(1, x.dim())))
        sent = torch.cat([torch.view_as_real(part).reshape(-1) for part in y.split(y_sizes, 1)])
        other = y.shape[2:].numel() * 2
        out = [rows[me] * c * other for c in y_sizes]
        back = [r * y_sizes[me] * other for r in rows]
        got = sent.new_empty(sum(back))
        dist.all_to_all_single(got, sent, back, out)
        parts = [
            torch.view_as_complex(part.reshape(r, y_sizes[me], *y.shape[2:], 2))
            for part, r in zip(got.split(back), rows)
        ]
        return torch.fft.fft(torch.cat(parts), dim=0)

    return call


def both_parts(o, total, part, logs):
    """Attention to the keys of two parts, and the logarithms of its sums; the first part may be ``None``: no keys."""
    if o is None:
        return part, logs
    both = torch.logaddexp(total, logs)
    return o * (total - both).exp()[..., None] + part * (logs - both).exp()[..., None], both


@peer("gloo ring", "attention")
def ring_of_neighbours(case):
    """Keys go from neighbour to neighbour while torch's kernel works on those that are there; its logarithms of sums
    merge the parts. Keys that no query of a rank sees only pass."""
    q, k, v, L = (case.operands[name] for name in ("q", "k", "v", "layout"))
    n, me, share = COMM.size, COMM.rank, q.shape[1] // k.shape[1]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def call():
        here, o, total = torch.stack([k, v]), None, None
        for step in range(n):
            of, works, coming = (me - step) % n, [], None
            if step < n - 1:
                coming = here.new_empty(*here.shape[:3], L.sizes(2)[of - 1], here.shape[4])
                works = [dist.irecv(coming, (me - 1) % n), dist.isend(here, (me + 1) % n)]
            if of <= me:
                wide = here.repeat_interleave(share, 2) if share > 1 else here
                part, logs = kernel(q, *wide, is_causal=of == me)
                o, total = both_parts(o, total, part, logs)
            for work in works:
                work.wait()
            here = coming
        return o

    return call


@peer("mpi4py", "gather_rows")
def rows_by_hand(case):
    """One Alltoallv of NumPy rows, selected before and after; which ones is worked out once, as by an Index."""
    import numpy as np

    x, L, wanted = (case.operands[k] for k in ("x", "layout", "wanted"))
    if L.partition.size != COMM.size or x.dtype not in KINDS:
        return None
    stops = np.cumsum(L.sizes(0))
    distinct, places = np.unique(wanted.numpy(), return_inverse=True)
    coming = np.bincount(np.searchsorted(stops, distinct, side="right"), minlength=COMM.size)
    going = np.array(COMM.alltoall(coming.tolist()))
    served = np.empty(going.sum(), np.int64)
    COMM.Alltoallv([distinct, coming], [served, going])
    served -= stops[COMM.rank] - len(x)
    source, width = x.numpy(), x[:1].numel()

    def call():
        sent = source.take(served, axis=0)
        got = np.empty((len(distinct), *source.shape[1:]), source.dtype)
        COMM.Alltoallv([sent, going * width, KINDS[x.dtype]], [got, coming * width, KINDS[x.dtype]])
        return torch.from_numpy(got if case.operands["distinct"] else got.take(places, axis=0))

    return call


MISSING = {
    name: f"no module {module}: pip install {name}"
    for name, module in (
        ("pylops-mpi", "pylops_mpi"),
        ("mpi4py-fft", "mpi4py_fft"),
        ("Heat", "heat"),
        ("lucidrains", "ring_attention_pytorch"),
    )
    if importlib.util.find_spec(module) is None
}
MISSING["jaxDecomp"] = "its transforms are from complex to complex only, and its wheel needs JAX"
MISSING["mpi4jax"] = "no wheel; its build needs an MPI compiler and JAX"
by_hand("mpi4py", Mpi())
by_hand("gloo", Gloo())
