"""A program as a user would write it, for ``mypy --strict`` (test_typing.py): the type checker knows what comes out of
the main functions. It is not run."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import assert_type

import distdl as dd
import distdl.functional as F

P, Q = dd.Partition((2, 1)), dd.Partition((1, 2))
L = dd.Layout(P, (8, 6))


def movements(x: torch.Tensor) -> torch.Tensor:
    y = F.repartition(x, P, Q)
    assert_type(y, torch.Tensor)
    assert_type(F.broadcast(x, P, Q), torch.Tensor)
    assert_type(F.invariant_sum(x, P, 0), torch.Tensor)
    assert_type(F.all_gather(x, L, dims=(0,)), torch.Tensor)
    assert_type(F.halo_exchange(x, dd.HaloSpec(L, 1)), torch.Tensor)
    assert_type(F.shift(x, P, 0), torch.Tensor)
    assert_type(F.wait(F.start(dd.maps.repartition(L, Q), x)), Any)
    return y


def pytrees(tree: dict[str, torch.Tensor], pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert_type(F.repartition(tree, P, Q), dict[str, torch.Tensor])
    assert_type(F.mark_varying(pair, P), tuple[torch.Tensor, torch.Tensor])
    assert_type(dd.parallel.replicate(tree, P), dict[str, torch.Tensor])
    assert_type(dd.parallel.average_parameters(tree, P, weight=2), dict[str, torch.Tensor])


def maps(x: torch.Tensor) -> float:
    A = dd.maps.repartition(L, Q)
    assert_type(A, dd.LinearMap)
    assert_type(A.T, dd.LinearMap)
    assert_type(A.T @ A, dd.LinearMap)
    assert_type(dd.simplify(A.T @ A), dd.LinearMap)
    assert_type(A(x), torch.Tensor)
    assert_type(A.in_shape, tuple[int, ...])
    assert_type(dd.viz.matrix(A), torch.Tensor)
    return dd.testing.dot_test(A)


def layers(x: torch.Tensor) -> torch.Tensor:
    conv = dd.nn.Conv2d(dd.Partition((1, 1, 2, 2)), 3, 8, (3, 3), padding=1, bias=False)
    assert_type(conv.forward(x), torch.Tensor)
    assert_type(conv.weight, torch.Tensor)
    assert_type(conv.P, dd.Partition | dd.Layout)
    assert_type(dd.nn.AvgPool2d(conv.P, 2, stride=2).forward(x), torch.Tensor)
    loss = dd.nn.CrossEntropyLoss(P, label_smoothing=0.1)
    assert_type(loss.forward(x, x.argmax(1)), torch.Tensor)
    model = torch.nn.Sequential(torch.nn.Conv1d(1, 2, 3), torch.nn.ReLU())
    assert_type(dd.nn.convert(model, dd.Partition((1, 1, 2))), torch.nn.Sequential)
    assert_type(dd.nn.layouts(model), dict[str, dd.Layout])
    return F.dist_linear(x, torch.ones(2, 3), P)


def functions(x: torch.Tensor) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.dist_mean(x, P)

    assert_type(dd.remat(loss)(x), torch.Tensor)
    assert_type(dd.func.hvp(loss, x, x), torch.Tensor)
    assert_type(dd.func.inner(x, x, P, dims=()), torch.Tensor)
    assert_type(dd.init.kaiming_uniform(L, 0), torch.Tensor)


def training(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    sync = dd.parallel.GradientSync(model, P)
    with sync.no_sync():
        pass
    sync.finish()
    assert_type(dd.parallel.clip_grad_norm_(model, 1.0, P), torch.Tensor)
    state = dd.checkpoint.state(model, optimizer, rng=True, step=3)
    assert_type(state, dd.checkpoint.State)
    dd.checkpoint.save("model.safetensors", *state)
    return dd.checkpoint.restore("model.safetensors", model, optimizer)


def shapes() -> None:
    assert_type(P.shape, tuple[int, ...])
    assert_type(L.local_shape(), tuple[int, ...])
    assert_type(L.shard(torch.ones(8, 6)), torch.Tensor)
    with dd.testing.count_messages() as sent:
        assert_type(sent.sends, int)
    with dd.checking(timeout=30):
        pass
    assert_type(dd.world().rank, int)
