"""Names of what public functions take, for annotations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from .partition import Layout, Partition

Place = Partition | Layout  # a Layout where the caller knows the global shape
Dims = int | Sequence[int] | None  # of a partition; None: all
Size = int | Sequence[int]  # one number, or one for each dim
Tree = TypeVar("Tree")  # a tensor or a pytree of tensors: what comes back is of the same type
Device = torch.device | str | int | None  # None: torch's default
