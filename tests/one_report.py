"""One report for a whole launch: rank 0 prints pytest's output, the other ranks only what fails on them.

A rank that fails prints its report and ends the job: its peers wait for messages that it did not send, and afterwards
ranks would be out of step.
"""

import io
import sys
import time

import pytest


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
