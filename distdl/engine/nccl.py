"""NCCL by CuPy's bindings, for CUDA tensors: everything goes on torch's current stream, and nothing waits on the host.

NCCL has no tags: messages between two ranks match by order, and a movement's messages go as one group. A communicator
belongs to an ordered set of ranks. It is made by its members alone, in program order, on their first movement; a box
plan over some of the ranks uses the whole world's communicator once that exists, since messages concern only their two
ends.
"""

from __future__ import annotations

import ctypes
import warnings
from dataclasses import dataclass

import torch

from .. import _torch
from ..errors import TransportError
from .transport import Transport, no_sum

_MAX_GROUPS = 256  # each holds memory on the device
# NCCL's names of what it can sum; the second number says how many of them one element is.
_SUM_TYPES = {
    torch.uint8: ("UINT8", 1),
    torch.int8: ("INT8", 1),
    torch.int32: ("INT32", 1),
    torch.int64: ("INT64", 1),
    torch.float16: ("FLOAT16", 1),
    torch.bfloat16: ("BFLOAT16", 1),
    torch.float32: ("FLOAT32", 1),
    torch.float64: ("FLOAT64", 1),
    torch.complex64: ("FLOAT32", 2),
    torch.complex128: ("FLOAT64", 2),
    torch.bool: ("UINT8", 1),
}


@dataclass(frozen=True)
class Cuda:
    """What a communicator needs of torch: this process's device and its current stream. Tests put the host in its
    place."""

    index: int

    def stream(self) -> int:
        """The address of torch's current stream."""
        return _torch.current_stream(self.index)

    def here(self):
        """A context in which this is the current device, as NCCL demands."""
        return _torch.on_device(self.index)

    def name(self) -> str:
        """Tells physical devices apart."""
        return str(torch.cuda.get_device_properties(self.index).uuid)

    def capturing(self) -> bool:
        """Whether the current stream is being captured as a CUDA graph."""
        return _torch.capturing()


def engines_on(world, index: int) -> NcclEngines:
    """The engines of a world whose tensors live on CUDA device ``index`` of this process."""
    from .peer import peer_memory  # stands above this file

    device = Cuda(index)
    try:
        return NcclEngines(world, device, load(), peer=peer_memory(world, device))
    except ImportError as error:
        return NcclEngines(world, device, why=f"cannot import cupy.cuda.nccl: {error}")
    except TransportError as error:
        return NcclEngines(world, device, wrong=str(error))


def load():
    """``cupy.cuda.nccl``, after torch has loaded its own NCCL, so that both share one library.

    Raises:
        TransportError: CuPy would bring a second, different NCCL into the process.
    """
    import cupy.cuda.nccl as nccl

    major, minor, patch = torch.cuda.nccl.version()[:3]
    ours, theirs = major * 10000 + minor * 100 + patch, nccl.get_version()
    if ours != theirs:
        raise TransportError(
            "CuPy and torch use different NCCL libraries in one process",
            op="NCCL",
            expected=f"{ours} (torch's)",
            actual=f"{theirs} (CuPy's)",
            next_step="import torch before cupy, and install one NCCL; or set DISTDL_CUDA=staged",
        )
    return nccl


class NcclEngines:
    """The communicators of a world, by ordered set of ranks.

    Args:
        world: its small all-gather tells members how to meet.
        device: this process's :class:`Cuda`.
        nccl: the bindings; ``None``: they cannot be loaded here, and ``why`` says so, or ``wrong``, where that is an
            error.
        peer: :class:`distdl.engine.peer.PeerMemory`, where ranks of one node are reached by that.
    """

    def __init__(self, world, device, nccl=None, why: str = "", wrong: str = "", peer=None):
        self.world, self.device, self.nccl, self.why, self.wrong = world, device, nccl, why, wrong
        self.peer = peer
        self.engines: dict[tuple[int, ...], NcclTransport | None] = {}
        self.whole: NcclTransport | None = None
        self.captured = False

    @property
    def index(self) -> int:
        """The device's number."""
        return self.device.index

    def get(self, ranks: tuple[int, ...]):
        """The engine for a movement among ``ranks`` (sorted); ``None``: it must be staged through the host."""
        engine = self._get(ranks)
        return engine if engine is None or engine.plain is engine or not self.device.capturing() else engine.plain

    def _get(self, ranks):
        if len(ranks) == self.world.size or self.whole is not None:
            if self.whole is None:
                self.whole = self.exactly(tuple(range(self.world.size)))
            return self.whole
        return self.exactly(ranks)

    def exactly(self, ranks: tuple[int, ...]):
        """The engine whose communicator has these ranks in this order, made by them on first use."""
        if ranks not in self.engines:
            self.engines[ranks] = self._make(ranks)
        return self.engines[ranks]

    def _make(self, ranks):
        """What keeps one rank from it travels with the rest, so that all of them stage, or all of them raise."""
        me, where, wrong = self.world.rank, self.world, self.wrong
        if self.nccl is not None and self.device.capturing():
            wrong = "a communicator cannot be made while a CUDA graph is captured; run the function once before"
        if len(self.engines) >= _MAX_GROUPS:
            wrong = f"more than {_MAX_GROUPS} groups of ranks; reuse partitions, or use fewer distinct ones"
        unique = self.nccl.get_unique_id() if self.nccl is not None and me == ranks[0] else None
        name, peers = self.device.name() if self.nccl else "", self.peer is not None
        found = where.all_gather((unique, wrong, self.why, peers, name), ranks, "NCCL")
        refused, missing = ({r: one[i] for r, one in sorted(found.items()) if one[i]} for i in (1, 2))
        if refused:
            raise TransportError(
                "; ".join(f"rank {r}: {text}" for r, text in refused.items()),
                op="NCCL",
                rank=me,
                expected="a communicator",
                actual=f"ranks {ranks}",
                next_step="or set DISTDL_CUDA=staged",
            )
        if missing:
            if me == ranks[0]:
                text = "; ".join(f"rank {r}: {why}" for r, why in missing.items())
                warnings.warn(
                    f"distdl moves CUDA tensors through pinned host memory and MPI, since NCCL is missing ({text}). "
                    "pip install distdl[gpu12], or choose this with DISTDL_CUDA=staged",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return None
        if len({asked for *_, asked, _ in found.values()}) > 1:
            some = [r for r, (*_, asked, _) in found.items() if asked]
            raise TransportError(
                "some ranks move by peer memory within a node, and others do not",
                op="NCCL",
                rank=me,
                expected="DISTDL_PEER alike on all ranks",
                actual=f"ranks {some} of {ranks} would",
                next_step="set DISTDL_PEER to the same on all of them, or on none",
            )
        names: dict[str, int] = {}
        for r, (*_, name) in sorted(found.items()):
            if names.setdefault(name, r) != r:
                raise TransportError(
                    f"ranks {names[name]} and {r} use the same device",
                    op="NCCL",
                    rank=me,
                    actual=name,
                    expected="one device for each rank",
                    next_step="put rank r's tensors on "
                    "dd.Topology.discover().devices, start fewer ranks, or set DISTDL_CUDA=staged",
                )
        with self.device.here():
            comm = self.nccl.NcclCommunicator(len(ranks), found[ranks[0]][0], ranks.index(me))
        engine = NcclTransport(self, comm, ranks)
        reach = None if self.peer is None else self.peer.reach(ranks)
        return engine if reach is None else engine.reaching(reach, ranks)

    def close(self) -> None:
        """Destroy the communicators, newest first, which is one order on all their ranks. Where a CUDA graph was
        captured they
        are left to the end of the process: a graph that still lives holds on to them, and to destroy them would wait
        for it."""
        made = [engine.comm for engine in self.engines.values() if engine is not None]
        groups = [ranks for ranks, engine in self.engines.items() if engine is not None and engine.reach is not None]
        self.engines.clear()
        self.whole = None
        for comm in reversed(made):
            if self.captured:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(comm))  # CuPy destroys a communicator that nobody holds
            else:
                comm.destroy()
        if groups:
            self.peer.close(groups)


class NcclTransport(Transport):
    """One communicator. ``ranks[i]`` is the world rank of NCCL's rank i."""

    device_types: tuple[str, ...] = ("cuda",)
    collectives: tuple[str, ...] = ("all_reduce", "all_gather", "reduce_scatter")
    sums = frozenset(_SUM_TYPES)
    takes_types = False
    chunk = 2**62
    tags = 0

    def __init__(self, engines: NcclEngines, comm, ranks):
        self.engines, self.comm, self.nccl, self.device = engines, comm, engines.nccl, engines.device
        self.rank, self.size = engines.world.rank, engines.world.size
        self.places = {r: i for i, r in enumerate(ranks)}
        self.wide = engines.world.wide
        self._byte = self.nccl.NCCL_UINT8
        self.plain = self  # which CUDA graphs may hold on to

    def reaching(self, reach, ranks) -> NcclTransport:
        """The same for ranks some of which are reached by peer memory."""
        from .peer import PeerTransport

        return PeerTransport(self, reach, ranks)

    def post(self, sends, receives, call=None, memory=None):
        nccl, comm, places, byte, device = self.nccl, self.comm, self.places, self._byte, self.device
        self._notice_capture()
        with device.here():
            stream = device.stream()
            nccl.groupStart()
            for peer, address, nbytes in sends:
                comm.send(address, nbytes, byte, places[peer], stream)
            for peer, address, nbytes in receives:
                comm.recv(address, nbytes, byte, places[peer], stream)
            nccl.groupEnd()

    def wait(self, handle):
        """Nothing: whatever follows on the stream comes after."""

    def abandon(self, handle, memory):
        """Nothing: the stream, and torch's pool for it, keep the order."""

    def collective(self, kind, source, target, count, dtype, ranks):
        engine = self.engines.exactly(ranks)
        return engine._collective(kind, source, target, count, dtype)

    def _collective(self, kind, source, target, count, dtype):
        nccl, comm = self.nccl, self.comm
        self._notice_capture()
        with self.device.here():
            stream = self.device.stream()
            if kind == "all_gather":
                comm.allGather(source, target, count * dtype.itemsize, self._byte, stream)
                return
            name, each = _SUM_TYPES.get(dtype, (None, 1))
            if name is None:
                raise no_sum("NCCL", kind, self.rank, dtype, _SUM_TYPES)
            operation = (
                nccl.NCCL_MAX if dtype == torch.bool else nccl.NCCL_SUM
            )  # sums of booleans are "or", as in torch
            run = comm.allReduce if kind == "all_reduce" else comm.reduceScatter
            run(source, target, count * each, getattr(nccl, "NCCL_" + name), operation, stream)

    def _notice_capture(self) -> None:
        if not self.engines.captured and self.device.capturing():
            self.engines.captured = True

    def all_gather(self, data, ranks):
        """Small messages between hosts go by the world's host engine."""
        return self.engines.world.host.all_gather(data, ranks)

    def close(self):
        self.engines.close()
