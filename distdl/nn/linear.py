"""Linear layers and embeddings as modules."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from .. import functional as F
from .. import init
from .._types import Device, Place
from ..movement.options import per_dim, plain
from ..partition import Layout, partition_of
from .layer import Layer, bias_of, weight

__all__ = ["Embedding", "ExpertLinear", "Linear"]


class Linear(Layer):
    """:func:`distdl.functional.dist_linear`; ``P`` is (*batch, out, in). Takes its ``x_layout`` and so on.

    Example:
        >>> layer = dd.nn.Linear(dd.Partition((1, 1, 1)), 3, 5)
        >>> layer(torch.ones(2, 3)).shape
        torch.Size([2, 5])
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        P: Place,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **layout: Any,
    ) -> None:
        super().__init__(P, device, dtype)
        n, shape = partition_of(P).ndim, (out_features, in_features)
        self.options = layout
        self._parameter("weight", shape, (n - 2, n - 1), weight)
        self._parameter("bias", shape[:1], (n - 2,), bias_of(shape), bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y = x Wᵀ + b."""
        return F.dist_linear(x, self.weight, self.P, self.bias, params="invariant", **self.options)


class ExpertLinear(Layer):
    """:func:`distdl.functional.dist_expert_linear`: one linear layer for each expert, which lie in balanced blocks over
    ``P``, of one dim; each begins as a torch.nn.Linear does.

    Args:
        num_experts: in all; some ranks have none where ranks outnumber them.
        in_features, out_features, bias: of each expert.

    Attributes:
        weight: (this rank's experts, out, in).
        bias: (this rank's experts, out).

    Example:
        >>> layer = dd.nn.ExpertLinear(dd.Partition((1,)), 2, 3, 4)
        >>> layer(torch.ones(5, 3), torch.tensor([0, 1, 1, 0, 1])).shape
        torch.Size([5, 4])
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        P: Place,
        num_experts: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = per_dim((num_experts, out_features, in_features), 3, "a number of experts or features")
        super().__init__(P, device, dtype)
        self.num_experts = sizes[0]
        bound = 1 / math.sqrt(sizes[2]) if sizes[2] else 0.0
        draw = functools.partial(init.uniform, low=-bound, high=bound)
        self._parameter("weight", sizes, (0, None, None), draw)
        self._parameter("bias", sizes[:2], (0, None), draw, bias)

    def forward(self, x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        """Each token, a row of x, by the expert of its number in ``expert``."""
        return F.dist_expert_linear(x, self.weight, self.P, expert, self.bias, num_experts=self.num_experts)


class Embedding(Layer):
    """:func:`distdl.functional.dist_embedding`: ``P`` is (*dims of idx, vocabulary, embedding); takes its keyword
    arguments.

    Example:
        >>> layer = dd.nn.Embedding(dd.Partition((1, 1, 1)), 7, 4)
        >>> layer(torch.tensor([1, 2])).shape
        torch.Size([2, 4])
    """

    weight: torch.Tensor

    def __init__(
        self,
        P: Place,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(P, device, dtype)
        n, padding_idx = partition_of(P).ndim, plain(padding_idx, "padding_idx")
        self.options = dict(options, padding_idx=padding_idx, num_embeddings=num_embeddings)
        draw = functools.partial(_rows, padding_idx=padding_idx)
        self._parameter("weight", (num_embeddings, embedding_dim), (n - 2, n - 1), draw)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        """The rows of ``idx``."""
        return F.dist_embedding(idx, self.weight, self.P, params="invariant", **self.options)


def _rows(layout: Layout, seed: int, padding_idx: int | None, **kind: Any) -> torch.Tensor:
    block = init.normal(layout, seed, **kind)
    if padding_idx is not None:
        row, (first, last) = padding_idx % layout.shape[0], layout.box()[0]
        if first <= row < last:
            block[row - first] = 0
    return block
