"""``python -m distdl measure``: fits :class:`distdl.machines.Machine` to this machine, as its ranks share it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch

import distdl as dd
import distdl.functional as F

from ..forecast.machines import Machine
from .bench.timing import Ranks, sample

Of = Callable[[int], Any]


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    top = argparse.ArgumentParser(
        "python -m distdl measure", description="fit the model of dd.machines to this machine, all ranks at once"
    )
    top.add_argument("-n", type=int, default=2, help="number of ranks (default: 2)")
    top.add_argument("--out", help="file to write, for dd.machines.load")
    top.add_argument("--rounds", type=int, default=31, help="samples of each number (default: 31)")
    return top


def fitted(rounds: int = 31) -> Machine:
    """This machine, as the ranks of the world share it: all of them work, or send, at once. Collective.

    Each number is of the fastest of ``rounds``, as its slowest rank saw it, with one thread for each rank.
    """
    ranks = Ranks()
    line = dd.Partition((ranks.size,))

    def seconds(call: Callable[[], object], inner: int = 1) -> float:
        return float(sample({"it": call}, ranks, rounds=rounds, inner=inner)["it"].min())

    small = torch.ones(8)
    operator = _per_operator(seconds, small)
    flops = _rate(seconds, _product, lambda n: 2 * n**3, (256, 512, 768), operator)
    conv = _rate(seconds, _conv, lambda n: 3 * 2 * n * n * 16 * 16 * 9, (64, 96, 128), operator)
    memory = tuple(_by_size(seconds, lambda n: torch.ones(n).clone, seconds(small.clone, 20), 2))
    alone = dd.Layout(dd.Partition((1,), (ranks.rank,)), (8,))
    rolled = seconds(lambda: F.roll(small, alone, 0, 1), 20)
    copying = tuple(_by_size(seconds, partial(_roll, ranks.rank), rolled, 2))
    x = small.clone().requires_grad_()
    recorded = seconds(lambda: F.roll(x, alone, 0, 1).backward(small), 20) - 2 * operator
    call, box = _per_box(seconds, rolled, ranks.rank)
    links: dict[str, Any] = {}
    if ranks.size > 1:
        latency = max(seconds(_shift(line, 8), 20) - call, 1e-7)
        depth = (ranks.size - 1).bit_length()
        sums = max((seconds(lambda: F.all_sum_reduce(small, line), 20) - call) / (2 * depth), 1e-7)
        links = dict(
            near_latency=latency,
            near_bandwidth=tuple(_by_size(seconds, partial(_shift, line), call + latency, 1)),
            sum_latency=sums,
            sum_bandwidth=tuple(
                _by_size(seconds, partial(_sum, line), call + 2 * depth * sums, 2 * (ranks.size - 1) / ranks.size)
            ),
        )
    return Machine(
        name=f"measured on {ranks.size} ranks",
        node=2**20,  # all of them
        flops=flops,
        conv_flops=conv,
        memory=memory,
        copying=copying,
        call=call,
        graph=max(recorded / 2 - rolled, 0.0),
        operator=operator,
        box=box,
        **links,
    )


# Numbers of 4 bytes. From 32 MiB on glibc takes fresh pages for each tensor, which take twice as long or more to fill:
# a size on either side of that.
_SIZES = (2**10, 2**13, 2**16, 2**19, 2**22, 2**23 - 2**16, 2**23, 2**24)


def _by_size(seconds: Callable[..., float], make: Of, constant: float, times: float) -> Iterator[tuple[float, float]]:
    """(bytes, bytes per second) of calls that move ``times`` the bytes of n numbers, beside a constant time; the rate
    of each size is at least that of its whole time, and at most ten times that."""
    for n in _SIZES:
        took, nbytes = seconds(make(n), 5 if n < 2**18 else 1), times * 4 * n
        yield nbytes, nbytes / max(took - constant, took / 10)


def _per_box(seconds: Callable[..., float], rolled: float, rank: int) -> tuple[float, float]:
    """Seconds for a movement, and for each box that it copies: of a roll, which took ``rolled``, and of ghosts around a
    torus, both on one rank and of a few bytes."""
    L = dd.Layout(dd.Partition((1, 1), (rank,)), (8, 8))
    spec, x = dd.HaloSpec(L, 1, boundary="circular"), torch.ones(8, 8)
    line = dd.Layout(dd.Partition((1,), (rank,)), (8,))
    few, many = (
        dd.trace(move, layout, size=rank + 1, rank=rank).movements[0].boxes
        for move, layout in ((lambda x: F.roll(x, line, 0, 1), line), (lambda x: F.halo_exchange(x, spec), L))
    )
    box = max(seconds(lambda: F.halo_exchange(x, spec), 20) - rolled, 0.0) / (many - few)
    return max(rolled - few * box, 0.0), box


def _roll(rank: int, n: int) -> Callable[[], object]:
    x, L = torch.ones(n), dd.Layout(dd.Partition((1,), (rank,)), (n,))
    return lambda: F.roll(x, L, 0, 1)


def _sum(line: dd.Partition, n: int) -> Callable[[], object]:
    x = torch.ones(n)
    return lambda: F.all_sum_reduce(x, line)


def _shift(line: dd.Partition, n: int) -> Callable[[], object]:
    x = torch.ones(n)
    return lambda: F.shift(x, line, 0)


def _product(n: int) -> Callable[[], object]:
    a = torch.ones(n, n)
    return lambda: a @ a


def _conv(n: int) -> Callable[[], object]:
    """A convolution of 16 channels on n x n points, forward and backward."""
    x, w = torch.ones(1, 16, n, n, requires_grad=True), torch.ones(16, 16, 3, 3, requires_grad=True)
    g = torch.ones(1, 16, n, n)
    return lambda: torch.autograd.grad(torch.nn.functional.conv2d(x, w, padding=1), (x, w), g)


def _per_operator(seconds: Callable[..., float], small: torch.Tensor) -> float:
    """Of small operators that autograd records, and goes back through."""
    x = small.clone().requires_grad_()

    def chain() -> None:
        y = x
        for _ in range(20):
            y = y * 1.5
        y.backward(small)

    return seconds(chain, 3) / 41


def _rate(seconds: Callable[..., float], make: Of, flops: Of, sizes: Sequence[int], operator: float) -> float:
    """Operations per second, the middle one of some sizes."""
    return sorted(flops(n) / max(seconds(make(n)) - operator, 1e-9) for n in sizes)[len(sizes) // 2]


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{rate:.3g} at {nbytes:.3g} B" for nbytes, rate in value)
    return "as others" if value is None else f"{value:.3g}"


def main(argv: Sequence[str] | None = None) -> None:
    """On every rank."""
    torch.set_num_threads(1)
    options = parser().parse_args(argv)
    machine = fitted(options.rounds)
    if dd.world().rank == 0:
        print(f"{machine.name}:")
        for f in fields(machine)[1:]:
            print(f"{f.name:>16}  {_shown(getattr(machine, f.name))}")
        if options.out:
            machine.save(options.out)


if __name__ == "__main__":
    main()
