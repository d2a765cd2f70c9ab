"""The tests that judge a mutant, cheapest first: functions of the ordinary suite, all in one process."""

from __future__ import annotations

import importlib
import inspect
import itertools
import resource
import signal
import sys
import time
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

sys.path[:0] = sorted({str(path.parent) for path in Path(__file__).parents[1].rglob("test_*.py")})
FIRST = {
    "boxes": ["test_boxes", "test_partition", "test_plan"],
    "partition": ["test_partition"],
    "plan": ["test_plan"],
    "linear_map": ["test_one_process", "test_forked"],
    "pair": ["test_one_process", "test_forked"],
    "autograd": ["test_one_process", "test_forked"],
    "ties": ["test_one_process", "test_forked"],
    "engine.dispatch": ["test_dispatch", "test_one_process", "test_forked"],
    "engine.recognise": ["test_plan", "test_exchange"],
    "engine.part": ["test_exchange", "test_fused", "test_device_double", "test_plan"],
    "engine.program": ["test_exchange", "test_fused", "test_device_double", "test_plan"],
    "engine.exchange": ["test_exchange", "test_fused", "test_device_double", "test_plan"],
    "movement.boundary": ["test_halo"],
    "movement.halo": ["test_halo"],
}
SKIP = {
    "test_digest_is_equal_in_every_process",
    "test_planning_4096_ranks",
    "test_many_ranks_are_quick",
    "test_repartition",
    "test_transpose_is_the_matrix_transpose",
    "test_transpose_of_halos_is_the_matrix_transpose",
    "test_blocks_cover_exactly_once",
    "test_balanced",
    "test_many_of_every_cell",
    "test_a_few_of_every_cell",
    "test_random_movement",
    "test_random_movement_by_collectives",
    "test_one_rank_alone_is_nonlinear",
}
ONE_RANK = ["value", "split_phase", "inputs", "dtypes", "tracing", "bad_input"]  # of tests/mpi, as a world of one rank
LIMIT = 8  # seconds of processor time for one test, which takes one or two; what needs more never ends


def calls(function):
    """The calls that pytest would make of a test function; none where it needs fixtures or more ranks."""
    marks = getattr(function, "pytestmark", [])
    if any(
        m.name in ("slow", "gpu") or (m.name == "skipif" and m.args[0]) or (m.name == "mpi" and m.args[0] > 1)
        for m in marks
    ):
        return
    choices = []
    for mark in marks:
        if mark.name == "parametrize":
            names = (
                [n.strip() for n in mark.args[0].split(",")] if isinstance(mark.args[0], str) else list(mark.args[0])
            )
            entries = []
            for value in mark.args[1]:
                if isinstance(value, type(pytest.param())):
                    if any(m.name == "mpi" and m.args[0] > 1 for m in value.marks):
                        continue
                    value = value.values[0] if len(names) == 1 else value.values
                entries.append(dict(zip(names, (value,) if len(names) == 1 else value)))
            choices.append(entries)
    wanted = set(inspect.signature(function).parameters) - {"monkeypatch"}
    for picked in itertools.product(*choices):
        arguments = {k: v for part in picked for k, v in part.items()}
        if wanted <= set(arguments):
            yield arguments


def call(function, arguments):
    with pytest.MonkeyPatch.context() as patch:
        if "monkeypatch" in inspect.signature(function).parameters:
            arguments = {**arguments, "monkeypatch": patch}
        function(**arguments)


def of_module(name):
    """(name, test) for every call of a module's tests."""
    module = importlib.import_module(name)
    for test, function in list(vars(module).items()):
        ours = test.startswith("test_") and test not in SKIP
        if ours and callable(function) and not hasattr(function, "hypothesis"):
            for i, arguments in enumerate(calls(function)):
                yield f"{name}.{test}[{i}]", partial(call, function, arguments)


def fuzz(share):
    """One case of each operator and kind, with pairs in turn; those whose number modulo 3 is in ``share``."""
    import random

    from fuzzing import BUILDERS, KINDS, PAIRS, Simulated, compare, draw, seed_of
    from torch import float64

    def one(i, name, kind):
        pair = list(PAIRS)[i % len(PAIRS)]
        seed = seed_of(name, kind, pair)
        case = draw(name, kind, random.Random(seed), 4 + i % 3)
        faults = compare(case, pair, Simulated(case), float64, seed)
        assert not faults, (name, kind, pair, faults)

    for i, (name, kind) in enumerate(itertools.product(BUILDERS, KINDS)):
        if i % 3 in share:
            yield f"fuzz.{name}[{kind}]", partial(one, i, name, kind)


def examples(count):
    """The bodies of the tests that hypothesis drives, with a few examples of our own."""
    import random

    import test_boxes
    import test_partition
    import test_plan
    from fuzzing import KINDS, _layout

    import distdl as dd

    def one(i):
        rng = random.Random(i)
        L = _layout(rng, 6, KINDS[i % 3], ndim=1 + i % 3, least=1)
        M = _layout(rng, 6, KINDS[(i + 1) % 3], ndim=L.ndim, least=1)
        M = dd.Layout(M.partition, L.shape)
        test_partition.test_blocks_cover_exactly_once.hypothesis.inner_test(L)
        test_boxes.test_balanced.hypothesis.inner_test(3 * i, 1 + i % 5)
        test_plan.test_repartition.hypothesis.inner_test((L, M))
        test_plan.test_repartition.hypothesis.inner_test((L, L))
        test_plan.test_transpose_is_the_matrix_transpose.hypothesis.inner_test((L, M))

    for i in range(count):
        yield f"examples[{i}]", partial(one, i)


def tests(module):
    """(name, test) of every test that judges mutants of ``module``."""
    for name in FIRST.get(module, ()):
        yield from of_module(name)
    yield from examples(6)
    yield from fuzz([0])
    for name in ["test_boxes", "test_partition", "test_plan", "test_one_process"]:
        if name not in FIRST.get(module, ()):
            yield from of_module(name)
    yield from fuzz([1, 2])
    if module in ("autograd", "linear_map", "pair"):
        yield "nonlinear", partial(importlib.import_module("test_forked").test_one_rank_alone_is_nonlinear, 0)
    for name in ONE_RANK:
        yield from of_module(f"test_{name}")
    one_process = importlib.import_module("test_one_process")
    for name in ("repartition", "mark_varying", "halo_exchange"):
        yield f"random {name}", partial(one_process.test_random_movement, name)
    yield "random all_gather by collectives", partial(one_process.test_random_movement_by_collectives, "all_gather")


class Endless(BaseException):
    """A test took too long."""


def _end(*_):
    raise Endless


def run(module, worth=None):
    """Every test that judges mutants of ``module``, the ``worth``-iest first: the name of the first that fails and how
    it did, or ``None``; and the seconds that each took."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGXCPU, _end)
    name, took = "import", {}
    try:
        import forked

        forked.limit = 5.0  # a peer that has gone does not come back
        for name, test in sorted(tests(module), key=lambda found: -(worth or {}).get(found[0], 0)):
            began = time.process_time()
            resource.setrlimit(resource.RLIMIT_CPU, (int(began) + LIMIT, resource.RLIM_INFINITY))
            signal.alarm(8 * LIMIT)  # where it sleeps, or cannot be interrupted
            with suppress(pytest.skip.Exception):  # what needs more ranks than one
                test()
            took[name] = time.process_time() - began
    except BaseException as error:
        return (name, f"{type(error).__name__}: {error}"), took
    return None, took
