"""Fourier neural operators as modules: the convolution over kept wave numbers, and the block made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import functional as F
from .. import init
from .._arguments import Checked
from .._types import Device, Place
from ..errors import PartitionError, ShapeError
from ..functional.spectral import spectral_grid
from ..partition import Layout, partition_of
from .conv import Conv1d, Conv2d, Conv3d
from .layer import Layer

__all__ = ["FNOBlock", "SpectralConv"]

Modes = int | Sequence[int | Sequence[int]]  # for each spatial dim: of both low and high ones, or (low, high)


class SpectralConv(Layer):
    """:func:`distdl.functional.dist_spectral_conv` of real x: a matrix from channels to channels for each kept wave
    number.

    ``weight`` is (in, out, *kept modes, 2), the real and imaginary parts, so that it can be cast, saved and reduced as
    any parameter; each rank has its own modes. It fits x of any spatial size.

    Example:
        >>> layer = dd.nn.SpectralConv(dd.Partition((1, 1, 1)), 2, 3, 2)
        >>> layer(torch.ones(1, 2, 8)).shape
        torch.Size([1, 3, 8])
    """

    weight: torch.Tensor

    def __init__(
        self,
        P: Place,
        in_channels: int,
        out_channels: int,
        modes: Modes,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(P, device, dtype)
        self.modes = modes
        S, kept = spectral_grid(P, modes)
        shape = (in_channels, out_channels, *kept, 2)
        self._parameter("weight", shape, (None, None, *range(2, S.ndim), None), _weight, over=S)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The convolution of this rank's block."""
        if x.is_complex() or self.weight.is_complex():
            raise ShapeError(
                "the module is of real numbers",
                op="SpectralConv",
                partitions=self.P,
                expected="a real x",
                actual=x.dtype,
                next_step="call F.dist_spectral_conv with a weight of spectral_layout(..., real=False)",
            )
        # Strides of its own: those of an empty block may be any, and are contiguous nonetheless.
        w = torch.view_as_complex(self.weight.contiguous().flatten().view(self.weight.shape))
        return F.dist_spectral_conv(x, w, self.P, self.modes, params="invariant")


def _weight(layout: Layout, seed: int, **kind: Any) -> torch.Tensor:
    """Complex normal numbers of variance 2 / (in + out)."""
    return init.normal(layout, seed, std=(layout.shape[0] + layout.shape[1]) ** -0.5, **kind)


class FNOBlock(Checked, torch.nn.Module):
    """One block of a Fourier neural operator: activation(SpectralConv(x) + Conv(x)), the convolution of one pixel.

    Args:
        P: partition or Layout of x, (batch, channels, *space) of 1 to 3 spatial dims.
        modes: as :func:`distdl.functional.dist_spectral_conv` takes them.
        activation: a function of a tensor; ``None``: none, as after the last block.

    Example:
        >>> layer = dd.nn.FNOBlock(dd.Partition((1, 1, 1)), 2, 3, 2)
        >>> layer(torch.ones(1, 2, 8)).shape
        torch.Size([1, 3, 8])
    """

    def __init__(
        self,
        P: Place,
        in_channels: int,
        out_channels: int,
        modes: Modes,
        activation: Callable[[torch.Tensor], torch.Tensor] | None = torch.nn.functional.gelu,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        n = partition_of(P).ndim - 2
        if n not in (1, 2, 3):
            raise PartitionError(
                "x needs batch, channels and 1 to 3 dims",
                expected="3 to 5 dims",
                actual=n + 2,
                next_step="give P one dim for the batch, one for the channels and one for each spatial dim",
            )
        self.activation = activation
        self.spectral = SpectralConv(P, in_channels, out_channels, modes, device, dtype)
        self.pixel = (Conv1d, Conv2d, Conv3d)[n - 1](P, in_channels, out_channels, 1, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw both layers' parameters anew."""
        self.spectral.reset_parameters()
        self.pixel.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block of this rank's block."""
        y = self.spectral(x) + self.pixel(x)
        return y if self.activation is None else self.activation(y)
