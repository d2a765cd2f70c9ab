"""Folders of torch.distributed.checkpoint, read into blocks and written from blocks; without a process group.

Its planners and its file storage do the work: what they are asked for are boxes of Layouts in the place of DTensors.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import pickle
import secrets
import shutil
import zlib
from contextlib import suppress
from typing import Any

import torch

from .._types import Place
from ..partition import Layout
from .choice import Layouts, Names, block_of, chosen
from .format import Box, Entry, plan, volume
from .group import Group, Path
from .writing import bytes_of, describe, refuse_differing

__all__ = ["load_dcp", "save_dcp"]
_METADATA = ".metadata"


class _Metadata(pickle.Unpickler):
    """DCP's description of a folder is a pickle: of its own records, sizes and dtypes, and of nothing that runs."""

    _RECORDS = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    _OTHERS = (torch.Size, *{type(pathlib.PurePosixPath()), pathlib.PosixPath, pathlib.WindowsPath})

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if "." not in name else None
        record = module in self._RECORDS and isinstance(found, type) and found.__module__ == module
        if (
            record
            or found in self._OTHERS
            or isinstance(found, torch.dtype)
            or found is torch.serialization._get_layout
        ):
            return found
        raise pickle.UnpicklingError(f"it would run {module}.{name}, which is no part of such a description")


class _Blocks:
    """The part of a LoadPlanner that a storage reader asks: where to put what it has read."""

    def __init__(self, blocks: dict[str, torch.Tensor]):
        self.blocks = blocks

    def resolve_tensor(self, item: Any) -> torch.Tensor:
        place = tuple(slice(at, at + n) for at, n in zip(item.dest_offsets, item.lengths))
        return self.blocks[item.dest_index.fqn][place]

    def commit_tensor(self, item: Any, tensor: torch.Tensor) -> None:
        """It is in its block already."""


def load_dcp(
    path: Path,
    layouts: Layouts = None,
    *,
    names: Names = None,
    device: torch.device | str | None = None,
    P: Place | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read this rank's blocks of a folder that torch.distributed.checkpoint wrote; collective.

    Whatever mesh and number of ranks wrote it. A rank reads the chunks that its boxes touch, each of them whole, as
    torch does.

    Args:
        path: the folder.
        layouts, names, device, P: as for :func:`load_safetensors`. Nested state is named with dots: ``model.0.weight``.

    Returns:
        ({own name: block}, {}). Tensors only: other objects of the folder are pickles, and are left alone.

    Messages: one small all-gather.

    Raises:
        CheckpointError: on every rank: no such folder or tensor, another shape than its layout's, a chunk that is
            missing or damaged, a description that would run something, ranks that read different folders.
        PartitionError: this rank is not one of ``P``.

    Example:
        >>> dd.checkpoint.save_dcp("run", {"w": torch.ones(2)})
        >>> dd.checkpoint.load_dcp("run", {"w": dd.Layout(dd.Partition((1,)), (2,))})
        ({'w': tensor([1., 1.])}, {})
    """
    tensors: dict[str, torch.Tensor] = {}
    group = Group("checkpoint.load_dcp", path, P)

    def job() -> int:
        folder = os.fsdecode(group.path)
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
        from torch.distributed.checkpoint.planner import LoadPlan
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

        with open(os.path.join(folder, _METADATA), "rb") as file:
            description = file.read()
            file.seek(0)
            metadata = _Metadata(file).load()
        kinds = {n: kind for n, kind in metadata.state_dict_metadata.items() if isinstance(kind, TensorStorageMetadata)}
        items: list[Any] = []
        for own, name in chosen(names, layouts, kinds).items():
            kind = kinds[name]
            tensors[own], box = block_of(own, tuple(kind.size), kind.properties.dtype, layouts)
            if box is None or not volume(box):
                continue
            offsets, sizes = (torch.Size(numbers) for numbers in ([a for a, _ in box], [b - a for a, b in box]))
            parts = create_read_items_for_chunk_list(name, kind, [ChunkStorageMetadata(offsets, sizes)])
            if sum(part.lengths.numel() for part in parts) != volume(box):
                raise ValueError(f"{name!r} is not whole in the folder: chunks of {box} are missing")
            items += [dataclasses.replace(part, dest_index=MetadataIndex(own)) for part in parts]
        reader = FileSystemReader(folder)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        for item in items:
            file = os.path.normpath(metadata.storage_data[item.storage_index].relative_path)
            if os.path.isabs(file) or file.startswith(".."):
                raise ValueError(f"the description names a file outside of its folder: {file!r}")
        reader.read_data(LoadPlan(items), _Blocks(tensors)).wait()  # type: ignore[arg-type]
        return zlib.crc32(description)

    if len(set(group.step(job).values())) > 1:
        raise group.error(
            "the ranks read different folders", "read from a file system that all share, while nobody saves to it"
        )
    return {name: block.to(device or "cpu") for name, block in tensors.items()}, {}


class _Sources:
    """The part of a SavePlanner that a storage writer asks: what to write."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.tensors = tensors

    def resolve_data(self, item: Any) -> torch.Tensor:
        return self.tensors[item.index.fqn].detach().resolve_conj().resolve_neg()


def save_dcp(
    path: Path,
    tensors: dict[str, torch.Tensor],
    layouts: dict[str, Layout] | None = None,
    *,
    P: Place | None = None,
) -> None:
    """Write global tensors as a folder that ``torch.distributed.checkpoint.load`` reads, on any mesh; collective.

    Args:
        path: a folder that does not exist yet, or is empty, on a file system that all ranks share. It takes its name
            when everything is written.
        tensors, layouts, P: as for :func:`save`. A box that several ranks hold is written once, and checksums make sure
            that the copies are equal.

    Messages: four small all-gathers, no tensor. Each rank writes its boxes to a file of its own.

    Raises:
        CheckpointError: on every rank, and nothing is left: a folder with something in it, a full disk or another
            failure of any rank; shapes or layouts that disagree, blocks that are not the whole of a tensor, copies that
            differ.
        PartitionError: this rank is not one of ``P``.

    Example:
        >>> dd.checkpoint.save_dcp("run", {"w": torch.ones(2)})
        >>> dd.checkpoint.load_dcp("run")  # and torch.distributed.checkpoint.load
        ({'w': tensor([1., 1.])}, {})
    """
    group, mine = Group("checkpoint.save_dcp", path, P), secrets.token_hex(8)
    reports = group.step(lambda: describe(group.path, tensors, layouts or {}, {}, mine, any_dtype=True))
    try:
        entries = plan(reports)
    except ValueError as error:  # all ranks see the same reports, so all raise it
        raise group.error(str(error), "give every rank its blocks of the same tensors") from error
    folder, name = os.path.split(os.path.normpath(os.fsdecode(group.path)))
    temporary = os.path.join(folder, f".{name}.{reports[group.ranks[0]].token}.saving")

    def create() -> None:
        if group.leads:
            with suppress(FileNotFoundError):
                if os.listdir(group.path):
                    raise ValueError("the folder has something in it, and stays")
            os.mkdir(temporary)

    def remove() -> None:
        if group.leads:
            shutil.rmtree(temporary, ignore_errors=True)

    group.step(create, remove)

    finish: list[Any] = []

    def write() -> tuple[dict[tuple[str, Box], int], Any]:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        rank = group.world.rank
        boxes = {name: box for name, (_, _, box) in reports[rank].tensors.items()}
        copies = {(name, box): zlib.crc32(bytes_of(tensors[name])) for name, box in boxes.items()
                  if len(entries[name].holders.get(box, ())) > 1}  # fmt: skip
        plans, metadata = _plans(entries, group.ranks)
        writer = FileSystemWriter(temporary)
        writer.set_up_storage_writer(is_coordinator=group.leads)
        mine = writer.prepare_global_plan(plans)[group.ranks.index(rank)]
        finish.append(lambda results: writer.finish(metadata, results))
        return copies, writer.write_data(mine, _Sources(tensors)).wait()  # type: ignore[arg-type]

    found = group.step(write, remove)
    refuse_differing(group, {rank: copies for rank, (copies, _) in found.items()}, remove)

    def publish() -> None:
        if group.leads:
            finish[0]([results for _, results in found.values()])
            os.rename(temporary, group.path)

    group.step(publish, remove)


def _plans(entries: dict[str, Entry], ranks: tuple[int, ...]) -> tuple[list[Any], Any]:
    """Every rank's SavePlan and the folder's description, the same on every rank."""
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    items: dict[int, list[Any]] = {rank: [] for rank in ranks}
    for name, entry in entries.items():
        properties = TensorProperties(dtype=getattr(torch, entry.dtype))
        writers = entry.writers or {tuple((0, n) for n in entry.shape): ranks[0]}  # one without elements is named, too
        for box, rank in writers.items():
            offsets, sizes = (torch.Size(numbers) for numbers in ([a for a, _ in box], [b - a for a, b in box]))
            data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, torch.Size(entry.shape))
            items[rank].append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
    plans, metadata = create_default_global_save_plan([SavePlan(items[rank]) for rank in ranks])
    metadata.planner_data = {name: (name,) for name in entries}
    return plans, metadata
