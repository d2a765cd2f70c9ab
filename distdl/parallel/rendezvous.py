"""torch.distributed beside distdl: the environment that ``env://`` reads, from MPI's ranks.

RPC, remote references, parameter servers and elastic restarts are not data flow, and torch has them. This makes them
start in a job that MPI launched, with the same ranks.
"""

from __future__ import annotations

import os
import socket

from ..nodes import Topology
from ..world import world

__all__ = ["export_rendezvous"]


def export_rendezvous(name: str = "default", *, addr: str | None = None, port: int | None = None) -> dict[str, str]:
    """Set the variables by which ``torch.distributed.init_process_group`` and ``rpc.init_rpc`` find each other.
    Collective.

    Args:
        name: the world whose ranks they get.
        addr: name or address of rank 0's node, where the store listens. Default: ``127.0.0.1`` where all ranks are on
            one node, and rank 0's host name elsewhere.
        port: where it listens; rank 0's choice counts. Default: one that is free on rank 0's node now (another program
            could take it before torch does).

    Returns:
        What was set in ``os.environ``: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and
        MASTER_PORT, as torchrun sets them, and over its own ones where it started the launcher;
        TORCHELASTIC_USE_AGENT_STORE is ``False``, because the ranks have a store of their own. On one node also
        GLOO_SOCKET_IFNAME and TP_SOCKET_IFNAME, the loopback interface,
        where they are not set: nothing then listens on a network.

    Messages: one small all-gather; no tensor of any shape.

    Raises:
        ShapeError: a port that is no integer.

    Example:
        >>> told = dd.parallel.export_rendezvous(port=29500)
        >>> told["RANK"], told["WORLD_SIZE"], told["MASTER_ADDR"], told["MASTER_PORT"]
        ('0', '1', '127.0.0.1', '29500')
    """
    where, topology = world(name), Topology.discover(name)
    proposed = None
    if where.rank == 0:
        host = addr or ("127.0.0.1" if topology.num_nodes == 1 else socket.gethostname())
        proposed = host, port or _free_port()
    address, number = where.all_gather(proposed, range(where.size), "export_rendezvous")[0]
    variables: dict[str, object] = {
        "RANK": topology.rank,
        "WORLD_SIZE": topology.world_size,
        "LOCAL_RANK": topology.local_rank,
        "LOCAL_WORLD_SIZE": topology.local_size,
        "GROUP_RANK": topology.node,
        "MASTER_ADDR": address,
        "MASTER_PORT": number,
        "TORCHELASTIC_USE_AGENT_STORE": False,
    }
    if topology.num_nodes == 1:
        loopback = next((interface for _, interface in socket.if_nameindex() if interface.startswith("lo")), None)
        for variable in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
            if loopback and variable not in os.environ:
                variables[variable] = loopback
    texts = {variable: str(value) for variable, value in variables.items()}
    os.environ.update(texts)
    return texts


def _free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port
