"""Fourier transforms of partitioned tensors, equal to torch.fft.

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
from typing import Any

import torch

from .._arguments import checked
from .._types import Place
from ..boxes import is_int
from ..errors import PartitionError
from ..movement.options import sizes_of
from ..partition import Layout
from .stages import Stage, schedule
from .transform import (
    REAL,
    Keeps,
    Kind,
    asked,
    cut_off,
    dims_of,
    kept_of,
    local,
    pairs_of,
    transform_of,
    transformed,
)

__all__ = [
    "dist_fftfreq",
    "dist_fftn",
    "dist_ifftn",
    "dist_irfftn",
    "dist_rfftfreq",
    "dist_rfftn",
    "fft_layout",
    "fft_stages",
]

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

    Example:
        >>> len(F.fft_stages(dd.Layout(dd.Partition((2, 1)), (8, 8)), (0, 1)))  # layouts, one after the other
        2
    """
    return schedule(transform_of(L, *asked(L, dims, s, keep), bool(real), bool(inverse), P_out))


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

    Example:
        >>> F.fft_layout(dd.Layout(dd.Partition((2, 1)), (8, 8)), (0, 1), real=True).shape
        (8, 5)
    """
    return fft_stages(L, dims, real=real, inverse=inverse, s=s, keep=keep)[-1].result


def _frequencies(L, dim, n, d, keep, dtype, device, half):
    (dim,) = dims_of(L, dim, None)
    (n,) = sizes_of(n, "n")
    make = torch.fft.rfftfreq if half else torch.fft.fftfreq
    numbers = make(n, d, dtype=dtype, device=device)
    pair = kept_of(pairs_of(keep if keep is None or is_int(keep) else (keep,), 1)[0], len(numbers), half)
    if half and pair is None and L.shape[dim] < len(numbers):
        pair = (L.shape[dim], 0)
    numbers = numbers if pair is None else cut_off(numbers, 0, pair)
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

    Example:
        >>> F.dist_fftfreq(dd.Layout(dd.Partition((1,)), (4,)), 0, 4)
        tensor([ 0.0000,  0.2500, -0.5000, -0.2500])
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
    """This rank's part of torch.fft.rfftfreq(n, d): the same for the dim of which there is half a spectrum.

    Example:
        >>> F.dist_rfftfreq(dd.Layout(dd.Partition((1,)), (3,)), 0, 4)
        tensor([0.0000, 0.2500, 0.5000])
    """
    return _frequencies(L, dim, n, d, keep, dtype, device, True)


# ---------------------------------------------------------------- the transforms


_FFTN = Kind("dist_fftn", local)
_IFFTN = Kind("dist_ifftn", local, inverse=True)
_RFFTN = Kind("dist_rfftn", local, real=True, takes=REAL)
_IRFFTN = Kind("dist_irfftn", local, real=True, inverse=True)


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

    Example:
        >>> F.dist_fftn(torch.tensor([1.0, 0.0, 0.0, 0.0]), dd.Partition((1,)), 0)
        tensor([1.+0.j, 1.+0.j, 1.+0.j, 1.+0.j])
    """
    return transformed(_FFTN, x, P, dims, s, norm, keep, P_out, shape)


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

    Example:
        >>> P = dd.Partition((1,))
        >>> F.dist_ifftn(F.dist_fftn(torch.arange(3.0), P, 0), P, 0).real.round()
        tensor([0., 1., 2.])
    """
    return transformed(_IFFTN, x, P, dims, s, norm, keep, P_out, shape)


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
    whole first: one more repartition, of real numbers.

    Example:
        >>> F.dist_rfftn(torch.tensor([1.0, 0.0, 0.0, 0.0]), dd.Partition((1,)), 0)
        tensor([1.+0.j, 1.+0.j, 1.+0.j])
    """
    return transformed(_RFFTN, x, P, dims, s, norm, keep, P_out, shape)


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
    last dim, when the others are transformed) are not read, on any device. Otherwise as :func:`dist_ifftn`.

    Example:
        >>> P = dd.Partition((1,))
        >>> F.dist_irfftn(F.dist_rfftn(torch.arange(4.0), P, 0), P, 0)
        tensor([0., 1., 2., 3.])
    """
    return transformed(_IRFFTN, x, P, dims, s, norm, keep, P_out, shape)
