"""Peers of matrices, solvers and attention: DTensor, Heat and pylops-mpi; lucidrains' ring attention."""

import torch

from .peers import COMM, MISSING, peer


def numbers(array) -> torch.Tensor:
    """A rank's block of pylops-mpi, as a tensor."""
    return torch.from_numpy(array.local_array)


@peer("DTensor", "matmul")
def dtensor(case):
    """torch.mm over the same grid, its result asked for in the same blocks."""
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    a, b, L = (case.operands[k] for k in ("a", "b", "layout"))
    if L.partition.size != COMM.size or any(n % p for n, p in zip(L.shape, L.partition.shape)):
        return None
    mesh, blocks = init_device_mesh("cpu", L.partition.shape), [Shard(0), Shard(1)]
    x, y = (DTensor.from_local(t, mesh, blocks, run_check=False) for t in (a, b))
    return lambda: torch.mm(x, y).redistribute(mesh, blocks).to_local()


@peer("Heat", "matmul")
def heat(case):
    """Its arrays are split along one dim."""
    a, b, L = (case.operands[k] for k in ("a", "b", "layout"))
    split = [d for d, p in enumerate(L.partition.shape) if p > 1]
    if MISSING.get("Heat") or L.partition.size != COMM.size or len(split) > 1:
        return None
    import heat as ht

    x, y = (ht.array(t, is_split=split[0] if split else None) for t in (a, b))
    return lambda: ht.matmul(x, y).larray


@peer("pylops-mpi", "matmul")
def pylops_matmul(case):
    """Its SUMMA, over a square grid; its arrays are NumPy's."""
    a, b, L = (case.operands[k] for k in ("a", "b", "layout"))
    p, q = L.partition.shape
    if MISSING.get("pylops-mpi") or p != q or L.partition.size != COMM.size:
        return None
    import pylops_mpi

    product = pylops_mpi.MPIMatrixMult(a.numpy(), L.shape[1], kind="summa", dtype="float32")
    x = distributed(pylops_mpi, L, b)
    return lambda: numbers(product @ x)


def distributed(pylops_mpi, L, x):
    """A block as an array of pylops-mpi, which lays the blocks end to end."""
    sizes = [(torch.Size(L.local_shape(r)).numel(),) for r in L.partition.ranks]
    array = pylops_mpi.DistributedArray(
        global_shape=sum(n for (n,) in sizes), local_shapes=sizes, dtype=x.numpy().dtype
    )
    array[:] = x.numpy().ravel()
    return array


@peer("pylops-mpi", "cg")
def pylops_cg(case):
    """Its solver, over its halo exchange and a star by NumPy."""
    b, L, steps = (case.operands[k] for k in ("b", "layout", "steps"))
    if MISSING.get("pylops-mpi") or L.partition.size != COMM.size:
        return None
    import pylops_mpi

    halo = pylops_mpi.MPIHalo(L.shape, (1, 1), L.partition.shape, dtype="float64")
    rows, columns = L.local_shape()

    class Star(pylops_mpi.MPILinearOperator):
        def _matvec(self, x):
            wide = halo.matvec(x).local_array.reshape(rows + 2, columns + 2)
            y = pylops_mpi.DistributedArray(
                global_shape=x.global_shape, local_shapes=x.local_shapes, dtype=x.dtype, base_comm=x.base_comm
            )
            near = wide[:-2, 1:-1] + wide[2:, 1:-1] + wide[1:-1, :-2] + wide[1:-1, 2:]
            y[:] = (5 * wide[1:-1, 1:-1] - near).ravel()
            return y

        _rmatvec = _matvec

    n = L.shape[0] * L.shape[1]
    star, right, zero = Star(shape=(n, n), dtype="float64"), distributed(pylops_mpi, L, b), torch.zeros_like(b)
    return lambda: numbers(pylops_mpi.cg(star, right, distributed(pylops_mpi, L, zero), niter=steps, tol=0)[0])


@peer("lucidrains", "attention")
def ring_attention_pytorch(case):
    """Its ring of flash attention in Python; on a CPU that is what it has."""
    q, k, v, L = (case.operands[name] for name in ("q", "k", "v", "layout"))
    if MISSING.get("lucidrains") or L.shape[2] % COMM.size:
        return None
    from ring_attention_pytorch import ring_flash_attn

    shared = q.shape[1] // k.shape[1]  # heads of one key follow each other with us, stand k.shape[1] apart with them
    q = q.unflatten(1, (-1, shared)).transpose(1, 2).flatten(1, 2)
    q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))

    def call():
        y = ring_flash_attn(q, k, v, None, True, min(1024, q.shape[1]), True, False, None, COMM.size)
        return y.transpose(1, 2).unflatten(1, (shared, -1)).transpose(1, 2).flatten(1, 2)

    return call
