"""Every private API of torch.distributed that distdl uses, in one place. Only the engine ``torch`` imports this."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes

dist: Any = torch.distributed  # torch does not export all that it documents


@contextmanager
def plain_memory():
    """A context in which tensors are plain memory, also inside the user's transforms, modes and default devices."""
    no_transforms, no_classes = torch._C._DisableFuncTorch(), torch._C.DisableTorchFunction()
    with no_transforms, no_classes, _disable_current_modes(), torch.inference_mode(False):
        yield


def unrecorded(call, *args):
    """``call(*args)``, of which torch's profiler takes no notes: those of gloo's sends would end when they are waited
    for, after the profile."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return call(*args)
    torch._C._autograd._enable_record_function(False)
    try:
        return call(*args)
    finally:
        torch._C._autograd._enable_record_function(True)


def default_store():
    """The store of torch's default process group: torch has no public way to it."""
    return distributed_c10d._get_default_store()


def gloo(store, rank: int, size: int, timeout):
    """A group that is in none of torch's tables, and waits for none of its ranks: connections are made when two of them
    first speak."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout, options._threads = timeout, 2
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")  # one device: messages of a pair keep their order
    make = dist.ProcessGroupGloo
    device = (
        make.create_device(interface=names.split(",")[0], lazy_init=True)
        if names
        else make.create_default_device(lazy_init=True)
    )
    options._devices = [device]
    return make(store, rank, size, options)


def nccl(store, rank: int, size: int):
    """A group of NCCL that is in none of torch's tables."""
    return dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())


def coalesced(group, calls):
    """Start sends and receives, (kind, tensor, peer) each, as one call; returns its work. Alone, each pair of ranks
    would get a communicator of its own."""
    group._start_coalescing()
    for kind, tensor, peer in calls:
        getattr(group, kind)([tensor], peer, 0)
    return group._end_coalescing()


def all_gather(group, target, source):
    """Start an all-gather of equal blocks; returns its work."""
    return group._allgather_base(target, source)


def reduce_scatter(group, target, source, options):
    """Start a reduce-scatter of equal blocks; returns its work."""
    return group._reduce_scatter_base(target, source, options)


def on_device_at(address: int, count: int, dtype, device):
    """Memory of a device as a tensor, which does not own it."""
    with plain_memory():
        storage = torch._C._construct_storage_from_data_pointer(address, device, count * dtype.itemsize)
        return torch.empty(0, dtype=dtype, device=device).set_(storage)
