"""Errors: which parts they carry, on which rank, and that they survive the way to another process."""

import ast
import pickle
from pathlib import Path

import pytest
from one_process import every_rank

import distdl as dd
from distdl import errors
from distdl.errors import (
    AgreementError,
    CheckpointError,
    DistdlError,
    PartitionError,
    RankError,
    ShapeError,
    TransportError,
)
from distdl.signature import disagreement

PACKAGE = Path(dd.__file__).parent
PARTS = ("op", "partitions", "expected", "actual", "rank", "next_step")
GRIDS = {
    "P",
    "P_src",
    "P_dst",
    "Q",
    "L",
    "layout",
    "layouts",
    "in_layout",
    "partition",
    "partitions",
    "plan",
    "plans",
    "maps",
}
NO_GRID = "agree.py", "partition_of"  # what it is given is no partition: that is the error


def raised():
    """(file, line, names of the functions around it, names that are known there, the call's parts) of every error made
    here."""

    def walk(node, functions, known):
        if isinstance(node, ast.FunctionDef):
            functions = (*functions, node.name)
            known = known | {
                n.id if isinstance(n, ast.Name) else n.arg
                for n in ast.walk(node)
                if isinstance(n, ast.arg) or (isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            }
        elif isinstance(node, ast.ClassDef):
            known = known | {
                n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"
            }
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in errors.__all__:
            parts = {k.arg for k in node.keywords}
            if any(k.arg is None and ast.unparse(k.value).startswith("disagreement(") for k in node.keywords):
                parts |= set(disagreement("the dtype", {0: "float32", 1: "float64"}))
            yield str(path.relative_to(PACKAGE)), node.lineno, functions, known, parts
        for child in ast.iter_child_nodes(node):
            yield from walk(child, functions, known)

    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name != "errors.py":
            yield from walk(ast.parse(path.read_text()), (), frozenset())


def test_every_error_has_all_its_parts():
    """What was expected, what came, and the next step; the operator and its partitions where an error names them itself
    rather than find them on the stack."""
    found = list(raised())
    assert len(found) > 150
    for file, line, functions, known, parts in found:
        wanted = {"expected", "actual", "next_step"}
        if "op" in parts and known & GRIDS and (file, *functions) != NO_GRID:
            wanted |= {"partitions"}
        assert parts >= wanted, f"{file}:{line} lacks {sorted(wanted - parts)}"
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert {name for name in kinds if not name.startswith("_")} == set(errors.__all__), "all of them are public"


def test_parts_and_rank():
    """The rank is where it was raised, also where the message leaves it out, and nowhere where no world runs."""

    def program():
        dd.Partition((2,)).take(0, 5)

    for rank, error in enumerate(every_rank(3, program)):
        assert (error.rank, error.op, error.actual, error.expected) == (rank, "Partition.take", 5, "an index of 2")
        assert "rank" not in str(error).partition(";")[0] and isinstance(error, (DistdlError, ValueError))
    for kind in (PartitionError, ShapeError, AgreementError, CheckpointError, TransportError):
        grids = dd.Partition((2, 2)), dd.Partition((1,))
        error = kind("broken", op="f", partitions=grids, expected=1, actual=2, rank=3, next_step="mend it")
        assert str(error) == (
            "f: broken; expected 1, got 2; on rank 3; partitions: Partition((2, 2)) -> Partition((1,)); "
            "next step: mend it"
        )
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind and str(again) == str(error) and again.args == error.args
        assert [getattr(again, part) for part in PARTS] == [getattr(error, part) for part in PARTS]
    failed = RankError(
        "rank 1 of 2 failed", op="launch", expected=1, actual=2, rank=1, next_step="mend it", traceback="Trace\nback"
    )
    again = pickle.loads(pickle.dumps(failed))
    assert str(again) == str(failed) and str(failed).endswith("next step: mend it\n\nTrace\nback") and again.rank == 1
    assert (
        str(ShapeError("broken")) == "broken" and str(ShapeError("broken", actual=1)) == "broken; expected None, got 1"
    )
    with pytest.raises(ValueError, match="broken"):
        raise ShapeError("broken")
