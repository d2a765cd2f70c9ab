"""Errors: which parts they carry, on which rank, and that they survive the way to another process."""

import ast
import pickle
from pathlib import Path

import pytest
from one_process import every_rank

import distdl as dd
from distdl.errors import AgreementError, CheckpointError, DistdlError, PartitionError, ShapeError, TransportError

PACKAGE = Path(dd.__file__).parent
KINDS = {kind.__name__ for kind in (PartitionError, ShapeError, AgreementError, CheckpointError, TransportError)}
PARTS = ("op", "partitions", "expected", "actual", "rank", "next_step")


def raised():
    """(place, names of the parts) of every error that the package makes."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS:
                names = {k.arg for k in node.keywords}
                if None not in names:  # **parts
                    yield f"{path.relative_to(PACKAGE)}:{node.lineno}", names


def test_every_error_says_what_and_why():
    """The operator, always; and what was expected beside what came, or the next step where there is no such pair."""
    found = list(raised())
    assert len(found) > 100
    for place, names in found:
        assert "op" in names and (names >= {"expected", "actual"} or "next_step" in names), place


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
        assert str(error) == ("f: broken; expected 1, got 2; on rank 3; partitions: Partition((2, 2)) -> Partition((1,)); "
                              "next step: mend it")  # fmt: skip
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind and str(again) == str(error) and again.args == error.args
        assert [getattr(again, part) for part in PARTS] == [getattr(error, part) for part in PARTS]
    assert str(ShapeError("broken")) == "broken" and str(ShapeError("broken", actual=1)) == "broken; expected None, got 1"
    with pytest.raises(ValueError, match="broken"):
        raise ShapeError("broken")
