"""torch.compile: every public function compiled against itself in eager, bit for bit, and with the same messages."""

import random

import pytest
import torch
from fuzzing import seed_of
from serial import randn
from sweep import BUILDERS, Setting, _tuple
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

import distdl as dd
import distdl.functional as F
from distdl import compiled
from distdl.errors import AgreementError
from distdl.testing import collective_assert, count_messages, gather_objects

pytestmark = [
    pytest.mark.skipif(not compiled.available, reason="this torch knows no constants of other classes in graphs"),
    pytest.mark.filterwarnings("ignore"),  # torch's compiler has warnings of its own, others in each version
]
N, RANK = dd.world().size, dd.world().rank
BACKENDS = ("aot_eager", "inductor")
D = dd.Layout(dd.Partition((N, 1)), (2 * N + 1, 3), ((3, *(2,) * (N - 1)), None))  # uneven
M = dd.Layout(dd.Partition((1, N)), D.shape, (None, (*(0,) * (N - 1), 3)))  # all of it on the last rank


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def block(seed=1, L=D):
    return L.shard(randn(*L.shape, seed=seed))


def found(f, inputs, parameters=()):
    """(results and gradients of ``f``, the messages)."""
    for p in parameters:
        p.grad = None
    inputs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    with count_messages() as sent:
        ys = [y for y in _tuple(f(*inputs)) if isinstance(y, torch.Tensor)]
        followed = [y for y in ys if y.requires_grad]
        weights = [randn(*y.shape, seed=40 + RANK).to(y.dtype) for y in followed]
        if followed:
            torch.autograd.backward(followed, weights)
    return [*(y.detach() for y in ys), *(t.grad for t in (*inputs, *parameters))], list(sent)


def fault(f, inputs, backend="aot_eager", parameters=(), exact=True, messages=True, fullgraph=True):
    """What compiled code does otherwise than eager; "" where nothing."""
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


# ---------------------------------------------------------------- every function

FUNCTIONS = [name for name in sorted(BUILDERS) if not name.startswith(("nn.", "maps."))]
REFUSED = {  # of these a graph holds nothing: it breaks, or with fullgraph=True says why
    "associative_scan": "function",
    "dist_deposit": "DataDependent",
    "dist_expert_linear": "DataDependent",
    "dist_sample": "DataDependent",
    "expert_parallel": "function",
    "sample_index": "DataDependent",
}
NEGOTIATE = ("broadcast", "permute", "sum_reduce")  # which sweep.py spells with bare partitions
ROUNDED = ("dist_attention",)  # torch decomposes its attention; and what remat works out again a graph keeps


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function(name):
    call = BUILDERS[name](Setting("last" if N < 3 else "first"))
    base, inputs = name.partition("/")[0], call.parts()
    if base in REFUSED or (base in NEGOTIATE and N > 1):
        with pytest.raises(Exception, match=REFUSED.get(base, "compiled code asks no other rank")):
            torch.compile(call.run, backend="aot_eager", fullgraph=True)(*inputs)
        torch._dynamo.reset()
        check(call.run, *inputs, fullgraph=False)  # its graph breaks
        return
    rounded = name.startswith(ROUNDED)
    check(call.run, *inputs, exact=not rounded, messages=not rounded)


SOME = (
    "all_gather",
    "dist_attention/ring",
    "dist_avg_pool",
    "dist_batch_norm",
    "dist_conv",
    "dist_cross_entropy",
    "dist_dropout",
    "dist_fftn",
    "dist_interpolate/nearest",
    "dist_linear",
    "dist_matmul",
    "dist_scan",
    "dist_spmv",
    "dist_tsqr",
    "gather_rows",
    "halo_exchange",
    "normal",
    "repartition",
)


@pytest.mark.parametrize("name", SOME)
def test_in_inductors_code(name):
    call = BUILDERS[name](Setting("last"))
    check(call.run, *call.parts(), backend="inductor", messages=not name.startswith(ROUNDED))
