"""Who may run what: functions go to processes started for them, by private files and no shell; plans are plain
values."""

import ast
import importlib
import io
import os
import pickle
import pickletools
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import distdl as dd
from distdl.plan import Plan, Side

launcher = importlib.import_module("distdl.programs.launch")  # dd.launch is the function
PACKAGE = Path(dd.__file__).parent
needs_mpi = pytest.mark.skipif(launcher.find_mpi() is None, reason="needs mpi4py and an MPI library")


def calls():
    """(file, name as written, node) of every call in the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield path.relative_to(PACKAGE).as_posix(), ast.unparse(node.func), node


def test_nothing_is_run_by_a_shell_or_from_text():
    forbidden = {
        "eval",
        "exec",
        "compile",
        "os.system",
        "os.popen",
        "subprocess.getoutput",
        "subprocess.getstatusoutput",
        "torch.load",
        "marshal.loads",
        "marshal.load",
        "shelve.open",
        "yaml.load",
        "__import__",
    }
    for file, name, node in calls():
        assert name not in forbidden, f"{file}:{node.lineno} calls {name}"
        for keyword in node.keywords:
            assert keyword.arg != "shell", f"{file}:{node.lineno} names a shell"
        if name.startswith("subprocess."):
            assert isinstance(node.args[0], ast.List), f"{file}:{node.lineno}: a command is a list of words"


def test_pickles_are_read_where_their_writer_is_known():
    """The files of a launch, in a folder of its own, and messages between ranks of one job. Nowhere else."""
    readers = {file for file, name, _ in calls() if name in ("pickle.load", "pickle.loads", "pickle.Unpickler")}
    readers |= {file for file, name, node in calls() if name == "map" and ast.unparse(node.args[0]) == "pickle.loads"}
    messages = {"signature.py", "watching/lookout.py", "watching/observer.py", "forecast/tracer.py"}
    assert readers == {"programs/launch.py", "programs/_rank.py", "world.py", *messages}
    imported = {path.name for path in PACKAGE.rglob("*.py") if "socket" in path.read_text()}
    assert imported == {"rendezvous.py", "_ranks.py"}, (
        "the library opens no connection of its own; one looks for a port that is free, one listens at 127.0.0.1"
    )
    assert 'socket.create_server(("127.0.0.1", 0)' in (PACKAGE / "programs" / "_ranks.py").read_text()
    opened = {
        (file, name)
        for file, name, _ in calls()
        if name.endswith((".listen", ".connect", ".accept", ".sendall", ".recv"))
        and "socket" in (PACKAGE / file).read_text()
    }
    assert not opened


class Plain(pickle.Unpickler):
    """Loads values of distdl's own plain classes, and refuses everything else."""

    def find_class(self, module, name):
        if (module, name) not in {
            ("distdl.partition", "Partition"),
            ("distdl.partition", "Layout"),
            ("distdl.plan", "Plan"),
            ("distdl.plan", "Side"),
            ("distdl.plan", "Axis"),
            ("distdl.movement.halo", "HaloSpec"),
        }:
            raise pickle.UnpicklingError(f"{module}.{name} is no plain value")
        return super().find_class(module, name)


def test_a_plan_is_a_plain_value():
    """Reading one needs five classes that hold numbers, and no function: nothing in it is run."""
    L = dd.Layout(dd.Partition((2, 2), (3, 1, 0, 2)), (5, 7), (None, (0, 7)))
    spec = dd.HaloSpec(L, 1, boundary="circular")
    for value in (L, spec, spec.plan(), Plan(Side.of(L), Side.of(L)).T):
        hash(value)
        data = pickle.dumps(value)
        assert Plain(io.BytesIO(data)).load() == value
        assert not {op.name for op, _, _ in pickletools.genops(data)} & {"REDUCE", "INST", "OBJ"}, (
            "only NEWOBJ, without arguments"
        )
    with pytest.raises(pickle.UnpicklingError, match="no plain value"):
        Plain(io.BytesIO(pickle.dumps(print))).load()


def test_the_command_is_the_interpreter_and_no_shell(monkeypatch):
    seen = []

    class Stopped(Exception):
        pass

    def popen(command, **options):
        seen.append((command, options))
        raise Stopped

    counts = (1, 2) if launcher.find_mpi() and launcher.find_launcher() else (1,)
    monkeypatch.setattr(subprocess, "Popen", popen)
    for n in counts:
        with pytest.raises(Stopped):
            dd.launch(print, n)("$(touch owned); `touch owned`")
        command, options = seen.pop()
        words = command[3 * (n > 1) :]
        assert len(words) == 5 and words[0] == sys.executable and words[1] == launcher._RANK and words[3] == "--call"
        assert command[: -len(words)] == ([launcher.find_launcher(), "-n", str(n)] if n > 1 else [])
        assert not options.get("shell") and options["stdin"] == subprocess.DEVNULL
        assert "touch" not in " ".join(command), "arguments travel by file"
        assert not Path(words[2]).exists(), "the folder is gone"


def test_words_are_not_expanded(tmp_path):
    (tmp_path / "a; touch owned.py").write_text("import sys; print(sys.argv[1:])")
    words = ["run", "a; touch owned.py", "$(touch owned)", "`touch owned`", "*"]
    done = subprocess.run([sys.executable, "-m", "distdl", *words], capture_output=True, text=True, cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)})  # fmt: skip
    assert done.stdout == f"{words[2:]}\n", done.stderr
    assert not (tmp_path / "owned").exists()


def test_the_folder_of_a_launch_is_private():
    def look():
        folder = Path(sys.argv[1])
        return (
            stat.S_IMODE(folder.stat().st_mode),
            folder.stat().st_uid == os.getuid(),
            sorted(p.name for p in folder.iterdir()),
        )

    assert dd.launch(look, 1)() == [(0o700, True, ["job", "roll"])]


@needs_mpi
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="looks into /proc")
def test_no_rank_listens_on_a_network():
    """Neither the ranks of a launched function nor this process wait for connections, but on loopback."""

    def listening():
        import torch

        import distdl as dd
        import distdl.functional as F

        P = dd.Partition((dd.world().size,))
        assert F.all_sum_reduce(torch.ones(1), P).item() == P.size
        links = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.islink(f"/proc/self/fd/{fd}")
        ]
        mine = {link[8:-1] for link in links if link.startswith("socket:[")}
        rows = [row.split() for file in ("tcp", "tcp6") for row in Path("/proc/net", file).read_text().splitlines()[1:]]
        loopback = ("0100007F:", "00000000000000000000000001000000:")
        return [row[1] for row in rows if row[3] == "0A" and row[9] in mine and not row[1].startswith(loopback)]

    found = dd.launch(listening, 2, timeout=120)()
    if launcher.find_mpi().vendor == "Open MPI":
        assert found == [[], []]
