"""Worlds: several of them, and nothing that is left behind by many calls or by worlds that were closed."""

import os
import resource

import pytest
import torch
from registry import needs

import distdl as dd
import distdl.functional as F
from distdl.errors import TransportError


def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize()


def exercise(calls, n, r):
    """Movements of ever-changing shapes: box plans, collectives, agreement, graphs that are dropped before their
    backward."""
    P, Q = dd.Partition((n, 1)), dd.Partition((1, n))
    line = dd.Partition((n,))
    for k in range(calls // 5):
        a, b = 1 + k % 61, 1 + k * 7 % 53
        L = dd.Layout(P, (a, b))
        x = torch.ones(L.local_shape(), requires_grad=k % 2 == 0)
        F.repartition(x, L, Q)
        F.repartition(x, P, Q)
        F.halo_exchange(x, dd.HaloSpec(L, 1, boundary="zeros"))
        F.all_sum_reduce(torch.ones(k % 97), line)
        y = F.shift(torch.ones(k % 89 + 1, requires_grad=True), line, 0)
        if k % 3 == 0:
            y.sum().backward()


def check_no_leak(calls, growth):
    n, r = dd.world().size, dd.world().rank
    exercise(max(calls // 5, 3000), n, r)  # caches fill (of plans and, under checking, of calls), allocators settle
    groups, before = len(getattr(dd.world().host, "groups", ())), resident()
    exercise(calls, n, r)
    grown = resident() - before
    dd.testing.collective_assert(len(getattr(dd.world().host, "groups", ())) == groups, "communicators were left")
    dd.testing.collective_assert(grown < growth, f"{grown / 2**20:.1f} MiB more after {calls} calls")


@pytest.mark.worlds(1, 2)  # seconds of every rank
def test_no_leak():
    check_no_leak(3000 if dd.world().size <= 4 else 1000, 16 * 2**20)


@pytest.mark.slow
def test_case_25_no_leak_in_100_000_calls():
    check_no_leak(100_000, 24 * 2**20)


@pytest.mark.of_mpi
@needs(2)
def test_too_many_groups_is_an_error(monkeypatch):
    """A limit, never an eviction: an eviction that differs by rank hangs."""
    from distdl.engine import mpi

    host = dd.world().host
    monkeypatch.setattr(mpi, "_MAX_GROUPS", len(host.groups))
    fresh = next(g for g in ((0, 1), (0,), (1,)) if g not in host.groups)
    if dd.world().rank in fresh:
        with pytest.raises(TransportError, match="groups"):
            host.group(fresh)


def test_a_world_of_its_own():
    """Another world on a duplicate communicator: the same numbers, its own partitions, freed again."""
    n, r = dd.world().size, dd.world().rank
    other = dd.World(name="other")
    try:
        P = dd.Partition((n,), world="other")
        assert P.index() == (r,) and F.all_sum_reduce(torch.ones(1), P).item() == n
        assert F.all_gather(torch.tensor([r]), P).tolist() == list(range(n))
        with pytest.raises(dd.errors.DistdlError):
            F.repartition(torch.ones(1), P, dd.Partition((n,)))
    finally:
        other.close()
    with pytest.raises(dd.errors.PartitionError, match="no such world"):
        dd.Partition((1,), world="other").index()


def test_a_closed_world_keeps_no_file():
    """Neither its board's memory nor anything else."""

    def opened():
        return len(os.listdir("/proc/self/fd"))

    dd.World(name="other").close()
    before = opened()
    for _ in range(20):
        dd.World(name="other").close()
    dd.testing.collective_assert(opened() <= before, f"{opened() - before} files were left open by 20 worlds")
