"""Worlds: the ranks of a job and the transports between them. The default world starts on first use, never at
import. To make one takes a few small messages; names and engines that are not there are errors."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from . import _torch, errors
from .calls import collective_call, single_plan, user_line
from .engine import transport as _transport
from .engine.local import LocalTransport
from .engine.operators import asked_while_traced
from .engine.side_stream import settle
from .engine.transport import DeviceEngines, Transport
from .errors import AgreementError, PartitionError, TransportError
from .failure import end_on_exceptions, job, moving
from .signature import Left, disagreement
from .watching import meeting, watchdog
from .watching.watch import Watch, watch_of

if TYPE_CHECKING:
    import torch

    from .partition import Partition

_worlds: dict[str, World] = {}
_fork = False  # whether this process is a fork of one that had loaded this
CUDA_WAYS = ("nccl", "staged", "mpi")  # how CUDA tensors travel
_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")  # set by MPI launchers for their ranks
# How many processes a launcher has started, by whose variables: all of them are set for its processes only. Not
# SLURM_NTASKS: sbatch sets that for every process.
_RANKS = "RANK", "WORLD_SIZE"  # set by torchrun, and by whoever wants torch.distributed to find its ranks
_COUNTS = (("OMPI_COMM_WORLD_SIZE",), ("PMI_SIZE",), ("WORLD_SIZE", "RANK"), ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"))
ENGINES = ("mpi", "torch")  # names of what carries a world's messages
_made: weakref.WeakSet = weakref.WeakSet()  # every world: a fork of this process may move in none


def cuda_way() -> str:
    """How CUDA tensors travel where nobody says otherwise."""
    return os.environ.get("DISTDL_CUDA", CUDA_WAYS[0])


class World:
    """A set of ranks and the transports between them.

    Args:
        comm: an mpi4py communicator (default ``COMM_WORLD``), or a process group of torch.distributed (default: torch's
            default group, or what the launcher says); it is duplicated, never used itself.
        name: what partitions call this world. ``"default"`` is the one that ``Partition(shape)`` means.
        transport: ``"mpi"``, or ``"torch"``: process groups of torch.distributed, gloo on CPUs and NCCL on CUDA
            devices; or an engine (tests, benchmarks). Default: ``DISTDL_TRANSPORT``; else what ``comm`` is of; else MPI
            where an MPI launcher has started several ranks; else ``"torch"`` where torch.distributed is initialised, or
            ``RANK`` and ``WORLD_SIZE`` are set, as by torchrun; else MPI.
        cuda: how CUDA tensors travel: ``"nccl"`` (over MPI it needs CuPy; without it, staged, with a warning),
            ``"staged"`` through pinned host memory, or ``"mpi"``: straight from the device by a CUDA-aware MPI.
            Default: ``DISTDL_CUDA``, or ``"nccl"``.
        half_sums: ``"float32"``: sums of more than two float16 or bfloat16 numbers are taken in float32 and rounded
            once; ``"native"``: in their own dtype where the engine can, which sends half as many bytes.

    Without mpi4py, a process that no launcher started is a world of one rank; so is any process with
    ``DISTDL_ALONE=1``. A process that a rank has started (a DataLoader's worker) is no rank: it may ask which rank has
    started it, and moves nothing.

    Raises:
        TransportError: a launcher (mpiexec, torchrun, srun) started more processes than MPI knows of, or mpi4py cannot
            be used; the ranks of torch.distributed cannot meet; this process was started by ``multiprocessing``, and
            not for a world; ``cuda`` is none of the three; or there is no such engine, or not for ``comm``.
        AbsenceError: under ``dd.checking()``: not all ranks of ``comm`` came to this collective call in time.

    Example:
        >>> ours = dd.World(name="of a library")  # its messages meet no others
        >>> F.all_sum_reduce(torch.ones(2), dd.Partition((1,), world="of a library"))
        tensor([1., 1.])
        >>> ours.close()
    """

    def __init__(
        self,
        comm: Any = None,
        name: str = "default",
        transport: Transport | str | None = None,
        cuda: str | None = None,
        half_sums: str = "float32",
    ) -> None:
        self.name, self.cuda = name, cuda or cuda_way()
        for what, given, ways, step in (
            ("for CUDA tensors", self.cuda, CUDA_WAYS, "set DISTDL_CUDA, or World(cuda=...), to one of them"),
            ("to sum halves", half_sums, ("float32", "native"), "leave it out, or choose one of these"),
        ):
            if given not in ways:
                names = f"{', '.join(ways[:-1])} or {ways[-1]}"
                raise TransportError(f"no such way {what}", op="World", expected=names, actual=given, next_step=step)
        chosen = transport if isinstance(transport, str) else None
        ours = transport is None or chosen is not None  # else an engine
        self.host: Transport = _host_transport(comm, name, chosen) if ours else transport  # type: ignore[assignment]
        self.wide = half_sums == "float32"  # whether sums of more than two halves are taken in float32
        self.watch: Watch | None = watch_of(self.host)
        self.host.serve(self.wide, None if self.watch is None else self.watch.lookout)
        self.rank: int = self.host.rank
        self.size: int = self.host.size
        self._engines: DeviceEngines | None = None
        _worlds[name] = self
        if ours:
            _made.add(self)
        if isinstance(self.host, _Child):
            self._move_nothing(self.host)
        elif self.watch is not None:
            watchdog.begin(self.watch)
        if comm is None and ours and not isinstance(self.host, _Child):  # for the processes that this one may start
            os.environ["DISTDL_RANK"] = f"{os.getpid()} {self.rank} {self.size} {job()}"

    @classmethod
    def from_group(cls, group: Any, name: str = "default", **options: Any) -> World:
        """The ranks of a torch.distributed process group as a world, in the order of the group; made by its members.
        ``options``: as of :class:`World`.

        Raises:
            TransportError: this process is none of the group's.
        """
        return cls(group, name, "torch", **options)

    def _move_nothing(self, child: _Child) -> None:
        self.host, self.watch, self._engines = child, None, None
        vars(self)["transport"] = child.refuse

    def transport(self, x: torch.Tensor, ranks: Sequence[int]) -> Transport:
        """The engine that moves ``x`` among ``ranks`` (sorted). What it cannot read is staged through pinned host
        memory."""
        moving.moves = True
        return self.host if x.is_cpu else self._for_cuda(x.device, ranks)

    def _for_cuda(self, device, ranks):
        settle(device)
        if device.type == "meta":
            raise TransportError(
                "a meta tensor has no memory to move",
                op="World",
                rank=self.rank,
                expected="a CPU or CUDA tensor",
                actual=device,
                next_step="work out shapes with layouts; or trace under FakeTensorMode",
            )
        if len(ranks) < self.size and self.rank not in ranks:
            return _Bystander(self.rank, self.size)
        if self.cuda == "staged" or self.size == 1:
            return self.host if self.size > 1 else _Bystander(self.rank, self.size)
        if self.cuda == "mpi":
            return self.host.on_device()
        if self._engines is None:
            self._engines = self.host.engines_on(self, device.index)
        if device.index != self._engines.index:
            raise TransportError(
                "a rank's CUDA tensors live on one device",
                op="World",
                rank=self.rank,
                actual=device,
                expected=f"cuda:{self._engines.index}",
                next_step="make another dd.World(comm, name) for the second device",
            )
        return self._engines.get(ranks) or self.host

    def check(self, *partitions: Partition, op: str | None = None) -> None:
        """Raise PartitionError where a partition is of another world, or names a rank that this one does not have.
        ``op``: in whose name, where that is a map."""
        for P in partitions:
            if P.world != self.name:
                raise PartitionError(
                    "the partitions belong to different worlds",
                    op=op,
                    partitions=partitions,
                    expected=self.name,
                    actual=P.world,
                    next_step="make both in one world",
                )
            if max(P.ranks) >= self.size:
                ranks = "1 rank" if self.size == 1 else f"{self.size} ranks"
                raise PartitionError(
                    f"the world has {ranks}",
                    op=op,
                    partitions=P,
                    expected=f"< {self.size}",
                    actual=f"rank {max(P.ranks)}",
                    next_step=f"start with -n {max(P.ranks) + 1}",
                )

    def all_gather(self, value: Any, ranks: Iterable[int], purpose: str = "agreement") -> dict[int, Any]:
        """{rank: its small, picklable value} over ``ranks``, in rising order; one small all-gather. Ranks of one job
        trust each other, so pickles do no harm here. ``purpose`` goes along: ranks that are here for different reasons
        all raise."""
        if _torch.dispatch_modes() and _torch.compiling():
            raise asked_while_traced(self.rank, purpose)
        _transport.begun += 1
        moving.moves = True
        ranks = tuple(sorted(ranks))
        lookout = None if self.watch is None or len(ranks) < self.size else self.watch.lookout
        doubtful = (lookout.era,) if lookout is not None and lookout.doubts else ()
        data = pickle.dumps((purpose, value, *doubtful))
        if _transport.log is not None:
            _transport.log.append(("agree", ranks, len(data)))
        host = (
            self.host
            if _transport.observer is None
            else _transport.observer.agreement(self.watch, self.host, value, ranks, purpose)
        )
        parts = host.all_gather(data, ranks)
        if not doubtful and parts.count(data) == len(parts):  # mostly all say the same
            return dict.fromkeys(ranks, value)
        found = {part: pickle.loads(part) for part in set(parts)}
        eras = [era for _, _, *eras in found.values() for era in eras]
        if eras and lookout is not None:
            lookout.align(max(eras) + 1)
        if any(theirs[0] != purpose for theirs in found.values()):
            said = {r: getattr(found[part][1], "op", found[part][0]) for r, part in zip(ranks, parts)}
            raise AgreementError(**disagreement("the operator called", said), op="agreement", rank=self.rank)
        return {r: found[part][1] for r, part in zip(ranks, parts)}

    def close(self) -> None:
        """Free communicators; collective. Called at exit."""
        if self._engines is not None:
            self._engines.close()
        if self.watch is not None:
            self.watch.close()
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
    where, error._told = _worlds[name], id(frame)
    ranks = tuple(r for r in ranks if r < where.size)
    if getattr(sys.exc_info()[1], "_told", None) == id(frame) or where.rank not in ranks or where.watch is None:
        return  # the first: an error about an error, in one call
    left = Left(error.op or frame.f_code.co_name, f"{type(error).__name__}, {error} at {user_line()}")
    if _transport.observer is None or not _transport.observer.local_error(where.watch, ranks, left):
        plan = single_plan()
        view = None if plan is None else plan.view(where.rank)
        peers = None if view is None else {message.peer for message in (*view.sends, *view.received)}
        where.watch.lookout.local_error(ranks, left, peers)


class _Bystander(LocalTransport):
    """For tensors of a rank that exchanges nothing, wherever they are."""

    device_types = ("cpu", "cuda")


class _Child(_Bystander):
    """In a process that rank ``rank`` of ``size`` has started, by ``multiprocessing`` or a fork: it knows the rank, and
    moves nothing. A fork of a world of one has all that it needs, and goes on; not one that ``multiprocessing`` made,
    which may be one of several that take themselves for ranks."""

    def refuse(self, *_):
        if self.size == 1 and (multiprocessing.parent_process() is None or _alone()):
            return self
        raise _no_rank(f"process {os.getpid()}, which rank {self.rank} of {self.size} has started")

    def all_gather(self, data, ranks):
        self.refuse()
        return super().all_gather(data, ranks)


def _no_rank(actual: str) -> TransportError:
    return TransportError(
        "this process is no rank, and moves nothing",
        op="World",
        expected="a rank, as its launcher started it",
        actual=actual,
        next_step="move in the ranks themselves; where a child imports the script (spawn, "
        'forkserver), keep the program below `if __name__ == "__main__":`; ranks are started by '
        "`python -m distdl run` or dd.launch; with DISTDL_ALONE=1 each process is a world of its own",
    )


def _alone() -> bool:
    return os.environ.get("DISTDL_ALONE", "0") not in ("", "0")


def _forked() -> None:
    """MPI does not survive a fork, nor does gloo: the child keeps what it knows of its worlds, not their engines."""
    global _fork
    _fork = True
    for found in _made:
        if not isinstance(found.host, _Child):
            found._move_nothing(_Child(found.rank, found.size))


os.register_at_fork(after_in_child=_forked)


def world(name: str = "default") -> World:
    """The world of that name; the default one starts on first use.

    Example:
        >>> dd.world().rank, dd.world().size
        (0, 1)
    """
    found = _worlds.get(name)
    if found is None:
        if name != "default":
            raise PartitionError(
                "no such world",
                op="world",
                actual=name,
                expected=sorted(_worlds),
                next_step="make it first: dd.World(comm, name)",
            )
        found = World()
    return found


def _engine_name(comm, chosen: str | None) -> str:
    """Which engine carries a world: the first that is said, see :class:`World`."""
    said, of = chosen or os.environ.get("DISTDL_TRANSPORT") or None, None
    if comm is not None:
        mpi = type(comm).__module__.partition(".")[0] == "mpi4py" or hasattr(comm, "Dup")
        of = "mpi" if mpi else "torch"
    if said is not None and (said not in ENGINES or said != (of or said)):
        raise TransportError(
            "no such engine" if said not in ENGINES else "the engine and the communicator do not belong together",
            op="World",
            expected=" or ".join(ENGINES) if said not in ENGINES else said,
            actual=said if said not in ENGINES else f"{type(comm).__name__}, of {of}",
            next_step="set DISTDL_TRANSPORT, or World(transport=...), to one of them, or to that of the communicator",
        )
    if said or of:
        return said or of
    loaded = sys.modules.get("mpi4py.MPI")
    if any(os.environ.get(name, "1") not in ("", "0", "1") for name in _LAUNCHED[:2]) or (
        loaded is not None and loaded.Is_initialized() and loaded.COMM_WORLD.size > 1
    ):
        return "mpi"
    return "torch" if _initialised() or all(os.environ.get(name) for name in _RANKS) else "mpi"


def _initialised() -> bool:
    """Whether torch.distributed is, in this process."""
    torch = sys.modules.get("torch")
    there = torch is not None and "torch.distributed" in sys.modules and torch.distributed.is_available()
    return there and torch.distributed.is_initialized()


def _host_transport(comm, name, chosen=None):
    if comm is None:
        if _alone():
            return LocalTransport()
        # By the process that set it, or by one that it has started.
        started = os.environ.get("DISTDL_RANK", "").split(" ", 3)
        mine = len(started) < 4 or int(started[0]) == os.getpid()
        child = multiprocessing.parent_process() is not None
        if child and (mine or int(started[2]) == 1) and not _fork and _initialised():
            child = False  # it was started to be a rank, as by torch.multiprocessing.spawn
        if not mine and (child or (int(started[2]) > 1 and started[3] == job())):
            return _Child(int(started[1]), int(started[2]))
        if child:
            raise _no_rank(f"process {os.getpid()}, which multiprocessing has started")
    engine = _engine_name(comm, chosen)
    transport = _by_torch(comm, name) if engine == "torch" else _by_mpi(comm, name)
    if transport.size > 1:
        end_on_exceptions(transport)
    return transport


def _by_torch(comm, name) -> Transport:
    if comm is None and os.environ.get("WORLD_SIZE") == "1" and not _initialised():
        return LocalTransport()
    from .engine.c10d import TorchTransport
    from .engine.c10d.meeting import meet

    found = meet(comm)
    if len(found.ranks) == 1:
        return LocalTransport()
    atexit.unregister(_close_all)
    atexit.register(_close_all)  # after the engine's own handler was registered, so before it runs
    return TorchTransport(found, name)


def _by_mpi(comm, name) -> Transport:
    if comm is None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # not installed, or its MPI library is missing
            launched = [name for name in _LAUNCHED if name in os.environ]
            if launched:
                raise TransportError(
                    f"an MPI launcher started this process ({launched[0]}), but mpi4py cannot be used: {error}",
                    op="World",
                    next_step="pip install distdl[mpich]",
                    expected="mpi4py and its MPI library",
                    actual=type(error).__name__,
                ) from error
            _compare(1)
            return LocalTransport()
        _compare(MPI.COMM_WORLD.size)
        comm = MPI.COMM_WORLD
    from .engine.mpi import Arrival, MpiTransport

    if comm.size > 1:
        meeting.meet(lambda: Arrival(comm), name)
    transport = MpiTransport(comm)
    atexit.unregister(_close_all)
    atexit.register(_close_all)  # after mpi4py's own handler was registered, so before it runs
    return transport


def _compare(size: int) -> None:
    """Raise TransportError where a launcher has started more processes than MPI's world has: each would take itself for
    all."""
    for variables in _COUNTS:
        told = os.environ.get(variables[0], "")
        if told.isdigit() and int(told) > size and all(name in os.environ for name in variables):
            says = ", ".join(f"{name}={os.environ[name]}" for name in variables)
            raise TransportError(
                f"{told} processes were started ({says}), but MPI's world has {size}: they do not know each other",
                op="World",
                expected=f"an MPI world of {told}",
                actual=size,
                next_step=f"start them by `python -m distdl run -n {told} script.py` (torchrun starts no MPI "
                "ranks), or by the mpiexec or srun of the MPI that `python -m distdl info` shows; DISTDL_ALONE=1 "
                "says that single processes are meant",
            )


@atexit.register
def _close_all() -> None:
    for found in list(_worlds.values())[::-1]:
        found.close()


def _rank(name: str | None) -> int | None:
    if name is None:
        return _worlds["default"].rank if "default" in _worlds else None
    return world(name).rank


errors.set_listener(_tell)
errors.set_rank_source(_rank)
