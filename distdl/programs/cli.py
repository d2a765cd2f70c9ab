"""Command line: ``python -m distdl run -n 4 script.py`` | ``run -n 4 -m module`` | ``demo`` | ``bench`` |
``measure`` | ``info``."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from ..engine.fast import paths
from ..engine.peer import asked_for as peer_asked_for
from ..errors import TransportError
from ..world import CUDA_WAYS, cuda_way
from .launch import ENGINES, find_launcher, find_mpi, run


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m distdl", description="pure distributed operators for PyTorch")
    commands = top.add_subparsers(dest="command", required=True)
    program = commands.add_parser("run", help="run a program on n ranks; a rank that fails ends all of them")
    program.add_argument("-n", type=int, default=1, help="number of ranks (default: 1)")
    program.add_argument(
        "--engine", choices=ENGINES, help="what carries messages (default: DISTDL_TRANSPORT; else mpi, with mpi4py)"
    )
    program.add_argument("--timeout", type=float, help="end the job after so many seconds")
    program.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="a module and its arguments, as of python -m"
    )
    program.add_argument("script", nargs=argparse.REMAINDER, help="a script and its arguments")
    commands.add_parser("demo", help="train a network split over four ranks beside the sequential one")
    commands.add_parser("bench", help="time operators on your own shapes: bench halo -n 2 --shape 512,512")
    commands.add_parser("measure", help="fit the model that prices traces to this machine: measure -n 4 --out it.json")
    commands.add_parser("info", help="versions, MPI and devices of this environment")
    return top


def info() -> str:
    """What this environment has. Starts neither MPI nor CUDA; what is missing is said to be missing."""
    rows = {"distdl": _version("distdl"), "python": platform.python_version(), "platform": platform.platform()}
    rows |= {name: _version(name) for name in ("torch", "numpy", "mpi4py", "cloudpickle")}
    mpi = find_mpi()
    rows["MPI"] = f"{mpi.vendor} {mpi.version} ({mpi.library})" if mpi else "none"
    try:
        rows["launcher"] = find_launcher()
    except TransportError as error:
        rows["launcher"] = str(error)
    gpu = [
        f"{d.name} {d.version}"
        for d in importlib.metadata.distributions()
        if d.name.startswith(("cupy", "nvidia-nccl"))
    ]
    rows["CuPy, NCCL"] = ", ".join(sorted(set(gpu))) or "none"
    rows |= dict(found for path in paths if (found := path.info()) is not None)
    rows["CUDA tensors"] = _cuda_way()
    rows["CUDA devices"] = _devices()
    return "\n".join(f"{name:>13}  {value}" for name, value in rows.items())


def _cuda_way() -> str:
    way, nccl = cuda_way(), importlib.util.find_spec("cupy") is not None
    if way == "nccl" and not nccl:
        return "staged through pinned host memory and MPI, with a warning: CuPy is missing"
    where = {None: " where NVLink joins its devices", True: " (DISTDL_PEER=1)"}
    within = "" if (wish := peer_asked_for()) is False else f"within a node by peer memory{where[wish]}, else "
    return {
        "nccl": f"{within}by NCCL (import torch before cupy: both then share torch's library)",
        "staged": "staged through pinned host memory and MPI (DISTDL_CUDA)",
        "mpi": "by a CUDA-aware MPI (DISTDL_CUDA)",
    }.get(way, f"DISTDL_CUDA={way} is none of {', '.join(CUDA_WAYS)}")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _devices() -> str:
    tool = shutil.which("nvidia-smi")  # torch would start CUDA to tell their names
    if tool is None:
        return "none"
    listed = subprocess.run(
        [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"], capture_output=True, text=True
    )
    return "; ".join(listed.stdout.split("\n")).strip("; ") or "none"


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    top = parser()
    argv = sys.argv[1:] if argv is None else argv
    own = argv[:1] in (["demo"], ["bench"], ["measure"])  # these read their options themselves
    options = argparse.Namespace(command=argv[0], args=argv[1:]) if own else top.parse_args(argv)
    try:
        return execute(top, options)
    except TransportError as error:
        print(f"distdl: {error}", file=sys.stderr)
        return 2


def execute(top: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run a parsed command."""
    if options.command == "info":
        print(info())
        return 0
    if options.command == "demo":
        ours = argparse.ArgumentParser(add_help=False)
        ours.add_argument("--engine", choices=ENGINES)
        said, rest = ours.parse_known_args(options.args)
        return run(4, ["-m", "distdl.programs.demo", *rest], engine=said.engine)
    if options.command == "bench":
        from .bench.__main__ import read  # wrong options end here, before any rank starts

        said = read(options.args)
        return run(said.n, ["-m", "distdl.programs.bench", *options.args], engine=said.engine)
    if options.command == "measure":
        from .measure import parser as options_of

        asked = options_of().parse_args(options.args)
        return run(asked.n, ["-m", "distdl.programs.measure", *options.args])
    program = ["-m", *options.module] if options.module else options.script
    if not program:
        top.error("run: which script, or -m module?")
    if program[0] != "-m" and not Path(program[0]).exists():
        top.error(f"run: no such file: {program[0]}")
    if options.n < 1:
        top.error(f"run: -n {options.n} is not a number of ranks")
    return run(options.n, program, timeout=options.timeout, engine=options.engine)
