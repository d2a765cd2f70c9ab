"""torch.compile: every public function compiled against itself in eager, bit for bit, and with the same messages."""

import pytest
import torch
from compiling import MARKS, N, check, fresh  # noqa: F401
from sweep import BUILDERS, Setting

pytestmark = MARKS


FUNCTIONS = [name for name in sorted(BUILDERS) if not name.startswith(("nn.", "maps."))]
REFUSED = {  # of these a graph holds nothing: it breaks, or with fullgraph=True says why
    "layout_of": "ask for layouts outside of compiled functions",
    "associative_scan": "function",
    "dist_deposit": "DataDependent",
    "dist_expert_linear": "DataDependent",
    "dist_sample": "DataDependent",
    "expert_parallel": "function",
    "sample_index": "DataDependent",
}
NEGOTIATE = ("broadcast", "permute", "sum_reduce")  # which sweep.py spells with bare partitions; and of uneven blocks:
UNEVEN = tuple(name for name in FUNCTIONS if name.startswith("dist_conv") and "/general" in name)
UNLIKE = ("dist_attention",)  # torch decomposes its attention; and what remat works out again a graph keeps
ROUNDED = (*UNLIKE, *(("dist_cumprod",) if torch.__version__ < (2, 13) else ()))  # of older torch its derivative too


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function(name):
    call = BUILDERS[name](Setting("last" if N < 3 else "first"))
    base, inputs = name.partition("/")[0], call.parts()
    if base in REFUSED or (base in NEGOTIATE and N > 1) or (name in UNEVEN and call.L.splits):
        with pytest.raises(Exception, match=REFUSED.get(base, "compiled code asks no other rank")):
            torch.compile(call.run, backend="aot_eager", fullgraph=True)(*inputs)
        torch._dynamo.reset()
        check(call.run, *inputs, fullgraph=False)  # its graph breaks
        return
    check(call.run, *inputs, exact=not name.startswith(ROUNDED), messages=not name.startswith(UNLIKE))


QUICK = ("dist_conv", "dist_dropout", "dist_fftn", "dist_interpolate/nearest", "halo_exchange")
SOME = (
    "all_gather",
    "dist_attention/ring",
    "dist_avg_pool",
    "dist_batch_norm",
    "dist_cross_entropy",
    "dist_linear",
    "dist_matmul",
    "dist_scan",
    "dist_spmv",
    "dist_tsqr",
    "gather_rows",
    "normal",
    "repartition",
)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SOME)])
def test_in_inductors_code(name):
    call = BUILDERS[name](Setting("last"))
    check(call.run, *call.parts(), backend="inductor", messages=not name.startswith(UNLIKE))
