"""``python -m distdl measure``: fits :class:`distdl.machines.Machine` to this machine, as its ranks share it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields

import torch

import distdl as dd
import distdl.functional as F

from ..forecast.machines import Machine
from .bench.timing import Ranks, sample

_MANY = 2**20  # numbers of a large tensor: 4 MiB


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

    Each number is the median over ``rounds`` of the slowest rank's time, with one thread for each rank.
    """
    ranks = Ranks()
    line = dd.Partition((ranks.size,))

    def seconds(call: Callable[[], object], inner: int = 1) -> float:
        found = sample({"it": call}, ranks, rounds=rounds, inner=inner)["it"]
        found.sort()
        return float(found[len(found) // 2])

    small, large = torch.ones(8), torch.ones(_MANY)
    memory = 2 * large.nbytes / seconds(large.clone)
    operator = _per_operator(seconds, small)
    flops = _rate(seconds, lambda n: lambda a=torch.ones(n, n): a @ a, lambda n: 2 * n**3, (256, 512, 768), operator)
    conv = _rate(seconds, _conv, lambda n: 3 * 2 * n * n * 16 * 16 * 9, (64, 96, 128), operator)
    alone = dd.Layout(dd.Partition((1,), (ranks.rank,)), (8,))
    call = seconds(lambda: F.roll(small, alone, 0, 1), 20)
    x = small.clone().requires_grad_()
    recorded = seconds(lambda: F.roll(x, alone, 0, 1).backward(small), 20) - 2 * operator
    latency = bandwidth = rounds_of_sums = None
    if ranks.size > 1:
        sizes = [8, 2**14, 2**16, 2**18, 2**20]
        times = [seconds(_shift(line, n), 5) - call for n in sizes]
        latency = max(times[0], 1e-7)
        bandwidth = _slope(4 * torch.tensor(sizes[1:]).double(), torch.tensor(times[1:]).double(), latency)
        depth = (ranks.size - 1).bit_length()
        rounds_of_sums = max((seconds(lambda: F.all_sum_reduce(small, line), 5) - call) / (2 * depth), 1e-7)
    least = Machine()
    return Machine(
        name=f"measured on {ranks.size} ranks",
        latency=latency or least.latency,
        bandwidth=bandwidth or least.bandwidth,
        near_latency=latency or least.near_latency,
        near_bandwidth=bandwidth or least.near_bandwidth,
        node=2**20,
        injection=2**20 * (bandwidth or least.bandwidth),
        flops=flops,
        conv_flops=conv,
        memory=memory,
        sum_latency=rounds_of_sums,
        call=call,
        graph=max(recorded / 2 - call, 0.0),
        operator=operator,
    )


def _shift(line: dd.Partition, n: int) -> Callable[[], object]:
    x = torch.ones(n)
    return lambda: F.shift(x, line, 0)


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


def _rate(
    seconds: Callable[..., float], make: Callable, flops: Callable, sizes: Sequence[int], operator: float
) -> float:
    """Operations per second, the middle one of some sizes."""
    return sorted(flops(n) / max(seconds(make(n)) - operator, 1e-9) for n in sizes)[len(sizes) // 2]


def _slope(nbytes: torch.Tensor, times: torch.Tensor, latency: float) -> float:
    """Bytes per second, by least squares of the relative error: 1 = latency / t + bytes / (rate t)."""
    a, b = nbytes / times, 1 - latency / times
    return float((a * a).sum() / (a * b).sum().clamp(min=1e-12))


def main(argv: Sequence[str] | None = None) -> None:
    """On every rank."""
    torch.set_num_threads(1)
    options = parser().parse_args(argv)
    machine = fitted(options.rounds)
    if dd.world().rank == 0:
        print(f"{machine.name}:")
        for f in fields(machine)[1:]:
            value = getattr(machine, f.name)
            print(f"{f.name:>16}  {'as messages' if value is None else format(value, '.3g')}")
        if options.out:
            machine.save(options.out)


if __name__ == "__main__":
    main()
