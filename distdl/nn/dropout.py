"""Dropout as modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch

from .. import functional as F
from .._arguments import Checked
from .._types import Place
from ..calls import public
from ..compiled import node, traced_as
from ..functional import random
from .layer import agreed_seed, first_line

__all__ = ["Dropout", "FeatureDropout"]


class Dropout(Checked, torch.nn.Module):
    """:func:`distdl.functional.dist_dropout`: the same global mask on any partition, another one at each call.

    Calls are counted, so every rank must call it equally often; the seed comes from torch's generator. A call that a
    checkpoint runs again has its first mask again. Compiled code counts its calls as it runs. Under vmap ``randomness``
    decides, as it does for torch's: "same" is one mask for all examples, "different" one for each, and "error" an
    error; compiled code has none of them.

    Attributes:
        seed: with the number of calls it is all that a checkpoint file must remember.

    Raises:
        DistdlError: a call in backward that is no repetition of one in forward (a checkpoint with
            preserve_rng_state=False).

    Example:
        >>> layer = dd.nn.Dropout(dd.Partition((1, 1)), 0.5)
        >>> layer.eval()(torch.ones(1, 2))
        tensor([[1., 1.]])
    """

    function: ClassVar[Callable[..., torch.Tensor]] = staticmethod(F.dist_dropout)

    def __init__(self, P: Place, p: float = 0.5) -> None:
        super().__init__()
        self.P, self.p = P, p
        self.seed, self._calls = agreed_seed(P), random.Calls()

    @property
    def calls(self) -> int:
        """The number of calls so far."""
        return self._calls.count

    @calls.setter
    def calls(self, count: int) -> None:
        self._calls.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop elements in training; x itself in evaluation."""
        if not self.training:
            return x
        return type(self).function(x, self.P, self.p, self._seed(x))

    def _seed(self, x: torch.Tensor) -> int | torch.Tensor:
        """Of this call."""
        return F.fold_in(self.seed, self._calls.next(), *random.examples(x.device))

    def extra_repr(self) -> str:
        """The partition and the probability."""
        return f"{first_line(self.P)}, p={self.p}"


class FeatureDropout(Dropout):
    """:func:`distdl.functional.dist_feature_dropout`: torch.nn.Dropout1d/2d/3d.

    Example:
        >>> layer = dd.nn.FeatureDropout(dd.Partition((1, 1, 1)), 0.5)
        >>> layer.eval()(torch.ones(1, 2, 1)).shape
        torch.Size([1, 2, 1])
    """

    function = staticmethod(F.dist_feature_dropout)


@node
def _numbered(calls: random.Calls, seed: int) -> int | torch.Tensor:
    return F.fold_in(seed, calls.in_graph())


def _seed_in_graph(dropout: Dropout, x: torch.Tensor) -> int | torch.Tensor:
    return _numbered(dropout._calls, dropout.seed)


public({"": Dropout._seed}, alike=False)
traced_as(Dropout._seed, _seed_in_graph)
