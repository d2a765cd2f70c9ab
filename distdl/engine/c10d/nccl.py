"""NCCL by torch's own process groups, where CuPy is missing: what :mod:`distdl.engine.nccl` uses of its bindings.

A group belongs to the ranks that make it, under a key of the store. Messages that go together are one call, which uses
the group's one communicator. Work runs on a stream of torch's; every ``wait`` here is the current stream's, not the
host's.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import _distributed
from ..._distributed import dist


class TorchNccl:
    """The bindings, for rank ``rank`` and its CUDA device ``index``."""

    NCCL_UINT8, NCCL_INT8, NCCL_INT32, NCCL_INT64 = torch.uint8, torch.int8, torch.int32, torch.int64
    NCCL_FLOAT16, NCCL_BFLOAT16 = torch.float16, torch.bfloat16
    NCCL_FLOAT32, NCCL_FLOAT64 = torch.float32, torch.float64
    NCCL_SUM, NCCL_MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX

    def __init__(self, store, rank: int, index: int, group=_distributed.nccl, at=_distributed.on_device_at):
        self.store, self.rank, self.device, self.group, self._at = store, rank, torch.device("cuda", index), group, at
        self.made = 0
        self.calls: list[tuple] = []  # since groupStart

    def get_unique_id(self) -> str:
        """A key of the store that no other group has."""
        self.made += 1
        return f"nccl/{self.rank}/{self.made}"

    def NcclCommunicator(self, size: int, key: str, rank: int) -> TorchCommunicator:
        """The group of this key."""
        return TorchCommunicator(self, self.group(dist.PrefixStore(key, self.store), rank, size))

    def groupStart(self) -> None:
        """What is sent and received from here on goes together."""
        self.calls.clear()

    def groupEnd(self) -> None:
        """And goes now."""
        if self.calls:
            _distributed.coalesced(self.calls[0][0], [call[1:] for call in self.calls]).wait()
            self.calls.clear()

    def at(self, address: int, count: int, dtype) -> torch.Tensor:
        """Memory of the device as a tensor."""
        return self._at(address, count, dtype, self.device)


class TorchCommunicator:
    """One group of NCCL."""

    def __init__(self, nccl: TorchNccl, group: Any):
        self.nccl, self.group = nccl, group

    def send(self, address, count, kind, peer, stream):
        self.nccl.calls.append((self.group, "send", self.nccl.at(address, count, kind), peer))

    def recv(self, address, count, kind, peer, stream):
        self.nccl.calls.append((self.group, "recv", self.nccl.at(address, count, kind), peer))

    def allGather(self, source, target, count, kind, stream):
        at, n = self.nccl.at, self.group.size()
        _distributed.all_gather(self.group, at(target, count * n, kind), at(source, count, kind)).wait()

    def allReduce(self, source, target, count, kind, operation, stream):
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        to = self.nccl.at(target, count, kind)
        if source != target:
            with _distributed.plain_memory():
                to.copy_(self.nccl.at(source, count, kind))
        self.group.allreduce([to], options).wait()

    def reduceScatter(self, source, target, count, kind, operation, stream):
        options = dist.ReduceScatterOptions()
        options.reduceOp = operation
        at, n = self.nccl.at, self.group.size()
        mine, all_of_them = at(target, count, kind), at(source, count * n, kind)
        _distributed.reduce_scatter(self.group, mine, all_of_them, options).wait()

    def destroy(self):
        self.group.shutdown()
