"""What bench_gpu_parallel trains: a Transformer's blocks by AdamW, as dd.parallel and as torch.distributed train
them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as local
from mpi4py import MPI
from torch.utils.checkpoint import checkpoint

import distdl as dd
from distdl import parallel as dp

COMM = MPI.COMM_WORLD
SEQUENCE = 512

# ---------------------------------------------------------------- the model


def block(p, x):
    """A Transformer's block: causal attention, and an MLP of four times the width. ``x``: (sequences, tokens,
    width)."""
    n, t, width = x.shape
    h = local.layer_norm(x, (width,), p["g1"], p["b1"])
    q, k, v = (z.reshape(n, t, -1, min(128, width)).transpose(1, 2) for z in local.linear(h, p["qkv"]).split(width, 2))
    h = local.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, width)
    x = x + local.linear(h, p["out"])
    h = local.layer_norm(x, (width,), p["g2"], p["b2"])
    return x + local.linear(local.gelu(local.linear(h, p["up"])), p["down"])


class Block(torch.nn.Module):
    """The same as a module; ``again``: its activations are worked out again in backward."""

    def __init__(self, params, again=False):
        super().__init__()
        self.again = again
        for name, value in params.items():
            self.register_parameter(name, torch.nn.Parameter(value.clone()))

    def forward(self, x):
        return checkpoint(block, self._parameters, x, use_reentrant=False) if self.again else block(self._parameters, x)


@dataclass
class Task:
    """What all candidates train: initial parameters of each block, this rank's samples, and how."""

    params: list
    x: Any
    target: Any
    P: dd.Partition

    @classmethod
    def of(cls, options, device, dtype):
        """Equal parameters on all ranks, samples of each rank's own."""
        width, draw = options.hidden, torch.Generator(device).manual_seed(1)

        def normal(*shape, scale=0.02):
            return (scale * torch.randn(shape, generator=draw, device=device)).to(dtype)

        def one():
            ones, zeros = (make(width, device=device, dtype=dtype) for make in (torch.ones, torch.zeros))
            return {
                "g1": ones,
                "b1": zeros,
                "qkv": normal(3 * width, width),
                "out": normal(width, width),
                "g2": ones.clone(),
                "b2": zeros.clone(),
                "up": normal(4 * width, width),
                "down": normal(width, 4 * width),
            }

        params = [one() for _ in range(options.blocks)]
        draw.manual_seed(100 + COMM.rank)
        shape = (max(1, options.tokens // SEQUENCE), min(SEQUENCE, options.tokens), width)
        return cls(params, normal(*shape, scale=1), normal(*shape, scale=1), dd.Partition((COMM.size,)))

    def model(self, again=False):
        return torch.nn.Sequential(*(Block(p, again) for p in self.params))

    def loss(self, y):
        """The mean over this rank's samples."""
        return (y.float() - self.target.float()).square().mean()

    def adamw(self, params):
        return torch.optim.AdamW(params, lr=1e-4, fused=True)


@dataclass
class Candidate:
    """``gradients()`` returns this rank's loss, and leaves the mean gradients where ``update`` finds them; ``whole()``:
    these, whole."""

    gradients: Any
    update: Any
    whole: Any

    def step(self):
        self.gradients()
        self.update()


def stepping(optimizer):
    def update():
        optimizer.step()
        optimizer.zero_grad()

    return update


def grads_of(model):
    return lambda: [p.grad for p in model.parameters()]


# ---------------------------------------------------------------- data parallel


def synced(task, late=False):
    """GradientSync; ``late``: nothing is reduced before backward has ended."""
    model = task.model()
    sync = dp.GradientSync(model.parameters(), task.P)

    def gradients():
        loss = task.loss(model(task.x))
        if late:
            with sync.no_sync():
                (loss / COMM.size).backward()
        else:
            (loss / COMM.size).backward()
        sync.finish()
        return loss.detach()

    return Candidate(gradients, stepping(task.adamw(model.parameters())), grads_of(model))


def ddp(task, optimizer=None, again=False, view=True):
    model = torch.nn.parallel.DistributedDataParallel(task.model(again), gradient_as_bucket_view=view)

    def gradients():
        loss = task.loss(model(task.x))
        loss.backward()
        return loss.detach()

    return Candidate(gradients, stepping((optimizer or task.adamw)(model.parameters())), grads_of(model))


def alone(task):
    """Without any communication: what nothing can beat."""
    model = task.model()

    def gradients():
        loss = task.loss(model(task.x))
        loss.backward()
        return loss.detach()

    return Candidate(gradients, stepping(task.adamw(model.parameters())), None)


def data(task):
    return {
        "DDP": lambda: ddp(task),
        "DDP, gradients copied": lambda: ddp(task, view=False),
        "distdl": lambda: synced(task),
        "distdl, reduced after backward": lambda: synced(task, late=True),
        "no communication": lambda: alone(task),
    }


# ---------------------------------------------------------------- sharded optimizer state


def zero1(task, overlapped):
    """Whole gradients; AdamW on this rank's block of each Transformer block. ``overlapped``: gradients are all-reduced
    while backward runs, instead of reduce-scattered after it."""
    model = task.model()
    units = [list(one.parameters()) for one in model]
    shardings = [dp.Sharding.of(unit, task.P) for unit in units]
    blocks = [s.block(unit).requires_grad_() for s, unit in zip(shardings, units)]
    optimizer = task.adamw(blocks)
    sync = dp.GradientSync(model.parameters(), task.P) if overlapped else None

    def gradients():
        loss = task.loss(model(task.x))
        (loss / COMM.size).backward()
        if sync:
            sync.finish()
        for s, b, unit in zip(shardings, blocks, units):
            grads = [p.grad for p in unit]
            b.grad = s.block(grads) if sync else s.reduce(grads)
            for p in unit:
                p.grad = None
        return loss.detach()

    @torch.no_grad()
    def update():
        stepping(optimizer)()
        for s, b, unit in zip(shardings, blocks, units):
            for p, w in zip(unit, s.gather(b)):
                p.data = w

    return Candidate(gradients, update, lambda: [g for s, b in zip(shardings, blocks) for g in s.gather(b.grad)])


def zero(task):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def peer(params):
        return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=1e-4, fused=True)

    return {
        "DDP + ZeroRedundancyOptimizer": lambda: ddp(task, peer),
        "distdl ZeRO-1": lambda: zero1(task, False),
        "distdl ZeRO-1 over GradientSync": lambda: zero1(task, True),
    }


# ---------------------------------------------------------------- sharded parameters


def chained(task, **how):
    shardings = [dp.Sharding.of(p, task.P) for p in task.params]
    blocks = [s.block(p).requires_grad_() for s, p in zip(shardings, task.params)]

    def last(p, x):
        return task.loss(block(p, x)) / COMM.size

    run = dp.chain([block] * (len(blocks) - 1) + [last], shardings, **how)

    def gradients():
        loss = run(blocks, task.x)
        loss.backward()
        return loss.detach() * COMM.size

    def whole():
        return [g for s, b in zip(shardings, blocks) for g in s.gather(b.grad).values()]

    return Candidate(gradients, stepping(task.adamw(blocks)), whole)


def fsdp(task, again=False, reshard=True):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, model = init_device_mesh(task.x.device.type, (COMM.size,)), task.model(again)
    for one in model:
        fully_shard(one, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)

    def gradients():
        loss = task.loss(model(task.x))
        loss.backward()
        return loss.detach()

    def whole():
        return [p.grad.full_tensor() for p in model.parameters()]

    return Candidate(gradients, stepping(task.adamw(model.parameters())), whole)


def sharded(task):
    return {
        "FSDP2": lambda: fsdp(task),
        "FSDP2, activations again": lambda: fsdp(task, again=True),
        "FSDP2, not resharded": lambda: fsdp(task, reshard=False),
        "distdl ZeRO-3": lambda: chained(task, remat="parameters"),
        "distdl ZeRO-3, activations again": lambda: chained(task),
        "distdl ZeRO-3, no prefetch": lambda: chained(task, remat="parameters", prefetch=False),
        "distdl ZeRO-2": lambda: chained(task, remat=False),
    }


GROUPS = {"data": data, "zero": zero, "sharded": sharded}
