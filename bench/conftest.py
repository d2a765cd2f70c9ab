"""The suite's fixtures: pytest-benchmark collects and writes, ``distdl.programs.bench.timing`` takes the samples.

pytest-benchmark runs one candidate to its end before the next, and calibrates on each rank by itself. Here all
candidates of a case take turns, in a fixed number of rounds with a barrier before each, and the slowest rank's time
counts; pytest-benchmark is given the finished samples.
"""

import pytest
import torch
from mpi4py import MPI
from one_report import OneReport

import distdl as dd
from distdl.programs.bench.timing import environment, sample

from . import peers, peers_dense  # noqa: F401 - each registers its own

COMM = MPI.COMM_WORLD


def pytest_addoption(parser):
    group = parser.getgroup("distdl")
    group.addoption("--full", action="store_true", help="every size and dtype, not the few of a quick run")
    group.addoption("--rounds", type=int, default=15, help="rounds of each case, the same on all ranks")
    group.addoption("--peer", metavar="distdl=PATH", help="a checkout of microsoft/distdl to compare with")


@pytest.hookimpl(tryfirst=True)  # before pytest-benchmark reads its options
def pytest_configure(config):
    torch.set_num_threads(1)  # ranks share the cores
    config.addinivalue_line("markers", "full: only with --full")
    if COMM.rank:
        config.option.benchmark_json = None


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session):
    peers.start_gloo()
    if COMM.size > 1:
        session.config.pluginmanager.register(OneReport(session.config, dd.world()), "one report")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--full"):
        skipped = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=skipped)


def pytest_report_header():
    return [f"peer {name} is left out: {why}" for name, why in peers.MISSING.items()]


def pytest_benchmark_update_machine_info(machine_info):
    machine_info.clear()  # not this machine's name
    machine_info.update(environment(COMM.size))


def pytest_benchmark_update_commit_info(commit_info):
    for key in ("project", "branch", "author_time"):
        commit_info.pop(key, None)


@pytest.fixture
def timed(benchmark, request):
    """``timed(case)``: check the peers, take the samples, hand them to pytest-benchmark: one entry for each
    candidate."""

    def run(case, with_peers=True, comm=COMM):
        if with_peers:
            peers.add_peers(case)
        rounds = request.config.getoption("--rounds")
        times = sample(case.calls, comm, rounds=rounds, inner=case.inner)
        benchmark._mode = "paired"  # used: pytest-benchmark warns of a fixture that was not
        for candidate, seconds in times.items():
            stats = benchmark._make_stats(case.inner)  # its only way in for finished samples
            stats.name, stats.group, stats.params = f"{case.result.name}: {candidate}", case.result.name, None
            stats.extra_info = {**case.result.facts(), "candidate": candidate}
            for t in seconds:
                stats.update(t * case.inner)
        case.result.times = times
        return case.result

    return run


def pytest_sessionfinish():
    COMM.Barrier()
