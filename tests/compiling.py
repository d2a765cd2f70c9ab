"""Compiled code beside the same in eager: results, gradients and messages."""

import os
import shutil

import pytest
import torch
from serial import randn

import distdl as dd
from distdl import compiled
from distdl.testing import collective_assert, count_messages

BACKENDS = ("aot_eager", "inductor")
_CPP = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
N, RANK = dd.world().size, dd.world().rank
MARKS = [
    pytest.mark.skipif(not compiled.available, reason="this torch knows no constants of other classes in graphs"),
    pytest.mark.filterwarnings("ignore"),  # torch's compiler has warnings of its own, others in each version
    pytest.mark.usefixtures("fresh"),
]
CHECKED = bool(os.environ.get("DISTDL_CHECK"))  # then cotangents are equal, as is asked of invariant values
D = dd.Layout(dd.Partition((N, 1)), (2 * N + 1, 3), ((3, *(2,) * (N - 1)), None))  # uneven
M = dd.Layout(dd.Partition((1, N)), D.shape, (None, (*(0,) * (N - 1), 3)))  # all of it on the last rank


def needs_cpp(backend="inductor"):
    """Skips a test where inductor has no compiler of its code for CPUs."""
    if backend == "inductor" and not _CPP:
        pytest.skip("inductor needs a C++ compiler")


@pytest.fixture
def fresh():
    """Nothing is compiled yet."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def block(seed=1, L=D):
    """This rank's block of a random tensor."""
    return L.shard(randn(*L.shape, seed=seed))


def _tuple(y):
    return tuple(y) if isinstance(y, (tuple, list)) else (y,)


def found(f, inputs, parameters=()):
    """(results and gradients of ``f``, the messages)."""
    for p in parameters:
        p.grad = None
    inputs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    with count_messages() as sent:
        ys = [y for y in _tuple(f(*inputs)) if isinstance(y, torch.Tensor)]
        followed = [y for y in ys if y.requires_grad]
        weights = [randn(*y.shape, seed=40 + RANK * (not CHECKED)).to(y.dtype) for y in followed]
        if followed:
            torch.autograd.backward(followed, weights)
    return [*(y.detach() for y in ys), *(t.grad for t in (*inputs, *parameters))], list(sent)


def fault(f, inputs, backend="aot_eager", parameters=(), exact=True, messages=True, fullgraph=True):
    """What compiled code does otherwise than eager; "" where nothing."""
    needs_cpp(backend)
    wished, direct = found(f, inputs, parameters)
    ours, sent = found(torch.compile(f, backend=backend, fullgraph=fullgraph), inputs, parameters)
    if messages and sent != direct:
        return f"messages {sent}, in eager {direct}"
    for a, b in zip(ours, wished, strict=True):
        if (a is None) != (b is None) or (a is not None and (a.shape, a.dtype) != (b.shape, b.dtype)):
            return f"{a}, in eager {b}"
        if a is None or torch.equal(a, b) or (a.isnan().any() and torch.equal(a.isnan(), b.isnan())):
            continue
        if (exact and backend == "aot_eager") or not torch.allclose(a, b, rtol=1e-12, atol=1e-12):
            return f"off by {(a - b).abs().max()}"
    return ""


def check(f, *inputs, **options):
    collective_assert(not (text := fault(f, inputs, **options)), text)
