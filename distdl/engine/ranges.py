"""Movements by name in torch's profiler: ``distdl::repartition (3 peers, 13440 B)``.

Ranges are made only while ``torch.profiler`` (or ``torch.autograd.profiler.emit_nvtx``, for NVTX) records; otherwise a
movement pays for one comparison.
"""

from __future__ import annotations

from operator import index

import torch

from .program import program_of


def label(plans, xs, transport, what: str = "") -> str:
    """A movement's name, with how many ranks this one exchanges messages with, and how many bytes it sends; or with the
    collective of the engine, and this rank's share."""
    x = xs[0]
    if not x.is_cpu and x.device.type not in transport.device_types:  # staged: the program is that of host memory
        xs = [torch.empty(x.shape, dtype=x.dtype) for x in xs]
    program, _ = program_of(plans, xs, transport)
    sent = sum(index(nbytes) for _, _, _, nbytes in program.sends)
    if program.kind == "all_reduce":
        sent = sum(like.numel() * like.dtype.itemsize for like in program.likes)
    if program.kind:
        among = f"{program.kind.replace('_', '-')} of {len(program.group)} ranks"
    else:
        n = len({peer for peer, *_ in (*program.sends, *program.receives)})
        among = f"{n} {'peer' if n == 1 else 'peers'}"
    return f"distdl::{what}{plans[0].named[0]} ({among}, {sent} B)"


def ranged(plans, xs, transport, what: str = ""):
    """The range of one movement, or of a part of it."""
    return torch.profiler.record_function(label(plans, xs, transport, what))
