"""The benchmarks' arithmetic, the verdict of a comparison on made-up samples, and the command line on two ranks."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import __main__ as suite
from bench import report
from distdl.programs.bench import cases, table
from distdl.programs.bench.__main__ import numbers, read
from distdl.programs.bench.table import Result
from distdl.programs.bench.timing import bootstrapped, ratio, sample
from distdl.programs.launch import find_mpi

ROOT = Path(__file__).parents[2]
launched = pytest.mark.skipif(find_mpi() is None, reason="needs mpi4py and an MPI library")


def result(scale=1.0, seed=0, spread=0.05, rounds=41, **facts):
    """A case whose call takes ``scale`` times its limit, both under the same noise of the machine."""
    random = np.random.default_rng(seed)
    machine = random.lognormal(0, 1, rounds)  # up to e times more, hitting all candidates of a round alike
    times = {"distdl": 1e-4 * scale * machine * random.lognormal(0, spread, rounds), "memcpy": 1e-4 * machine}
    return Result("halo", "8²", 2, nbytes=10**6, times=times, **facts)


# ---------------------------------------------------------------- arithmetic


@pytest.mark.parametrize(
    "op, n, factor",
    [
        ("all_sum_reduce", 4, 1.5),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 2, 0.5),
        ("all_to_all", 8, 0.875),
        ("broadcast", 8, 1),
        ("sum_reduce", 3, 1),
        ("all_sum_reduce", 1, 0),
    ],
)
def test_factors_of_the_bus_bandwidth(op, n, factor):
    assert table.TRAFFIC[op](n) == pytest.approx(factor)


def test_bandwidths_are_in_powers_of_ten():
    assert table.bandwidths(2 * 10**9, 0.5, 1.5) == pytest.approx((4.0, 6.0))


@pytest.mark.parametrize("both, percent", [(1.0, 100), (1.5, 50), (2.0, 0), (2.5, 0), (0.9, 100)])
def test_overlap(both, percent):
    assert table.overlap([1.0], [1.0], [both]) == pytest.approx(percent)


def test_rows_have_the_columns_of_all_cases():
    peer, plain = result(2.0, spread=0), result(seed=1)
    peer.times["mpi4py"] = peer.times["distdl"] / 4
    first, second = table.rows([peer, plain])
    assert first["x memcpy"] == pytest.approx((2, 2, 2)) and first["x mpi4py"] == pytest.approx((4, 4, 4))
    assert second["x mpi4py"] is None and list(first) == list(second)
    t = peer.times["distdl"] * 1e6
    assert [first[k] for k in ("min µs", "median µs", "p90 µs")] == pytest.approx(
        [t.min(), np.median(t), np.percentile(t, 90)]
    )
    assert first["alg GB/s"] == pytest.approx(1e3 / np.median(t))
    assert "4.00 [4.00, 4.00]" in table.text([first, second])


def test_repartition_factor_is_that_of_an_all_to_all():
    A, B = (cases.dd.Layout(cases.dd.Partition(g), (8, 8)) for g in ((4, 1), (1, 4)))
    plan = cases.dd.maps.repartition(A, B).plan
    assert plan.volume(0) / 16 == table.TRAFFIC["all_to_all"](4)


def test_grids():
    found = [cases.grid_of(n, d) for n, d in ((1, 2), (4, 2), (12, 2), (7, 3), (16, 3), (16384, 2))]
    assert found == [(1, 1), (2, 2), (4, 3), (7, 1, 1), (4, 2, 2), (128, 128)]


# ---------------------------------------------------------------- sampling and intervals


def test_samples_have_fixed_rounds_and_take_turns():
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
    times = sample(calls, None, rounds=4, inner=2, warmup=1)
    assert [len(t) for t in times.values()] == [4, 4, 4]
    assert "".join(order) == "abc" + "aabbcc" + "bbccaa" + "ccaabb" + "aabbcc"


def test_interval_covers_the_median():
    """Over 200 sets of 41 samples with median 1, a 95 % interval holds it in about 190."""
    random = np.random.default_rng(1)
    inside = 0
    for _ in range(200):
        noise = random.lognormal(0, 0.3, 41)
        _, low, high = ratio(noise, np.ones(41), draws=400)
        inside += low <= 1 <= high
    assert 180 <= inside <= 199
    assert np.median(bootstrapped([1.0, 2.0, 3.0])) == 2.0


# ---------------------------------------------------------------- compare


@pytest.mark.parametrize(
    "scales, verdict",
    [
        ((1.0, 1.0, 1.0), "same"),
        ((1.3, 1.0, 1.0), "same"),
        ((1.3, 1.3, 1.0), "slower"),
        ((1.3, 1.3, 1.3), "slower"),
        ((1.05, 1.05, 1.05), "same"),
        ((0.7, 0.7, 1.0), "faster"),
        ((0.7, 1.0, 1.0), "same"),
        ((1.3, 0.7, 1.0), "same"),
    ],
)
def test_verdict_needs_two_launches_of_three(scales, verdict):
    new = [[result(s, seed=i)] for i, s in enumerate(scales)]
    old = [[result(1.0, seed=10 + i)] for i in range(3)]
    (row,) = report.compare(new, old, 1.1)
    assert row["verdict"] == verdict, row


def test_a_wide_interval_is_no_verdict():
    """30 % slower in the median, but within noise as wide as that."""
    new = [[result(1.3, seed=i, spread=1.5, rounds=9)] for i in range(3)]
    (row,) = report.compare(new, [[result(1.0, seed=20, spread=1.5, rounds=9)]], 1.1)
    assert row["verdict"] == "same"


def test_a_slower_machine_is_no_slower_library():
    new = [[result(1.0, seed=i)] for i in range(3)]
    for (r,) in new:
        r.times = {k: 3 * t for k, t in r.times.items()}
    assert report.compare(new, [[result(1.0, seed=30)]], 1.1)[0]["verdict"] == "same"


def written(path, scale, seed):
    r = result(scale, seed=seed)
    environment = {"ranks": 2, "cores": 2, "processor": "x", "load": [0.0], "oversubscribed": False, "torch": "2"}
    found = [
        {"group": r.name, "extra_info": {**r.facts(), "candidate": k}, "stats": {"data": list(t)}}
        for k, t in r.times.items()
    ]
    path.write_text(json.dumps({"machine_info": environment, "benchmarks": found}))
    return str(path)


def test_exit_code_of_compare(tmp_path, capsys):
    old = written(tmp_path / "old.json", 1.0, 9)
    slow, same = ([written(tmp_path / f"{s}-{i}.json", s, i) for i in range(3)] for s in (1.4, 1.0))
    assert report.main([*slow, "--compare", old]) == 1
    assert report.main([*slow, "--compare", old, "--bound", "1.6"]) == 0
    assert report.main([*same, "--compare", old]) == 0
    assert report.main(same) == 0 and "halo" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        report.main([*slow[:2], "--compare", old])
    assert "needs 3" in capsys.readouterr().err


def test_scaling_efficiencies():
    times = {1: 4.0, 2: 2.0, 4: 2.0}
    found = [
        Result("halo", "", n, scaling=kind, times={"distdl": [t]})
        for n, t in times.items()
        for kind in ("strong", "weak")
    ]
    by = {(row["scaling"], row["ranks"]): row["efficiency"] for row in report.scaling(found)}
    assert by == {
        ("strong", 1): 1,
        ("strong", 2): 1,
        ("strong", 4): 0.5,
        ("weak", 1): 1,
        ("weak", 2): 2,
        ("weak", 4): 2,
    }
    by = {(row["scaling"], row["ranks"]): row["efficiency"] for row in report.scaling(found[2:])}
    assert by == {("strong", 2): 1, ("strong", 4): 0.5, ("weak", 2): 1, ("weak", 4): 1}, (
        "against the fewest ranks there are"
    )
    assert {row["efficiency"] for row in report.scaling(found[:2])} == {None}


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    small, large = result(), result()
    small.nbytes = 1000
    (path,) = report.plots([small, large], tmp_path)
    assert path.stat().st_size > 1000


# ---------------------------------------------------------------- the command line


def test_what_the_suite_refuses(tmp_path, capsys):
    """Before any rank starts, and without a traceback."""
    rows = tmp_path / "rows.json"
    rows.write_text('{"rows": []}')
    for call, told in (
        (lambda: report.main([str(rows)]), "neither the suite's file nor"),
        (lambda: report.main([str(tmp_path / "none.json")]), "No such file"),
        (lambda: suite.main(["-n", "2,x"]), "at least 1"),
        (lambda: suite.main(["--rounds", "0"]), "at least 1"),
        (lambda: suite.main(["--peer", f"distdl={tmp_path}"]), "a checkout of microsoft/distdl"),
    ):
        with pytest.raises(SystemExit):
            call()
        assert told in capsys.readouterr().err


def test_options(capsys):
    assert numbers("3,4") == numbers("3x4") == (3, 4)
    for wrong in (["-n", "0"], ["--rounds", "0"], ["nonsense"], ["--shape", "3,4"]):
        with pytest.raises(SystemExit):
            read(wrong)
    for wrong, told in (
        ("shift --grid 2", "--grid: shift has no such option"),
        ("--width 1", "--width: of which operator"),
        ("halo --to 2,1 --kernel 3", "--to, --kernel: halo has no such option"),
        ("shift --shape 3,4", "takes one number, the bytes"),
        ("halo --json none/x.json", "no such folder"),
    ):
        with pytest.raises(SystemExit):
            read(wrong.split())
        assert told in capsys.readouterr().err
    assert (read(["halo"]).width, read(["halo", "--width", "0"]).width, read(["conv"]).kernel) == (1, 0, 3)


def test_bfloat16_and_complex_sizes():
    assert cases.collective("all_sum_reduce", 1024, 1, dtype=torch.bfloat16).operands["count"] == 512
    assert cases.collective("shift", 1024, 1, dtype=torch.complex64).operands["count"] == 128


@pytest.mark.parametrize("engine", [pytest.param("mpi", marks=launched), "torch"])
def test_one_operator_on_two_ranks(tmp_path, engine):
    """The table, and a file that the report reads. By torch's engine no rank starts MPI."""
    path = tmp_path / "halo.json"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "distdl",
            "bench",
            "halo",
            "--engine",
            engine,
            "-n",
            "2",
            "--shape",
            "8,6",
            "--rounds",
            "2",
            "--json",
            str(path),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("x memcpy") == 1 and "8 x 6 over 2 x 1, width 1" in done.stdout
    environment, (found,) = report.read(path)
    assert ("mpi" in environment) == (engine == "mpi")
    assert environment["ranks"] == 2 and environment["torch"] == torch.__version__
    assert found.nbytes == 6 * 4 and {k: len(t) for k, t in found.times.items()} == {"distdl": 2, "memcpy": 2}
