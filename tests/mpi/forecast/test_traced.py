"""A trace on one process lists, for every rank, what that rank sends: kinds, peers and bytes, in order."""

import pytest
import registry
import torch
from sweep import BUILDERS, SCALARS, SETTINGS, Setting, _tuple

import distdl as dd
from distdl.errors import DistdlError

N, RANK = dd.world().size, dd.world().rank
# Numbers decide what these send, or to whom, on ranks that have any.
DATA = {"dist_deposit", "dist_expert_linear", "dist_sample", "expert_parallel", "nn.ExpertLinear", "sample_index"}
ALIKE = {"sizes of vmap", "a seed for parameters"}  # what ranks ask of each other although all of them know it


def leaves(parts):
    return [p.detach().requires_grad_(p.is_floating_point() or p.is_complex()) for p in parts]


def differentiated(run, xs):
    """Forward and backward: of the sum of all results."""
    ys = [y for y in _tuple(run(*xs)) if isinstance(y, torch.Tensor) and y.requires_grad]
    if ys:
        torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])


def sent(messages):
    """How many bytes an agreement takes depends on what is agreed on."""
    return [(kind, ranks, 0 if kind == "agree" else n) for kind, ranks, n in messages]


def compared(run, parts, decided=False):
    """What is wrong with the trace of ``run`` on this rank; "" if nothing is."""
    where, asked = dd.world(), set()

    def all_gather(value, ranks, purpose="agreement"):
        ranks = tuple(ranks)
        asked.update({purpose} if len(ranks) > 1 else ())
        return dd.World.all_gather(where, value, ranks, purpose)

    where.all_gather = all_gather
    try:
        with dd.testing.count_messages() as real:
            differentiated(run, leaves(parts))
    except DistdlError as error:  # not for such tensors
        real = type(error)
    finally:
        del where.all_gather
    try:
        found = dd.trace(run, *leaves(parts), size=N, rank=RANK, backward=True).messages
    except DistdlError as error:
        wished = real if isinstance(real, type) else DistdlError if asked - ALIKE or decided else ()
        return "" if isinstance(error, wished) else f"{asked}: {error}"
    if isinstance(real, type) or asked - ALIKE:
        return f"traced, although it asks for {asked}, or is refused: {real}"
    return "" if sent(found) == sent(real) else f"traced {found}, sent {real}"


def traceable(name):
    """(setting, this rank's call) wherever the call is valid and has layouts."""
    for setting in SETTINGS:
        if "bare" not in setting and (setting != "scalar" or name in SCALARS) and ("outside" not in setting or N > 1):
            yield setting, BUILDERS[name](Setting(setting))


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_every_function(name):
    found = [(setting, compared(call.run, call.parts(), name in DATA)) for setting, call in traceable(name)]
    wrong = [f"{setting}: {text}" for setting, text in found if text]
    dd.testing.collective_assert(not wrong, f"{name}: {wrong}")


@registry.each_case()
def test_every_movement(case):
    wrong = [compared(A, [torch.ones(A.in_shape, dtype=torch.float64)]) for A in (case.map, case.map.T)]
    dd.testing.collective_assert(not any(wrong), str(wrong))
