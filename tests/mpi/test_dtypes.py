"""Every dtype that torch can store moves unchanged; sums of half precisions are taken in float32."""

import pytest
import torch
from registry import each_case, integers, needs

import distdl as dd
import distdl.functional as F

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
          torch.float64, torch.complex64, torch.complex128]  # fmt: skip


@each_case(thin=True)
def test_every_dtype(case):
    X = integers(case.shape, 5).abs() % 4
    for dtype in DTYPES:
        values = X != 0 if dtype == torch.bool else X * (1 + 2j) if dtype.is_complex else X
        x = case.local(values.to(dtype), torch.zeros(1))
        y = case.map(x)
        wanted = case.wanted(values.to(torch.complex128) if dtype.is_complex else values.double())
        assert y.dtype == dtype and torch.equal(y, (wanted != 0) if dtype == torch.bool else wanted.to(dtype)), dtype
        assert case.map.T(y).dtype == dtype


@needs(3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_halves_are_taken_in_float32(dtype):
    """big + 1 + 1: adding in half precision loses both ones."""
    r = dd.world().rank
    big = {torch.float16: 2048, torch.bfloat16: 256}[dtype]
    P, x = dd.Partition((3,)), torch.tensor([big if r == 0 else 1], dtype=dtype)
    if r > 2:
        return
    one = dd.Partition((1,))
    assert F.all_sum_reduce(x, P).tolist() == [big + 2]
    assert F.invariant_sum(x, P).tolist() == [big + 2]
    assert F.sum_reduce(x, P, one, shape=(1,)).tolist() == ([big + 2] if r == 0 else [])
    assert F.reduce_scatter(x.expand(3), P).tolist() == [big + 2]
    spec = dd.HaloSpec(dd.Layout(P, (3,)), 1, boundary="none")  # adjoint on rank 1: its own, and both neighbours' ghosts
    windows = {0: [0, 1], 1: [0, big, 0], 2: [1, 0]}
    back = dd.maps.halo_exchange(spec).T(torch.tensor(windows[r], dtype=dtype))
    assert back.tolist() == ([big + 2] if r == 1 else [0])


def test_mixed_dtypes_in_one_pytree():
    n, r = dd.world().size, dd.world().rank
    P = dd.Partition((n,))
    tree = {"f": torch.full((2,), float(r)), "i": torch.full((3,), r), "h": torch.full((1,), r, dtype=torch.bfloat16),
            "b": torch.tensor([r == 0])}  # fmt: skip
    gathered, summed = F.all_gather(tree, P), F.all_sum_reduce(tree, P)
    for name, x in tree.items():
        assert gathered[name].dtype == summed[name].dtype == x.dtype
        assert gathered[name].tolist() == [v for k in range(n) for v in [k == 0 if name == "b" else k] * x.numel()]
    assert summed["i"].tolist() == [n * (n - 1) // 2] * 3 and summed["b"].tolist() == [True]


def test_integers_beside_differentiable_leaves():
    """Integer leaves have no gradient and do not disturb their neighbours', to second order."""
    n, r = dd.world().size, dd.world().rank
    P = dd.Partition((n,))
    x = torch.full((2,), r + 1.0, dtype=torch.float64)

    def loss(x):
        moved = F.shift({"i": torch.tensor([r]), "x": x}, P, 0)
        return (moved["x"] ** 3 * moved["i"]).sum()

    # My tensor goes to rank r + 1 together with my index.
    assert torch.allclose(torch.func.grad(loss)(x), 3 * r * x**2)
    assert torch.allclose(torch.func.jvp(torch.func.grad(loss), (x,), (x,))[1], 6 * r * x * x)
    z = x.clone().requires_grad_()
    loss(z).backward()
    assert torch.allclose(z.grad, 3 * r * x**2)
