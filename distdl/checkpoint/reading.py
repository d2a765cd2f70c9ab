"""Read this rank's boxes of a safetensors file, by safetensors itself."""

from __future__ import annotations

import json

from .format import volume
from .group import Group

__all__ = ["load", "read"]


def read(group, layout_of, choose, device=None):
    """({name: block}, metadata, the names that no rank chose).

    ``choose(names of the file)`` are those that this rank wants, ``layout_of(name, global shape)`` is a Layout, or ``None``: whole.
    """
    tensors, metadata = {}, {}

    def job():
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ImportError("reading checkpoints needs safetensors: pip install distdl[checkpoint]") from error
        with safe_open(group.path, "pt") as file:
            told, names = file.metadata() or {}, list(file.keys())
            metadata.update(json.loads(told.get("distdl", "{}")))
            chosen = choose(names)
            lacking = sorted(set(chosen) - set(names))
            if lacking:
                raise KeyError(f"the file has no {lacking}; it has {names}")
            for name in chosen:
                tensors[name] = _block(file.get_slice(name), name, layout_of).to(device or "cpu")
        return told.get("distdl.save"), names, set(names) - set(chosen)

    found = group.step(job)
    if len({(token, *names) for token, names, _ in found.values()}) > 1:
        raise group.error("the ranks read different files", "read from a file system that all share, while nobody saves to it")
    return tensors, metadata, set.intersection(*(left for _, _, left in found.values()))


def _block(source, name, layout_of):
    shape = tuple(source.get_shape())
    layout = layout_of(name, shape)
    if layout is None:
        return source[...].clone()  # what safetensors returns is a view of the mapped file
    if layout.shape != shape:
        raise ValueError(f"{name!r} has shape {shape} in the file, and {layout.shape} in its layout")
    if layout.box() is None or not volume(layout.box()):
        return source[tuple(slice(0, 0) for _ in shape)].new_empty(layout.local_shape())
    return source[layout.slices()].clone()


def load(path, layouts=None, *, names=None, device=None, P=None):
    """Read this rank's blocks of a file that :func:`save`, or safetensors, wrote; collective.

    Args:
        path: the file.
        layouts: {name: Layout}, on any ranks, whatever the file was written by; what has none is read whole.
        names: which tensors (default: all).
        device: where to put them (default: CPU).
        P: the ranks that make the call; default: all ranks of the default world.

    Returns:
        ({name: block}, metadata). Only the bytes of the blocks are read. A rank outside a layout gets an empty tensor.

    Messages: one small all-gather.

    Raises:
        CheckpointError: on every rank: no such file or tensor, another shape, a damaged file, ranks that read different files.
        PartitionError: this rank is not one of ``P``.
    """
    layouts = layouts or {}

    def choose(found):
        return list(dict.fromkeys([*(found if names is None else names), *layouts]))

    tensors, metadata, _ = read(Group("checkpoint.load", path, P), lambda name, _: layouts.get(name), choose, device)
    return tensors, metadata
