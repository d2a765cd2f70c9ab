"""Causal attention of a sequence over all ranks: keys by need, every key, and rings; by hand, a ring over gloo."""

import torch
import torch.nn.functional as local

import distdl as dd
import distdl.functional as F
from distdl.programs.bench import cases
from distdl.programs.bench.table import Result

from .choose import SIZE, choose


def attention(rows, heads, kv_heads, features=64):
    """One sequence, in blocks of rows; ``every``: all keys come to all ranks, and the mask leaves out what came for
    nothing."""
    L = dd.Layout(dd.Partition((1, 1, SIZE, 1)), (1, heads, rows, features))
    M = L.with_shape((1, kv_heads, rows, features))
    q, k, v = (cases.drawn(at.local_shape(), torch.float32, seed) for seed, at in enumerate((L, M, M)))
    Q, K, V = (F.all_gather(t, at, 2) for t, at in ((q, L), (k, M), (v, M)))
    first, last = L.box()[2]
    mask = torch.arange(first, last)[:, None] >= torch.arange(rows)

    def seen(K, V, n):
        return local.scaled_dot_product_attention(q, K[:, :, :n], V[:, :, :n], mask[:, :n], enable_gqa=True)

    calls = {
        "distdl": lambda: F.dist_attention(q, k, v, L, causal=True, method="gather", kv_shape=M),
        "every": lambda: seen(*F.all_gather([k, v], M, 2), rows),
        "ring": lambda: F.dist_attention(q, k, v, L, causal=True, method="ring", kv_shape=M),
        "share": lambda: seen(K, V, last),
        "whole": (lambda: local.scaled_dot_product_attention(Q, K, V, is_causal=True, enable_gqa=True))
        if dd.world().rank == 0
        else lambda: None,
    }
    what = f"{rows} rows, {heads} heads of {features}, {kv_heads} of keys"
    result = Result("attention", what, SIZE, limit="share", subjects=("distdl", "every", "ring"))
    return cases.Case(result, calls, {"q": q, "k": k, "v": v, "layout": L})


@choose("rows, heads, kv_heads", [(1024, 8, 8), (4096, 8, 2)], [(256, 8, 8), (4096, 8, 8), (8192, 4, 4)])
def bench_causal(timed, rows, heads, kv_heads):
    """Forward."""
    timed(attention(rows, heads, kv_heads))
