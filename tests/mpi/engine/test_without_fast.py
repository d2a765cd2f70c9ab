"""Each fast path may be removed: movements, their derivatives and the layers are as right without any one of them, and
without all."""

import sys

import pytest
from mpi.functional.test_sweep import test_sweep as check_layers
from mpi.movement.test_derivatives import test_grad, test_jvp, test_nested_jvp, test_second_order
from mpi.movement.test_value import test_adjoint_value, test_results_are_reproducible, test_value
from sweep import BUILDERS

from distdl.engine import fast

__all__ = ["test_adjoint_value", "test_grad", "test_jvp", "test_nested_jvp", "test_results_are_reproducible",
           "test_second_order", "test_value"]  # fmt: skip
FILES = [type(path).__module__.rpartition(".")[2] for path in fast.paths]


@pytest.fixture(autouse=True, params=[*FILES, "all"], ids=lambda name: f"without {name}")
def without(request, monkeypatch, fresh_programs):
    """Take a fast path away as ``DISTDL_FAST`` would, wherever the engine has the list of them."""
    left = [name for name in FILES if request.param not in (name, "all")]
    monkeypatch.setenv("DISTDL_FAST", ",".join(left))
    paths = fast._paths()
    assert len(paths) == len(left)
    scratch = next((path for path in paths if type(path).take is not fast.Fast.take), fast.Plain())
    changed = 0
    for module in [module for name, module in sys.modules.items() if name.startswith("distdl.engine")]:
        for name, value in (("paths", paths), ("scratch", scratch)):
            if getattr(module, name, None) is getattr(fast, name) and module is not fast:
                monkeypatch.setattr(module, name, value)
                changed += 1
    assert changed == 2, "engine/program.py asks them"


@pytest.mark.parametrize("name", sorted(name for name in BUILDERS if name.startswith("dist_")))
def test_layers(name):
    check_layers(name, False)
