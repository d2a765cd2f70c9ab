"""Every collective, 8 bytes to 256 MB."""

import torch

from distdl.programs.bench import cases

from .choose import SIZE, choose


@choose("nbytes", [1024, 2**20], [8, 64, 2**13, 2**16, 2**23, 2**25, 2**28])
@choose("op", cases.COLLECTIVES)
def bench_collective(timed, op, nbytes):
    """As nccl-tests and the OSU benchmarks time them."""
    timed(cases.collective(op, nbytes, SIZE))


@choose("dtype", [torch.bfloat16], [torch.complex64])
@choose("op", ["all_sum_reduce"], ["reduce_scatter", "all_gather"])
def bench_dtypes(timed, op, dtype):
    """Other numbers; sums of bfloat16 are kept in float32."""
    timed(cases.collective(op, 2**20, SIZE, dtype=dtype))
