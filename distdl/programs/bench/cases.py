"""The operators as cases: operands, our call, and the limit that nothing can beat.

A movement's limit is one copy of what it leaves on this rank, into fresh memory as our result is. A layer's is
("share") the serial layer on this rank's share, without messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as local

import distdl as dd
import distdl.functional as F

from .table import TRAFFIC, Result
from .timing import sample

REDUCING = ("all_sum_reduce", "sum_reduce", "reduce_scatter")


@dataclass
class Case:
    """One case: a :class:`Result` without times, what to call, and what peers need to do the same."""

    result: Result
    calls: dict[str, Callable]
    operands: dict = field(default_factory=dict)
    inner: int = 1

    def run(self, comm, rounds: int) -> Result:
        """Take the samples."""
        self.result.times = sample(self.calls, comm, rounds=rounds, inner=self.inner)
        return self.result


def short(dtype: torch.dtype) -> str:
    """ "float32" of torch.float32."""
    return str(dtype).removeprefix("torch.")


def size(shape) -> str:
    """A shape as text: 512², 64³, 3 x 5."""
    powers = {2: "²", 3: "³"}
    return (
        f"{shape[0]}{powers[len(shape)]}"
        if len(shape) in powers and len(set(shape)) == 1
        else " x ".join(map(str, shape))
    )


def calls_for(nbytes: int) -> int:
    """How many calls make a sample: long against the clock and the barrier. By the size only: all ranks agree."""
    return max(1, min(50, 2**20 // max(1, nbytes)))


def copy_of(y) -> Callable:
    """The limit of a movement: its result copied once, into fresh memory."""
    y = y.detach()
    return lambda: y.clone()


def drawn(shape, dtype, seed: int = 0) -> torch.Tensor:
    """Standard normal numbers, other ones on each rank."""
    generator = torch.Generator().manual_seed(1000 * seed + dd.world().rank)
    return torch.randn(tuple(shape), generator=generator, dtype=dtype)


def grid_of(n: int, ndim: int) -> tuple[int, ...]:
    """n ranks over ndim dims, as square as n's prime factors allow."""
    grid, prime = [1] * ndim, 2
    factors = []
    while n > 1:
        while n % prime == 0:
            factors.append(prime)
            n //= prime
        prime += 1
    for factor in reversed(factors):
        grid[grid.index(min(grid))] *= factor
    return tuple(sorted(grid, reverse=True))


def halo(shape, grid, *, width=1, boundary="none", dtype=torch.float32, scaling="") -> Case:
    """A halo exchange over all split dims, corners too. S: what the busiest rank sends."""
    L = dd.Layout(dd.Partition(grid), shape)
    widths = tuple(width if p > 1 or boundary == "circular" else 0 for p in grid)
    spec = dd.HaloSpec(L, widths, boundary=boundary)
    A, x = dd.maps.halo_exchange(spec), drawn(L.local_shape(), dtype)
    sent = max(A.plan.volume(r) for r in L.partition.ranks) * dtype.itemsize
    what = f"{size(shape)} over {size(grid)}, width {width}" + (f", {boundary}" if boundary != "none" else "")
    return Case(
        Result("halo", what, L.partition.size, short(dtype), sent, scaling=scaling),
        {"distdl": lambda: F.halo_exchange(x, spec), "memcpy": copy_of(F.halo_exchange(x, spec))},
        {"x": x, "layout": L, "widths": widths, "boundary": boundary, "map": A},
        calls_for(x.nbytes),
    )


def repartition(A: dd.Layout, B: dd.Layout, what: str, *, dtype=torch.float32, scaling="") -> Case:
    """From one layout to another. S: the largest shard; the factor: the share of it that the busiest rank sends."""
    x, move = drawn(A.local_shape(), dtype), dd.maps.repartition(A, B)
    largest = max(math.prod(L.local_shape(r)) for L in (A, B) for r in L.partition.ranks)
    sent = max(move.plan.volume(r) for r in move.ranks)
    return Case(
        Result(
            "repartition",
            f"{size(A.shape)} {what}",
            dd.world().size,
            short(dtype),
            largest * dtype.itemsize,
            sent / largest,
            scaling=scaling,
        ),
        {"distdl": lambda: F.repartition(x, A, B), "memcpy": copy_of(F.repartition(x, A, B))},
        {"x": x, "A": A, "B": B, "map": move},
        calls_for(largest * dtype.itemsize),
    )


def collective(name: str, nbytes: int, n: int, *, dtype=torch.float32) -> Case:
    """A collective of n ranks. S as in nccl-tests: the tensor of each rank; the whole for gathers, scatters and
    reduce_scatter."""
    P, one = dd.Partition((n,)), dd.Partition((1,))
    count = max(n if name in ("all_gather", "reduce_scatter", "gather", "scatter") else 1, nbytes // dtype.itemsize)
    L, root, rank = dd.Layout(P, (count,)), dd.world().rank == 0, dd.world().rank
    whole, part, none = drawn((count,), dtype), drawn(L.local_shape(), dtype), torch.empty(0, dtype=dtype)
    x, call = {
        "all_sum_reduce": (whole, lambda x: F.all_sum_reduce(x, P)),
        "all_gather": (part, lambda x: F.all_gather(x, L)),
        "reduce_scatter": (whole, lambda x: F.reduce_scatter(x, L)),
        "broadcast": (whole if root else none, lambda x: F.broadcast(x, one, P, shape=(count,))),
        "sum_reduce": (whole, lambda x: F.sum_reduce(x, P, one, shape=(count,))),
        "scatter": (whole if root else none, lambda x: F.scatter(x, L)),
        "gather": (part, lambda x: F.gather(x, L)),
        "shift": (whole, lambda x: F.shift(x, P, 0)),
    }[name]
    limit = copy_of(whole if name != "scatter" else part)  # what the busiest rank leaves behind
    nbytes = count * dtype.itemsize
    return Case(
        Result(name, _bytes(nbytes), n, short(dtype), nbytes, TRAFFIC[name](n)),
        {"distdl": lambda: call(x), "memcpy": limit if rank < n else lambda: None},
        {"x": x, "n": n, "count": count, "layout": L},
        calls_for(nbytes),
    )


COLLECTIVES = (
    "all_sum_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "sum_reduce",
    "scatter",
    "gather",
    "shift",
)


def _bytes(n: int) -> str:
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if n >= unit and n % unit == 0:
            return f"{n // unit} {name}"
    return f"{n} B"


def backward(call, *leaves) -> Callable:
    """``call``, then the backward pass with a cotangent of ones."""

    def run():
        for leaf in leaves:
            leaf.grad = None
        y = call()
        y.backward(torch.ones_like(y))

    return run


def layer(name: str, what: str, ours, share, leaves, *, dtype=torch.float32, more=None, scaling="") -> Case:
    """Forward + backward of ``ours`` against ``share``: the same work on this rank's share, without messages."""
    calls = {"distdl": backward(ours, *leaves), "share": backward(share, *leaves), **(more or {})}
    return Case(Result(name, what, dd.world().size, short(dtype), limit="share", scaling=scaling), calls)


def leaf(shape, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    """A parameter or input with a gradient."""
    return drawn(shape, dtype, seed).requires_grad_()


def conv(shape, grid, out_channels, kernel, *, stride=1, padding=0, dtype=torch.float32, scaling="") -> Case:
    """A convolution, forward + backward."""
    n = len(shape) - 2
    L, serial = dd.Layout(dd.Partition(grid), shape), (local.conv1d, local.conv2d, local.conv3d)[n - 1]
    x, b = leaf(L.local_shape(), dtype), leaf((out_channels,), dtype, 2)
    w = leaf((out_channels, shape[1], *(kernel,) * n), dtype, 1)
    what = f"{size(shape)} over {size(grid)}, {size((kernel,) * n)}, stride {stride}, {out_channels} channels"
    return layer(
        "conv",
        what,
        lambda: F.dist_conv(x, w, L, b, stride=stride, padding=padding, params="invariant"),
        lambda: serial(x, w, b, stride, padding),
        (x, w, b),
        dtype=dtype,
        scaling=scaling,
    )


def linear(
    tokens: int, out: int, features: int, grid, x_layout="invariant", y_layout="invariant", *, dtype=torch.float32
) -> Case:
    """x (tokens, in) times (out, in) over ``grid`` = (tokens, out, in); forward + backward."""
    P = dd.Partition(grid)
    shape = (tokens, out, features)
    t, o, i = dd.Layout(P, shape).local_shape() if P.active else (0, 0, 0)
    whole = {"x": t, "y": t}
    if x_layout == "sharded":
        whole["x"] = dd.Layout(dd.Partition((grid[1],)), (t,)).local_shape(P.index()[1])[0]
    x, w, b = leaf((whole["x"], i), dtype), leaf((o, i), dtype, 1), leaf((o,), dtype, 2)
    full = leaf((t, i), dtype, 3)
    what = f"{size(shape)} over {size(grid)}, x {x_layout}, y {y_layout}"
    L = dd.Layout(P, shape)
    return layer(
        "linear",
        what,
        lambda: F.dist_linear(x, w, L, b, x_layout=x_layout, y_layout=y_layout, x_dim=0, y_dim=0, params="invariant"),
        lambda: local.linear(full, w, b),
        (x, w, b, full),
        dtype=dtype,
    )


def norm(kind: str, shape, grid, *, dtype=torch.float32) -> Case:
    """A normalisation, forward + backward; statistics cross ranks where what they are taken over is split."""
    L = dd.Layout(dd.Partition(grid), shape)
    x, c = leaf(L.local_shape(), dtype), shape[1]
    g, b = leaf((c,), dtype, 1), leaf((c,), dtype, 2)
    h, k = (leaf(L.local_shape()[-1:], dtype, s) for s in (3, 4))
    ours, share, leaves = {
        "batch_norm": (
            lambda: F.dist_batch_norm(x, L, None, None, g, b, True, params="invariant")[0],
            lambda: local.batch_norm(x, None, None, g, b, True),
            (x, g, b),
        ),
        "group_norm": (
            lambda: F.dist_group_norm(x, L, 4, g, b, params="invariant"),
            lambda: local.group_norm(x, 4, g, b),
            (x, g, b),
        ),
        "instance_norm": (
            lambda: F.dist_instance_norm(x, L, g, b, params="invariant"),
            lambda: local.instance_norm(x, None, None, g, b),
            (x, g, b),
        ),
        "layer_norm": (
            lambda: F.dist_layer_norm(x, L, shape[-1], h, k, params="invariant"),
            lambda: local.layer_norm(x, h.shape, h, k),
            (x, h, k),
        ),
        "rms_norm": (
            lambda: F.dist_rms_norm(x, L, shape[-1], h, params="invariant"),
            lambda: local.rms_norm(x, h.shape, h),
            (x, h),
        ),
    }[kind]
    return layer(kind, f"{size(shape)} over {size(grid)}", ours, share, leaves, dtype=dtype)


NORMS = ("batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm")
