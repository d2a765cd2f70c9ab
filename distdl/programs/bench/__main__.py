"""``python -m distdl bench [op] [-n N] [--shape ...]``: one operator on your own shapes. Starts its ranks itself."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

import distdl as dd
from distdl.errors import ShapeError

from ..launch import ENGINES
from . import cases
from .table import report, rows
from .timing import Ranks, environment

OPS = ("halo", "repartition", *cases.COLLECTIVES, "linear", "conv", *cases.NORMS)
SHAPES = {
    "halo": (1024, 1024),
    "repartition": (1024, 1024),
    "linear": (512, 512, 512),
    "conv": (1, 16, 128, 128),
    "layer_norm": (512, 512),
    "rms_norm": (512, 512),
}
USES = {
    "halo": ("shape", "grid", "width", "boundary"),
    "repartition": ("shape", "grid", "to"),
    "linear": ("shape", "grid"),
    "conv": ("shape", "grid", "kernel", "channels"),
    **dict.fromkeys(cases.NORMS, ("shape", "grid")),
    **dict.fromkeys(cases.COLLECTIVES, ("shape",)),
}  # which of an operator's options it has
DEFAULTS = {"width": 1, "boundary": "none", "kernel": 3, "channels": 16}


def numbers(text: str) -> tuple[int, ...]:
    """ "512,512" or "512x512" as (512, 512)."""
    return tuple(int(part) for part in text.replace("x", ",").split(","))


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    top = argparse.ArgumentParser(
        "python -m distdl bench", description="time operators on your own shapes, in pairs with a limit"
    )
    top.add_argument("op", nargs="?", choices=OPS, help="default: all of them, on small shapes")
    top.add_argument("-n", type=int, default=2, help="number of ranks (default: 2)")
    top.add_argument(
        "--shape", type=numbers, help="global shape, as 512,512; linear: tokens, out, in; a collective: the bytes"
    )
    top.add_argument(
        "--grid", type=numbers, help="the partition; default: as square as it goes (repartition: dim 0 only)"
    )
    top.add_argument("--to", type=numbers, help="repartition: the partition of the result (default: dim 1 only)")
    top.add_argument("--width", type=int, help="halo: its width (default: 1)")
    top.add_argument("--boundary", help="halo: none (the default), zeros, circular, ...")
    top.add_argument("--kernel", type=int, help="conv: its size, padded by half of it (default: 3)")
    top.add_argument("--channels", type=int, help="conv: of the output (default: 16)")
    top.add_argument("--dtype", default="float32", choices=("float32", "float64", "bfloat16", "float16", "complex64"))
    top.add_argument("--rounds", type=int, default=41)
    top.add_argument(
        "--engine", choices=ENGINES, help="what carries messages (default: DISTDL_TRANSPORT; else mpi, with mpi4py)"
    )
    top.add_argument("--json", type=Path, help="a file for the samples, with the environment")
    return top


def read(argv=None) -> argparse.Namespace:
    """Parse and check the options."""
    top = parser()
    options = top.parse_args(argv)
    if min(options.n, options.rounds) < 1:
        top.error(f"-n {options.n} --rounds {options.rounds}: both are at least 1")
    given = [name for name in dict.fromkeys(sum(USES.values(), ())) if getattr(options, name) is not None]
    foreign = [f"--{name}" for name in given if name not in USES.get(options.op, ())]
    if foreign:
        top.error(
            f"{', '.join(foreign)}: " + (f"{options.op} has no such option" if options.op else "of which operator?")
        )
    if options.op in cases.COLLECTIVES and options.shape and len(options.shape) != 1:
        top.error(f"--shape {','.join(map(str, options.shape))}: a collective takes one number, the bytes")
    for name, value in DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.json and not options.json.parent.is_dir():
        top.error(f"--json {options.json}: no such folder")
    return options


def case(name: str, n: int, options) -> cases.Case:
    """The case that the options describe."""
    dtype = getattr(torch, options.dtype)
    shape = options.shape or SHAPES.get(name, (2**20,) if name in cases.COLLECTIVES else (4, 16, 64, 64))
    if name in cases.COLLECTIVES:
        return cases.collective(name, shape[0], n, dtype=dtype)
    ndim = len(shape)
    if name == "repartition":
        if ndim < 2:
            raise ShapeError(
                "a repartition needs two dims",
                op="bench",
                expected="--shape of two numbers or more",
                actual=shape,
                next_step="for example --shape 4096,4096",
            )
        grid, to = options.grid or (n,) + (1,) * (ndim - 1), options.to or (1, n) + (1,) * (ndim - 2)
        A, B = (dd.Layout(dd.Partition(g), shape) for g in (grid, to))
        return cases.repartition(A, B, f"{cases.size(grid)} to {cases.size(to)}", dtype=dtype)
    if name == "halo":
        grid = options.grid or cases.grid_of(n, ndim)
        return cases.halo(shape, grid, width=options.width, boundary=options.boundary, dtype=dtype)
    if name == "linear":
        if ndim != 3:
            raise ShapeError(
                "a linear layer has three sizes",
                op="bench",
                expected="--shape of tokens, out, in",
                actual=shape,
                next_step="for example --shape 4096,4096,1024",
            )
        tokens, out, features = shape
        return cases.linear(tokens, out, features, options.grid or (1, n, 1), dtype=dtype)
    spatial = (1,) * (ndim - 2)
    if name == "conv":
        grid = options.grid or (1, 1, n, *spatial[1:])
        return cases.conv(shape, grid, options.channels, options.kernel, padding=options.kernel // 2, dtype=dtype)
    last = name in ("layer_norm", "rms_norm")
    return cases.norm(
        name, shape, options.grid or ((1,) * (ndim - 1) + (n,) if last else (1, 1, n, *spatial[1:])), dtype=dtype
    )


def main(argv=None) -> int:
    """On every rank of a launch."""
    options = read(argv)
    torch.set_num_threads(1)  # ranks share the cores
    comm = Ranks()
    found = [case(op, comm.size, options).run(comm, options.rounds) for op in ([options.op] if options.op else OPS)]
    if comm.rank == 0:
        title = f"{comm.size} ranks, {options.rounds} rounds; x: times as long as, with its 95 % interval"
        report(rows(found), title, None, comm.size)
        if options.json:
            samples = [{**r.facts(), "times": {k: t.tolist() for k, t in r.times.items()}} for r in found]
            options.json.write_text(
                json.dumps({"environment": environment(comm.size), "results": samples}, indent=1) + "\n"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
