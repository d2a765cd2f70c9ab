"""MPI by mpi4py: raw bytes from and to torch's own memory."""

from __future__ import annotations

import copy
import ctypes
import os
import time
from functools import cached_property
from operator import index

import torch
from mpi4py import MPI

from ..errors import DistdlError, TransportError
from ..watching.board import Board
from ..watching.lookout import Lookout
from ..watching.side import SideChannel
from .transport import Call

_TAGS = 32768  # every MPI offers at least this many
_SPINS = 50  # polls before a rank that waits lets others run
_SLOT = 1024  # bytes per rank of one small all-gather
_MAX_GROUPS = 4096
_SUM_TYPES = {
    torch.uint8: MPI.UINT8_T, torch.int8: MPI.INT8_T, torch.int16: MPI.INT16_T, torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T, torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX, torch.complex128: MPI.C_DOUBLE_COMPLEX, torch.bool: MPI.C_BOOL,
}  # fmt: skip


def _reads_devices() -> bool | None:
    """Whether the MPI library was built to read CUDA memory; None where it has no such question (MPICH and its kin)."""
    ask = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return None if ask is None else bool(ask())


class MpiTransport:
    """Box plans go point-to-point on a duplicate of ``comm``, tagged with a count per pair of ranks and bits of the
    plan: messages of different calls never meet, and a rank that waits in vain finds out why (:mod:`lookout`).

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
        # Made now, while all ranks are here: who checks or watches later need not ask the others.
        self.side, self.board = SideChannel(self.comm), Board.shared(self.comm)
        self.lookout = Lookout(self.comm, self.side)
        self._abandoned: list = []  # (requests, memory) that nobody waits for

    @cached_property
    def cuda_aware(self) -> MpiTransport:
        """The same engine for an MPI that reads device memory by itself. MPI knows no streams: what it sends must be
        complete.

        Raises:
            TransportError: the MPI library says that it cannot; it would read device addresses as its own.
        """
        if _reads_devices() is False:
            raise TransportError(
                "this MPI cannot read CUDA memory",
                op="World(cuda='mpi')",
                rank=self.rank,
                expected="an MPI library built with CUDA support",
                actual=MPI.Get_library_version().split("\0")[0],
                next_step="set DISTDL_CUDA to nccl, or to staged",
            )
        engine = copy.copy(self)
        engine.device_types = ("cpu", "cuda")
        engine.takes_types = False  # MPI copies what lies on a device piece by piece
        return engine

    def _ready(self) -> None:
        if "cuda" in self.device_types:
            torch.cuda.current_stream().synchronize()

    def abandon(self, handle, memory):
        self._abandoned.append((handle[0], memory))

    def post(self, sends, receives, call=None):
        self._ready()
        if self._abandoned:
            self._abandoned = [one for one in self._abandoned if not MPI.Request.Testall(one[0])]
        if call is None:
            call = Call(0, tuple({peer for peer, _, _ in (*sends, *receives)}))
        comm, lookout, requests = self.comm, self.lookout, []
        numbers, recent, step, wrap, mark = lookout.numbers, lookout.recent, lookout.step, lookout.wrap, lookout.mark
        mark |= call.code & lookout.codes
        for peer in call.peers:
            numbers[peer] += step
            recent[peer].append(call)
        for peer, address, nbytes in receives:
            for part in self._parts(address, nbytes):
                requests.append(comm.Irecv(part, peer, numbers[peer] & wrap | mark))
        for peer, address, nbytes in sends:
            for part in self._parts(address, nbytes):
                requests.append(comm.Isend(part, peer, numbers[peer] & wrap | mark))
        return requests, receives, call, lookout.era

    def _parts(self, address, nbytes):
        """The messages of MPI that carry these bytes."""
        if type(nbytes) is not int:
            return [(MPI.buffer.fromaddress(address, nbytes.span), 1, nbytes.kind)]
        chunk, starts = self.chunk, range(0, nbytes, self.chunk)
        return [(MPI.buffer.fromaddress(address + start, min(chunk, nbytes - start)), MPI.BYTE) for start in starts]

    def _lengths(self, nbytes):
        """Their sizes."""
        if type(nbytes) is not int:
            return [index(nbytes)]
        return [min(self.chunk, nbytes - start) for start in range(0, nbytes, self.chunk)]

    def wait(self, handle, board=None):
        if handle is None:  # a collective, which is done
            return
        requests, receives, call, era = handle
        statuses = [MPI.Status() for _ in requests]
        try:
            if not MPI.Request.Testall(requests, statuses):
                self._patiently(requests, statuses, receives, call, era, board)
        except MPI.Exception as error:
            raise TransportError(
                f"MPI failed: {error}",
                op="exchange",
                rank=self.rank,
                expected=f"messages of {[(p, n) for p, _, n in receives]} (rank, bytes)",
                actual="an error",
                next_step="check that every rank calls the same operators with the same layouts and dtype",
            ) from error
        for (peer, nbytes), status in zip(self._expected(receives), statuses):
            if status.Get_count(MPI.BYTE) != nbytes:
                raise TransportError(
                    "a message has another length than planned",
                    op="exchange",
                    rank=self.rank,
                    expected=f"{nbytes} bytes from rank {peer}",
                    actual=f"{status.Get_count(MPI.BYTE)} bytes",
                    next_step="give every rank the same layouts and dtype; where blocks differ in size, pass a Layout",
                )

    def _expected(self, receives):
        """(rank, bytes) of each message of MPI."""
        return [(p, size) for p, _, n in receives for size in self._lengths(n)]

    def _patiently(self, requests, statuses, receives, call, era, board):
        """Wait for all messages; ``board.missing`` tells who has not sent yet, and the lookout looks why."""
        for _ in range(_SPINS):
            if MPI.Request.Testall(requests, statuses):
                return
        began = due = time.monotonic()
        while not MPI.Request.Testall(requests, statuses):
            os.sched_yield()  # never longer: large messages go on only while somebody asks for them
            now = time.monotonic()
            if now < due:
                continue
            due = now + self.lookout.interval
            peers = [peer for peer, _ in self._expected(receives)]
            missing = {p for p, request in zip(peers, requests) if not request.Get_status()}
            if board is not None:
                board.missing = sorted(missing)
            try:
                self.lookout.look(call, era, now - began, missing)
            except DistdlError:
                for request in requests[: len(peers)]:
                    request.Cancel()
                raise
        if board is not None:
            board.missing = None

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
        self._ready()
        comm, mpi_type = self.group(ranks), _SUM_TYPES.get(dtype)
        if mpi_type is None:
            raise TransportError(
                "MPI cannot sum this dtype",
                op=kind,
                rank=self.rank,
                actual=dtype,
                expected=f"one of {sorted(map(str, _SUM_TYPES))}",
                next_step="convert it first",
            )
        operation, item = (MPI.LOR if dtype == torch.bool else MPI.SUM), dtype.itemsize
        step = self.chunk // item
        for start in range(0, count, step):
            n = min(step, count - start)

            def memory(address, first=start * item, size=n * item):
                return MPI.buffer.fromaddress(address + first, size)

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
        """The smallest rank of this process's node: of those that can share memory, as the board found."""
        return min(self.board.places)

    def abort(self, code: int = 1):
        """End every rank of the job."""
        self.comm.Abort(code)

    def close(self):
        self.board.close()
        self.side.close()
        for ranks in list(self.groups)[::-1]:  # the same order on all members: program order, backwards
            self.groups.pop(ranks).Free()
