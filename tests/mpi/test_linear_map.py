"""Linear maps of a user's own, and maps as values."""

import torch
from registry import here, randn
from torch.func import grad, jvp, vmap

import distdl as dd
import distdl.functional as F


def test_user_maps_have_every_transform():
    n, r, P = here()
    A = dd.linear_map(
        lambda x: F.all_sum_reduce(2 * x, P), lambda y: 2 * F.all_sum_reduce(y, P), (3,), (3,), ranks=P.ranks
    )
    dd.testing.check_map(A)
    dd.testing.check_map(A.T)
    X = randn((n, 3), 1)
    C = randn((n, 3), 2)
    f = lambda x: (C[r] * A(x).sin()).sum()
    serial = lambda X: (C * (2 * X.sum(0)).sin()).sum()
    assert torch.allclose(grad(f)(X[r]), grad(serial)(X)[r])
    assert torch.allclose(jvp(grad(f), (X[r],), (C[r],))[1], jvp(grad(serial), (X,), (C,))[1][r])
    assert torch.allclose(vmap(A)(torch.stack([X[r], C[r]])), torch.stack([2 * X.sum(0), 2 * C.sum(0)]))


def test_maps_are_cached_and_pickle():
    import pickle

    n, r, P = here()
    L = dd.Layout(P, (5,))
    A = dd.maps.repartition(L, dd.Partition((n,), range(n - 1, -1, -1)))
    assert dd.maps.repartition(dd.Layout(dd.Partition((n,)), (5,)), dd.Partition((n,), range(n - 1, -1, -1))) is A
    assert dd.maps.gather(L, 0) is dd.maps.gather(L) is dd.maps.gather(where=L, root=0)  # however it is spelt
    B = pickle.loads(pickle.dumps(A))
    assert B == A and torch.equal(B(L.shard(torch.arange(5.0))), A(L.shard(torch.arange(5.0))))
    assert len(set(dd.testing.gather_objects(A.plan.digest))) == 1
