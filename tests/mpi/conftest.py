"""One report for a whole launch: rank 0 prints pytest's output, the other ranks only what fails on them.

A rank that fails prints its report and ends the job: its peers wait for messages that it did not send, and afterwards ranks
would be out of step.
"""

import io
import sys
import time

import pytest
import torch

import distdl as dd
from distdl.transport.nccl import NcclTransport

linear_map = sys.modules["distdl.linear_map"]  # dd.linear_map is the function

# Layers are compositions: 1 to 4 ranks show every way of splitting them. More ranks are for the movements.
LAYERS = ("checkpoint", "conv", "dropout_init", "embedding", "expert", "fuzz_layers", "interpolate", "linear", "local", "loss",
          "neon", "networks", "nn", "norm", "parallel_average", "parallel_data", "parallel_grid", "parallel_hooks",
          "parallel_pipeline", "parallel_precision", "parallel_shard", "parallel_topology", "pool", "reduce", "remat", "rendezvous",
          "transition")
collect_ignore = [f"test_{name}.py" for name in LAYERS] if dd.world().size > 4 else []


@pytest.hookimpl(trylast=True)  # after the terminal reporter is there
def pytest_configure(config):
    if not config.pluginmanager.has_plugin("one report"):
        use(config.getoption("--engine"))
        if dd.world().size > 1:
            config.pluginmanager.register(OneReport(config, dd.world()), "one report")


def use(engine):
    """Let every movement of CPU tensors go by another engine. With NCCL each one is copied to this rank's device and back, so
    that the whole suite is a test of the device's side too."""
    if engine == "fake-nccl":
        import fake_nccl

        engines = fake_nccl.engines(dd.world())
        dd.World.transport = lambda self, x, ranks: engines.get(ranks) if self.rank in ranks else self.host
    if engine == "nccl-messages":
        NcclTransport.collectives = ("all_reduce",)
    if engine in ("nccl", "nccl-messages"):
        run = linear_map.run_plain
        device = torch.device("cuda", dd.world().rank % torch.cuda.device_count())
        linear_map.run_plain = lambda maps, xs, *more: [y.cpu() for y in run(maps, [x.to(device) for x in xs], *more)]


class OneReport:
    def __init__(self, config, world):
        self.world, self.failed = world, False
        self.capture = config.pluginmanager.get_plugin("capturemanager")
        if world.rank:
            self.output = config.get_terminal_writer()._file = io.StringIO()  # pytest has no public way

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        if report.failed:
            sections = "".join(f"\n--- {name} ---\n{text}" for name, text in report.sections)
            self.say(f"{report.nodeid} failed in {report.when}\n{report.longreprtext}{sections}")
            time.sleep(1)  # ranks that fail at the same place speak too
            self.world.host.abort(1)

    def pytest_sessionfinish(self, exitstatus):
        self.failed = exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)

    def pytest_unconfigure(self):
        if self.failed and self.world.rank:  # in collecting, for example
            self.say(self.output.getvalue())

    def say(self, text):
        if self.capture:
            self.capture.suspend_global_capture(in_=True)
        lines = "".join(f"[rank {self.world.rank}] {line}\n" for line in text.splitlines())
        sys.stderr.write(lines)
        sys.stderr.flush()
