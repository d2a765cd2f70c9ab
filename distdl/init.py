"""Initialisation of partitioned parameters: ``dd.init.kaiming_uniform(layout, seed)``.

Every function is pure and returns this rank's block of a global tensor that depends on (global shape, seed) only: the
same on any number of ranks. Fans are those of the *global* shape. Nothing is sent, and no rank ever holds more than its
block and one more (:func:`orthogonal`: of whole columns). ``seed`` is an int (``F.fold_in(seed, i)`` for parameter i);
``dtype`` and ``device`` default to torch's. A rank outside gets ``(0, *the first block's other sizes)``.

Of torch's seeds the numbers are not: laws are equal, not draws. What is not drawn (zeros, eye, dirac) is torch's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch.nn.init import calculate_gain

from ._arguments import check_functions, checked
from ._types import Device, Place
from .calls import public
from .errors import PartitionError
from .functional import random
from .partition import Layout, Partition, partition_of

__all__ = [
    "zeros",
    "ones",
    "eye",
    "dirac",
    "uniform",
    "normal",
    "trunc_normal",
    "kaiming_uniform",
    "kaiming_normal",
    "xavier_uniform",
    "xavier_normal",
    "orthogonal",
    "bias_uniform",
    "fans",
    "parameter_layout",
]
Seed = int | torch.Tensor


def parameter_layout(P: Place, shape: Sequence[int], dims: Sequence[int | None]) -> Layout:
    """The layout of a parameter whose dim i is split over partition dim ``dims[i]`` of a layer's ``P``, and copied
    along the rest.

    It spans the ranks that share this rank's place in the other dims, so the blocks of copies are equal. Blocks are
    balanced; where ``P`` is a Layout whose dim is as large as the parameter's, they are its own.

    Args:
        shape: the parameter's global shape.
        dims: for each of its dims a partition dim, in any order but each once, or ``None``: not split.

    Raises:
        PartitionError: a dim twice, or another number of them.

    Example:
        >>> dd.init.parameter_layout(dd.Partition((2, 3)), (5, 7), (1, None)).sizes(0)  # rows lie along dim 1
        (2, 2, 1)
    """
    grid = partition_of(P)
    used = [d for d in dims if d is not None]
    if len(dims) != len(shape) or sorted(used) != list(grid.dims(used)):
        raise PartitionError(
            "one partition dim or None for each dim of the parameter",
            expected=f"{len(shape)} entries, no dim twice",
            actual=tuple(dims),
            next_step="name each partition dim once, at the parameter dim that it splits",
        )
    fibre = grid.along(used) or grid.along(used, grid.ranks[0])
    sizes = tuple(1 if d is None else grid.shape[d] for d in dims)
    places = product(*(range(grid.shape[d]) for d in used))  # the fibre's own order where ``used`` rises
    ranks = tuple(fibre.rank_at([dict(zip(used, place)).get(d, 0) for d in range(grid.ndim)]) for place in places)
    lies = P if isinstance(P, Layout) else Layout(grid, (0,) * grid.ndim)
    splits = tuple(None if d is None or lies.shape[d] != n else lies.sizes(d) for d, n in zip(dims, shape))
    return Layout(Partition(sizes, ranks, grid.world), tuple(shape), splits)


def fans(shape: Sequence[int]) -> tuple[int, int]:
    """(fan in, fan out) of a weight of global ``shape`` (out, in, *kernel), as torch counts them.

    Example:
        >>> dd.init.fans((8, 4, 3, 3))
        (36, 72)
    """
    if len(shape) < 2:
        raise PartitionError(
            "a fan needs two dims",
            expected="(out, in, *kernel)",
            actual=tuple(shape),
            next_step="initialise vectors with normal, uniform or constants",
        )
    field = math.prod(shape[2:])
    return shape[1] * field, shape[0] * field


def _kaiming_std(layout: Layout, a: float, fan: str, nonlinearity: Any) -> float:
    if fan not in ("in", "out"):
        raise PartitionError(
            "no such fan",
            expected="'in' or 'out'",
            actual=fan,
            next_step="choose one of these",
        )
    count = fans(layout.shape)[fan == "out"]
    return calculate_gain(nonlinearity, a) / math.sqrt(count) if count else 0.0


def _xavier_std(layout: Layout, gain: float) -> float:
    count = sum(fans(layout.shape))
    return gain * math.sqrt(2 / count) if count else 0.0


@checked
def uniform(
    layout: Layout,
    seed: Seed,
    *,
    low: float = 0.0,
    high: float = 1.0,
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> torch.Tensor:
    """Uniform in [low, high).

    Example:
        >>> L, half = (dd.Layout(dd.Partition((p, 1)), (2, 3)) for p in (1, 2))
        >>> torch.equal(dd.init.uniform(half, 7), half.shard(dd.init.uniform(L, 7)))
        True
    """
    return random.uniform(layout, seed, dtype, device, low, high)


@checked
def normal(
    layout: Layout,
    seed: Seed,
    *,
    mean: float = 0.0,
    std: float = 1.0,
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> torch.Tensor:
    """Normal.

    Example:
        >>> L, half = (dd.Layout(dd.Partition((p, 1)), (2, 3)) for p in (1, 2))
        >>> torch.equal(dd.init.normal(half, 7), half.shard(dd.init.normal(L, 7)))
        True
    """
    return random.normal(layout, seed, dtype, device, mean, std)


@checked
def trunc_normal(
    layout: Layout,
    seed: Seed,
    *,
    mean: float = 0.0,
    std: float = 1.0,
    a: float = -2.0,
    b: float = 2.0,
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> torch.Tensor:
    """Normal, restricted to [a, b].

    Example:
        >>> L, half = (dd.Layout(dd.Partition((p, 1)), (2, 3)) for p in (1, 2))
        >>> torch.equal(dd.init.trunc_normal(half, 7), half.shard(dd.init.trunc_normal(L, 7)))
        True
    """
    return random.trunc_normal(layout, seed, dtype, device, mean, std, a, b)


@checked
def zeros(layout: Layout, *, dtype: torch.dtype | None = None, device: Device = None) -> torch.Tensor:
    """Zeros.

    Example:
        >>> L = dd.Layout(dd.Partition((1, 1)), (2, 3))
        >>> dd.init.zeros(L)
        tensor([[0., 0., 0.],
                [0., 0., 0.]])
    """
    return torch.zeros(layout.local_shape(), dtype=dtype, device=device)


@checked
def ones(layout: Layout, *, dtype: torch.dtype | None = None, device: Device = None) -> torch.Tensor:
    """Ones.

    Example:
        >>> L = dd.Layout(dd.Partition((1, 1)), (2, 3))
        >>> dd.init.ones(L)
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """
    return torch.ones(layout.local_shape(), dtype=dtype, device=device)


def _indices(layout: Layout, device: Device) -> list[torch.Tensor]:
    """The global indices of this rank's block in each dim."""
    return [torch.arange(*bounds, device=device) for bounds in layout.box() or [(0, n) for n in layout.local_shape()]]


def _places(places: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return places.to(dtype or torch.get_default_dtype())


@checked
def eye(layout: Layout, *, dtype: torch.dtype | None = None, device: Device = None) -> torch.Tensor:
    """The identity, as ``torch.nn.init.eye_`` fills a matrix, square or not: a linear layer keeps its inputs.

    Args:
        layout: of two dims.

    Raises:
        PartitionError: another number of dims.

    Example:
        >>> L = dd.Layout(dd.Partition((1, 1)), (2, 3))
        >>> dd.init.eye(L)
        tensor([[1., 0., 0.],
                [0., 1., 0.]])
    """
    if layout.ndim != 2:
        raise PartitionError(
            "an identity has rows and columns",
            partitions=layout,
            expected="2 dims",
            actual=layout.shape,
            next_step="dd.init.dirac is the identity of a convolution",
        )
    rows, columns = _indices(layout, device)
    return _places(rows[:, None] == columns, dtype)


@checked
def dirac(layout: Layout, *, groups: int = 1, dtype: torch.dtype | None = None, device: Device = None) -> torch.Tensor:
    """One at the middle of the kernel where the channels in and out are the same of their group, as
    ``torch.nn.init.dirac_``: a convolution keeps its inputs.

    Args:
        layout: of (out, in / groups, *kernel), 1 to 3 kernel dims.
        groups: as the convolution's.

    Raises:
        PartitionError: another number of dims, or groups that do not divide the channels out.

    Example:
        >>> dd.init.dirac(dd.Layout(dd.Partition((1, 1, 1)), (2, 2, 3)))[:, :, 1]
        tensor([[1., 0.],
                [0., 1.]])
    """
    if not 3 <= layout.ndim <= 5 or groups < 1 or layout.shape[0] % groups:
        raise PartitionError(
            "no weight of a convolution with these groups",
            partitions=layout,
            expected="(out, in / groups, *kernel), 3 to 5 dims, groups that divide out",
            actual=f"{layout.shape}, groups={groups}",
            next_step="give the weight's layout, and the convolution's groups",
        )
    out, inner, *kernel = _indices(layout, device)
    result = out[:, None] % max(layout.shape[0] // groups, 1) == inner
    for places, n in zip(kernel, layout.shape[2:]):
        result = result[..., None] & (places == n // 2)
    return _places(result, dtype)


_PANEL = 64  # reflections at a time


@checked
def orthogonal(
    layout: Layout, seed: Seed, *, gain: float = 1.0, dtype: torch.dtype | None = None, device: Device = None
) -> torch.Tensor:
    """gain · a matrix with orthonormal columns (rows, where there are fewer of these), each as likely as any other: the
    law of ``torch.nn.init.orthogonal_``. Of more than two dims all but the first are columns together.

    Q = H₁ H₂ … Hₖ D, where Hⱼ reflects a vector of n-j+1 normal numbers onto an axis and D has the signs that make R's
    diagonal positive (Stewart, SIAM J. Numer. Anal. 17, 1980). A rank applies the reflections, 64 at a time, to its own
    columns of the identity. Worked out in float64, and equal on any number of ranks to its rounding.

    Raises:
        PartitionError: fewer than two dims.

    Example:
        >>> q = dd.init.orthogonal(dd.Layout(dd.Partition((1, 1)), (3, 2)), 7)
        >>> torch.allclose(q.T @ q, torch.eye(2), atol=1e-6)
        True
    """
    if layout.ndim < 2:
        raise PartitionError(
            "an orthogonal matrix has rows and columns",
            partitions=layout,
            expected="2 dims or more",
            actual=layout.shape,
            next_step="initialise vectors with normal, uniform or constants",
        )
    first, *others = _indices(layout, device)
    along = torch.zeros(1, dtype=torch.int64, device=device)
    for places, size in zip(others, layout.shape[1:]):
        along = (along[:, None] * size + places).flatten()
    n, k = layout.shape[0], math.prod(layout.shape[1:])
    wide = n < k
    n, k = max(n, k), min(n, k)  # of a tall matrix, which is turned at the end
    rows, columns = (along, first) if wide else (first, along)
    own = _places(torch.arange(n, device=device)[:, None] == columns, torch.float64)
    for start in range((k - 1) // _PANEL * _PANEL, -1, -_PANEL) if own.numel() else ():
        stop = min(start + _PANEL, k)
        drawn = random.normal_box(((start, n), (start, stop)), (n, k), seed, torch.float64, device)
        x = drawn.tril()
        sign = torch.where(x.diagonal() < 0, -1.0, 1.0)
        v = x + torch.eye(n - start, stop - start, dtype=x.dtype, device=device) * sign * x.norm(dim=0)
        # Their product is I - V T Vᵀ, and T⁻¹ the upper triangle of VᵀV with half of its diagonal.
        gram = v.T @ v
        inverse = gram.triu() - 0.5 * torch.diag(gram.diagonal())
        # No reflection of later columns has touched the rows of these: they are the identity's.
        below = torch.cat([-sign[:, None] * own[start:stop], own[stop:]])
        turned = below - v @ torch.linalg.solve_triangular(inverse, v.T @ below, upper=True)
        own = torch.cat([own[:start], turned])
    block = own.index_select(0, rows)
    return (gain * (block.T if wide else block)).to(dtype or torch.get_default_dtype()).reshape(layout.local_shape())


@checked
def kaiming_uniform(
    layout: Layout,
    seed: Seed,
    *,
    a: float = 0.0,
    fan: str = "in",
    nonlinearity: str = "leaky_relu",
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> torch.Tensor:
    """Uniform in ±gain·√(3 / fan) (He et al., arXiv:1502.01852). ``a=√5`` is what torch.nn.Linear and Conv start from.

    Args:
        a: the slope of a leaky ReLU.
        fan: "in" or "out".

    Example:
        >>> L, half = (dd.Layout(dd.Partition((p, 1)), (2, 3)) for p in (1, 2))
        >>> torch.equal(dd.init.kaiming_uniform(half, 7), half.shard(dd.init.kaiming_uniform(L, 7)))
        True
    """
    bound = math.sqrt(3) * _kaiming_std(layout, a, fan, nonlinearity)
    return uniform(layout, seed, low=-bound, high=bound, dtype=dtype, device=device)


@checked
def kaiming_normal(
    layout: Layout,
    seed: Seed,
    *,
    a: float = 0.0,
    fan: str = "in",
    nonlinearity: str = "leaky_relu",
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> torch.Tensor:
    """Normal with standard deviation gain / √fan; see :func:`kaiming_uniform`.

    Example:
        >>> L, half = (dd.Layout(dd.Partition((p, 1)), (2, 3)) for p in (1, 2))
        >>> torch.equal(dd.init.kaiming_normal(half, 7), half.shard(dd.init.kaiming_normal(L, 7)))
        True
    """
    return normal(layout, seed, std=_kaiming_std(layout, a, fan, nonlinearity), dtype=dtype, device=device)


@checked
def xavier_uniform(
    layout: Layout, seed: Seed, *, gain: float = 1.0, dtype: torch.dtype | None = None, device: Device = None
) -> torch.Tensor:
    """Uniform in ±gain·√(6 / (fan in + fan out)) (Glorot & Bengio, AISTATS 2010).

    Example:
        >>> L, half = (dd.Layout(dd.Partition((p, 1)), (2, 3)) for p in (1, 2))
        >>> torch.equal(dd.init.xavier_uniform(half, 7), half.shard(dd.init.xavier_uniform(L, 7)))
        True
    """
    bound = math.sqrt(3) * _xavier_std(layout, gain)
    return uniform(layout, seed, low=-bound, high=bound, dtype=dtype, device=device)


@checked
def xavier_normal(
    layout: Layout, seed: Seed, *, gain: float = 1.0, dtype: torch.dtype | None = None, device: Device = None
) -> torch.Tensor:
    """Normal with standard deviation gain·√(2 / (fan in + fan out)).

    Example:
        >>> L, half = (dd.Layout(dd.Partition((p, 1)), (2, 3)) for p in (1, 2))
        >>> torch.equal(dd.init.xavier_normal(half, 7), half.shard(dd.init.xavier_normal(L, 7)))
        True
    """
    return normal(layout, seed, std=_xavier_std(layout, gain), dtype=dtype, device=device)


@checked
def bias_uniform(
    layout: Layout, seed: Seed, weight_shape: Sequence[int], *, dtype: torch.dtype | None = None, device: Device = None
) -> torch.Tensor:
    """Uniform in ±1/√(fan in) of the weight's *global* shape: the bias of torch.nn.Linear and Conv.

    Example:
        >>> b = dd.init.bias_uniform(dd.Layout(dd.Partition((1,)), (4,)), 7, weight_shape=(4, 100))
        >>> bool(b.abs().max() <= 0.1)
        True
    """
    fan_in = fans(weight_shape)[0]
    bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
    return uniform(layout, seed, low=-bound, high=bound, dtype=dtype, device=device)


public({name: globals()[name] for name in __all__}, alike=False)
check_functions(globals(), __all__)
