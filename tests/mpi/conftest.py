"""The engine that a launch tests, and one report for all its ranks."""

import tempfile
import weakref
from importlib import import_module
from pathlib import Path

import pytest
import tiers
import torch
from one_report import OneReport

import distdl as dd
import distdl.functional as F
from distdl import calls
from distdl.engine import dispatch
from distdl.engine.nccl import NcclTransport
from distdl.plan import View


def pytest_ignore_collect(collection_path, config):
    if collection_path.is_dir():
        return None
    tier = tiers.on_ranks(collection_path.stem.removeprefix("test_"), "", dd.world().size)
    named = any(collection_path == config.invocation_params.dir / str(arg) for arg in config.args)
    return True if not named and (tier == "never" or (tier and f"not {tier}" in config.option.markexpr)) else None


@pytest.hookimpl(tryfirst=True)  # before tests of other tiers are left out
def pytest_collection_modifyitems(items):
    n = dd.world().size
    for item in items:
        file = item.path.stem.removeprefix("test_")
        if tiers.on_ranks(file, item.name, n) == "full":
            item.add_marker("full")
            if tiers.spare(file, item.name, n):
                item.add_marker("spare")
        if any(n not in marker.args for marker in item.iter_markers("worlds")):
            item.add_marker("slow")


VIEWS = weakref.WeakSet()  # all that were made


def _noted(self, *args, init=View.__init__, **named):
    init(self, *args, **named)
    VIEWS.add(self)


View.__init__ = _noted


@pytest.hookimpl(trylast=True)  # after the terminal reporter is there
def pytest_configure(config):
    if not config.pluginmanager.has_plugin("one report"):
        use(config.getoption("--engine"))
        if dd.world().size > 1:
            config.pluginmanager.register(OneReport(config, dd.world()), "one report")


@pytest.fixture
def fresh_programs():
    """Programs are worked out anew for this test, and again after it: for tests that change what an engine can do."""

    def forget():
        for view in VIEWS:
            view.programs.clear()

    forget()
    yield
    forget()


@pytest.fixture
def folder():
    """A folder of this rank's own: pytest's are cleaned up at exit by all ranks at once, and they disturb each
    other."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


class _OnDevice(dispatch.Exchange):
    """A movement of CPU tensors by way of this rank's device."""

    __slots__ = ()

    def __init__(self, plans, xs, transport):
        super().__init__(plans, [x.cuda() for x in xs], transport)

    def finish(self):
        return [y.cpu() for y in super().finish()]


def use(engine):
    """Let every movement of CPU tensors go by another engine. With NCCL each one is copied to this rank's device and
    back, so that the whole suite is a test of the device's side too. "cuda": tensors are on this rank's device from the
    beginning, local computation too, for the tests that make theirs on torch's default device: those of dd.parallel."""
    if engine in ("fake-nccl", "fake-peer"):
        # Of the bindings by MPI, or of torch's own groups by gloo.
        fake = import_module("fake_torch_nccl" if hasattr(dd.world().host, "store") else engine.replace("-", "_"))
        engines = fake.engines(dd.world())
        dd.World.transport = lambda self, x, ranks: engines.get(ranks) if self.rank in ranks else self.host
    if engine == "cuda" and torch.cuda.is_available():  # elsewhere every test is skipped
        device = torch.device("cuda", dd.world().rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.set_default_device(device)
        F.shift(
            torch.zeros(1), dd.Partition((dd.world().size,)), 0
        )  # the ranks meet now, so that tests count their own messages
    if engine == "nccl-messages":
        NcclTransport.collectives = ("all_reduce",)
    if engine in ("nccl", "nccl-messages"):
        calls._known[__file__] = False  # the line below is no user's
        device = torch.device("cuda", dd.world().rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        transport = dd.World.transport
        dd.World.transport = lambda self, x, ranks: transport(
            self, x if x.device.type != "cpu" else x.to(device), ranks
        )
        dispatch.Exchange = dispatch.begin_exchange = _OnDevice
