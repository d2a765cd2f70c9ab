"""The cubes: data x tensor x pipeline, and data x tensor x space, on 8 ranks, two of each."""

import pytest
from test_grid import (
    column_then_row,
    data_tensor_pipeline,
    data_tensor_space,
    mlp,
    rank_order,
    serve,
    split_outputs,
    tensor_part,
    two_convolutions,
)


@pytest.mark.slow  # eight ranks on few cores
@pytest.mark.mpi(8)
def test_two_of_each():
    P = rank_order((2, 2, 2))
    params, serial = mlp(2)
    serve(params, data_tensor_pipeline(P), serial, tensor_part(P), P, steps=3)


@pytest.mark.slow
@pytest.mark.mpi(8)
@pytest.mark.parametrize("form", [split_outputs, column_then_row])
def test_data_tensor_space(form):
    P = rank_order((2, 2, 2))
    params, serial = two_convolutions()
    run, places = data_tensor_space(P, form)
    serve(params, run, serial, places, P, rate=0.5, stages=False)
