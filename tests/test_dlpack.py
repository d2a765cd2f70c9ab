"""Arrays of other libraries as operators' inputs and results, by DLPack: the same memory where torch can have it."""

import numpy as np
import pytest
import torch

import distdl as dd
import distdl.functional as F

P = dd.Partition((1,))


def test_numpy():
    a = np.arange(6.0)
    x = torch.from_dlpack(a)
    assert x.data_ptr() == a.ctypes.data
    y = F.repartition(F.shift(x, P, 0), P, P)
    b = np.from_dlpack(y)
    assert b.ctypes.data == y.data_ptr() and (b == a).all()
    g = torch.func.grad(lambda x: F.invariant_sum((x**2).sum(), P))(x)
    assert (np.from_dlpack(g) == 2 * a).all() and (a == np.arange(6.0)).all()


def test_jax():
    jnp = pytest.importorskip("jax.numpy", reason="needs JAX: pip install jax")
    a = jnp.arange(6.0).reshape(2, 3)
    x = torch.from_dlpack(a)
    assert x.data_ptr() == a.unsafe_buffer_pointer() and x.dtype == torch.float32
    y = F.halo_exchange(x, dd.HaloSpec(dd.Layout(dd.Partition((1, 1)), (2, 3)), 1, boundary="circular"))
    b = jnp.from_dlpack(y)
    assert (b == jnp.pad(a, 1, mode="wrap")).all() and (a == jnp.arange(6.0).reshape(2, 3)).all()
    g = torch.func.grad(lambda x: F.invariant_sum((x**2).sum(), P))(x)
    assert (jnp.from_dlpack(g) == 2 * a).all()


@pytest.mark.gpu
def test_cupy():
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    a = cupy.arange(6.0)
    x = torch.from_dlpack(a)
    assert x.data_ptr() == a.data.ptr
    assert (cupy.from_dlpack(F.shift(x, P, 0)) == a).all()
