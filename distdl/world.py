"""Worlds: the ranks of a job and the transports between them. The default world starts on first use, never at import."""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import traceback
from dataclasses import dataclass

from . import errors
from . import transport as _transport
from .errors import PartitionError, TransportError
from .partition import set_rank_source
from .transport.local import LocalTransport

_worlds: dict[str, World] = {}
_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")  # set by MPI launchers for their ranks


class World:
    """A set of ranks and the transports between them.

    Args:
        comm: an mpi4py communicator (default ``COMM_WORLD``); it is duplicated, never used itself.
        name: what partitions call this world. ``"default"`` is the one that ``Partition(shape)`` means.
        transport: an engine to use instead of MPI (tests, benchmarks).

    Without mpi4py, a process that no MPI launcher started is a world of one rank.

    Raises:
        TransportError: an MPI launcher started this process, but mpi4py cannot be used.
    """

    def __init__(self, comm=None, name: str = "default", transport=None):
        self.name = name
        self.host = _host_transport(comm) if transport is None else transport
        self.rank, self.size = self.host.rank, self.host.size
        _worlds[name] = self

    def transport(self, device_type: str):
        """The engine for tensors on ``device_type``; memory that MPI cannot read is staged through pinned host memory."""
        return self.host

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

    def all_gather(self, value, ranks) -> dict:
        """{rank: its small, picklable value} over ``ranks``, in rising order; one small all-gather. Ranks of one job trust each
        other, so pickles do no harm here."""
        data, ranks = pickle.dumps(value), tuple(sorted(ranks))
        if _transport.log is not None:
            _transport.log.append(("agree", ranks, len(data)))
        return dict(zip(ranks, map(pickle.loads, self.host.all_gather(data, ranks))))

    def close(self) -> None:
        """Free communicators; collective. Called at exit."""
        self.host.close()
        _worlds.pop(self.name, None)

    def __repr__(self):
        return f"World(rank {self.rank} of {self.size}, name={self.name!r}, {type(self.host).__name__})"


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
                                     f"{error}", op="World", next_step="pip install distdl[mpich]") from error
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
        local_rank, local_size: among the processes of this node.
        devices: CUDA devices of this process: an even share of the node's, by local rank.
    """

    rank: int
    world_size: int
    node: int
    num_nodes: int
    local_rank: int
    local_size: int
    devices: tuple[int, ...]

    @classmethod
    def discover(cls, name: str = "default") -> Topology:
        """Ask the running world; collective."""
        import platform

        import torch

        w = world(name)
        hosts = list(w.all_gather(platform.node(), range(w.size)).values())
        nodes = list(dict.fromkeys(hosts))
        peers = [r for r, h in enumerate(hosts) if h == hosts[w.rank]]
        local, count = peers.index(w.rank), torch.cuda.device_count()
        if count >= len(peers):
            share = count // len(peers)
            devices = tuple(range(local * share, (local + 1) * share))
        else:
            devices = (local % count,) if count else ()
        return cls(w.rank, w.size, nodes.index(hosts[w.rank]), len(nodes), local, len(peers), devices)


set_rank_source(lambda name: world(name).rank)
errors.set_rank_source(lambda: _worlds["default"].rank if "default" in _worlds else None)
