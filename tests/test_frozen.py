"""Public names, their signatures, and the Python calls of an operation, as they are frozen (freezing.py)."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import freezing
import pytest
import torch

ROOT = Path(__file__).parents[1]
VERSIONS = f"Python {'.'.join(platform.python_version_tuple()[:2])}, torch {torch.__version__.partition('+')[0]}"


def test_names():
    differs = freezing.compare("names", freezing.names())
    assert not differs, f"names or signatures differ (make refreeze, if that is meant):\n{differs}"


def test_python_calls():
    """No row of the table of bench/bench_overhead.py enters more Python functions than it did."""
    frozen = freezing.read("calls")
    if not freezing.REFREEZE and frozen["versions"] != VERSIONS:
        pytest.skip(f"counted with {frozen['versions']}, of which some calls are torch's own")
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-m", "overhead"]
    now = json.loads(subprocess.run(run, env=environment, check=True, capture_output=True, text=True).stdout)
    if freezing.REFREEZE:
        freezing.write("calls", now | {"versions": VERSIONS})
        return
    more = {
        row: (frozen[row], counts) for row, counts in now.items() if any(a < b for a, b in zip(frozen[row], counts))
    }
    assert frozen.keys() - {"versions"} == now.keys()
    assert not more, f"more Python calls than before, [forward, forward + backward] (make refreeze, if meant): {more}"


def test_a_change_is_seen(monkeypatch, tmp_path):
    """Of a signature, of a text and of its line number, which is none."""
    monkeypatch.setattr(freezing, "FOLDER", tmp_path)
    monkeypatch.setattr(freezing, "REFREEZE", False)
    freezing.write("names", {"a": "(x)", "gone": "()"})
    assert freezing.compare("names", {"a": "(x, y=1)", "gone": "()"}).splitlines()[0] == "a"
    assert "now:    None" in freezing.compare("names", {"a": "(x)"})
    assert freezing.signature(lambda a, /, b, *, d=torch.float64, **e: 0) == "(a, /, b, *, d=torch.float64, **e)"
    here, there = (f"at /home/me/x.py:{n} in f after 0.{n} s, {n:#x}0000000" for n in (12, 34))
    assert freezing.normal(here) == freezing.normal(there) == "at <line> in f after <time>, <address>"


def test_other_texts_fail(monkeypatch, tmp_path):
    monkeypatch.setattr(freezing, "FOLDER", tmp_path)
    monkeypatch.setattr(freezing, "REFREEZE", False)
    freezing.write("errors", {"one": ["DistdlError: f: as it was"]})
    texts = freezing.Texts("errors")

    def of(test, text):
        for _ in texts.collect(test):
            freezing.DistdlError(text, op="f")

    of("one", "as it was")
    of("another", "not frozen yet")
    with pytest.raises(AssertionError, match=r"- DistdlError: f: as it was\n\+ DistdlError: f: other words"):
        of("one", "other words")
