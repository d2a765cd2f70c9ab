"""MPI by mpi4py: raw bytes from and to torch's own memory."""

from __future__ import annotations

import ctypes
import os
import time
from functools import cached_property
from operator import index

import torch
from mpi4py import MPI

from ..errors import DistdlError, TransportError
from .transport import Call, Transport, Unwatched, Waiting, another_length, no_sum

_TAGS = 32768  # every MPI offers at least this many
_SPINS, _BYTES = 50, 2**11  # polls before a rank that waits lets others run; one more for so many bytes: large messages
# go on only while somebody asks for them
_memory = MPI.buffer.fromaddress
_SLOT = 1024  # bytes per rank of one small all-gather
_MAX_GROUPS = 4096
_KEPT = 64  # small messages whose memory is kept before somebody asks whether they have gone
_SUM_TYPES = {
    torch.uint8: MPI.UINT8_T, torch.int8: MPI.INT8_T, torch.int16: MPI.INT16_T, torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T, torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX, torch.complex128: MPI.C_DOUBLE_COMPLEX, torch.bool: MPI.C_BOOL,
}  # fmt: skip


def _reads_devices() -> bool | None:
    """Whether the MPI library was built to read CUDA memory; None where it has no such question (MPICH and its kin)."""
    ask = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return None if ask is None else bool(ask())


class MpiJob:
    """The job that MPI's launcher has started."""

    def job(self) -> tuple[int, int]:
        return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size

    def abort(self, code: int = 1, cause: str = "") -> None:
        if not MPI.Is_finalized():
            MPI.COMM_WORLD.Abort(code)


class Arrival(MpiJob):
    """The start of an engine on ``comm``: its ranks come to it one by one. ``places``: their numbers in the job; -1
    elsewhere."""

    def __init__(self, comm):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.places = MPI.Group.Translate_ranks(comm.group, list(range(comm.size)), MPI.COMM_WORLD.group)
        self.request = comm.Ibarrier()

    def complete(self) -> bool:
        """Whether all are here."""
        return self.request.Test()


class MpiChannel:
    """Small messages, on a communicator of their own."""

    def __init__(self, comm):
        self.comm, self.messages = comm.Dup(), []

    def send(self, peer: int, kind: int, data: bytes):
        if len(self.messages) > _KEPT:
            self.messages = [message for message in self.messages if not message.Test()]
        self.messages.append(self.comm.Isend((data, MPI.BYTE), peer, kind))
        return self.messages[-1]

    def sent(self, messages) -> bool:
        return MPI.Request.Testall(messages)

    def arrived(self):
        status, found = MPI.Status(), []
        while self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            data, source, kind = bytearray(status.Get_count(MPI.BYTE)), status.Get_source(), status.Get_tag()
            self.comm.Recv((data, MPI.BYTE), source, kind)
            found.append((source, kind, bytes(data)))
        return found

    def close(self):
        for message in self.messages:
            if not message.Test():
                message.Free()
        self.comm.Free()


class MpiTransport(MpiJob, Transport):
    """Box plans go point-to-point on a duplicate of ``comm``. Tags say a count per pair of ranks and bits of the plan:
    messages of different calls never meet, and a rank that waits in vain can find out why.

    Communicators of subgroups serve collectives only. They are made in program order by their members alone, are never
    evicted (an eviction that differs between ranks would hang), and are freed at exit in the order in which they were
    made.
    """

    device_types: tuple[str, ...] = ("cpu",)
    collectives: tuple[str, ...] = ("all_reduce",)
    sums = frozenset(_SUM_TYPES)
    wide = True
    chunk = 2**30  # bytes per MPI message; below every MPI's limit of 2^31 - 1
    takes_types = True

    def __init__(self, comm=None):
        self.comm = (MPI.COMM_WORLD if comm is None else comm).Dup()
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.size = self.comm.rank, self.comm.size
        self.groups = {tuple(range(self.size)): self.comm}
        self.tags = self.comm.Get_attr(MPI.TAG_UB)
        self.waiting: Waiting = Unwatched()
        self.notices: list[bytes] = []
        self._abandoned: list = []  # (requests, memory) that nobody waits for

    def serve(self, wide, waiting):
        self.wide = wide
        if waiting is not None:
            self.waiting = waiting

    def channel(self):
        return MpiChannel(self.comm)

    def publish(self, notice):
        self.notices = self.all_gather(notice, tuple(range(self.size)))

    def notice(self, rank):
        return self.notices[rank] if self.notices else None

    def peek(self, peer):
        status = MPI.Status()
        return status.Get_tag() if self.comm.Iprobe(peer, MPI.ANY_TAG, status) else None

    def discard(self, peer, tag):
        status = MPI.Status()
        self.comm.Probe(peer, tag, status)
        self.comm.Recv((bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE), peer, tag)

    def on_device(self):
        return self._on_device

    @cached_property
    def _on_device(self) -> OnDevice:
        return OnDevice(self)

    def abandon(self, handle, memory):
        self._abandoned.append((handle[0], memory))

    def post(self, sends, receives, call=None, memory=None):
        if self._abandoned:
            self._abandoned = [one for one in self._abandoned if not MPI.Request.Testall(one[0])]
        if call is None:
            call = Call(0, tuple({peer for peer, _, _ in (*sends, *receives)}))
        comm, waiting, requests, expected = self.comm, self.waiting, [], []
        numbers, recent, step, wrap, mark = waiting.numbers, waiting.recent, waiting.step, waiting.wrap, waiting.mark
        mark |= call.code & waiting.codes
        for peer in call.peers:
            numbers[peer] += step
            recent[peer].append(call)
        for peer, address, nbytes in receives:
            for size, part in self._parts(address, nbytes):
                requests.append(comm.Irecv(part, peer, numbers[peer] & wrap | mark))
                expected.append((peer, size))
        for peer, address, nbytes in sends:
            for _, part in self._parts(address, nbytes):
                requests.append(comm.Isend(part, peer, numbers[peer] & wrap | mark))
        return requests, expected, call, mark

    def _parts(self, address, nbytes):
        """The messages of MPI that carry these bytes, and their sizes."""
        if type(nbytes) is not int:
            return ((index(nbytes), (_memory(address, nbytes.span), 1, nbytes.kind)),)
        chunk = self.chunk
        if nbytes <= chunk:
            return ((nbytes, (_memory(address, nbytes), MPI.BYTE)),)
        cuts = ((start, min(chunk, nbytes - start)) for start in range(0, nbytes, chunk))
        return [(size, (_memory(address + start, size), MPI.BYTE)) for start, size in cuts]

    def wait(self, handle):
        if handle is None:  # a collective, which is done
            return
        requests, expected, call, mark = handle
        statuses = []
        try:
            for request in requests:  # one after the other: who asks for one of them moves all
                status = MPI.Status()
                if not request.Test(status):
                    self._patiently(request, status, requests, expected, call, mark)
                statuses.append(status)
        except MPI.Exception as error:
            raise TransportError(
                f"MPI failed: {error}",
                op="exchange",
                rank=self.rank,
                expected=f"messages of {expected} (rank, bytes)",
                actual="an error",
                next_step="check that every rank calls the same operators with the same layouts and dtype",
            ) from error
        for (peer, nbytes), status in zip(expected, statuses):
            if status.Get_count(MPI.BYTE) != nbytes:
                raise another_length(self.rank, peer, nbytes, status.Get_count(MPI.BYTE))

    def _patiently(self, request, status, requests, expected, call, mark):
        """Wait for one of ``requests``; :attr:`waiting` hears who has not sent yet, and looks why."""
        test = request.Test
        for _ in range(_SPINS + sum(nbytes for _, nbytes in expected) // _BYTES):
            if test(status):
                return
        began = due = time.monotonic()
        while not test(status):
            os.sched_yield()  # never longer
            now = time.monotonic()
            if now < due:
                continue
            due = now + self.waiting.interval
            missing = sorted({peer for (peer, _), one in zip(expected, requests) if not one.Get_status()})
            try:
                self.waiting.look(call, mark, now - began, missing)
            except DistdlError:
                for one in requests[: len(expected)]:
                    if one != MPI.REQUEST_NULL:
                        one.Cancel()
                raise

    def group(self, ranks):
        """The communicator of ``ranks`` (sorted), made by its members on first use."""
        comm = self.groups.get(ranks)
        if comm is None:
            if len(self.groups) >= _MAX_GROUPS:
                raise TransportError(
                    f"more than {_MAX_GROUPS} groups of ranks",
                    op="collective",
                    rank=self.rank,
                    next_step="reuse partitions, or use fewer distinct ones",
                    expected=f"at most {_MAX_GROUPS}",
                    actual=f"another one: {ranks}",
                )
            whole = self.comm.Get_group()
            members = whole.Incl(ranks)
            # Distinct tags keep two groups apart that share ranks and are being made at the same time.
            comm = self.groups[ranks] = self.comm.Create_group(members, sum(ranks) % _TAGS)
            comm.Set_errhandler(MPI.ERRORS_RETURN)
            members.Free()
            whole.Free()
        return comm

    def collective(self, kind, source, target, count, dtype, ranks):
        comm, mpi_type = self.group(ranks), _SUM_TYPES.get(dtype)
        if mpi_type is None:
            raise no_sum("MPI", kind, self.rank, dtype, _SUM_TYPES)
        operation, item = (MPI.LOR if dtype == torch.bool else MPI.SUM), dtype.itemsize
        step = self.chunk // item
        for start in range(0, count, step):
            n = min(step, count - start)

            def memory(address, first=start * item, size=n * item):
                return _memory(address + first, size)

            mine = MPI.IN_PLACE if source == target else (memory(source), n, mpi_type)
            try:
                comm.Allreduce(mine, (memory(target), n, mpi_type), operation)
            except MPI.Exception as error:
                raise TransportError(
                    f"MPI failed: {error}",
                    op=kind,
                    rank=self.rank,
                    expected=f"{count} numbers of {dtype} from each of ranks {ranks}",
                    actual="an error",
                    next_step="give every rank a tensor of the same shape and dtype; dd.checking() "
                    "says which one differs",
                ) from error

    def all_gather(self, data, ranks):
        comm = self.group(ranks)
        slot, gathered = _SLOT, None
        while gathered is None:
            mine = (len(data).to_bytes(8, "little") + data)[:slot].ljust(slot, b"\0")
            received = bytearray(slot * comm.size)
            comm.Allgather((mine, MPI.BYTE), (received, MPI.BYTE))
            parts = [received[i : i + slot] for i in range(0, len(received), slot)]
            sizes = [int.from_bytes(part[:8], "little") for part in parts]
            if max(sizes) + 8 <= slot:
                gathered = [bytes(part[8 : 8 + n]) for part, n in zip(parts, sizes)]
            slot = max(sizes) + 8  # every rank sees the same sizes, so all go round again, or none
        return gathered

    def node(self) -> int:
        """The smallest rank of this process's node: of those that MPI says can share memory."""
        comm = self.comm.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        try:
            return comm.bcast(self.rank)
        finally:
            comm.Free()

    def close(self):
        for ranks in list(self.groups)[::-1]:  # the same order on all members: program order, backwards
            self.groups.pop(ranks).Free()


class OnDevice(Transport):
    """The engine ``inner`` for an MPI that reads device memory by itself. MPI knows no streams: what it sends must be
    complete.

    Raises:
        TransportError: the MPI library says that it cannot; it would read device addresses as its own.
    """

    device_types = ("cpu", "cuda")
    takes_types = False  # MPI copies what lies on a device piece by piece

    def __init__(self, inner: MpiTransport):
        if _reads_devices() is False:
            raise TransportError(
                "this MPI cannot read CUDA memory",
                op="World(cuda='mpi')",
                rank=inner.rank,
                expected="an MPI library built with CUDA support",
                actual=MPI.Get_library_version().split("\0")[0],
                next_step="set DISTDL_CUDA to nccl, or to staged",
            )
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.collectives, self.sums, self.wide = inner.collectives, inner.sums, inner.wide
        self.chunk, self.tags = inner.chunk, inner.tags

    def post(self, sends, receives, call=None, memory=None):
        torch.cuda.current_stream().synchronize()
        return self.inner.post(sends, receives, call, memory)

    def wait(self, handle):
        self.inner.wait(handle)

    def abandon(self, handle, memory):
        self.inner.abandon(handle, memory)

    def collective(self, kind, source, target, count, dtype, ranks):
        torch.cuda.current_stream().synchronize()
        return self.inner.collective(kind, source, target, count, dtype, ranks)

    def all_gather(self, data, ranks):
        return self.inner.all_gather(data, ranks)

    def close(self):
        """Nothing: it is the inner engine's."""
