"""Causal attention over CUDA devices: in blocks and in zigzag, against a ring by hand over NCCL, torch's own context
parallelism, and one device's kernel on the whole sequence.

``python -m distdl run -n 2 -m bench.bench_gpu_attention``: 32 heads of 128 features, 8 of keys, bfloat16, and so many
rows for each device; device and host time as in :mod:`bench.bench_gpu`. ``share`` is one device's time for the whole
sequence, divided by the number of devices: what nothing can be faster than that works out the same numbers.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as local

import distdl as dd
import distdl.functional as F
from distdl.programs.bench.table import report

from .bench_gpu import COMM, measure, rows_of, start_nccl
from .peers import both_parts

HEADS, KEY_HEADS, FEATURES = 32, 8, 128


def drawn(heads, rows, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (1, heads, rows, FEATURES)
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()


def ring(q, k, v):
    """By hand, forward: keys go from neighbour to neighbour while torch's kernel works on those that are there."""
    n, me, shared = COMM.size, COMM.rank, q.shape[1] // k.shape[1]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    here, o, total = torch.stack([k, v]), None, None
    for step in range(n):
        source, works, coming = (me - step) % n, [], None
        if step < n - 1:
            coming = torch.empty_like(here)
            ops = [dist.P2POp(dist.isend, here, (me + 1) % n), dist.P2POp(dist.irecv, coming, (me - 1) % n)]
            works = dist.batch_isend_irecv(ops)
        if source <= me:
            wide = here.repeat_interleave(shared, 2)
            part, logs, *_ = kernel(q, *wide, 0.0, source == me)
            o, total = both_parts(o, total, part.float(), logs)
        for work in works:
            work.wait()
        here = coming
    return o.to(q.dtype)


def cases(rows):
    p, total = COMM.size, rows * COMM.size
    Q, K, V = drawn(HEADS, total, 1), drawn(KEY_HEADS, total, 2), drawn(KEY_HEADS, total, 3)
    L = dd.Layout(dd.Partition((1, 1, p, 1)), (1, HEADS, total, FEATURES))
    M = L.with_shape((1, KEY_HEADS, total, FEATURES))
    turned, N = F.reorder_layout(L, 2, "zigzag"), F.reorder_layout(M, 2, "zigzag")
    with torch.no_grad():
        blocks = [where.shard(t).clone() for where, t in zip((L, M, M), (Q, K, V))]
        dealt = [F.zigzag(t, where, 2) for where, t in zip((L, M, M), blocks)]
    blocks, dealt = ([t.requires_grad_() for t in some] for some in (blocks, dealt))

    attend = partial(F.dist_attention, *blocks, L, causal=True, kv_shape=M, kernel="fused")
    calls = {
        "distdl": lambda: F.dist_attention(*dealt, turned, causal=True, order="zigzag", kv_shape=N, kernel="fused"),
        "distdl, blocks": partial(attend, method="gather"),
        "whole": lambda: local.scaled_dot_product_attention(Q, K, V, is_causal=True, enable_gqa=True),
    }
    if p <= KEY_HEADS:
        calls["distdl, heads"] = partial(attend, method="heads")
    with torch.no_grad():
        wished = L.shard(calls["whole"]()).clone()
        close(calls["distdl"](), F.zigzag(wished, L, 2))
        close(calls["distdl, blocks"](), wished)
    return calls, blocks


def close(found, wished):
    error = float((found - wished).abs().max())
    dd.testing.collective_assert(error < 0.03, f"off by {error}")


def context_parallel(rows, rotate):
    """torch's: it deals the rows out itself, balanced as by zigzag. (forward, forward + backward), as measured."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = dist.device_mesh.init_device_mesh("cuda", (COMM.size,))
    set_rotate_method(rotate)
    buffers = [drawn(HEADS, rows * COMM.size, seed).detach() for seed in (1, 2, 3)]  # it knows no shared heads
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        parts = [t.detach().clone().requires_grad_() for t in buffers]
        call = lambda: local.scaled_dot_product_attention(*parts, is_causal=True)  # noqa: E731
        with torch.no_grad():
            forward = measure({"": call}, rounds=7, inner=5)
        return forward[""], measure({"": lambda: call().backward(parts[0])}, rounds=7, inner=5)[""]


def table(rows):
    calls, blocks = cases(rows)
    nbytes, p = blocks[0].nbytes, COMM.size
    steps = {name: lambda call=call: (y := call()).backward(y.detach()) for name, call in calls.items()}
    with torch.no_grad():
        forward = measure(calls | {"ring by hand": lambda: ring(*blocks)}, rounds=7, inner=5)
    both = measure(steps, rounds=7, inner=5)
    for method in ("allgather", "alltoall"):
        name = f"torch context_parallel, {method}"
        forward[name], both[name] = context_parallel(rows, method)
    for what, found in (("forward", forward), ("forward + backward", both)):
        device, host = found.pop("whole")
        found["share"] = device / p, host / p
        yield from rows_of(f"causal attention, {rows} rows for each device, {what}", nbytes, found)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("bench_gpu_attention")
    parser.add_argument("--json", default=None, help="a directory for the results")
    parser.add_argument("--rows", type=int, nargs="*", default=[2048, 8192], help="rows for each device")
    options = parser.parse_args()
    start_nccl()
    found = [row for rows in options.rows for row in table(rows)]
    if COMM.rank == 0:
        card = torch.cuda.get_device_name()
        path = f"{options.json}/gpu-attention-{card.replace(' ', '-')}-n{COMM.size}.json" if options.json else None
        report(found, f"attention: {COMM.size} x {card}, microseconds", path, COMM.size)
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
