"""Cosine and sine transforms of partitioned tensors, of types 1 to 4, equal to scipy.fft.

They are stages and repartitions of fft.py with another local transform in the place of Fourier's. All eight are one
sum, y[k] = 2 Σ_j w_j x[j] cos(π (j + a)(k + b) / h), or of the sine: points and wave numbers lie at whole or half
steps, and w is 1/2 where a point is its own mirror image (Martucci, IEEE Trans. Signal Process. 42 (1994) 1038). That
is the real part of a Fourier transform of length 2h of x and zeros, between two vectors of phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from .._types import Place
from ..errors import PartitionError
from ..ties import nothing
from .transform import Kind, transformed

__all__ = ["dist_dctn", "dist_dstn", "dist_idctn", "dist_idstn"]

# Of each type a, b and h - n: where points and wave numbers begin, and how much half a period is longer than the dim.
_COSINES = {1: (0, 0, -1), 2: (0.5, 0, 0), 3: (0, 0.5, 0), 4: (0.5, 0.5, 0)}
_SINES = {1: (1, 1, 1), 2: (0.5, 1, 0), 3: (1, 0.5, 0), 4: (0.5, 0.5, 0)}
_BACK = {1: 1, 2: 3, 3: 2, 4: 4}  # the inverse, but for the factor 1/2h
_OTHER = {"backward": "forward", "ortho": "ortho", "forward": "backward"}


def _phases(mirror, angle, factor: float, own: float):
    """factor · exp(-i · angle), times ``own`` where a place is its own mirror image."""
    return torch.polar(factor * own ** mirror.to(torch.float64), -angle)


def _line(x, d: int, n: int, sine: bool, type: int, norm: str):
    """The transform of length ``n`` along dim ``d`` of real x, which is cut or continued by zeros."""
    a, b, more = (_SINES if sine else _COSINES)[type]
    h = n + more
    x = x.narrow(d, 0, min(n, x.shape[d]))
    j, k = (torch.arange(m, dtype=torch.float64, device=x.device) for m in (x.shape[d], n))
    first = int(b)  # the first wave number's place in the spectrum
    ortho = norm == "ortho"
    factor = {"backward": 2.0, "ortho": (2 / h) ** 0.5, "forward": 1 / h}[norm]
    before = _phases((j + a) % h == 0, torch.pi / h * j * (b - first), 1.0, 0.5**0.5 if ortho else 0.5)
    after = _phases((k + b) % h == 0, torch.pi / h * a * (k + b), factor, 0.5**0.5 if ortho else 1.0)
    after = 1j * after if sine else after

    def along(v):
        return v.to(x.dtype).reshape(-1, *(1,) * (x.dim() - d - 1))

    if b == first:
        y = torch.fft.rfft(x * along(before.real), 2 * h, d)
    else:
        y = torch.fft.fft(torch.complex(x * along(before.real), x * along(before.imag)), 2 * h, d)
    y = y.narrow(d, first, n)
    return y.real * along(after.real) - y.imag * along(after.imag)


def _local(x, t, stage, norm: str, sine: bool, type: int):
    """The transforms of one stage, one dim after the other; of complex x those of its two parts."""
    if not x.numel():
        return nothing(stage.result.local_shape(), x)
    if x.is_complex():
        return torch.complex(*(_local(part, t, stage, norm, sine, type) for part in (x.real, x.imag)))
    for d in stage.dims:
        x = _line(x, d, t.sizes[t.dims.index(d)], sine, type, norm)
    return x


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
    1/2n (of type 1: 1/2(n+1))."""
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
    :func:`dist_idctn`."""
    return _trigonometric("dist_idstn", True, True, x, P, dims, type, s, norm, P_out, shape)
