"""Predictions beside measurements: ``python -m bench.forecast -n 2,4,8`` on a quiet machine with a core for each rank.

On each number of ranks the model of ``dd.machines`` is fitted to the machine, by ``python -m distdl measure``'s own
microbenchmarks; then programs that it has not seen are priced and run. Prints a table, writes it as JSON, and says
whether ``dd.suggest`` picks the partition that is fastest. ``--quick`` takes less than a minute for each number of
ranks: thin halos, a square one, a repartition and a small U-Net, whose constants are hardest to predict. ``--plots
FOLDER`` draws what four programs would take on up to 16,384 ranks of ``dd.machines.cluster``, and needs no ranks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

import distdl as dd
from distdl.programs.bench import programs
from distdl.programs.bench.timing import Ranks, environment, sample
from distdl.programs.measure import fitted

BOUND = 0.3  # of the relative error


def square(n: int) -> tuple[int, int]:
    """The squarest grid of n ranks."""
    a = max(d for d in range(1, n + 1) if n % d == 0 and d * d <= n)
    return n // a, a


def cases(n: int):
    """(name, program of a partition, grid): what is predicted."""
    grid = square(n)
    yield "halo 1024²", lambda P: programs.halo(P, (1024, 1024)), grid
    yield "halo 4096², width 2", lambda P: programs.halo(P, (4096, 4096), 2), grid
    yield "repartition 512²", lambda P: programs.repartition(P, (512, 512)), (n, 1)
    yield "repartition 2048²", lambda P: programs.repartition(P, (2048, 2048)), (n, 1)
    yield "MLP, 512 tokens", programs.mlp, (1, n)
    yield "MLP, 2048 tokens", lambda P: programs.mlp(P, tokens=2048), (1, n)
    yield "U-Net 128²", programs.unet, (1, 1, *grid)
    yield "U-Net 512²", lambda P: programs.unet(P, (1, 1, 512, 512)), (1, 1, *grid)


CHOICES = {
    "stencil 64 x 1024": lambda P: programs.stencil(P, (64, 1024)),
    "stencil 1024 x 64": lambda P: programs.stencil(P, (1024, 64)),
    "halo 64 x 1024": lambda P: programs.halo(P, (64, 1024)),
    "halo 1024 x 64": lambda P: programs.halo(P, (1024, 64)),
    "MLP, 512 tokens": programs.mlp,
    "MLP, 16 tokens": lambda P: programs.mlp(P, tokens=16),
}


QUICK = ("halo 64 x 1024", "halo 1024 x 64", "halo 1024²", "repartition 512²", "U-Net 128²")


def quick_cases(n: int):
    """Those of :func:`cases` in which constants count most, and two thin halos."""
    for name in QUICK[:2]:
        yield from ((name, CHOICES[name], grid) for grid in dict.fromkeys(((n, 1), square(n), (1, n))))
    yield from (case for case in cases(n) if case[0] in QUICK)


def fastest(call, ranks, rounds: int, inner: int = 1) -> float:
    """Seconds of the fastest round, as its slowest rank saw it: what else runs on the machine does not count."""
    return float(sample({"it": call}, ranks, rounds=rounds, inner=inner)["it"].min())


def in_a_row(predicted: float) -> int:
    """How many calls a sample has: about a millisecond of them, at most 20. Of a lone one the sample would also count
    the wait for whoever leaves the barrier last."""
    return max(1, min(20, int(1e-3 / predicted)))


def here(rounds: int, quick: bool = False) -> dict:
    """What one launch has to say: (name, grid, predicted, measured, predicted without boxes, measured as a lone call)
    of each case, and of each choice what was fastest."""
    torch.set_num_threads(1)
    ranks = Ranks()
    n = ranks.size
    machine = fitted(rounds)
    machine = ranks.allgather(machine)[0]
    table, choices = [], []
    for name, program, grid in quick_cases(n) if quick else cases(n):
        P = dd.Partition(grid)
        traced, step = dd.trace(program, P, size=n, rank=range(n)), program(P)
        predicted, plain = traced.cost(machine), traced.cost(replace(machine, box=0.0))
        measured = fastest(step, ranks, rounds, in_a_row(predicted))
        table.append((name, str(grid), predicted, measured, plain, fastest(step, ranks, rounds)))
    if n == 4 and not quick:
        for name, program in CHOICES.items():
            grids = [(4, 1), (2, 2), (1, 4)]
            steps = {str(g): program(dd.Partition(g)) for g in grids}
            times = {g: float(t.min()) for g, t in sample(steps, ranks, rounds=rounds).items()}
            guess = dd.suggest(program, grids, machine=machine)
            predicted = {str(s.partition.shape): s.seconds for s in guess}
            choices.append((name, predicted, times))
    return {"ranks": n, "machine": vars(machine), "where": environment(n), "table": table, "choices": choices}


def told(found: dict) -> str:
    """The table of one launch."""
    m = found["machine"]
    rows = [
        f"{found['ranks']} ranks; {1e6 * m['call']:.1f} µs for a movement, {1e6 * m['box']:.1f} for each box of it, "
        f"{1e6 * m['near_latency']:.1f} for a message, {1e6 * m['operator']:.1f} for an operator",
        f"{'program':24}{'grid':>14}{'predicted ms':>14}{'without boxes':>14}{'measured ms':>13}{'a lone call':>13}"
        f"{'predicted/measured':>20}",
    ]
    for name, grid, predicted, measured, plain, lone in found["table"]:
        rows.append(
            f"{name:24}{grid:>14}{1e3 * predicted:14.3f}{1e3 * plain:14.3f}{1e3 * measured:13.3f}{1e3 * lone:13.3f}"
            f"{predicted / measured:20.2f}" + ("" if abs(predicted / measured - 1) <= BOUND else "  beyond")
        )
    for name, predicted, times in found["choices"]:
        best, chosen = min(times, key=times.__getitem__), min(predicted, key=predicted.__getitem__)
        shown = ", ".join(f"{g} {1e3 * predicted[g]:.3f}/{1e3 * times[g]:.3f}" for g in times)
        loss = times[chosen] / times[best] - 1
        rows.append(f"{name}: chosen {chosen}, fastest {best} ({loss:+.1%}); predicted/measured ms: {shown}")
    return "\n".join(rows)


def _program_of(name: str, P: dd.Partition, weak: bool):
    """A program of one size, or of one size for each rank."""
    a, b = P.shape if weak else (16, 16)
    if name == "stencil":
        return programs.stencil(P, (4096 * a, 4096 * b))
    if name == "repartition":
        return programs.repartition(dd.Partition((P.size, 1)), (1024 * a * b, 16384))
    if name == "MLP":
        return programs.mlp(P, tokens=1024 * a * b, width=8192, inner=32768)
    return programs.unet(dd.Partition((1, 1, *P.shape)), (1, 1, 512 * a, 512 * b), levels=3)


def plots(folder: Path) -> None:
    """Weak and strong scaling of four programs to 16,384 ranks of ``dd.machines.cluster``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    counts = [4**k for k in range(8)]
    figure, both = pyplot.subplots(1, 2, figsize=(10, 4.4), sharey=True)
    for axes, weak in zip(both, (False, True)):
        for name in ("stencil", "repartition", "MLP", "U-Net"):
            times = []
            for n in counts:
                made = dd.trace(_program_of, name, dd.Partition(square(n)), weak, size=n, rank=n // 2)
                times.append(made.cost(dd.machines.cluster) or float("nan"))  # one rank repartitions nothing
            (line,) = axes.plot(counts, times, "o-", label=name)
            first = next(i for i, t in enumerate(times) if t == t)
            ideal = [times[first] / (1 if weak else n / counts[first]) for n in counts[first:]]
            axes.plot(counts[first:], ideal, ":", color=line.get_color(), linewidth=1)
            print(f"{'weak' if weak else 'strong':7}{name:12}", *(f"{1e3 * t:.3g}" for t in times), "ms", flush=True)
        axes.set(xscale="log", yscale="log", xlabel="ranks", title="one size for each rank" if weak else "one size")
        axes.grid(alpha=0.3)
    both[0].set_ylabel("seconds for a step, predicted on dd.machines.cluster")
    both[0].legend()
    figure.tight_layout()
    figure.savefig(folder / "forecast.png", dpi=120)


def main(argv=None) -> None:
    top = argparse.ArgumentParser("python -m bench.forecast", description=__doc__.partition("\n")[0])
    top.add_argument("-n", default="2,4,8", help="numbers of ranks (default: 2,4,8)")
    top.add_argument("--rounds", type=int, help="samples of each number (default: 31, or 9)")
    top.add_argument("--quick", action="store_true", help="what is hardest to predict, in about a minute")
    top.add_argument("--out", type=Path, default=Path("build/bench/forecast.json"))
    top.add_argument("--plots", type=Path, help="only draw scaling to 16,384 ranks, into this folder")
    top.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # on the ranks of a launch
    options = top.parse_args(argv)
    options.rounds = options.rounds or (9 if options.quick else 31)
    if options.plots:
        plots(options.plots)
    elif options.here:
        found = here(options.rounds, options.quick)
        if dd.world().rank == 0:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(found))
            print(told(found), flush=True)
    else:
        every = []
        for n in map(int, options.n.split(",")):
            part = options.out.with_suffix(f".{n}.json")
            command = [sys.executable, "-m", "distdl", "run", "-n", str(n), "-m", "bench.forecast", "--here"]
            command += ["--rounds", str(options.rounds), "--out", str(part), *["--quick"] * options.quick]
            subprocess.run(command, check=True)
            every.append(json.loads(part.read_text()))
        options.out.write_text(json.dumps(every))


if __name__ == "__main__":
    main()
