"""How the ranks of a job meet: by its store, which torch.distributed or the launcher has, or rank 0."""

from __future__ import annotations

import os
import struct
from typing import Any

from ... import _distributed
from ..._distributed import dist
from ...errors import TransportError
from .messages import told

_stores: dict[tuple[str, str], Any] = {}  # of the job, by address and port


def initialised() -> bool:
    """Whether torch.distributed is, in this process."""
    return dist.is_available() and dist.is_initialized()


class Meeting:
    """What an engine starts with: the job's store, the ranks of its world by their numbers in the job, this process's
    place among them, its (number, size) in the job, and whether it has the store itself."""

    def __init__(self, store, ranks: tuple[int, ...], rank: int, place: tuple[int, int], hosts: bool = False):
        self.store, self.ranks, self.rank, self.place, self.hosts = store, ranks, rank, place, hosts


def meet(group=None) -> Meeting:
    """The store and the ranks of ``group``, of torch's default group, or of what the launcher has told this process;
    no peer is needed.

    Raises:
        TransportError: there is neither, or the store cannot be reached.
    """
    if initialised():
        ranks = tuple(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))
        me, store = dist.get_rank(), dist.PrefixStore("distdl", _distributed.default_store())
        if me not in ranks:
            raise TransportError(
                "this process is none of the group's",
                op="World",
                expected=f"one of ranks {ranks}",
                actual=f"rank {me}",
                next_step="make the world on the members of the group only",
            )
        return Meeting(store, ranks, ranks.index(me), (me, dist.get_world_size()))
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise TransportError(
            f"the ranks of torch.distributed cannot meet: no default process group, and no {', '.join(missing)}",
            op="World",
            expected=", ".join(names),
            actual=", ".join(f"{n}={os.environ[n]}" for n in names if n not in missing) or "none of them",
            next_step="start with torchrun --nproc-per-node 2 script.py, or python -m distdl run --engine torch -n 2 "
            "script.py; or call torch.distributed.init_process_group first; DISTDL_ALONE=1 says that single processes "
            "are meant",
        )
    rank, size, host, port = (os.environ[name] for name in names)
    hosts = rank == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else the launcher has it
    prefix = f"distdl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if (host, port) not in _stores:  # one connection for all worlds
        try:
            whole = dist.TCPStore(host, int(port), None, hosts, wait_for_workers=False, multi_tenant=True)
        except RuntimeError as error:
            raise TransportError(
                f"the store of the job cannot be reached: {told(error)}",
                op="World",
                expected=f"an answer of {host}:{port}",
                actual=type(error).__name__,
                next_step="see whether rank 0 runs, and MASTER_ADDR and MASTER_PORT are those of its machine",
            ) from error
        _stores[host, port] = dist.PrefixStore(prefix, whole)
    place = int(rank), int(size)
    return Meeting(_stores[host, port], tuple(range(place[1])), place[0], place, hosts)


class StoreChannel:
    """Small messages by the store: each rank has one box, whose letters are numbered."""

    def __init__(self, store, rank: int):
        self.store, self.rank, self.taken = store, rank, 0

    def send(self, peer: int, kind: int, data: bytes) -> None:
        number = self.store.add(f"box/{peer}", 1)
        self.store.set(f"box/{peer}/{number}", struct.pack("<ii", self.rank, kind) + data)

    def sent(self, messages) -> bool:
        return True  # the store has them

    def arrived(self):
        found = []
        while self.store.check([key := f"box/{self.rank}/{self.taken + 1}"]):
            data = self.store.get(key)
            self.store.delete_key(key)
            self.taken += 1
            found.append((*struct.unpack_from("<ii", data), data[8:]))
        return found

    def close(self):
        """Nothing: the store ends with the job."""
