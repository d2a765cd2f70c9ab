"""Mutants that the test commands themselves judge: ``python tests/mutation/drawn.py [-j 2] [--until STAGE]``.

Of the layers, movements, checkpoints and training, which need ranks, some mutants were drawn once: ``drawn.json``
beside this file has them, each known by its module, its change and its statement, with its last judgement (``--draw``
draws as many new ones as have left the code). Each is judged in a copy of this checkout, in three stages: by those
tests of ``make test`` that know its module, by all of ``make test``, and by ``make test-full``; what lives goes on to
the next (``--until own`` or ``first`` ends earlier). Hours: another run goes on where one ended; ``--again`` judges
anew. Of those that both tiers together kill, the first must kill nine of ten.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tests")]

import tiers  # noqa: E402
from equivalent import EQUIVALENT  # noqa: E402
from mutate import named  # noqa: E402

RESULTS = HERE / "drawn.json"
SEED, COUNT, SHARE = 2024, 120, 0.9
FROM = ("functional/*.py", "movement/*.py", "agree.py", "signature.py", "checkpoint/*.py", "parallel/*.py", "nn/*.py")
FIRST, REST = "not full and not slow", "full and not slow and not spare"
# Which tests know a module that no file of tests is named after.
KNOWN = {
    "agree": ["agreement", "vmap"],
    "along": ["reduce", "norm"],
    "autocast": ["dtypes"],
    "blocks": ["value", "derivatives"],
    "call": ["value", "derivatives"],
    "channels": ["conv"],
    "conv_transpose": ["conv"],
    "copies": ["value", "derivatives"],
    "dropout": ["dropout_init"],
    "enter": ["outside", "linear"],
    "gathers": ["value", "derivatives"],
    "moments": ["norm", "reduce"],
    "neon": ["local"],
    "numeric": ["reduce", "loss"],
    "peers": ["value", "derivatives"],
    "random": ["dropout_init"],
    "schedules": ["pipeline", "pipeline_schedule"],
    "signature": ["agreement", "checking"],
    "spectral": ["fft", "fno"],
    "sums": ["files", "checkpoint"],  # of checkpoints
    "sync": ["sums"],
    "transform": ["fft"],
    "window": ["conv", "pool"],
}
COPIED = (
    *("distdl", "tests", "bench", "docs", "notebooks", "requirements", "pyproject.toml", "Makefile"),
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
)
UNCHANGED = "unchanged"
STAGES = ("own", "first", "rest")


def everyone() -> dict[str, tuple[str, int]]:
    """{key: (file, which of its mutants)} of all that may be drawn, but for those argued to change no result."""
    found: dict[str, tuple[str, int]] = {}
    for pattern in FROM:
        for path in sorted((ROOT / "distdl").glob(pattern)):
            module = ".".join(path.relative_to(ROOT / "distdl").with_suffix("").parts)
            argued = EQUIVALENT.get(module, {})
            for i, (_, text, what, _) in enumerate(named(path.read_text())):
                if what not in argued.get(text, ()):
                    found.setdefault(f"{module}: {what}: {text}", (str(path.relative_to(ROOT)), i))
    return found


def mutated(source: str, which: int) -> str:
    """The source of a mutant; of number -1, the source as it is."""
    if which < 0:
        return ast.unparse(ast.parse(source))
    for i, (*_, tree) in enumerate(named(source)):
        if i == which:
            return ast.unparse(ast.fix_missing_locations(tree))
    raise IndexError(which)


def known(file: str) -> list[str]:
    """The test files that know a module: those named after it, or else those of its folder."""
    stem, folder = Path(file).stem, Path(file).parent.name
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    stems = KNOWN.get(stem, [stem]) + (["nn", "convert", "nn_idioms"] if folder == "nn" else [])
    found = [p for p in tests if p.stem[5:] in stems] or [p for p in tests if p.parent.name == folder]
    return [str(p.relative_to(ROOT)) for p in found]


def commands(file: str, stage: str):
    """(tier, seconds, arguments of Python) of a stage, those first that see most."""
    alone = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]

    def ranks(n, *args):
        return ["-m", "distdl", "run", "-n", str(n), *alone, *args]

    tier, marks, worlds = (2, REST, (2, 3, 4, 8)) if stage == "rest" else (1, FIRST, (2, 4, 1))
    if stage != "first":
        mine = known(file)
        on_ranks, in_one = ([f for f in mine if f.startswith("tests/mpi") is there] for there in (True, False))
        if in_one:
            yield tier, 300, [*alone, *in_one, "-m", marks]
        for n in worlds:
            files = [f for f in on_ranks if n in tiers.RANKS.get(Path(f).stem[5:], tiers.ANY)]
            if files:
                yield tier, 300, ranks(n, *files, "-m", marks)
    if stage != "own":
        for n in worlds:
            yield tier, 900, ranks(n, "tests/mpi", "-m", marks)
        yield tier, 900, [*alone, "tests", "--ignore=tests/mpi", "-m", marks]


def run(where: Path, seconds: float, arguments: list[str]) -> str | None:
    """How a command fails, or ``None``."""
    path = os.pathsep.join([str(where), str(where / "tests")])
    job = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=where,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, _ = job.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGTERM)  # the launcher ends its ranks
        try:
            job.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate()
        return f"no end within {seconds:g} s"
    if job.returncode in (0, 5):  # 5: none of the tests is in this tier
        return None
    lines = out.splitlines() or [f"exit code {job.returncode}"]
    return next((line for word in ("FAILED", "failed in", "ERROR") for line in lines if word in line), lines[-1])[:200]


def copy_to(where: Path) -> None:
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, where / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, where / name)


def judged(where: Path, file: str, which: int, stage: str) -> dict:
    """Which command of a stage kills a mutant first."""
    original = (ROOT / file).read_text()
    fine = {"tier": None, "how": None, "command": None, "stage": stage}
    (where / file).write_text(mutated(original, which))
    try:
        for tier, seconds, arguments in commands(file, stage):
            how = run(where, seconds, arguments)
            if how:
                fine |= {"tier": tier, "how": how, "command": " ".join(arguments)}
                break
    finally:
        (where / file).write_text(original)
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/mutation/drawn.py")
    parser.add_argument("--jobs", "-j", type=int, default=2, help="mutants judged at the same time")
    parser.add_argument("--until", choices=STAGES, default=STAGES[-1], help="the last stage that judges")
    parser.add_argument("--draw", action="store_true", help="draw new ones for those that are no mutants any more")
    parser.add_argument("--again", action="store_true", help="forget the judgements")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    there = everyone()
    results = {key: None if options.again else result for key, result in results.items() if key in there}
    if options.draw:
        new = random.Random(SEED).sample([key for key in there if key not in results], COUNT - len(results))
        results |= dict.fromkeys(new)
    mutants = [(key, *there[key]) for key in results]
    unchanged = (UNCHANGED, mutants[0][1], -1)  # the tests as they are: else everything would be killed
    broken: list[dict] = []
    lock = threading.Lock()

    def lives(key: str, stage: str) -> bool:
        """Whether a mutant lived through the stages before, and was not judged in this one."""
        last = results[key]
        return last is None or (last["tier"] is None and STAGES.index(last["stage"]) < STAGES.index(stage))

    def work(stage: str, waiting: list):
        with tempfile.TemporaryDirectory(prefix="distdl-mutants-") as folder:
            where = Path(folder)
            copy_to(where)
            while True:
                with lock:
                    if not waiting or broken:
                        return
                    key, file, which = waiting.pop(0)
                result = judged(where, file, which, stage)
                with lock:
                    if key != UNCHANGED:
                        results[key] = result
                        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
                    elif result["tier"]:
                        broken.append(result)
                    print(
                        f"{stage} {'survived' if result['tier'] is None else 'killed'}  {key}  {result['how']}",
                        flush=True,
                    )

    for stage in STAGES[: STAGES.index(options.until) + 1]:
        waiting = [one for one in mutants if lives(one[0], stage)]
        waiting[:0] = [unchanged] if waiting else []
        workers = [threading.Thread(target=work, args=(stage, waiting)) for _ in range(options.jobs)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if broken:
            print(f"the tests fail as they are: {broken}")
            return 2
    each = [result or {"tier": None} for result in results.values()]
    counts = [sum(result["tier"] == tier for result in each) for tier in (1, 2, None)]
    killed, share = counts[0] + counts[1], counts[0] / max(counts[0] + counts[1], 1)
    print(
        f"of {len(mutants)} mutants {killed} killed ({100 * killed / len(mutants):.1f} %), "
        f"{counts[0]} of them by `make test` ({100 * share:.1f} %); {counts[2]} survive"
    )
    return int(share < SHARE)


if __name__ == "__main__":
    sys.exit(main())
