"""Fuzz of the layers, lightly: random layouts (uneven, empty, permuted, some of the ranks), keywords, memory formats,
autocast and placeholders, against serial torch.

Convolutions and poolings have random sweeps of their own, in test_conv.py and test_pool.py.
"""

import math
import random

import pytest
import torch
import torch.nn.functional as tf
from fuzzing import KINDS, Unfit, _is_kind, _layout, seed_of
from serial import along, check_layer, randn, whole
from sweep import Call, Left, alone

import distdl as dd
import distdl.functional as F

INVARIANT = dict(params="invariant")


def layer(name, rng, L):
    """(distributed, serial, parameters, their places, place of the result, settings) of a random call on x over L."""
    shape, last = L.shape, L.ndim - 1
    reduction = rng.choice(("mean", "sum"))
    dims = tuple(sorted(rng.sample(range(L.ndim), rng.randint(1, L.ndim))))
    w, b = randn(shape[-1], seed=1), randn(shape[-1], seed=2)
    eps, keepdim, p = rng.choice((1e-5, 0.1)), rng.random() < 0.5, rng.choice((0, 0.4, 1))
    ord, correction = rng.choice((1, 2, 3, math.inf)), rng.choice((0, 1)) if math.prod(shape) > 1 else 0
    channel = randn(shape[1] if L.ndim > 1 else 1, seed=3)
    target = randn(*shape, seed=4)
    return {
        "layer_norm": lambda: (
            lambda x, w, b: F.dist_layer_norm(x, L, shape[-1], w, b, eps, **INVARIANT),
            lambda x, w, b: tf.layer_norm(x, shape[-1:], w, b, eps),
            [w, b],
            [along(L, last)] * 2,
            L,
        ),
        "rms_norm": lambda: (
            lambda x, w: F.dist_rms_norm(x, L, shape[-1], w, eps, **INVARIANT),
            lambda x, w: tf.rms_norm(x, shape[-1:], w, eps),
            [w],
            [along(L, last)],
            L,
        ),
        "batch_norm": lambda: (
            lambda x, w: F.dist_batch_norm(x, L, None, None, w, None, True, 0.1, eps, **INVARIANT)[0],
            lambda x, w: tf.batch_norm(x, None, None, w, None, True, 0.1, eps),
            [channel],
            [along(L, 1)],
            L,
        ),
        "mse": lambda: (
            lambda x, y: F.dist_mse_loss(x, y, L, reduction),
            lambda x, y: getattr((x - y).square(), reduction)(),
            [target],
            [L],
            whole,
        ),
        "bce": lambda: (
            lambda x, y: F.dist_bce_with_logits_loss(x, y, L, reduction),
            lambda x, y: tf.binary_cross_entropy_with_logits(x, y, reduction=reduction),
            [target.sigmoid()],
            [L],
            whole,
        ),
        "sum": lambda: (lambda x: F.dist_sum(x, L), lambda x: x.sum(), [], [], whole),
        "mean": lambda: (lambda x: F.dist_mean(x, L), lambda x: x.mean(), [], [], whole),
        "norm": lambda: (
            lambda x: F.dist_norm(x, L, ord=ord),
            lambda x: torch.linalg.vector_norm(x, ord),
            [],
            [],
            whole,
        ),
        "var": lambda: (
            lambda x: F.dist_var(x, L, correction=correction),
            lambda x: x.var(correction=correction),
            [],
            [],
            whole,
        ),
        "max": lambda: (lambda x: F.dist_max(x, L), lambda x: x.amax(), [], [], whole),
        "logsumexp": lambda: (
            lambda x: F.dist_logsumexp(x, L, dims, keepdim),
            lambda x: x.logsumexp(dims, keepdim),
            [],
            [],
            Left(L, dims, keepdim),
        ),
        "dropout": lambda: (
            lambda x: F.dist_dropout(x, L, p, 7),
            lambda x: F.dist_dropout(x, alone(L), p, 7),
            [],
            [],
            L,
        ),
    }[name]()


NAMES = (
    "layer_norm",
    "rms_norm",
    "batch_norm",
    "mse",
    "bce",
    "sum",
    "mean",
    "norm",
    "var",
    "max",
    "logsumexp",
    "dropout",
)


def examples(name, count):
    n = dd.world().size
    for kind in KINDS:
        for i in range(count):
            rng = random.Random(seed_of(name, kind, n, i))
            for _ in range(100):
                try:
                    L = _layout(rng, n, kind, ndim=rng.randint(2, 3))
                except Unfit:
                    continue
                # Fewer than three values under one norm: the derivative is a difference of large equal terms, also in
                # torch.
                enough = {
                    "batch_norm": L.shape[0] * math.prod(L.shape[2:]),
                    "layer_norm": L.shape[-1],
                    "rms_norm": L.shape[-1],
                }
                if _is_kind(kind, [L]) and math.prod(L.shape) and enough.get(name, 3) > 2:
                    yield kind, i, rng, L
                    break


@pytest.mark.mpi(2)
@pytest.mark.parametrize("count", [1, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_layers(name, count):
    for kind, i, rng, L in examples(name, count):
        dist, serial, parameters, places, out = layer(name, rng, L)
        check_layer(
            dist,
            serial,
            [randn(*L.shape, seed=9 + i), *parameters],
            [L, *places],
            out,
            orders=2 if i % 3 == 0 else 1,
            name=f"{name} {kind} {L}",
            rtol=1e-9,
        )
        faults = []
        for what, dtype in (("memory", torch.float64), ("autocast", torch.float32)):
            # Other memory, junk on ranks outside; and under autocast the dtype of torch, on every rank.
            inputs = [X.to(dtype) for X in (randn(*L.shape, seed=9 + i), *parameters)]
            call = Call(L, dist, serial, inputs, [L, *places], lambda: out)
            parts = [x.mT.contiguous().mT if x.dim() > 1 else x for x in call.parts()]
            with torch.autocast("cpu", torch.bfloat16, enabled=what == "autocast"):
                y, ((wished, shape, kept),) = dist(*parts), call.cut(call.whole(*inputs))
            rtol = 1e-9 if what == "memory" else 0.05
            if tuple(y.shape) != shape or y.dtype != kept:
                faults.append(f"{what}: {tuple(y.shape)} {y.dtype}, expected {shape} {kept}")
            elif wished is not None and not torch.allclose(y, wished, rtol=rtol, atol=rtol):
                faults.append(f"{what}: {y}, expected {wished}")
        dd.testing.collective_assert(not faults, f"{name} {kind} {L}: {faults}")


def test_logsumexp_over_several_dims():
    """Found above: it took the largest element along the first dim only, and kept the other dims."""
    X = randn(3, 4, 2, seed=1)
    for splits in ((dd.world().size, 1, 1), (1, dd.world().size, 1)):
        L = dd.Layout(dd.Partition(splits), X.shape)
        for dims in ((0, 1), (0, 1, 2), (1, 2)):
            check_layer(
                lambda x: F.dist_logsumexp(x, L, dims),
                lambda x: x.logsumexp(dims),
                [X],
                [L],
                lambda y: y[tuple(s for d, s in enumerate(L.slices()) if d not in dims)],
                name=f"{splits} {dims}",
            )
