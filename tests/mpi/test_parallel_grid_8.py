"""The cube: data x tensor x pipeline on 8 ranks, two of each."""

import pytest
from test_parallel_grid import data_tensor_pipeline, mlp, rank_order, serve, tensor_part


@pytest.mark.slow  # eight ranks on few cores
@pytest.mark.mpi(8)
def test_two_of_each():
    P = rank_order((2, 2, 2))
    params, serial = mlp(2)
    serve(params, data_tensor_pipeline(P), serial, tensor_part(P), P, steps=3)
