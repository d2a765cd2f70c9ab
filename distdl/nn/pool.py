"""Pooling as modules: the arguments of torch.nn's after the partition, for x of (batch, channels, *space)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import functional as F
from .._types import Place, Size
from .function import Function

__all__ = [
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "L2Pool1d",
    "L2Pool2d",
    "L2Pool3d",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
]


class _MaxPool(Function[Any]):  # a block, or with return_indices two
    function = staticmethod(F.dist_max_pool)

    def __init__(
        self,
        P: Place,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        dilation: Size = 1,
        ceil_mode: bool = False,
        *,
        return_indices: bool = False,
        shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__(
            P,
            kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            ceil_mode=ceil_mode,
            return_indices=return_indices,
            shape=shape,
        )


class MaxPool1d(_MaxPool):
    """:func:`distdl.functional.dist_max_pool` over 1 spatial dim, with torch.nn.MaxPool1d's arguments.

    Example:
        >>> layer = dd.nn.MaxPool1d(dd.Partition((1, 1, 1)), 2)
        >>> layer(torch.ones(1, 2, 8)).shape
        torch.Size([1, 2, 4])
    """

    n = 1


class MaxPool2d(_MaxPool):
    """:func:`distdl.functional.dist_max_pool` over 2 spatial dims, with torch.nn.MaxPool2d's arguments.

    Example:
        >>> layer = dd.nn.MaxPool2d(dd.Partition((1, 1, 1, 1)), 2)
        >>> layer(torch.ones(1, 2, 8, 8)).shape
        torch.Size([1, 2, 4, 4])
    """

    n = 2


class MaxPool3d(_MaxPool):
    """:func:`distdl.functional.dist_max_pool` over 3 spatial dims, with torch.nn.MaxPool3d's arguments.

    Example:
        >>> layer = dd.nn.MaxPool3d(dd.Partition((1, 1, 1, 1, 1)), 2)
        >>> layer(torch.ones(1, 2, 8, 8, 8)).shape
        torch.Size([1, 2, 4, 4, 4])
    """

    n = 3


class _AvgPool(Function[torch.Tensor]):
    function = staticmethod(F.dist_avg_pool)

    def __init__(
        self,
        P: Place,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        *,
        divisor_override: int | None = None,
        shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__(
            P,
            kernel_size,
            stride=stride,
            padding=padding,
            ceil_mode=ceil_mode,
            count_include_pad=count_include_pad,
            divisor_override=divisor_override,
            shape=shape,
        )


class AvgPool1d(_AvgPool):
    """:func:`distdl.functional.dist_avg_pool` over 1 spatial dim, with torch.nn.AvgPool1d's arguments.

    Example:
        >>> layer = dd.nn.AvgPool1d(dd.Partition((1, 1, 1)), 2)
        >>> layer(torch.ones(1, 2, 8)).shape
        torch.Size([1, 2, 4])
    """

    n = 1


class AvgPool2d(_AvgPool):
    """:func:`distdl.functional.dist_avg_pool` over 2 spatial dims, with torch.nn.AvgPool2d's arguments.

    Example:
        >>> layer = dd.nn.AvgPool2d(dd.Partition((1, 1, 1, 1)), 2)
        >>> layer(torch.ones(1, 2, 8, 8)).shape
        torch.Size([1, 2, 4, 4])
    """

    n = 2


class AvgPool3d(_AvgPool):
    """:func:`distdl.functional.dist_avg_pool` over 3 spatial dims, with torch.nn.AvgPool3d's arguments.

    Example:
        >>> layer = dd.nn.AvgPool3d(dd.Partition((1, 1, 1, 1, 1)), 2)
        >>> layer(torch.ones(1, 2, 8, 8, 8)).shape
        torch.Size([1, 2, 4, 4, 4])
    """

    n = 3


class _L2Pool(Function[torch.Tensor]):
    function = staticmethod(F.dist_l2_pool)

    def __init__(
        self, P: Place, kernel_size: Size, stride: Size | None = None, *, shape: Sequence[int] | None = None
    ) -> None:
        super().__init__(P, kernel_size, stride=stride, shape=shape)


class L2Pool1d(_L2Pool):
    """:func:`distdl.functional.dist_l2_pool` over 1 spatial dim.

    Example:
        >>> layer = dd.nn.L2Pool1d(dd.Partition((1, 1, 1)), 2)
        >>> layer(torch.ones(1, 2, 8)).shape
        torch.Size([1, 2, 4])
    """

    n = 1


class L2Pool2d(_L2Pool):
    """:func:`distdl.functional.dist_l2_pool` over 2 spatial dims.

    Example:
        >>> layer = dd.nn.L2Pool2d(dd.Partition((1, 1, 1, 1)), 2)
        >>> layer(torch.ones(1, 2, 8, 8)).shape
        torch.Size([1, 2, 4, 4])
    """

    n = 2


class L2Pool3d(_L2Pool):
    """:func:`distdl.functional.dist_l2_pool` over 3 spatial dims.

    Example:
        >>> layer = dd.nn.L2Pool3d(dd.Partition((1, 1, 1, 1, 1)), 2)
        >>> layer(torch.ones(1, 2, 8, 8, 8)).shape
        torch.Size([1, 2, 4, 4, 4])
    """

    n = 3


class _AdaptiveMaxPool(Function[Any]):  # a block, or with return_indices two
    function = staticmethod(F.dist_adaptive_max_pool)

    def __init__(
        self,
        P: Place,
        output_size: int | Sequence[int | None],
        *,
        return_indices: bool = False,
        shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__(P, output_size, return_indices=return_indices, shape=shape)


class AdaptiveMaxPool1d(_AdaptiveMaxPool):
    """:func:`distdl.functional.dist_adaptive_max_pool` over 1 spatial dim.

    Example:
        >>> layer = dd.nn.AdaptiveMaxPool1d(dd.Partition((1, 1, 1)), 3)
        >>> layer(torch.ones(1, 2, 8)).shape
        torch.Size([1, 2, 3])
    """

    n = 1


class AdaptiveMaxPool2d(_AdaptiveMaxPool):
    """:func:`distdl.functional.dist_adaptive_max_pool` over 2 spatial dims.

    Example:
        >>> layer = dd.nn.AdaptiveMaxPool2d(dd.Partition((1, 1, 1, 1)), 3)
        >>> layer(torch.ones(1, 2, 8, 8)).shape
        torch.Size([1, 2, 3, 3])
    """

    n = 2


class AdaptiveMaxPool3d(_AdaptiveMaxPool):
    """:func:`distdl.functional.dist_adaptive_max_pool` over 3 spatial dims.

    Example:
        >>> layer = dd.nn.AdaptiveMaxPool3d(dd.Partition((1, 1, 1, 1, 1)), 3)
        >>> layer(torch.ones(1, 2, 8, 8, 8)).shape
        torch.Size([1, 2, 3, 3, 3])
    """

    n = 3


class _AdaptiveAvgPool(Function[torch.Tensor]):
    function = staticmethod(F.dist_adaptive_avg_pool)

    def __init__(
        self, P: Place, output_size: int | Sequence[int | None], *, shape: Sequence[int] | None = None
    ) -> None:
        super().__init__(P, output_size, shape=shape)


class AdaptiveAvgPool1d(_AdaptiveAvgPool):
    """:func:`distdl.functional.dist_adaptive_avg_pool` over 1 spatial dim.

    Raises:
        PartitionError, ShapeError: as its function does.

    Example:
        >>> layer = dd.nn.AdaptiveAvgPool1d(dd.Partition((1, 1, 1)), 3)
        >>> layer(torch.ones(1, 2, 8)).shape
        torch.Size([1, 2, 3])
    """

    n = 1


class AdaptiveAvgPool2d(_AdaptiveAvgPool):
    """:func:`distdl.functional.dist_adaptive_avg_pool` over 2 spatial dims.

    Raises:
        PartitionError, ShapeError: as its function does.

    Example:
        >>> layer = dd.nn.AdaptiveAvgPool2d(dd.Partition((1, 1, 1, 1)), 3)
        >>> layer(torch.ones(1, 2, 8, 8)).shape
        torch.Size([1, 2, 3, 3])
    """

    n = 2


class AdaptiveAvgPool3d(_AdaptiveAvgPool):
    """:func:`distdl.functional.dist_adaptive_avg_pool` over 3 spatial dims.

    Raises:
        PartitionError, ShapeError: as its function does.

    Example:
        >>> layer = dd.nn.AdaptiveAvgPool3d(dd.Partition((1, 1, 1, 1, 1)), 3)
        >>> layer(torch.ones(1, 2, 8, 8, 8)).shape
        torch.Size([1, 2, 3, 3, 3])
    """

    n = 3
