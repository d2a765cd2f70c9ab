"""Jobs that tests start: a quick command line, and whether their processes are gone."""

import subprocess
import sys
import time
from pathlib import Path

import distdl as dd

# `python -m distdl` without the two seconds in which the package imports torch: the command line needs only some of its
# modules. What runs on the ranks imports the whole package. The tests of documents and of benchmarks begin with the
# real command.
LIGHT = f"""
import sys, types
sys.modules["distdl"] = package = types.ModuleType("distdl")
package.__path__ = {dd.__path__!r}
from distdl.programs.cli import main
sys.exit(main())
"""


def command(*args):
    return [sys.executable, "-c", LIGHT, *map(str, args)]


def run(*args, **options):
    """Run the command line; returns (exit code, stdout, stderr)."""
    done = subprocess.run(
        command(*args), capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, **options
    )
    return done.returncode, done.stdout, done.stderr


def alive(pid):
    """Whether a process runs; one that is dead but not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids, within=10.0):
    """Wait until none of the processes runs."""
    until = time.monotonic() + within
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.1)
    return not any(map(alive, pids))
