"""Worlds: the ranks of a job and the transports between them. The default world starts on first use, never at import."""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import traceback
from dataclasses import dataclass, replace

from . import errors
from . import transport as _transport
from .errors import AgreementError, PartitionError, TransportError
from .partition import set_rank_source
from .transport.local import LocalTransport
from .transport.nccl import NcclEngines, engines_on
from .transport.watch import watch
from .transport.where import collective_call, user_line

_worlds: dict[str, World] = {}
_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")  # set by MPI launchers for their ranks


class World:
    """A set of ranks and the transports between them.

    Args:
        comm: an mpi4py communicator (default ``COMM_WORLD``); it is duplicated, never used itself.
        name: what partitions call this world. ``"default"`` is the one that ``Partition(shape)`` means.
        transport: an engine to use instead of MPI (tests, benchmarks).
        cuda: how CUDA tensors travel: ``"nccl"`` (needs CuPy; without it, staged, with a warning), ``"staged"`` through pinned
            host memory, or ``"mpi"``: straight from the device by a CUDA-aware MPI. Default: ``DISTDL_CUDA``, or ``"nccl"``.
        half_sums: ``"float32"``: sums of more than two float16 or bfloat16 numbers are taken in float32 and rounded once;
            ``"native"``: in their own dtype where the engine can, which sends half as many bytes.

    Without mpi4py, a process that no MPI launcher started is a world of one rank.

    Raises:
        TransportError: an MPI launcher started this process, but mpi4py cannot be used; or ``cuda`` is none of the three.
    """

    def __init__(self, comm=None, name: str = "default", transport=None, cuda: str | None = None,
                 half_sums: str = "float32"):
        self.name, self.cuda = name, cuda or os.environ.get("DISTDL_CUDA", "nccl")
        if self.cuda not in ("nccl", "staged", "mpi"):
            raise TransportError("no such way for CUDA tensors", op="World", expected="nccl, staged or mpi", actual=self.cuda,
                                 next_step="set DISTDL_CUDA, or World(cuda=...), to one of them")
        self.host = _host_transport(comm) if transport is None else transport
        if half_sums not in ("float32", "native"):
            raise TransportError("no such way to sum halves", op="World", expected="float32 or native", actual=half_sums,
                                 next_step="leave it out, or choose one of these")
        self.host.wide = half_sums == "float32"
        self.rank, self.size = self.host.rank, self.host.size
        self._engines: NcclEngines | None = None
        _worlds[name] = self
        if self.size > 1:
            watch(self.host)

    def transport(self, x, ranks):
        """The engine that moves ``x`` among ``ranks`` (sorted). What it cannot read is staged through pinned host memory."""
        return self.host if x.is_cpu else self._for_cuda(x.device, ranks)

    def _for_cuda(self, device, ranks):
        if device.type == "meta":
            raise TransportError("a meta tensor has no memory to move", op="World", rank=self.rank, expected="a CPU or CUDA tensor",
                                 actual=device, next_step="work out shapes with layouts; or trace under FakeTensorMode")
        if len(ranks) < self.size and self.rank not in ranks:
            return _Bystander(self.rank, self.size)
        if self.cuda == "staged" or self.size == 1:
            return self.host if self.size > 1 else _Bystander(self.rank, self.size)
        if self.cuda == "mpi":
            return self.host.cuda_aware
        if self._engines is None:
            self._engines = engines_on(self, device.index)
        if device.index != self._engines.device.index:
            raise TransportError("a rank's CUDA tensors live on one device", op="World", rank=self.rank, actual=device,
                                 expected=f"cuda:{self._engines.device.index}",
                                 next_step="make another dd.World(comm, name) for the second device")
        return self._engines.get(ranks) or self.host

    def check(self, op: str, *partitions) -> None:
        """Raise PartitionError where a partition is of another world, or names a rank that this one does not have."""
        for P in partitions:
            if P.world != self.name:
                raise PartitionError("the partitions belong to different worlds", op=op, partitions=partitions,
                                     expected=self.name, actual=P.world, next_step="make both in one world")
            if max(P.ranks) >= self.size:
                ranks = "1 rank" if self.size == 1 else f"{self.size} ranks"
                raise PartitionError(f"the world has {ranks}", op=op, partitions=P, expected=f"< {self.size}",
                                     actual=f"rank {max(P.ranks)}", next_step=f"start with -n {max(P.ranks) + 1}")

    def all_gather(self, value, ranks, purpose: str = "agreement") -> dict:
        """{rank: its small, picklable value} over ``ranks``, in rising order; one small all-gather. Ranks of one job trust each
        other, so pickles do no harm here. ``purpose`` goes along: ranks that are here for different reasons all raise."""
        _transport.begun += 1
        data, ranks = pickle.dumps((purpose, value)), tuple(sorted(ranks))
        if _transport.log is not None:
            _transport.log.append(("agree", ranks, len(data)))
        host = self.host if _transport.observer is None else _transport.observer.agreement(self.host, value, ranks, purpose)
        parts = host.all_gather(data, ranks)
        if parts.count(data) == len(parts):  # mostly all say the same
            return dict.fromkeys(ranks, value)
        found = {part: pickle.loads(part) for part in set(parts)}
        if any(theirs != purpose for theirs, _ in found.values()):
            told = "; ".join(f"rank {r}: {getattr(found[part][1], 'op', found[part][0])}" for r, part in zip(ranks, parts))
            raise AgreementError("the ranks disagree in the operator called", op="agreement", rank=self.rank, actual=told,
                                 expected="the same on every rank", next_step="call the same operators in the same order")
        return {r: found[part][1] for r, part in zip(ranks, parts)}

    def close(self) -> None:
        """Free communicators; collective. Called at exit."""
        if self._engines is not None:
            self._engines.close()
        self.host.close()
        _worlds.pop(self.name, None)

    def __repr__(self):
        return f"World(rank {self.rank} of {self.size}, name={self.name!r}, {type(self.host).__name__})"


def _tell(error) -> None:
    """Tell the other ranks of the call that this one leaves it, so that they need not wait for it in vain."""
    found = collective_call()
    if found is None or found[2] not in _worlds:
        return
    frame, ranks, name = found
    host, error._told = _worlds[name].host, id(frame)
    ranks = tuple(r for r in ranks if r < host.size)
    if getattr(sys.exc_info()[1], "_told", None) == id(frame) or host.rank not in ranks or not hasattr(host, "lookout"):
        return  # the first: an error about an error, in one call
    op, text = error.op or frame.f_code.co_name, f"{type(error).__name__}, {error} at {user_line()}"
    if _transport.observer is None or not _transport.observer.local_error(host, ranks, op, text):
        host.lookout.local_error(ranks, op, text)


class _Bystander(LocalTransport):
    """For tensors of a rank that exchanges nothing, wherever they are."""

    device_types = ("cpu", "cuda")


def world(name: str = "default") -> World:
    """The world of that name; the default one starts on first use."""
    found = _worlds.get(name)
    if found is None:
        if name != "default":
            raise PartitionError("no such world", op="world", actual=name, expected=sorted(_worlds),
                                 next_step="make it first: dd.World(comm, name)")
        found = World()
    return found


def _host_transport(comm):
    if comm is None:
        try:
            import mpi4py.MPI  # noqa: F401
        except (ImportError, RuntimeError) as error:  # not installed, or its MPI library is missing
            launched = [name for name in _LAUNCHED if name in os.environ]
            if launched:
                raise TransportError(f"an MPI launcher started this process ({launched[0]}), but mpi4py cannot be used: "
                                     f"{error}", op="World", next_step="pip install distdl[mpich]",
                                     expected="mpi4py and its MPI library", actual=type(error).__name__) from error
            return LocalTransport()
    from .transport.mpi import MpiTransport

    transport = MpiTransport(comm)
    atexit.register(_close_all)  # after mpi4py's own handler was registered, so before it runs
    if transport.size > 1:
        _abort_on_exception(transport)
    return transport


def _abort_on_exception(transport) -> None:
    """An uncaught exception on one rank ends the job: its peers would wait for messages that never come."""
    previous = sys.excepthook

    def hook(kind, value, trace):
        if issubclass(kind, KeyboardInterrupt):
            previous(kind, value, trace)
        else:
            sys.stderr.write("".join(traceback.format_exception(kind, value, trace)))
            sys.stderr.write(f"distdl: rank {transport.rank} of {transport.size} failed; ending the job\n")
        sys.stderr.flush()
        transport.abort(1)

    sys.excepthook = hook
    ignored = sys.unraisablehook

    def at_exit(unraisable):  # Python only prints these, and exits with 0
        try:
            ignored(unraisable)
        finally:
            if (unraisable.err_msg or "").startswith("Exception ignored in atexit callback"):
                sys.stderr.write(f"distdl: rank {transport.rank} of {transport.size} failed at exit; ending the job\n")
                sys.stderr.flush()
                transport.abort(1)

    sys.unraisablehook = at_exit


@atexit.register
def _close_all() -> None:
    for found in list(_worlds.values())[::-1]:
        found.close()


@dataclass(frozen=True)
class Topology:
    """Where this process stands: node and device of every rank follow from it.

    Attributes:
        rank, world_size: in the world.
        node, num_nodes: number of this process's node, in order of each node's smallest rank.
        local_rank, local_size: among the processes of this node. Nodes may have different numbers of processes.
        devices: CUDA devices of this process.
        nodes: the ranks of each node, in rising order.
    """

    rank: int
    world_size: int
    node: int
    num_nodes: int
    local_rank: int
    local_size: int
    devices: tuple[int, ...]
    nodes: tuple[tuple[int, ...], ...]

    @property
    def is_block_mapped(self) -> bool:
        """Whether nodes hold consecutive ranks. Only then, on nodes of G processes each, rank = node * G + local_rank."""
        return [r for ranks in self.nodes for r in ranks] == list(range(self.world_size))

    @classmethod
    def place(cls, nodes, devices: int | dict = 0, per_process: int | None = None) -> tuple[Topology, ...]:
        """The topology of every rank, from where each runs: a pure function.

        Args:
            nodes: the node of each rank, by any name: ``("a", "a", "b", "b")``; see ``dd.parallel.block_mapping``.
            devices: CUDA devices on each node: a number, or {name: number}.
            per_process: how many each process drives, in order of local ranks. Default: an even share; where there are fewer
                devices than processes, processes share them in turn.

        Raises:
            PartitionError: a node has fewer devices than ``per_process`` for each of its processes.
        """
        ranks_of: dict = {}
        for rank, name in enumerate(nodes):
            ranks_of.setdefault(name, []).append(rank)
        table = tuple(tuple(ranks) for ranks in ranks_of.values())
        numbers = {name: n for n, name in enumerate(ranks_of)}
        found = []
        for rank, name in enumerate(nodes):
            peers = ranks_of[name]
            local, count = peers.index(rank), devices.get(name, 0) if isinstance(devices, dict) else devices
            share = count // len(peers) if per_process is None else per_process
            if share * len(peers) > count:
                raise PartitionError(f"node {name} has too few devices", op="Topology.place", actual=count, rank=rank,
                                     expected=f"{share} for each of {len(peers)} processes",
                                     next_step="start fewer processes on a node, or give each fewer devices")
            mine = tuple(range(local * share, (local + 1) * share))
            if not mine and count and per_process is None:
                mine = (local % count,)
            found.append(cls(rank, len(nodes), numbers[name], len(table), local, len(peers), mine, table))
        return tuple(found)

    @classmethod
    def discover(cls, name: str = "default") -> Topology:
        """Ask the running world; collective. Ranks are on one node where MPI says that they can share memory.

        A node's devices are shared out evenly, see :meth:`place`; a process whose ``CUDA_VISIBLE_DEVICES`` names none of its
        neighbours' has all that it names.
        """
        import platform

        import torch

        w = world(name)
        mine = w.host.node() if hasattr(w.host, "node") else platform.node()
        visible = set(os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")) - {""}
        told = w.all_gather((mine, visible), range(w.size), "Topology.discover")
        count = torch.cuda.device_count()
        here = cls.place([node for node, _ in told.values()], {mine: count})[w.rank]
        others = [theirs for r, (_, theirs) in told.items() if r in here.nodes[here.node] and r != w.rank]
        alone = visible and all(theirs and visible.isdisjoint(theirs) for theirs in others)
        return replace(here, devices=tuple(range(count))) if alone else here


set_rank_source(lambda name: world(name).rank)
errors.set_listener(_tell)
errors.set_rank_source(lambda: _worlds["default"].rank if "default" in _worlds else None)
