"""Two faults of torch's inductor that compiled code goes round, each in a few lines: asserted of the torch that is
pinned, looked for in others."""

import os
import shutil

import pytest
import torch

from distdl import compiled

PINNED = torch.__version__.startswith("2.13.")
pytestmark = [
    pytest.mark.skipif(
        not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")),
        reason="inductor needs a C++ compiler",
    ),
    pytest.mark.skipif(not compiled.available, reason="this torch's graphs have no movements"),
    pytest.mark.filterwarnings("ignore"),
]


def report(there: bool, what: str) -> None:
    """A fault must be there in the torch that is pinned: else what goes round it may go."""
    if not PINNED:
        pytest.skip(f"{what}: {'still there' if there else 'mended'} in torch {torch.__version__}")
    assert there, f"{what}: mended? Then look at what goes round it."


def test_wrapping_integers():
    """Products of places that wrap, as random.py has them: refused, or other numbers. (There: ``distdl::bits``.)"""
    f = lambda: (torch.arange(4) + 5) * -7046029254386353131 >> 30
    try:
        wrong = not torch.equal(torch.compile(f)(), f())
    except Exception as error:
        wrong = "too big" in str(error)
    report(wrong, "int64 products of an arange")


def test_the_order_of_effects(monkeypatch):
    """What a token stands for is noted by a buffer's name, looked for by an operation's. (There: ``keep_order``.)"""
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.virtualized import V

    library = torch.library.Library("distdl_test", "DEF")
    library.define("noted(Tensor x) -> Tensor")
    library.impl("noted", torch.clone, "CPU")
    torch.library.register_fake("distdl_test::noted", torch.empty_like, lib=library)
    _register_effectful_op(torch.ops.distdl_test.noted.default, _EffectType.ORDERED)
    looked_for, noted = set(), set()

    def init(self, operations, before=Scheduler.__init__):
        noted.update(V.graph.additional_star_deps)
        looked_for.update(operation.get_operation_name() for operation in operations)
        before(self, operations)

    monkeypatch.setattr(Scheduler, "__init__", init)
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    noted_twice = lambda x: (torch.ops.distdl_test.noted(x.sin()), torch.ops.distdl_test.noted(torch.ones(3)))
    torch.compile(noted_twice, fullgraph=True)(torch.ones(3))
    assert noted and looked_for
    report(not noted & looked_for, "the order of effects")
