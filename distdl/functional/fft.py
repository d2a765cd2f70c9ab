"""Fourier transforms of partitioned tensors, equal to torch.fft, and the convolution of Fourier neural operators.

A transform of a dim needs all of it on one rank. So :func:`fft_stages` lists stages: local transforms of the dims that
no rank splits, a repartition that makes others whole, and so on: for a slab one repartition, for pencils two. The
result stays where the last stage leaves it (:func:`fft_layout`), as moving it back would double the messages; the
inverse transform takes it from there to where it came from. Wave numbers that ``keep`` leaves out are cut off before
the next repartition.

A = F_k R_k ... R_1 F_1, with local transforms F and repartitions R; its adjoint swaps each one's lists. The
normalisation of Aᴴ is torch's: that of "backward" is n times the inverse. From complex to real the adjoint counts the
wave numbers twice that half a spectrum stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from .._arguments import checked
from .._types import Place
from ..agree import alike, check_tensor, resolve
from ..errors import PartitionError, ShapeError
from ..movement.halo import plain, sizes_of
from ..partition import Layout, Partition, is_int, partition_of
from ..ties import nothing
from .autocast import autocast
from .enter import check_block, enter, outside, replicated
from .stages import Keep, Stage, Transform, schedule, spectrum, wave_numbers

__all__ = [
    "dist_fftfreq",
    "dist_fftn",
    "dist_ifftn",
    "dist_irfftn",
    "dist_rfftfreq",
    "dist_rfftn",
    "dist_spectral_conv",
    "fft_layout",
    "fft_stages",
    "spectral_layout",
]

# None, or for each dim a number of wave numbers or how many (low, high) ones.
Keeps = int | Sequence[int | Sequence[int] | None] | None
_NORMS = ("backward", "ortho", "forward")


# ---------------------------------------------------------------- arguments


def _dims(P, dims, s) -> tuple[int, ...]:
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


def _kept(asked, n: int, half: bool) -> Keep:
    """(low, high): wave numbers 0 .. low-1 and -high .. -1 are kept, of ``n`` there are; ``None``: all."""
    if asked is None:
        return None
    low, high = sizes_of(asked, "keep") * 2 if is_int(asked) else sizes_of(asked, "keep")
    if half:
        high = 0 if is_int(asked) else high
    if min(low, high) < 0 or not 1 <= low + high <= n or (half and high):
        raise PartitionError(
            "the dim has no such wave numbers",
            expected=f"(low, high), together 1 to {n}" if not half else f"1 to {n}, and no negative ones",
            actual=asked,
            next_step="keep fewer modes, or transform at a larger size (s)",
        )
    return low, high


def _pairs(keep, n: int) -> tuple:
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
def _transform(L: Layout, dims, s, keep, real: bool, inverse: bool, out) -> Transform:
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
        if n < 1:
            raise PartitionError(
                f"dim {d} has nothing to transform",
                expected="sizes of at least 1",
                actual=n,
                next_step="give s positive sizes; half a spectrum of one wave number needs s",
            )
        sizes.append(n)
    t = Transform(L, dims, tuple(sizes), (None,) * len(dims), real, inverse)
    t = t._replace(keep=tuple(_kept(k, wave_numbers(t, i), real and i == last) for i, k in enumerate(keep)))
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


def _asked(P, dims, s, keep):
    """(dims, s, keep) in plain numbers, of as many entries."""
    s = None if s is None else tuple(None if n is None else plain(n, "s") for n in ((s,) if is_int(s) else s))
    dims = _dims(P, dims, s)
    return dims, _per_dim(s, len(dims), "s"), _pairs(keep, len(dims))


def _check_norm(norm) -> None:
    if norm not in _NORMS:
        raise PartitionError("no such norm", expected=_NORMS, actual=norm, next_step="choose one of these")


# ---------------------------------------------------------------- layouts


@checked
def fft_stages(
    L: Layout,
    dims: int | Sequence[int] | None,
    *,
    real: bool = False,
    inverse: bool = False,
    s: int | Sequence[int | None] | None = None,
    keep: Keeps = None,
    P_out: Place | None = None,
) -> tuple[Stage, ...]:
    """What a transform of a tensor of layout ``L`` does, stage by stage: where the tensor lies, which dims are
    transformed there, and the map that brings it to the next stage. Pure, and no message; ``dd.viz`` draws the maps.

    Args:
        L: the layout of the tensor.
        dims, s, keep, P_out: as for :func:`dist_fftn`.
        real, inverse: which of the four transforms.

    Returns:
        A tuple of stages, with ``move`` (a LinearMap, ``None`` at first), ``layout``, ``dims`` and ``result`` (the
        layout after the transforms). The moves are as few as can be, and then those in which the busiest rank moves the
        fewest
        elements: the most truncated dims come first.
    """
    return schedule(_transform(L, *_asked(L, dims, s, keep), bool(real), bool(inverse), P_out))


@checked
def fft_layout(
    L: Layout,
    dims: int | Sequence[int] | None,
    *,
    real: bool = False,
    inverse: bool = False,
    s: int | Sequence[int | None] | None = None,
    keep: Keeps = None,
) -> Layout:
    """The layout of a transform's result where ``P_out`` is left out: that of the last stage, so that nothing is moved
    back.

    ``fft_layout(fft_layout(L, ...), ..., inverse=True, s=sizes)`` is a layout that leads there, the one by the fewest
    moves: ``L`` where sizes divide and some dim of dims is whole (the last one for ``real``). ``P_out=L`` brings the
    tensor back to any ``L``, explicit splits too, in as many moves.
    """
    return fft_stages(L, dims, real=real, inverse=inverse, s=s, keep=keep)[-1].result


def _frequencies(L, dim, n, d, keep, dtype, device, half):
    (dim,) = _dims(L, dim, None)
    (n,) = sizes_of(n, "n")
    make = torch.fft.rfftfreq if half else torch.fft.fftfreq
    numbers = make(n, d, dtype=dtype, device=device)
    pair = _kept(_pairs(keep if keep is None or is_int(keep) else (keep,), 1)[0], len(numbers), half)
    if half and pair is None and L.shape[dim] < len(numbers):
        pair = (L.shape[dim], 0)
    numbers = numbers if pair is None else _cut(numbers, 0, pair)
    if len(numbers) != L.shape[dim]:
        raise PartitionError(
            f"dim {dim} is not the spectrum of such a transform",
            expected=f"{len(numbers)} wave numbers",
            actual=L.shape[dim],
            next_step="pass the layout of the spectrum, n as the transform has it, and its keep=(low, high)",
        )
    return numbers[L.slices()[dim]]


@checked
def dist_fftfreq(
    L: Layout,
    dim: int,
    n: int,
    d: float = 1.0,
    *,
    keep: Any = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """This rank's part of torch.fft.fftfreq(n, d), for dim ``dim`` of a spectrum of layout ``L``. No message.

    Args:
        L: the layout of the spectrum, such as :func:`fft_layout` gives it.
        n: length of the transform along the dim.
        d: distance of two points.
        keep: (low, high) as for :func:`dist_fftn`, where wave numbers were cut off.
    """
    return _frequencies(L, dim, n, d, keep, dtype, device, False)


@checked
def dist_rfftfreq(
    L: Layout,
    dim: int,
    n: int,
    d: float = 1.0,
    *,
    keep: Any = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """This rank's part of torch.fft.rfftfreq(n, d): the same for the dim of which there is half a spectrum."""
    return _frequencies(L, dim, n, d, keep, dtype, device, True)


# ---------------------------------------------------------------- one stage on one rank


def _cut(y, d: int, keep):
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


def _local(x, t: Transform, stage: Stage, norm: str):
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
    full = [d for d in stage.dims if not keep[d] and d != last]
    cut = [d for d in stage.dims if keep[d] and d != last]
    whole = last in stage.dims and not cut and not keep[last]
    if not t.inverse:
        if whole:
            return torch.fft.rfftn(x, [size[d] for d in (*full, last)], (*full, last), norm)
        if last in stage.dims:
            x = torch.fft.rfft(x, size[last], last, norm)
            x = _cut(x, last, keep[last]) if keep[last] else x
        for d in cut:
            x = _cut(torch.fft.fft(x, size[d], d, norm), d, keep[d])
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


def _run(x, t: Transform, norm: str):
    """All stages of a transform."""
    for stage in schedule(t):
        x = x if stage.move is None else stage.move(x)
        x = _local(x, t, stage, norm) if stage.dims else x
    return x


# ---------------------------------------------------------------- the transforms


def _numbers(op, x, P, kinds):
    """x in a dtype that can be transformed: on every rank, as those outside pass the dtype that the others have."""
    check_tensor(x, P)
    (x,) = autocast(op, partition_of(P).ndim, x)
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


def _result(x, real: bool):
    """The dtype of a transform of x."""
    return x.dtype.to_real() if real else x.dtype.to_complex()


_REAL, _COMPLEX = (torch.float32, torch.float64), (torch.complex64, torch.complex128)


def _fft(op, x, P, dims, s, norm, keep, P_out, shape, real, inverse):
    _check_norm(norm)
    dims, s, keep = _asked(P, dims, s, keep)
    if P_out is not None and partition_of(P_out).ndim != partition_of(P).ndim:
        raise PartitionError(
            "P_out has another number of dims",
            expected=partition_of(P).ndim,
            actual=partition_of(P_out).ndim,
            next_step="give P_out one dim for each dim of the tensor",
        )
    x = _numbers(op, x, P, _REAL if real and not inverse else _REAL + _COMPLEX)
    (x,), layouts = resolve([x], P, shape, () if P_out is None else (P_out,))
    if layouts is None:  # a bare partition, and no rank of this call
        return outside(x, like=P_out if isinstance(P_out, Layout) else None, dtype=_result(x, real and inverse))
    (L,) = layouts
    if L.active:
        check_block(x, L)
    elif x.shape != L.local_shape():
        x = nothing(L.local_shape(), x)
    t = _transform(L, dims, s, keep, real, inverse, P_out)
    stages = schedule(t)
    if len(stages) == 1:
        alike(L)
    return _run(x, t, norm)


def dist_fftn(
    x: torch.Tensor,
    P: Place,
    dims: int | Sequence[int] | None,
    *,
    s: int | Sequence[int | None] | None = None,
    norm: str = "backward",
    keep: Keeps = None,
    P_out: Place | None = None,
    shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """The discrete Fourier transform over ``dims``, as torch.fft.fftn: X[k] = Σ_j x[j] exp(-2πi j·k/n).

    Args:
        x: this rank's block: float32, float64, complex64 or complex128; integers are converted as torch does.
        P: partition or Layout of x, which may split any dims.
        dims: the dims to transform, distinct; ``None``: all (with ``s`` the last ones).
        s: for each of dims the length of the transform: x is cut, or padded with zeros, at its end. ``None``: its size.
        norm: "backward" (no factor), "ortho" (1/√n) or "forward" (1/n).
        keep: for each of dims how many wave numbers to keep: (low, high), 0 .. low-1 and -high .. -1, or one number for
            both; ``None``: all. The others are cut off before the next repartition.
        P_out: partition or Layout of the result. ``None``: :func:`fft_layout`, and nothing is moved back.
        shape: the global shape of x; left out with a bare partition, it is negotiated.

    Returns:
        This rank's block of the spectrum, complex, in fresh memory.

    Messages: those of the repartitions that :func:`fft_stages` lists, with N' the elements left at that time: along
    dims that no rank splits none; for a slab on p ranks p-1 of N'/p² elements from each rank; for pencils on p1 x p2
    ranks p1-1 and p2-1, of N'/(p p1) and N'/(p p2). The transposes in backward.

    Raises:
        PartitionError: dims, s, norm or keep that do not fit; a tensor of one dim that ranks split.
        ShapeError: half precision, outside of autocast.
    """
    return _fft("dist_fftn", x, P, dims, s, norm, keep, P_out, shape, False, False)


def dist_ifftn(
    x: torch.Tensor,
    P: Place,
    dims: int | Sequence[int] | None,
    *,
    s: int | Sequence[int | None] | None = None,
    norm: str = "backward",
    keep: Keeps = None,
    P_out: Place | None = None,
    shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """The inverse of :func:`dist_fftn`, as torch.fft.ifftn; arguments and messages as there.

    Args:
        s: the sizes of the result; needed where ``keep`` says what the spectrum has lost.
        keep: the wave numbers that x has; zeros are put in the place of others, after the last repartition.
        P_out: ``None``: the layout from which :func:`dist_fftn` comes to that of x.
    """
    return _fft("dist_ifftn", x, P, dims, s, norm, keep, P_out, shape, False, True)


def dist_rfftn(
    x: torch.Tensor,
    P: Place,
    dims: int | Sequence[int] | None,
    *,
    s: int | Sequence[int | None] | None = None,
    norm: str = "backward",
    keep: Keeps = None,
    P_out: Place | None = None,
    shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """The transform of a real tensor, as torch.fft.rfftn: of the last of ``dims`` there are the wave numbers 0 .. n//2
    only. Otherwise as :func:`dist_fftn`; the last of dims keeps (low, 0), or a number. Where a rank splits it, it is
    made
    whole first: one more repartition, of real numbers."""
    return _fft("dist_rfftn", x, P, dims, s, norm, keep, P_out, shape, True, False)


def dist_irfftn(
    x: torch.Tensor,
    P: Place,
    dims: int | Sequence[int] | None,
    *,
    s: int | Sequence[int | None] | None = None,
    norm: str = "backward",
    keep: Keeps = None,
    P_out: Place | None = None,
    shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """The inverse of :func:`dist_rfftn`, as torch.fft.irfftn: a real tensor. An odd size must be asked for by ``s``:
    half a spectrum of 5 is of 8 or 9. Imaginary parts of wave numbers that are their own conjugates (0 and n/2 of the
    last dim, when the others are transformed) are not read, on any device. Otherwise as :func:`dist_ifftn`."""
    return _fft("dist_irfftn", x, P, dims, s, norm, keep, P_out, shape, True, True)


# ---------------------------------------------------------------- spectral convolution


def _modes(P, modes) -> tuple:
    """``modes`` for each spatial dim, in plain numbers."""
    n = partition_of(P).ndim - 2
    if n < 1:
        raise PartitionError(
            "x needs batch, channels and space",
            expected="3 dims or more",
            actual=n + 2,
            next_step="give P one dim for the batch, one for the channels and one for each spatial dim",
        )
    found = _pairs(modes, n)
    if None in found:
        raise PartitionError(
            "how many modes are kept?",
            expected="a number or (low, high) for each spatial dim",
            actual=modes,
            next_step="name all of them, as the weight has one matrix for each",
        )
    return found


@lru_cache(maxsize=1024)
def _spectral(P: Partition, modes: tuple, real: bool) -> tuple[Partition, tuple[Keep, ...]]:
    """(the grid over which the kept spectrum lies, (low, high) of each spatial dim): of the partition and the modes
    alone, so that a weight fits tensors of any size."""
    n = 4 * P.size * max(sum(m) if isinstance(m, tuple) else 2 * m for m in modes) or 1
    L = Layout(P, (P.size, P.size, *(n,) * len(modes)))
    t = _transform(L, tuple(range(2, P.ndim)), (None,) * len(modes), modes, real, False, None)
    return schedule(t._replace(free=(1,)))[-1].layout.partition, t.keep


def spectral_grid(P, modes, real: bool = True) -> tuple[Partition, tuple[int, ...]]:
    """(the grid of (batch, channels, *modes) over which the kept spectrum lies, how many modes each dim keeps)."""
    S, keep = _spectral(partition_of(P), _modes(P, modes), real)
    return S, tuple(sum(pair) for pair in keep if pair)


@checked
def spectral_layout(P: Place, modes: Keeps, in_channels: int, out_channels: int, *, real: bool = True) -> Layout:
    """The layout of the weight of :func:`dist_spectral_conv`: (in channels, out channels, *kept modes), each rank its
    own modes. It depends on the grid and the modes only, not on the size of x.

    The layout spans the ranks that share this rank's part of the batch; those of others hold equal blocks.

    Args:
        P: partition or Layout of x.
        modes: as there.
        real: whether x is.
    """
    S, kept = spectral_grid(P, modes, bool(real))
    dims = tuple(range(2, S.ndim))
    fibre = S.along(dims) or S.along(dims, S.ranks[0])
    return Layout(fibre, (*sizes_of((in_channels, out_channels), "channels"), *kept))


@checked
def dist_spectral_conv(
    x: torch.Tensor,
    w: torch.Tensor,
    P: Place,
    modes: Keeps,
    *,
    norm: str = "forward",
    params: str = "varying",
    shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """The convolution of a Fourier neural operator (Li et al., arXiv:2010.08895): of each kept wave number a matrix
    from channels to channels, y = F⁻¹(Σ_i (F x)[b, i, k] w[i, o, k]); other wave numbers of y are zero.

    Args:
        x: (batch, channels, *space), this rank's block, real (half spectra) or complex. P may split any dims.
        w: (in, out, *kept modes), complex: this rank's block of layout :func:`spectral_layout`; no rank ever has all.
        P: partition or Layout of x.
        modes: for each spatial dim the wave numbers that are kept: (low, high), 0 .. low-1 and -high .. -1, or one
            number for both; of the last dim of real x its first ones.
        norm: of both transforms.
        params: "varying": w is each rank's own (or already marked). "invariant": ranks that have other examples and the
            same modes hold copies, which the layer marks.
        shape: the global shape of x; left out with a bare partition, it is negotiated.

    Returns:
        (batch, out, *space), over ``P``: splits stay where sizes do.

    Messages: those of :func:`dist_rfftn` with ``keep``, and the same back; channels that ranks split turn to modes as
    other dims do, in one repartition more. Backward the transposes; the gradient of w: none over modes, and one
    all-reduce over the ranks of the batch where w is invariant.

    Raises:
        PartitionError: fewer than 3 dims, modes that a dim does not have.
        ShapeError: w that is not this rank's block.
    """
    op = "dist_spectral_conv"
    _check_norm(norm)
    modes, where = _modes(P, modes), partition_of(P)
    x, L, at = enter(_numbers(op, x, P, _REAL + _COMPLEX), P, shape=shape)
    real = not x.is_complex()
    S, keep = _spectral(where, modes, real)
    (w,) = replicated(params, S, (0, 1), w)
    if at is None:
        like = None if L is None else L.with_shape((L.shape[0], w.shape[1], *L.shape[2:]))
        return outside(x, w, like=like)
    space, sizes = tuple(range(2, L.ndim)), L.shape[2:]
    to = _transform(L, space, sizes, keep, real, False, None)
    wanted = (L.shape[1], w.shape[1] if w.dim() == L.ndim else "out", *_block(S, keep))
    if tuple(w.shape) != wanted or w.dtype != x.dtype.to_complex():
        raise ShapeError(
            "w is not this rank's block",
            partitions=P,
            expected=f"{wanted}, {x.dtype.to_complex()}",
            actual=f"{tuple(w.shape)}, {w.dtype}",
            next_step="pass spectral_layout(P, modes, in_channels, out_channels).shard(w)",
        )
    X = Layout(S, to.shape, (L.splits[0] if L.splits else None, *(None,) * (L.ndim - 1)))
    x = _run(x, to._replace(out=X), norm)
    Y = X.with_shape((L.shape[0], w.shape[1], *X.shape[2:]))
    y = torch.einsum("bi...,io...->bo...", x, w)
    back = _transform(Y, space, sizes, keep, real, True, L.with_shape((L.shape[0], w.shape[1], *sizes)))
    return _run(y, back, norm)


def _block(S: Partition, keep):
    """This rank's numbers of kept modes."""
    L = Layout(S, (S.shape[0], S.shape[1], *(sum(pair) for pair in keep)))
    return L.local_shape()[2:]
