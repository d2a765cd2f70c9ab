"""``python -m bench [-n 1,2,4] [--launches 3] [--full] [-k NAME] [FILES]``: run the suite, one file for each launch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from distdl.programs.launch import run

HERE = Path(__file__).parent
ALWAYS = [
    "-c",
    str(HERE.parent / "pyproject.toml"),
    "--rootdir",
    str(HERE.parent),
    "-o",
    "python_files=bench_*.py",
    "-o",
    "python_functions=bench_*",
    "-p",
    "no:cacheprovider",
    "--benchmark-quiet",
    "-W",
    "default",
]


def main(argv=None) -> int:
    """Run the launches; the exit code of the first that failed."""
    parser = argparse.ArgumentParser("python -m bench")
    parser.add_argument("-n", default="2", help="ranks of the launches, as 1,2,4 (default: 2)")
    parser.add_argument("--launches", type=int, default=1, help="how many of each; --compare needs 3")
    parser.add_argument(
        "--out", type=Path, default=Path("build/bench"), help="a folder for the results (default: build/bench)"
    )
    parser.add_argument("files", nargs="*", help="bench_*.py; default: all")
    parser.add_argument("--full", action="store_true", help="every size and dtype")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each case (default: 15)")
    parser.add_argument("--peer", metavar="distdl=PATH", help="a checkout of microsoft/distdl to compare with")
    parser.add_argument("-k", metavar="NAME", help="only cases of such a name, as pytest's -k")
    options = parser.parse_args(argv)
    counts = options.n.split(",")
    if not all(n.isdecimal() and int(n) for n in counts) or min(options.launches, options.rounds) < 1:
        parser.error(f"-n {options.n} --launches {options.launches} --rounds {options.rounds}: all are at least 1")
    if options.peer and not (Path(options.peer.removeprefix("distdl=")) / "src" / "distdl").is_dir():
        parser.error(f"--peer {options.peer}: distdl=PATH, the path of a checkout of microsoft/distdl")
    more = [f"--rounds={options.rounds}", *["--full"] * options.full]
    more += [f"--peer={options.peer}"] * bool(options.peer) + ["-k", options.k or ""]
    options.out.mkdir(parents=True, exist_ok=True)
    apart = ("bench_overhead", "bench_gpu")  # modules of their own
    files = options.files or sorted(str(p) for p in HERE.glob("bench_*.py") if not p.stem.startswith(apart))
    for launch in range(1, options.launches + 1):
        for n in map(int, counts):
            target = options.out / f"n{n}-{launch}.json"
            code = run(n, ["-m", "pytest", *files, *ALWAYS, f"--benchmark-json={target}", *more])
            if code:
                return code
            print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
