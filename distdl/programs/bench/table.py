"""Results and their table: bytes, min, median and p90, bandwidths, ratios to the limit and to peers, overlap.

Bandwidths follow nccl-tests (doc/PERFORMANCE.md there): algorithm bandwidth = S / t, bus bandwidth = that times a
factor that makes it comparable with what the hardware moves: 2(n-1)/n for all-reduce, (n-1)/n for all-gather,
reduce-scatter, gather, scatter and all-to-all, 1 for broadcast, reduce and point-to-point. Overlap follows the OSU
micro-benchmarks: the share of a movement's time that disappears behind a computation of its own length.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from .timing import environment, ratio

TRAFFIC = {"all_sum_reduce": lambda n: 2 * (n - 1) / n}
TRAFFIC |= dict.fromkeys(("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"), lambda n: (n - 1) / n)
TRAFFIC |= dict.fromkeys(("broadcast", "sum_reduce", "shift", "halo"), lambda n: 1.0)


@dataclass
class Result:
    """One case: what was timed, and the seconds of each round, by candidate.

    Args:
        op: the operator; ``what``: the case's parameters; ``dtype``: short, as "float32".
        nbytes: S of the bandwidths; 0: none are given (layers). ``traffic``: the factor of the bus bandwidth.
        limit: the candidate that nothing can beat ("memcpy", "share", "forward").
        subjects: the candidates that get a row; all the others are peers, with a column each.
        times: seconds per call, as the slowest rank saw them.
    """

    op: str
    what: str
    ranks: int
    dtype: str = "float32"
    nbytes: int = 0
    traffic: float = 1.0
    limit: str = "memcpy"
    subjects: tuple[str, ...] = ("distdl",)
    scaling: str = ""  # "strong" or "weak": part of a series over ranks
    times: dict = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What says which case this is, in any launch."""
        return f"{self.op} {self.what} {self.dtype}"

    def facts(self) -> dict:
        """All but the times."""
        found = asdict(self)
        del found["times"]
        return found


def bandwidths(nbytes: float, seconds: float, traffic: float) -> tuple[float, float]:
    """Algorithm and bus bandwidth in GB/s (10⁹ bytes)."""
    algorithm = nbytes / seconds / 1e9
    return algorithm, algorithm * traffic


def overlap(blocking, compute, both) -> float:
    """Percent of the movement's time hidden behind the computation: 100 (1 - (both - compute) / blocking), within 0 and
    100."""
    hidden = 1 - (np.median(both) - np.median(compute)) / np.median(blocking)
    return float(100 * min(1.0, max(0.0, hidden)))


def rows(results) -> list[dict]:
    """The table's rows; columns that a row lacks are None."""
    found = []
    for result in results:
        times = {name: np.asarray(t) for name, t in result.times.items()}
        for subject in result.subjects:
            t = times[subject]
            row = {
                "op": result.op if subject == "distdl" else f"{result.op}: {subject}",
                "case": result.what,
                "dtype": result.dtype,
                "ranks": result.ranks,
                "bytes": result.nbytes or None,
                "min µs": t.min() * 1e6,
                "median µs": float(np.median(t)) * 1e6,
                "p90 µs": float(np.percentile(t, 90)) * 1e6,
            }
            if result.nbytes:
                row["alg GB/s"], row["bus GB/s"] = bandwidths(result.nbytes, float(np.median(t)), result.traffic)
            if "split" in times and subject == "distdl":
                row["overlap %"] = overlap(t, times["compute"], times["split"])
            for name, other in times.items():
                if name not in ("split", "compute") and name not in result.subjects:
                    row[f"x {name}"] = ratio(t, other)
            found.append(row)
    keys = list(dict.fromkeys(key for row in found for key in row))
    first = [k for k in keys if not k.startswith("x ") and k != "overlap %"]
    last = [k for k in keys if k == "overlap %"]
    keys = first + [k for k in keys if k.startswith("x ")] + last
    return [{key: row.get(key) for key in keys} for row in found]


def text(found: list[dict]) -> str:
    """Rows (dicts with equal keys) as an aligned table."""
    if not found:
        return "nothing was measured"
    keys = list(found[0])
    lines = [keys, *[[cell(row[k]) for k in keys] for row in found]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(keys))]
    return "\n".join(
        "  ".join(cell.rjust(w) if i > 1 else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths)))
        for line in lines
    )


def cell(value) -> str:
    if value is None:
        return "-"
    if isinstance(value, (tuple, list)):
        return f"{value[0]:.2f} [{value[1]:.2f}, {value[2]:.2f}]"
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def report(found: list[dict], title: str, path: str | None, ranks: int) -> None:
    """Print rows under a title, and write them as JSON with the environment."""
    print(f"\n{title}\n{text(found)}")
    if path:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(
            json.dumps({"title": title, "environment": environment(ranks), "rows": found}, indent=1) + "\n"
        )
