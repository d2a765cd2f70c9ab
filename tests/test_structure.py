"""What importing does, which way imports run, and life without MPI."""

import ast
import os
import re
import subprocess
import sys
from inspect import unwrap
from pathlib import Path
from types import FunctionType

import pytest
import registry
import tiers
import torch

import distdl as dd
import distdl.functional as F
from distdl import compiled

PACKAGE = Path(dd.__file__).parent
LAUNCHER_VARIABLES = ("OMPI_", "PMI", "PRTE_", "MPI_LOCAL", "HYDRA")


def run(code):
    env = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    env["PYTHONPATH"] = str(PACKAGE.parent)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_starts_neither_mpi_nor_cuda():
    code = """
import sys, distdl, distdl.functional
assert "mpi4py" not in sys.modules and "mpi4py.MPI" not in sys.modules
import torch
assert not torch.cuda.is_initialized()
P = distdl.Partition((2,)); L = distdl.Layout(P, (5,))
from distdl.plan import Plan, Side
plan = Plan(Side.of(L), Side.of(distdl.Layout(P, (5,), ((1, 4),))))
print([y.tolist() for y in plan.simulate([torch.arange(3.), torch.arange(3., 5.)])])
assert "mpi4py" not in sys.modules, "plans and simulate need no MPI"
"""
    assert run(code) == "[[0.0], [1.0, 2.0, 3.0, 4.0]]"


def test_one_rank_without_mpi4py():
    """Every movement works in a single process without mpi4py, and a launched one says what is missing."""
    code = """
import sys
sys.modules["mpi4py"] = None
import torch, distdl as dd, distdl.functional as F
P = dd.Partition((1, 1)); L = dd.Layout(P, (3, 4)); x = torch.arange(12.).reshape(3, 4).requires_grad_()
y = F.halo_exchange(F.repartition(x, P, P), dd.HaloSpec(L, 1, boundary="circular"))
y = F.all_sum_reduce(F.all_gather(F.reduce_scatter(y[1:-1, 1:-1], L), P), P)
loss = F.invariant_sum((F.shift(F.mark_varying(y, P), P, 0) ** 2).sum(), P)
loss.backward()
assert torch.equal(x.grad, 2 * x.detach())
H = torch.func.hessian(lambda x: (F.broadcast(x, P, P, shape=(3, 4)) ** 2).sum())(x.detach())
assert torch.equal(H.reshape(12, 12), 2 * torch.eye(12))
print(dd.world())
import os
os.environ["PMI_SIZE"] = "2"
dd.world().close()
try:
    dd.world()
except dd.errors.TransportError as error:
    print("launcher" in str(error), error.next_step)
"""
    first, second = run(code).splitlines()
    assert first == "World(rank 0 of 1, name='default', LocalTransport)" and second.startswith("True pip install")


# A module may import those of the lines above its own; inside a folder also its
# siblings.
ORDER = [set(line.split()) for line in """
    calls
    errors failure flat _names boxes
    _torch
    _value
    _faults
    partition
    _types
    plan
    _distributed
    compiled
    engine
    signature
    watching
    world ties
    nodes
    autograd
    pair
    linear_map
    algebra
    agree held
    index
    movement
    _kinds
    _arguments
    maps remat
    functional
    init
    func testing
    solve
    nn
    svg timeline_page
    viz checkpoint interop timeline forecast
    parallel
    programs
    __init__
    __main__
""".strip().splitlines()]  # fmt: skip
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}


def imported(path):
    """Top-level names inside distdl that a file imports at module level."""
    package = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = (*package[: len(package) - node.level + 1], *(node.module or "").split("."))
            base = tuple(b for b in base if b)
            yield from ([base[0]] if base else [a.name for a in node.names])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("distdl"):
            yield [*node.module.split("."), "__init__"][1]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    mine = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert mine in LEVEL, f"give {mine} a place in ORDER"
    for name in imported(path):
        if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists():
            above = name == mine or LEVEL[name] < LEVEL[mine]
            assert above, f"{mine} imports {name}, which does not stand above it in ORDER"


def test_tiers_name_files():
    """And what the second tier draws from are tests that are there."""
    files = {path.stem.removeprefix("test_"): path for path in Path(__file__).parent.rglob("test_*.py")}
    ranks = {name for name, path in files.items() if "mpi" in path.parts}
    assert {*tiers.RANKS, *tiers.FOUR, *tiers.BUT, *tiers.AGAIN, *tiers.DRAWN} <= ranks
    assert {*tiers.ONLY, *tiers.LATER} <= files.keys() - ranks
    for name, drawn in tiers.DRAWN.items():
        for _, _, tests in drawn:
            for function in re.findall(r"test_[a-z]\w+(?=\\\[)", tests):
                assert f"def {function}(" in files[name].read_text(), (name, function)


LONGEST = 450  # lines of a file
LONGER: dict[str, int] = {}  # files that are longer, with their lines: entries may go and numbers sink, nothing else


def test_files_are_short():
    lines = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {name: n for name, n in lines.items() if n > LONGEST} == LONGER


def test_the_three_files_to_read_first_are_a_thousand_lines():
    """docs/design.md sends a reader of the source to them."""
    lines = [len((PACKAGE / f"{name}.py").read_text().splitlines()) for name in ("partition", "plan", "linear_map")]
    assert sum(lines) <= 1000


def test_one_autograd_function():
    """DESIGN: one torch.autograd.Function is all movements; another recomputes under torch.func, as no checkpoint
    can."""
    classes = [(p.name, node) for p in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(p.read_text()))
               if isinstance(node, ast.ClassDef)]  # fmt: skip
    bases = "autograd.Function", "SingleLevelFunction"
    found = {(name, node.name) for name, node in classes if any(ast.unparse(b).endswith(bases) for b in node.bases)}
    assert found == {("autograd.py", "_Apply"), ("remat.py", "_Recompute")}


# Errors and agreements ask the stack for the public call (calls.py). Who still takes a name, and why; at most ten.
TAKE_OP = {
    "errors.DistdlError.__init__": "of what is no public call: a map, an engine, another rank's operator",
    "autograd.refuse_older_vmap": "backward and jvp are called by torch, and name the step",
    "functional.enter.check_bias": "public: layers written by users have names of their own",
    "world.World.check": "maps can be called by themselves, and have a name each",
}


def test_the_name_of_a_call_is_not_handed_down():
    """Whoever takes it as a parameter ``op`` stands in a list, which may only shrink."""

    def taking(node, path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            path = (*path, node.name)
        elif isinstance(node, ast.arg) and node.arg == "op":
            yield ".".join(path)
        for child in ast.iter_child_nodes(node):
            yield from taking(child, path)

    modules = [(p, p.relative_to(PACKAGE).with_suffix("").parts) for p in PACKAGE.rglob("*.py")]
    found = {name for path, module in modules for name in taking(ast.parse(path.read_text()), module)}
    assert found == set(TAKE_OP) and len(found) <= 4


def test_public_names():
    for module in (dd, F, dd.maps, dd.func, dd.testing):
        for name in module.__all__:
            thing = getattr(module, name)
            assert not callable(thing) or thing.__doc__, f"{name} has no docstring"


def test_every_name_is_public_or_private():
    """A submodule never stands where a user means a function: ``F.linear`` says ``F.dist_linear``."""
    for module in (dd, F, dd.maps, dd.nn):
        others = (
            {n for n in vars(module) if not n.startswith("_")}
            - set(module.__all__)
            - set(getattr(module, "_SUBMODULES", ()))
        )
        others -= {"programs"}  # programs: a test may have imported them
        assert not others, f"{module.__name__}: {others}"
    for module, name, meant in (
        (F, "linear", "dist_linear"),
        (F, "norm", "dist_norm"),
        (F, "loss", "dist_mse_loss|dist_l1_loss"),
        (F, "conv", "dist_conv"),
        (dd.nn, "layers", ""),
        (F, "relu", ""),
        (dd, "layout", "Layout"),
        (dd, "repartition", "mean distdl.functional.repartition[?]"),
        (dd.nn, "Repartition", "mean distdl.functional.repartition[?]"),  # DistDL's classes
        (dd.nn, "DistributedChannelConv2d", "mean Conv2d[?]"),
        (dd.nn, "DistributedMSELoss", "mean MSELoss"),
        (dd.nn, "BatchNorm1d", "mean BatchNorm[?]"),
        (F, "all_reduce", "mean all_sum_reduce"),
    ):
        assert not hasattr(module, name)
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'.*({meant})"):
            getattr(module, name)


def test_modules_are_imported_when_first_asked_for():
    code = """
import sys, distdl as dd
assert not {"distdl.programs.data", "distdl.viz", "sympy", "torch._dynamo"} & set(sys.modules)
assert dd.data.batches and dd.viz.__all__ and dd.data is sys.modules["distdl.programs.data"]
import distdl.functional.linear as m
from distdl.functional import norm
from distdl import plan
from distdl.engine import exchange
from distdl.functional.loss import dist_mse_loss
import distdl.functional as F
assert m.dist_linear is F.dist_linear and norm.__name__ == "distdl.functional.norm"
assert plan.Plan and not hasattr(F, "linear")
print("imported")
"""
    assert run(code) == "imported"


def test_executor_through_counting_and_null_transports():
    """What the executor hands to a transport: flat buffers in peer order, of exactly the planned bytes."""
    from distdl.engine import exchange
    from distdl.engine.local import LocalTransport, NullTransport
    from distdl.plan import Plan, Side

    posted = []

    class Counting(NullTransport):
        def post(self, sends, receives, call=None, memory=None):
            posted.append(([(p, n) for p, _, n in sends], [(p, n) for p, _, n in receives]))
            return super().post(sends, receives, call)

    L, M = dd.Layout(dd.Partition((4, 1)), (8, 8)), dd.Layout(dd.Partition((1, 4)), (8, 8))
    plan = Plan(Side.of(L), Side.of(M))
    x = torch.arange(16.0).reshape(2, 8)
    (y,) = exchange.Exchange((plan,), [x], Counting(1, 4)).finish()
    assert posted == [([(0, 16), (2, 16), (3, 16)], [(0, 16), (2, 16), (3, 16)])]
    assert y.shape == (8, 2) and torch.equal(y[2:4], x[:, 2:4]), "what stays is copied without the transport"
    posted.clear()
    exchange.Exchange((plan,), [torch.stack([x] * 3)], Counting(1, 4)).finish()
    assert posted[0][0] == [(0, 48), (2, 48), (3, 48)]
    alone = Plan(Side.of(dd.Layout(dd.Partition((1,)), (3,))), Side.of(dd.Layout(dd.Partition((1,)), (3,))))
    posted.clear()
    exchange.Exchange((alone,), [torch.ones(3)], Counting(0, 1)).finish()
    assert not posted
    with pytest.raises(dd.errors.ShapeError):
        exchange.Exchange((plan,), [torch.ones(3, 3)], Counting(1, 4)).finish()
    assert LocalTransport().all_gather(b"x", (0,)) == [b"x"]


def test_the_compiler_looks_into_no_call():
    """Each public function is a node of a compiled graph or evaluated while it is traced; in older torch a break. One
    makes a constant of what ranks tell: there it breaks."""
    attribute = "_torchdynamo_inline" if compiled.available else "_torchdynamo_disable"
    functions = {name: getattr(F, name) for name in F.__all__ if isinstance(getattr(F, name), FunctionType)}
    assert {"repartition", "roll", "halo_exchange", "wait", "dist_conv", "conv_layout"} <= functions.keys()
    assert hasattr(functions.pop("layout_of"), "_torchdynamo_disable")
    assert [name for name, function in functions.items() if not hasattr(function, attribute)] == []


def test_every_movement_has_cases():
    """So that the tests of tests/mpi/movement see it."""
    moved = {build(4)["map"].steps[0].name for _, build in registry.CASES.values()}
    movements = {name for name in F.__all__ if unwrap(getattr(F, name)).__module__.startswith("distdl.movement.")}
    spellings = {"zigzag", "block_cyclic"}  # of reorder, and calls of its cases
    no_movement = {"start", "wait", "reorder_layout", "positions", "zigzag_positions"}
    missing = movements - moved - spellings - no_movement
    assert not missing, f"give them cases in tests/registry.py: {missing}"


def test_ranks_share_no_temporary_folder_of_pytest():
    """Its clean-up at exit fails where several ranks do it at once: tests of a launch use the fixture ``folder``."""
    asking = [path.name for path in (Path(__file__).parent / "mpi").rglob("*.py") if "tmp_path" in path.read_text()]
    assert not asking


def test_mutants_that_change_nothing_exist(monkeypatch):
    """Each that is argued to change no result is a mutant of today's code."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "mutation")
    from equivalent import EQUIVALENT
    from mutate import named

    for module, lines in EQUIVALENT.items():
        found = {(text, what) for _, text, what, _ in named((PACKAGE / f"{module.replace('.', '/')}.py").read_text())}
        assert found >= {(text, what) for text, whats in lines.items() for what in whats}, module
