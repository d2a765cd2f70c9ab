"""Mutation testing in one process per mutant: ``python tests/mutation [module ...] [--lines N[-M]] [--every N] [-j
N]``.

For each mutant of :data:`MODULES` this process forks: torch is there already, and so is the code of distdl and of the
tests, so a child costs their execution (with the changed module among them) and the tests of :mod:`suite` up to the
first that fails. Those that killed the mutants before come first. No MPI: all ranks are simulated.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import os
import resource
import sys
import time
from collections import Counter, deque
from importlib.machinery import SourceFileLoader
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
sys.modules["mpi4py"] = None  # the default world is then this process alone

import hypothesis  # noqa: E402
import numpy  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.func  # noqa: E402
from equivalent import EQUIVALENT  # noqa: E402
from mutate import named  # noqa: E402
from torch.fx.experimental import proxy_tensor  # noqa: E402

MODULES = (
    "boxes",
    "partition",
    "plan",
    "ties",
    "autograd",
    "linear_map",
    "pair",
    "engine.dispatch",
    "engine.recognise",
    "engine.part",
    "engine.program",
    "engine.exchange",
    "movement.call",
    "movement.blocks",
    "movement.copies",
    "movement.gathers",
    "movement.boundary",
    "movement.halo",
    "movement.peers",
    "movement.split_phase",
)
PACKAGE = HERE.parents[1] / "distdl"
codes: dict = {}  # of distdl and the tests, by the names they are imported by
loaded = (hypothesis, numpy, pytest, proxy_tensor)
torch.func.vmap(torch.func.jacfwd(torch.func.grad(torch.sin)))(torch.ones(2))  # what torch loads on first use
proxy_tensor.make_fx(torch.sin)(torch.ones(2))


def compiled():
    """The code of distdl and of all tests by the names they are imported by: to read and compile it costs more than to
    run it."""
    paths = {".".join(("distdl", *p.relative_to(PACKAGE).with_suffix("").parts)): p for p in PACKAGE.rglob("*.py")}
    paths |= {path.stem: path for path in HERE.parent.rglob("*.py") if path.stem not in ("conftest", "__main__")}
    return {n.removesuffix(".__init__"): compile(p.read_text(), str(p), "exec") for n, p in sorted(paths.items())}


def child(module, code, worth, report):
    """Run the suite; never returns."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    codes[f"distdl.{module}"] = code
    get_code = SourceFileLoader.get_code
    SourceFileLoader.get_code = lambda self, name: codes.get(name) or get_code(self, name)
    try:
        import suite

        outcome = suite.run(module, worth)
    except BaseException as error:
        outcome = ("suite", f"{type(error).__name__}: {error}"), {}
    with os.fdopen(report, "w") as pipe:
        json.dump(outcome, pipe)
    os._exit(0)


def begin(module, code, worth=None):
    """Start to judge a mutant; :func:`verdict` tells how it went."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        child(module, code, worth, writer)
    os.close(writer)
    return pid, reader


def verdict(pid, reader):
    """((the test that killed the mutant, how), seconds of each test): ``None`` first where nothing did."""
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    return json.loads(said) if said else (("", f"ended by signal {os.waitstatus_to_exitcode(status)}"), {})


def judged(module, codes, took, jobs):
    """What killed each of ``codes``, in their order, while up to ``jobs`` are being judged. Mutants of neighbouring
    lines often
    die by one test: a test's worth is what it killed lately, for the time that it takes."""
    live, kills = deque(), dict.fromkeys(took, 0.0)

    def done():
        killer, _ = verdict(*live.popleft())
        for name in kills:
            kills[name] = 0.9 * kills[name] + (killer is not None and name == killer[0])
        return killer

    for code in codes:
        live.append(begin(module, code, {name: kills[name] / (0.01 + took[name]) for name in kills}))
        if len(live) >= jobs:
            yield done()
    while live:
        yield done()


def _worked() -> float:
    """Seconds of processor time so far, of all children."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/mutation")
    parser.add_argument("modules", nargs="*", default=MODULES)
    parser.add_argument("--lines", help="mutants of line N, or of lines N-M, only, with what killed them")
    parser.add_argument("--every", type=int, default=1, help="every n-th mutant only")
    parser.add_argument("--jobs", "-j", type=int, default=os.cpu_count(), help="mutants judged at the same time")
    parser.add_argument("--least", type=float, default=95, help="percentage that must be killed, of each module")
    parser.add_argument(
        "--argued", action="store_true", help="judge only the mutants that are argued to change no result"
    )
    options = parser.parse_args()
    lines = [int(n) for n in options.lines.split("-")] if options.lines else [0, 10**9]
    torch.set_num_threads(1)
    codes.update(compiled())
    gc.collect()
    gc.freeze()
    began, counts, wrong = time.monotonic(), Counter(), []
    for module in options.modules:
        argued = EQUIVALENT.get(module, {})
        if options.argued and not argued:
            continue
        path = PACKAGE / f"{module.replace('.', '/')}.py"
        unchanged, took = verdict(*begin(module, codes[f"distdl.{module}"]))
        if unchanged:
            print(f"{module} fails as it is: {': '.join(unchanged)}")
            return 2
        found = [
            (line, text, what, compile(ast.fix_missing_locations(tree), str(path), "exec"))
            for line, text, what, tree in named(path.read_text())
        ]
        chosen = [one for one in found[:: options.every] if lines[0] <= one[0] <= lines[-1]]
        listed = [what in argued.get(text, ()) for _, text, what, _ in chosen]
        judge = [one for one, known in zip(chosen, listed) if known == options.argued]
        alive = 0
        for (line, text, what, _), killer in zip(
            judge, judged(module, (code for *_, code in judge), took, options.jobs)
        ):
            alive += killer is None
            if killer is None:
                print(f"survived  {module}.py:{line}: {what}: {text}", flush=True)
            elif options.lines or options.argued:
                print(f"killed    {module}.py:{line}: {what}: {': '.join(killer)[:200]}", flush=True)
        all_of, left_out = (judge, 0) if options.argued else (chosen, sum(listed))
        mine = Counter(all=len(all_of), argued=left_out, killed=len(judge) - alive)
        print(
            f"{module}: {_shares(mine)}, {time.monotonic() - began:.0f} s ({_worked():.0f} s of work) so far",
            flush=True,
        )
        counts += mine
        if mine["killed"] < options.least / 100 * mine["all"]:
            wrong.append(module)
    print(f"all: {_shares(counts)}, in {time.monotonic() - began:.0f} s, {_worked():.0f} s of work")
    if options.lines:
        return 0
    if wrong and not options.argued:
        print(f"less than {options.least:g} % killed: {', '.join(wrong)}")
    return int(counts["killed"] > 0 if options.argued else bool(wrong))


def _shares(n) -> str:
    """How many mutants were killed, of all and of those not argued to change no result."""
    judged = n["all"] - n["argued"]
    share, of_judged = (100 * n["killed"] / max(count, 1) for count in (n["all"], judged))
    return (
        f"{n['killed']} of {n['all']} killed ({share:.1f} %); without the {n['argued']} argued to change no result, "
        f"{n['killed']} of {judged} ({of_judged:.1f} %)"
    )


if __name__ == "__main__":
    sys.exit(main())
