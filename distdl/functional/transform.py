"""A Fourier transform: what was asked for in plain numbers, checked, and its stages run one after the other.

For the transforms of fft.py and trigonometric.py and the convolutions of spectral.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from ..agree import alike, check_tensor, resolve
from ..boxes import is_int
from ..errors import PartitionError, ShapeError
from ..movement.options import plain, sizes_of
from ..partition import Layout, partition_of
from ..ties import nothing
from .autocast import autocast
from .enter import check_block, outside
from .stages import Keep, Stage, Transform, schedule, spectrum, wave_numbers

__all__: list[str] = []

# None, or for each dim a number of wave numbers or how many (low, high) ones.
Keeps = int | Sequence[int | Sequence[int] | None] | None
_NORMS = ("backward", "ortho", "forward")


# ---------------------------------------------------------------- what was asked for


def dims_of(P, dims, s) -> tuple[int, ...]:
    """The dims to be transformed, in the caller's order."""
    where = partition_of(P)
    if dims is None:
        dims = range(where.ndim) if s is None else range(where.ndim - len(s), where.ndim)
    named = (dims,) if is_int(dims) else tuple(dims)
    if not named:
        raise PartitionError(
            "no dim to transform",
            expected=f"some of {where.ndim} dims",
            actual=named,
            next_step="name the dims, or pass None for all of them",
        )
    where.dims(named)  # each exists, and once
    return tuple(where.dim(d) for d in named)


def _per_dim(values, n: int, what: str) -> tuple:
    """One entry for each of ``n`` dims; ``None``: of none."""
    values = (None,) * n if values is None else (values,) * n if is_int(values) else tuple(values)
    if len(values) != n:
        raise PartitionError(
            f"{what} does not fit the dims",
            expected=f"{n} entries, one for each dim",
            actual=values,
            next_step=f"give {what} an entry for each of dims, None where nothing is asked",
        )
    return values


def kept_of(keep, n: int, half: bool) -> Keep:
    """(low, high): wave numbers 0 .. low-1 and -high .. -1 are kept, of ``n`` there are; ``None``: all."""
    if keep is None:
        return None
    low, high = sizes_of(keep, "keep") * 2 if is_int(keep) else sizes_of(keep, "keep")
    if half:
        high = 0 if is_int(keep) else high
    if min(low, high) < 0 or not 1 <= low + high <= n or (half and high):
        raise PartitionError(
            "the dim has no such wave numbers",
            expected=f"(low, high), together 1 to {n}" if not half else f"1 to {n}, and no negative ones",
            actual=keep,
            next_step="keep fewer modes, or transform at a larger size (s)",
        )
    return low, high


def pairs_of(keep, n: int) -> tuple:
    """``keep`` for each of ``n`` dims, in plain numbers."""
    found = _per_dim(keep, n, "keep")
    for one in found:
        pair = one is None or is_int(one)
        if not pair and (isinstance(one, str) or len(tuple(one)) != 2 or not all(map(is_int, one))):
            raise PartitionError(
                "not a number of wave numbers",
                expected="None, a number of both low and high ones, or (low, high)",
                actual=one,
                next_step="give (low, high) for each dim: wave numbers 0 .. low-1 and -high .. -1 are kept",
            )
    return tuple(None if one is None else plain(one, "keep") for one in found)


@lru_cache(maxsize=1024)
def transform_of(L: Layout, dims, s, keep, real: bool, inverse: bool, out, least=1) -> Transform:
    """All that a schedule depends on, checked."""
    last = len(dims) - 1
    sizes = []
    for i, (d, n, k) in enumerate(zip(dims, s, keep)):
        m, half = L.shape[d], real and i == last
        if n is None and inverse and k is not None:
            raise PartitionError(
                f"the size of dim {d} is not known",
                expected="s, as wave numbers were cut off",
                actual=None,
                next_step="pass s, the sizes of the result, with keep",
            )
        n = (2 * (m - 1) if half and inverse else m) if n is None or n == -1 else n
        if n < least:
            raise PartitionError(
                f"dim {d} has nothing to transform",
                expected=f"sizes of at least {least}",
                actual=n,
                next_step="give s positive sizes; half a spectrum of one wave number needs s"
                if least == 1
                else "give s larger sizes, or choose another type: points of type 1 lie on both boundaries",
            )
        sizes.append(n)
    t = Transform(L, dims, tuple(sizes), (None,) * len(dims), real, inverse)
    t = t._replace(keep=tuple(kept_of(k, wave_numbers(t, i), real and i == last) for i, k in enumerate(keep)))
    for i, d in enumerate(dims):
        if inverse and t.keep[i] and L.shape[d] != spectrum(t, i):
            raise PartitionError(
                f"dim {d} does not have the wave numbers that keep says",
                expected=spectrum(t, i),
                actual=L.shape[d],
                next_step="pass the keep of the forward transform",
            )
    if out is None:
        return t
    out = out if isinstance(out, Layout) else Layout(out, t.shape)
    if out.shape != t.shape:
        raise PartitionError(
            "P_out is the layout of another shape",
            partitions=out,
            expected=t.shape,
            actual=out.shape,
            next_step="give P_out the sizes of the result, which fft_layout shows, or pass its partition",
        )
    return t._replace(out=out)


def asked(P, dims, s, keep):
    """(dims, s, keep) in plain numbers, of as many entries."""
    s = None if s is None else tuple(None if n is None else plain(n, "s") for n in ((s,) if is_int(s) else s))
    dims = dims_of(P, dims, s)
    return dims, _per_dim(s, len(dims), "s"), pairs_of(keep, len(dims))


def check_norm(norm) -> None:
    if norm not in _NORMS:
        raise PartitionError("no such norm", expected=_NORMS, actual=norm, next_step="choose one of these")


REAL, COMPLEX = (torch.float32, torch.float64), (torch.complex64, torch.complex128)


def transformable(x, kinds):
    """x in a dtype that can be transformed: on every rank, as those outside pass the dtype that the others have."""
    if not (x.is_floating_point() or x.is_complex()):
        x = x.to(torch.get_default_dtype())
    if x.dtype not in kinds:
        raise ShapeError(
            "such numbers are not transformed",
            expected=" or ".join(str(kind).removeprefix("torch.") for kind in kinds),
            actual=x.dtype,
            next_step="convert the tensor first",
        )
    return x


# ---------------------------------------------------------------- one stage on one rank


def cut_off(y, d: int, keep):
    """The wave numbers 0 .. low-1 and -high .. -1 of a whole spectrum."""
    low, high = keep
    if low + high == y.shape[d]:
        return y
    if not high:
        return y.narrow(d, 0, low)
    return torch.cat([y.narrow(d, 0, low), y.narrow(d, y.shape[d] - high, high)], d)


def _put_back(y, d: int, keep, n: int):
    """The spectrum of ``n`` wave numbers with zeros where they were cut off."""
    low, high = keep
    if low + high == n:
        return y
    zeros = y.new_zeros((*y.shape[:d], n - low - high, *y.shape[d + 1 :]))
    return torch.cat([y.narrow(d, 0, low), zeros, y.narrow(d, low, high)], d)


def _as_read(y, d: int, n: int):
    """Half a spectrum without what is not read: imaginary parts where a wave number is its own conjugate. Libraries on
    devices are free to read them where they should not be there."""
    if not y.is_cuda:
        return y
    place = torch.arange(y.shape[d], device=y.device)
    alone = ((place == 0) | (2 * place == n)).reshape(-1, *(1,) * (y.dim() - d - 1))
    return torch.where(alone, y.real.to(y.dtype), y)


def local(x, t: Transform, stage: Stage, norm: str):
    """The transforms of one stage: several dims at once, as torch is faster so; one by one where wave numbers are cut
    off."""
    last = t.dims[-1] if t.real else None
    number = {d: i for i, d in enumerate(t.dims)}
    size = {d: t.sizes[number[d]] for d in stage.dims}
    keep = {d: t.keep[number[d]] for d in stage.dims}
    if not x.numel():  # torch transforms no empty tensors
        shape, real = stage.result.local_shape(), last in stage.dims
        if real and t.inverse:
            return nothing(shape, x.real if x.is_complex() else x)
        return nothing(shape, x, dtype=x.dtype.to_complex()) if stage.dims else x
    full = sorted(d for d in stage.dims if not keep[d] and d != last)  # else older torch's fake tensors are too small
    cut = [d for d in stage.dims if keep[d] and d != last]
    whole = last in stage.dims and not cut and not keep[last]
    if not t.inverse:
        if whole:
            return torch.fft.rfftn(x, [size[d] for d in (*full, last)], (*full, last), norm)
        if last in stage.dims:
            x = torch.fft.rfft(x, size[last], last, norm)
            x = cut_off(x, last, keep[last]) if keep[last] else x
        for d in cut:
            x = cut_off(torch.fft.fft(x, size[d], d, norm), d, keep[d])
        return torch.fft.fftn(x, [size[d] for d in full], full, norm) if full else x
    if whole and not x.is_cuda:
        return torch.fft.irfftn(x, [size[d] for d in (*full, last)], (*full, last), norm)
    x = torch.fft.ifftn(x, [size[d] for d in full], full, norm) if full else x
    for d in cut:
        x = torch.fft.ifft(_put_back(x, d, keep[d], size[d]), size[d], d, norm)
    if last in stage.dims:
        x = _put_back(x, last, keep[last], size[last] // 2 + 1) if keep[last] else x
        x = torch.fft.irfft(_as_read(x, last, size[last]), size[last], last, norm)
    return x


def run(x, t: Transform, norm: str, local=local):
    """All stages of a transform."""
    for stage in schedule(t):
        x = x if stage.move is None else stage.move(x)
        x = local(x, t, stage, norm) if stage.dims else x
    return x


# ---------------------------------------------------------------- the door


class Kind(NamedTuple):
    """Which transform: what a rank does at a stage, in which order, and of which numbers."""

    name: str
    local: Callable[..., torch.Tensor]
    real: bool = False  # to or from half a spectrum
    inverse: bool = False
    takes: tuple[torch.dtype, ...] = REAL + COMPLEX
    like: bool = False  # the result's dtype is that of x
    least: int = 1  # points of a dim


def _result(x, kind: Kind):
    """The dtype of a transform of x."""
    if kind.like:
        return x.dtype
    return x.dtype.to_real() if kind.real and kind.inverse else x.dtype.to_complex()


def transformed(kind: Kind, x, P, dims, s, norm, keep, P_out, shape):
    """The transform of x: of whatever the arguments are."""
    check_norm(norm)
    dims, s, keep = asked(P, dims, s, keep)
    if P_out is not None and partition_of(P_out).ndim != partition_of(P).ndim:
        raise PartitionError(
            "P_out has another number of dims",
            expected=partition_of(P).ndim,
            actual=partition_of(P_out).ndim,
            next_step="give P_out one dim for each dim of the tensor",
        )
    check_tensor(x, P)
    (x,) = autocast(kind.name, partition_of(P).ndim, x)
    x = transformable(x, kind.takes)
    (x,), layouts = resolve([x], P, shape, () if P_out is None else (P_out,))
    if layouts is None:  # a bare partition, and no rank of this call
        return outside(x, like=P_out if isinstance(P_out, Layout) else None, dtype=_result(x, kind))
    (L,) = layouts
    if L.active:
        check_block(x, L)
    elif x.shape != L.local_shape():
        x = nothing(L.local_shape(), x)
    t = transform_of(L, dims, s, keep, kind.real, kind.inverse, P_out, kind.least)
    if len(schedule(t)) == 1:
        alike(L)
    return run(x, t, norm, kind.local)
