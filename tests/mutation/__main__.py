"""Mutation testing in one process per mutant: ``python tests/mutation [module ...] [--line N] [--every N]``.

For each mutant of :data:`MODULES` this process forks: torch is there already, so a child costs the
import of distdl (with the changed module in it) and the tests of :mod:`suite` up to the first that fails. No MPI: all ranks are
simulated.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.util
import os
import resource
import signal
import sys
import time
from collections import deque
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
sys.modules["mpi4py"] = None  # the default world is then this process alone

import hypothesis  # noqa: E402
import numpy  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.func  # noqa: E402
from mutate import mutants  # noqa: E402
from torch.fx.experimental import proxy_tensor  # noqa: E402

MODULES = ("partition", "plan", "ties", "run", "linear_map", "exchange", "maps")
PACKAGE = HERE.parents[1] / "distdl"
LIMIT = 20  # seconds of processor time until a mutant counts as one that never ends
loaded = (hypothesis, numpy, pytest, proxy_tensor)
torch.func.vmap(torch.func.jacfwd(torch.func.grad(torch.sin)))(torch.ones(2))  # what torch loads on first use
proxy_tensor.make_fx(torch.sin)(torch.ones(2))


class Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from other code."""

    def __init__(self, name, code):
        self.name, self.code = name, code

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self, origin=self.code.co_filename) if name == self.name else None

    def exec_module(self, module):
        module.__file__ = self.code.co_filename
        exec(self.code, module.__dict__)


def child(module, code, report):
    """Run the suite; never returns."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT + 1))
    signal.alarm(8 * LIMIT)  # where it sleeps
    sys.path_importer_cache.clear()
    sys.meta_path.insert(0, Changed(f"distdl.{module}", code))
    outcome = ""
    try:
        import suite

        suite.run(module)
    except BaseException as error:
        outcome = f"{type(error).__name__}: {error}"[:200]
    os.write(report, outcome.encode() or b"survived")
    os._exit(0)


def begin(module, code):
    """Start to judge a mutant; :func:`verdict` tells how it went."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        child(module, code, writer)
    os.close(writer)
    return pid, reader


def verdict(pid, reader) -> str:
    """What killed the mutant; ``survived`` where nothing did."""
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    _, status = os.waitpid(pid, 0)
    return said or f"ended by signal {os.waitstatus_to_exitcode(status)}"


def judged(module, codes, jobs):
    """The verdicts on ``codes`` in their order, while up to ``jobs`` are being judged."""
    live = deque()
    for code in codes:
        live.append(begin(module, code))
        if len(live) >= jobs:
            yield verdict(*live.popleft())
    while live:
        yield verdict(*live.popleft())


def _worked() -> float:
    """Seconds of processor time so far, of all children."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/mutation")
    parser.add_argument("modules", nargs="*", default=MODULES)
    parser.add_argument("--line", type=int, help="mutants of one line only, with what killed them")
    parser.add_argument("--every", type=int, default=1, help="every n-th mutant only")
    parser.add_argument("--jobs", "-j", type=int, default=1, help="mutants judged at the same time")
    parser.add_argument("--least", type=float, default=95, help="percentage that must be killed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began, killed, total, survivors = time.monotonic(), 0, 0, []
    for module in options.modules:
        path = PACKAGE / f"{module}.py"
        source = path.read_text()
        (unchanged,) = judged(module, [compile(source, str(path), "exec")], 1)
        if unchanged != "survived":
            print(f"{module} fails as it is: {unchanged}")
            return 2
        found = []
        for line, what, tree in mutants(source):
            if options.line in (None, line):
                found.append((line, what, compile(ast.fix_missing_locations(tree), str(path), "exec")))
        chosen = found[:: options.every]
        verdicts = judged(module, (code for _, _, code in chosen), options.jobs)
        for (line, what, _), outcome in zip(chosen, verdicts):
            total, killed = total + 1, killed + (outcome != "survived")
            if outcome == "survived":
                survivors.append((module, line, what))
                print(f"survived  {module}.py:{line}: {what}: {source.splitlines()[line - 1].strip()}", flush=True)
            elif options.line:
                print(f"killed    {module}.py:{line}: {what}: {outcome}")
        mine = sum(m == module for m, _, _ in survivors)
        print(f"{module}: {len(chosen) - mine} of {len(chosen)} killed, "
              f"{time.monotonic() - began:.0f} s ({_worked():.0f} s of work) so far", flush=True)
    share = 100 * killed / max(total, 1)
    print(f"{killed} of {total} mutants killed: {share:.1f} %, in {time.monotonic() - began:.0f} s, {_worked():.0f} s of work")
    return int(share < options.least)


if __name__ == "__main__":
    sys.exit(main())
