"""Groups of NCCL as torch makes them, played by gloo on host memory: what is coalesced begins together, and nothing may
wait for it before."""

import contextlib
import ctypes
from datetime import timedelta

import torch
import torch.distributed as dist

from distdl import _distributed
from distdl.engine.c10d.nccl import TorchNccl
from distdl.engine.nccl import NcclEngines

made = []  # (size, rank) of all groups


def host_at(address, count, dtype, device):
    with _distributed.plain_memory():
        return torch.frombuffer((ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address), dtype=dtype)


class Works(list):
    def wait(self):
        for work in self:
            work.wait()


class Group:
    """One group; the rest is gloo's."""

    def __init__(self, store, rank, size):
        self.gloo, self.pending = _distributed.gloo(store, rank, size, timedelta(days=1)), None
        self.size, self.shutdown = self.gloo.size, lambda: None
        made.append((size, rank))

    def _start_coalescing(self):
        self.pending = []

    def _end_coalescing(self):
        calls, self.pending = sorted(self.pending, key=lambda call: call[0]), None
        return Works(getattr(self.gloo, kind)(tensors, peer, tag) for kind, tensors, peer, tag in calls)

    def send(self, tensors, peer, tag):
        self.pending.append(("send", tensors, peer, tag))

    def recv(self, tensors, peer, tag):
        self.pending.append(("recv", tensors, peer, tag))

    def allreduce(self, tensors, options):
        whole = tensors[0]
        if options.reduceOp == dist.ReduceOp.MAX:
            assert whole.dtype == torch.uint8
        return Works([self.gloo.allreduce([whole], options)])

    def _allgather_base(self, target, source):
        n = self.size()
        return Works([self.gloo.allgather([list(target.chunk(n))], [source])])

    def _reduce_scatter_base(self, target, source, options):
        total = source.clone()
        sums = dist.AllreduceOptions()
        sums.reduceOp = options.reduceOp
        work = self.gloo.allreduce([total], sums)
        work.wait()
        target.copy_(total.chunk(self.size())[self.gloo.rank()])
        return Works()


class Host:
    """In place of a device."""

    index = 0

    def __init__(self, rank):
        self.rank = rank

    def stream(self):
        return 0

    def here(self):
        return contextlib.nullcontext()

    def name(self):
        return f"host memory of rank {self.rank}"

    def capturing(self):
        return False


def engines(world):
    """The NCCL engines of a world, by torch's groups."""
    return NcclEngines(world, Host(world.rank), TorchNccl(world.host.store, world.rank, 0, Group, host_at))
