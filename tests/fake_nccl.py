"""What distdl uses of ``cupy.cuda.nccl``, played by MPI on host memory, with NCCL's rules: no tags; messages of two
ranks match by order, and only inside a group. A rule that is broken raises; what NCCL would wait for, waits. So that
the engine, its order of communicators and its collectives are tested where there is no device."""

from __future__ import annotations

import contextlib
import functools
import itertools

import torch
from mpi4py import MPI

from distdl.engine.nccl import NcclEngines

NCCL_UINT8, NCCL_INT8, NCCL_INT32, NCCL_INT64, NCCL_FLOAT16, NCCL_BFLOAT16, NCCL_FLOAT32, NCCL_FLOAT64 = range(8)
NCCL_SUM, NCCL_MAX = range(2)
_TYPES = {
    NCCL_UINT8: MPI.UINT8_T,
    NCCL_INT8: MPI.INT8_T,
    NCCL_INT32: MPI.INT32_T,
    NCCL_INT64: MPI.INT64_T,
    NCCL_FLOAT32: MPI.FLOAT,
    NCCL_FLOAT64: MPI.DOUBLE,
}
_numbers = itertools.count()
_group: list | None = None
living: list = []


def get_version():
    return 1


def get_unique_id():
    return MPI.COMM_WORLD.rank, next(_numbers)


def groupStart():
    global _group
    assert _group is None, "groups do not nest here"
    _group = []


def groupEnd():
    global _group
    requests = [start() for start in _group]
    _group = None
    MPI.Request.Waitall(requests)


class NcclCommunicator:
    def __init__(self, size, unique, rank):
        leader, number = unique
        world, me = MPI.COMM_WORLD, MPI.COMM_WORLD.rank
        if rank:
            world.send((rank, me), leader, 20000 + number)
            members = world.recv(source=leader, tag=25000 + number)
        else:
            found = dict([(0, me)] + [world.recv(tag=20000 + number) for _ in range(size - 1)])
            members = [found[i] for i in range(size)]
            for peer in members[1:]:
                world.send(members, peer, 25000 + number)
        self.comm = world.Create_group(world.Get_group().Incl(members), number)
        assert (self.comm.size, self.comm.rank) == (size, rank)
        living.append(self)

    def send(self, address, count, kind, peer, stream):
        memory = MPI.buffer.fromaddress(address, count)
        assert kind == NCCL_UINT8 and peer != self.comm.rank
        _group.append(lambda: self.comm.Isend((memory, MPI.BYTE), peer))

    def recv(self, address, count, kind, peer, stream):
        memory = MPI.buffer.fromaddress(address, count)
        _group.append(lambda: self.comm.Irecv((memory, MPI.BYTE), peer))

    def allGather(self, source, target, count, kind, stream):
        n = _TYPES[kind].Get_size() * count
        self.comm.Allgather(
            (MPI.buffer.fromaddress(source, n), MPI.BYTE),
            (MPI.buffer.fromaddress(target, n * self.comm.size), MPI.BYTE),
        )

    def _sum_halves(self, source, target, count, kind, whole):
        """MPI has no halves: everybody gathers, and adds in the order of the ranks."""
        size, dtype = self.comm.size, {NCCL_FLOAT16: torch.float16, NCCL_BFLOAT16: torch.bfloat16}[kind]
        total = count if whole else count * size
        everything = bytearray(2 * total * size)
        self.comm.Allgather((MPI.buffer.fromaddress(source, 2 * total), MPI.BYTE), (everything, MPI.BYTE))
        rows = torch.frombuffer(everything, dtype=dtype).reshape(size, -1)
        found = functools.reduce(torch.add, rows)
        found = found if whole else found[self.comm.rank * count : (self.comm.rank + 1) * count]
        torch.frombuffer(MPI.buffer.fromaddress(target, 2 * count), dtype=dtype).copy_(found)

    def allReduce(self, source, target, count, kind, operation, stream):
        if kind not in _TYPES:
            self._sum_halves(source, target, count, kind, True)
            return
        n = _TYPES[kind].Get_size() * count
        mine = MPI.IN_PLACE if source == target else (MPI.buffer.fromaddress(source, n), count, _TYPES[kind])
        self.comm.Allreduce(
            mine, (MPI.buffer.fromaddress(target, n), count, _TYPES[kind]), (MPI.SUM, MPI.MAX)[operation]
        )

    def reduceScatter(self, source, target, count, kind, operation, stream):
        if kind not in _TYPES:
            self._sum_halves(source, target, count, kind, False)
            return
        n = _TYPES[kind].Get_size() * count
        mine = (MPI.buffer.fromaddress(source, n * self.comm.size), count, _TYPES[kind])
        theirs = (MPI.buffer.fromaddress(target, n), count, _TYPES[kind])
        self.comm.Reduce_scatter_block(mine, theirs, (MPI.SUM, MPI.MAX)[operation])

    def destroy(self):
        living.remove(self)
        self.comm.Free()


class Host:
    """In place of a device."""

    def __init__(self, index=0, name=None, captures=False):
        self.index, self._name, self.captures = index, name, captures

    def stream(self):
        return 0

    def here(self):
        return contextlib.nullcontext()

    def name(self):
        return f"host memory of rank {MPI.COMM_WORLD.rank}" if self._name is None else self._name

    def capturing(self):
        return self.captures


def engines(world, **device):
    """The NCCL engines of a world, on this fake."""
    import fake_nccl

    return NcclEngines(world, Host(**device), fake_nccl)
