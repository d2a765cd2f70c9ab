"""``python -m bench.report [FILES] [--compare OLD ...] [--plots FOLDER]``: the table of the suite's results.

Without files: build/bench/*.json. ``--compare`` fails (exit code 1) only where a case got slower than ``--bound``
allows in 2 of 3 launches, by the 95 % bootstrap interval of its paired ratio to the limit, new over old.
"""

from __future__ import annotations

import argparse
import glob
import json
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np

from distdl.programs.bench.table import Result, cell, rows, text
from distdl.programs.bench.timing import bootstrapped

FACTS = {f.name for f in fields(Result)}


class Unreadable(Exception):
    """A file that has no samples."""


def read(path) -> tuple[dict, list[Result]]:
    """The environment and the results of one launch: of pytest-benchmark's file, or of ``distdl bench --json``."""
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise Unreadable(f"{path}: {error}") from error
    if "results" not in found and "benchmarks" not in found:
        raise Unreadable(
            f"{path}: neither the suite's file nor one of distdl bench --json; this one has {sorted(found)}"
        )
    if "results" in found:
        results = [Result(**{**r, "subjects": tuple(r["subjects"])}) for r in found["results"]]
        for r in results:
            r.times = {k: np.array(t) for k, t in r.times.items()}
        return found["environment"], results
    cases: dict[str, Result] = {}
    for one in found["benchmarks"]:
        info = one["extra_info"]
        facts = {k: tuple(v) if k == "subjects" else v for k, v in info.items() if k in FACTS}
        case = cases.setdefault(one["group"], Result(**facts))
        case.times[info["candidate"]] = np.array(one["stats"]["data"])
    return found["machine_info"], list(cases.values())


def change(new: Result, old: Result, subject: str) -> tuple[float, float, float] | None:
    """New over old of the paired ratio subject / limit: median and 95 % interval; None where a side lacks it.

    Within a launch the ratio is taken round by round, so that the machine's mood cancels; the two launches are
    independent, and each is drawn from by itself.
    """
    medians = []
    for seed, result in enumerate((new, old)):
        if subject not in result.times or result.limit not in result.times:
            return None
        quotients = np.asarray(result.times[subject]) / np.asarray(result.times[result.limit])
        medians.append((np.median(quotients), bootstrapped(quotients, seed=seed)))
    (a, draws_a), (b, draws_b) = medians
    low, high = np.percentile(draws_a / draws_b, [2.5, 97.5])
    return float(a / b), float(low), float(high)


def compare(launches, old_launches, bound: float) -> list[dict]:
    """One row for each case and subject of both: the change in every launch, and the verdict.

    Launch i is compared with old launch i (with the last where there are fewer). "slower": the whole interval lies
    beyond ``bound`` in two launches or more; "faster": it lies below 1 / bound in as many; otherwise "same".
    """
    found: dict[tuple, list] = {}
    for i, results in enumerate(launches):
        old = {(r.name, r.ranks): r for r in old_launches[min(i, len(old_launches) - 1)]}
        for result in results:
            for subject in result.subjects:
                before = old.get((result.name, result.ranks))
                moved = before and change(result, before, subject)
                if moved:
                    found.setdefault((result.name, result.ranks, subject), []).append(moved)
    table = []
    for (name, ranks, subject), moves in found.items():
        verdict = (
            "slower"
            if sum(low > bound for _, low, _ in moves) >= 2
            else "faster"
            if sum(high < 1 / bound for _, _, high in moves) >= 2
            else "same"
        )
        table.append(
            {
                "case": name if subject == "distdl" else f"{name}: {subject}",
                "ranks": ranks,
                "verdict": verdict,
                "new / old": ", ".join(map(cell, moves)),
            }
        )
    return table


def scaling(results) -> list[dict]:
    """Parallel efficiency of the series over ranks, against the fewest, m: strong m t(m) / (n t(n)), weak t(m) /
    t(n)."""
    series: dict[tuple, dict] = {}
    for r in results:
        if r.scaling:
            series.setdefault((r.name, r.scaling), {}).setdefault(r.ranks, []).append(
                float(np.median(r.times["distdl"]))
            )
    table = []
    for (name, kind), by_ranks in series.items():
        times = {n: float(np.median(t)) for n, t in sorted(by_ranks.items())}
        fewest = min(times)
        for n, t in times.items():
            share = times[fewest] / t * (fewest / n if kind == "strong" else 1) if len(times) > 1 else None
            table.append({"case": name, "scaling": kind, "ranks": n, "median µs": t * 1e6, "efficiency": share})
    return table


def plots(results, folder) -> list[Path]:
    """Time against bytes, one picture for each operator that has several sizes; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made = []
    Path(folder).mkdir(parents=True, exist_ok=True)
    for op, n in sorted({(r.op, r.ranks) for r in results if r.nbytes}):
        mine = sorted(
            (r for r in results if (r.op, r.ranks, r.dtype) == (op, n, "float32") and r.nbytes and not r.scaling),
            key=lambda r: r.nbytes,
        )
        if len({r.nbytes for r in mine}) < 2 or any("distdl" not in r.times for r in mine):
            continue
        figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
        for name in dict.fromkeys(k for r in mine for k in r.times if k not in ("split", "compute")):
            points = [(r.nbytes, np.percentile(r.times[name], [10, 50, 90]) * 1e6) for r in mine if name in r.times]
            sizes, (low, mid, high) = [s for s, _ in points], np.array([t for _, t in points]).T
            axes.errorbar(
                sizes, mid, [mid - low, high - mid], label=name, marker="o", markersize=3, linewidth=1, capsize=2
            )
        axes.set(
            xscale="log", yscale="log", xlabel="bytes", ylabel="µs (median; 10 % to 90 %)", title=f"{op}, {n} ranks"
        )
        axes.legend()
        made.append(Path(folder) / f"{op}-n{n}.svg")
        figure.savefig(made[-1])
        pyplot.close(figure)
    return made


def title(environment: dict) -> str:
    """What a launch ran on, in two lines."""
    e = environment
    crowded = f"; oversubscribed: {e['ranks']} ranks on {e['cores']} cores" if e["oversubscribed"] else ""
    return (
        f"{e['ranks']} ranks, {e['cores']} cores ({e['processor']}), load {e['load'][0]}{crowded}\n"
        f"torch {e['torch']}, {e.get('mpi', 'no MPI')}; x: times as long as, median of paired ratios "
        "with its 95 % interval"
    )


def main(argv=None) -> int:
    """Print the tables; 1 where something got slower."""
    parser = argparse.ArgumentParser("python -m bench.report")
    parser.add_argument("files", nargs="*", help="one for each launch (default: build/bench/*.json)")
    parser.add_argument(
        "--compare", nargs="+", metavar="OLD", help="older launches to compare with; needs three new ones"
    )
    parser.add_argument("--bound", type=float, default=1.1, help="how much slower is too slow (default: 1.1)")
    parser.add_argument("--plots", metavar="FOLDER", help="draw time against bytes (needs matplotlib)")
    options = parser.parse_args(argv)
    try:
        found = [read(path) for path in options.files or sorted(glob.glob("build/bench/*.json"))]
        old = [read(path) for path in options.compare or ()]
    except Unreadable as error:
        parser.error(str(error))
    if not found:
        parser.error("no results: run python -m bench first, or name files")
    if options.compare:
        return _compared(found, old, options.bound, parser)
    for environment, results in found:
        print(f"\n{title(environment)}")
        for limit in dict.fromkeys(r.limit for r in results):
            print(f"\n{text(rows([r for r in results if r.limit == limit]))}")
    everything = [r for _, results in found for r in results]
    series = scaling(everything)
    if series:
        print(f"\nScaling (launches of different sizes, not paired)\n{text(series)}")
    if options.plots:
        drawn = plots(everything, options.plots)
        print(
            "\n".join(f"drew {path}" for path in drawn)
            or "nothing to draw: no operator has float32 cases of several sizes"
        )
    return 0


def _compared(found, old, bound, parser) -> int:
    failed, compared = False, False
    for n in sorted({e["ranks"] for e, _ in found}):
        new, before = ([results for e, results in side if e["ranks"] == n] for side in (found, old))
        if not before:
            continue
        if len(new) < 3:
            parser.error(f"{len(new)} launches of {n} ranks: the verdict needs 3 (python -m bench --launches 3)")
        table = compare(new, before, bound)
        print(f"\n{n} ranks: the ratio to the limit, new / old, in each launch; bound {bound}\n{text(table)}")
        compared |= bool(table)
        failed |= any(row["verdict"] == "slower" for row in table)
    if not compared:
        parser.error("nothing to compare: no case is in both")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
