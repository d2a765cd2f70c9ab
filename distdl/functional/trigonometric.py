"""Cosine and sine transforms of partitioned tensors, of types 1 to 4, equal to scipy.fft.

They are stages and repartitions of fft.py with another local transform in the place of Fourier's. Type 2 of n points is
Fourier's of the same n real points in another order, and type 3 goes that way back (Makhoul, IEEE Trans. Acoust. Speech
Signal Process. 28 (1980) 27). Type 1 is that of points and their mirror images, and type 4 that of points and zeros,
between two turns. Sines are cosines read from the other end, with signs that alternate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from .._types import Place
from ..errors import PartitionError
from ..ties import nothing
from .transform import Kind, transformed

__all__ = ["dist_dctn", "dist_dstn", "dist_idctn", "dist_idstn"]

_BACK = {1: 1, 2: 3, 3: 2, 4: 4}  # the inverse, but for its factor
_OTHER = {"backward": "forward", "ortho": "ortho", "forward": "backward"}


# ---------------------------------------------------------------- one dim of real numbers


def _along(v, x, d: int):
    """A vector over dim ``d`` of x, in x's precision."""
    dtype = x.dtype.to_complex() if v.is_complex() else x.dtype
    return v.to(dtype).reshape(-1, *(1,) * (x.dim() - d - 1))


def _turn(first: float, step: float, n: int, x, d: int):
    """exp(i (first + step · place)) over dim ``d``."""
    angle = first + step * torch.arange(n, dtype=torch.float64, device=x.device)
    return _along(torch.polar(torch.ones_like(angle), angle), x, d)


def _zeros(x, d: int, n: int):
    return x.new_zeros((*x.shape[:d], n, *x.shape[d + 1 :]))


def _first(x, d: int):
    """x[0] + (-1)^k x[n-1] + 2 Σ_(0<j<n-1) x[j] cos(π j k / (n-1))."""
    inner = x.narrow(d, 1, x.shape[d] - 2)
    return torch.fft.rfft(torch.cat([x, inner.flip(d)], d), dim=d).real


def _first_of_sines(x, d: int):
    """2 Σ_j x[j] sin(π (j+1) (k+1) / (n+1))."""
    zero = _zeros(x, d, 1)
    return -torch.fft.rfft(torch.cat([zero, x, zero, -x.flip(d)], d), dim=d).imag.narrow(d, 1, x.shape[d])


def _second(x, d: int):
    """2 Σ_j x[j] cos(π k (2j+1) / 2n)."""
    n = x.shape[d]
    even, odd = (x[(slice(None),) * d + (slice(i, None, 2),)] for i in (0, 1))
    y = torch.fft.rfft(torch.cat([even, odd.flip(d)], d), dim=d)
    y = y * (2 * _turn(0, -math.pi / (2 * n), n // 2 + 1, x, d))
    return torch.cat([y.real, -y.imag.narrow(d, 1, (n - 1) // 2).flip(d)], d)  # y[n-k] is the other part of y[k]


def _third(x, d: int):
    """x[0] + 2 Σ_(0<j) x[j] cos(π j (2k+1) / 2n)."""
    n = x.shape[d]
    half = n // 2 + 1
    other = torch.cat([_zeros(x, d, 1), x.narrow(d, n - half + 1, half - 1).flip(d)], d)
    y = torch.complex(x.narrow(d, 0, half), -other) * _turn(0, math.pi / (2 * n), half, x, d)
    j = torch.arange(n, device=x.device)
    order = torch.where(j % 2 == 0, j // 2, n - 1 - j // 2)
    return torch.fft.irfft(y, n, d, "forward").index_select(d, order)


def _fourth(x, d: int):
    """2 Σ_j x[j] cos(π (2j+1) (2k+1) / 4n)."""
    n = x.shape[d]
    y = torch.fft.fft(x * _turn(0, -math.pi / (2 * n), n, x, d), 2 * n, d).narrow(d, 0, n)
    return (y * (2 * _turn(-math.pi / (4 * n), -math.pi / (2 * n), n, x, d))).real


_COSINES = {1: _first, 2: _second, 3: _third, 4: _fourth}


def _line(x, d: int, sine: bool, type: int, norm: str):
    """The transform along dim ``d``, whose size stays."""
    n = x.shape[d]
    if sine and type > 1:
        signs = _along(1 - 2 * (torch.arange(n, device=x.device) % 2), x, d)
        if type == 2:
            return _line(x * signs, d, False, type, norm).flip(d)
        return _line(x.flip(d), d, False, type, norm) * signs
    period = 2 * (n if type > 1 else n + 1 if sine else n - 1)
    factor = {"backward": 1.0, "ortho": period**-0.5, "forward": 1 / period}[norm]
    if sine:
        return _first_of_sines(x, d) * factor
    if norm != "ortho" or type == 4:
        return _COSINES[type](x, d) * factor
    ends = torch.ones(n, dtype=torch.float64, device=x.device)  # of what is its own mirror image there is one, not two
    ends[[0, n - 1] if type == 1 else [0]] = 0.5**0.5
    ends = _along(ends, x, d)
    y = _COSINES[type](x if type == 2 else x / ends, d) * factor
    return y if type == 3 else y * ends


def _local(x, t, stage, norm: str, sine: bool, type: int):
    """The transforms of one stage, one dim after the other; of complex x those of its two parts."""
    if not x.numel():
        return nothing(stage.result.local_shape(), x)
    if x.is_complex():
        return torch.complex(*(_local(part, t, stage, norm, sine, type) for part in (x.real, x.imag)))
    for d in stage.dims:
        n = t.sizes[t.dims.index(d)]
        x = x.narrow(d, 0, min(n, x.shape[d]))
        x = torch.cat([x, _zeros(x, d, n - x.shape[d])], d) if x.shape[d] < n else x
        x = _line(x, d, sine, type, norm)
    return x


# ---------------------------------------------------------------- the transforms


def _trigonometric(name: str, sine: bool, inverse: bool, x, P, dims, type, s, norm, P_out, shape):
    if type not in _BACK:
        raise PartitionError("no such type", expected=tuple(_BACK), actual=type, next_step="choose one of these")
    if inverse:
        type, norm = _BACK[type], _OTHER.get(norm, norm)
    least = 1 + (type == 1 and not sine)  # that has both ends of an interval
    kind = Kind(name, partial(_local, sine=sine, type=type), inverse=inverse, like=True, least=least)
    return transformed(kind, x, P, dims, s, norm, None, P_out, shape)


def dist_dctn(
    x: torch.Tensor,
    P: Place,
    dims: int | Sequence[int] | None,
    *,
    type: int = 2,
    s: int | Sequence[int | None] | None = None,
    norm: str = "backward",
    P_out: Place | None = None,
    shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """The cosine transform over ``dims``, as scipy.fft.dctn. For fields whose slope is zero at the boundary.

    Type 2 is 2 Σ_j x[j] cos(π k (2j+1) / 2n), of points at half steps: a Neumann boundary beyond the last cells. Type 1
    has points on the boundary (at least 2), type 3 undoes type 2, and type 4 has a boundary of each kind.

    Args:
        x: this rank's block: float32, float64; complex64 and complex128, whose two parts are transformed; integers are
            converted as torch does.
        P, dims, P_out, shape: as for :func:`dist_fftn`.
        type: 1, 2, 3 or 4.
        s: for each of dims the length of the transform: x is cut, or padded with zeros, at its end.
        norm: "backward" (no factor), "forward" (1/2n; of type 1: 1/2(n-1)) or "ortho": the matrix is orthogonal, with
            scipy's factors of √2 at its ends.

    Returns:
        This rank's block of the result, of x's dtype, in fresh memory; where ``P_out`` is left out in the layout
        ``fft_layout(L, dims, s=s)``. A wave number is its place: 0 .. n-1.

    Messages: those of :func:`dist_fftn`, of real numbers for real x: half the bytes.

    Raises:
        PartitionError: dims, type, s or norm that do not fit; a tensor of one dim that ranks split.
        ShapeError: half precision, outside of autocast.

    Example:
        >>> F.dist_dctn(torch.tensor([1.0, 1.0]), dd.Partition((1,)), 0).shape
        torch.Size([2])
    """
    return _trigonometric("dist_dctn", False, False, x, P, dims, type, s, norm, P_out, shape)


def dist_idctn(
    x: torch.Tensor,
    P: Place,
    dims: int | Sequence[int] | None,
    *,
    type: int = 2,
    s: int | Sequence[int | None] | None = None,
    norm: str = "backward",
    P_out: Place | None = None,
    shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """The inverse of :func:`dist_dctn` of the same type and norm, as scipy.fft.idctn; arguments and messages as there.

    Args:
        s: the sizes of the result: higher wave numbers of x are cut off, or taken as zeros.
        P_out: ``None``: ``fft_layout(L, dims, inverse=True, s=s)``, from which :func:`dist_dctn` comes to that of x.

    Example:
        >>> P, x = dd.Partition((1,)), torch.tensor([1.0, 3.0])
        >>> F.dist_idctn(F.dist_dctn(x, P, 0), P, 0).round()
        tensor([1., 3.])
    """
    return _trigonometric("dist_idctn", False, True, x, P, dims, type, s, norm, P_out, shape)


def dist_dstn(
    x: torch.Tensor,
    P: Place,
    dims: int | Sequence[int] | None,
    *,
    type: int = 2,
    s: int | Sequence[int | None] | None = None,
    norm: str = "backward",
    P_out: Place | None = None,
    shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """The sine transform over ``dims``, as scipy.fft.dstn. For fields that are zero at the boundary: type 1 where the
    next points beyond the last ones are it, 2 Σ_j x[j] sin(π (j+1)(k+1) / (n+1)), type 2 where it is half a step away.
    Otherwise as :func:`dist_dctn`; a wave number is its place and one: 1 .. n, and the factor of norm "forward" is
    1/2n (of type 1: 1/2(n+1)).

    Example:
        >>> F.dist_dstn(torch.tensor([1.0, 1.0]), dd.Partition((1,)), 0).shape
        torch.Size([2])
    """
    return _trigonometric("dist_dstn", True, False, x, P, dims, type, s, norm, P_out, shape)


def dist_idstn(
    x: torch.Tensor,
    P: Place,
    dims: int | Sequence[int] | None,
    *,
    type: int = 2,
    s: int | Sequence[int | None] | None = None,
    norm: str = "backward",
    P_out: Place | None = None,
    shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """The inverse of :func:`dist_dstn` of the same type and norm, as scipy.fft.idstn; arguments as for
    :func:`dist_idctn`.

    Example:
        >>> P, x = dd.Partition((1,)), torch.tensor([1.0, 3.0])
        >>> F.dist_idstn(F.dist_dstn(x, P, 0), P, 0).round()
        tensor([1., 3.])
    """
    return _trigonometric("dist_idstn", True, True, x, P, dims, type, s, norm, P_out, shape)
