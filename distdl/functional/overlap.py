"""Convolutions that work while their halos are on the way.

A convolution is linear in the window that it reads, and the window is this rank's block with strips beside it. So, with
zeros around each of them,

    y = conv(block) + Σ_strips conv(strip)

The first term is nearly all of the work and needs no neighbour; it runs between :func:`start` and :func:`wait`. A strip
reaches the outputs near its side only, and is added to those. Neither the window nor the outputs are put together from
parts, so nothing large is copied, forward or backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as tf

from .. import _torch, maps
from ..movement.halo import HaloSpec
from ..movement.split_phase import start, wait


@dataclass(frozen=True)
class Line:
    """One spatial dim as this rank sees it, in coordinates of x: where its first output's kernel starts, its outputs,
    the kernel, its block of x, and the window lo..hi, of which the block holds a..b."""

    start: int
    count: int
    stride: int
    dilation: int
    kernel: int
    block: tuple[int, int]
    lo: int
    a: int
    b: int
    hi: int

    @property
    def stop(self) -> int:
        """Where the last output's kernel stops."""
        return self.start + (self.count - 1) * self.stride + self.dilation * (self.kernel - 1) + 1

    def around(self, lo: int, hi: int) -> tuple[int, int]:
        """Zeros before and after lo..hi, so that the kernels of all outputs fit. Negative: what no kernel reads."""
        return lo - self.start, self.stop - hi

    def sides(self):
        """For the part of the strip before the block, and for the one after it, where there are any: an
        :class:`_Edge`."""
        n = self.a - self.lo
        outputs = min(_ceil(self.a - self.start, self.stride), self.count)
        taps = min(_ceil(self.a - self.start, self.dilation), self.kernel)
        read = self.start + (outputs - 1) * self.stride + self.dilation * (taps - 1) + 1
        yield _Edge((0, n), (0, outputs), (0, taps), (self.lo - self.start, read - self.a))
        m = self.hi - self.b
        first = max(_ceil(self.b - self.start - self.dilation * (self.kernel - 1), self.stride), 0)
        tap = max(_ceil(self.b - self.start - (self.count - 1) * self.stride, self.dilation), 0)
        read = self.start + first * self.stride + tap * self.dilation
        yield _Edge((n, m), (first, self.count - first), (tap, self.kernel - tap), (self.b - read, self.stop - self.hi))


@dataclass(frozen=True)
class _Edge:
    """A part (start, size) of a strip, the outputs that it reaches, the kernel's taps that reach it, and the zeros
    around it."""

    part: tuple[int, int]
    outputs: tuple[int, int]
    taps: tuple[int, int]
    around: tuple[int, int]

    @property
    def counts(self) -> bool:
        """Whether any output reads it."""
        return min(self.part[1], self.outputs[1], self.taps[1]) > 0 and _reads(self.part[1], self.around)


# Where no output reads the strip: nothing of it, with a zero after it, is convolved, and nothing of that is kept. So y
# and its derivatives depend on the strip as they do on other ranks, and the same messages are sent.
_NONE = _Edge((0, 0), (0, 0), (0, 1), (0, 1))


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _reads(size: int, around) -> bool:
    return min(around) > -size


@dataclass(frozen=True)
class Overlap:
    """What one rank does.

    Attributes:
        strips: {dim: the map that fetches this rank's strip}; the same maps on all ranks.
        lines: the spatial dims.
        edges: for each of ``strips`` the parts that outputs read.
        inner: whether some output reads the block alone. Otherwise nothing can be done before the strips are there.
        beyond: the window's zeros before and after lo..hi, in each spatial dim.
    """

    strips: dict
    lines: tuple[Line, ...]
    edges: dict[int, list[_Edge]]
    inner: bool
    beyond: tuple[tuple[int, int], ...]


@lru_cache(maxsize=1024)
def overlap_of(spec: HaloSpec, coords, kernel, stride, pads, dilation) -> Overlap | None:
    """How the rank at ``coords`` overlaps; ``None``, on all of them, where nobody's window has more than the block in
    space, or somebody's has other examples or channels."""
    strips, layout = maps.halo_strips(spec), spec.in_layout
    beside = any(spec.sides(d, c) != (lo, lo, hi, hi) for d in (0, 1) for c, (lo, hi) in enumerate(layout.blocks(d)))
    if not strips or beside:
        return None
    lines, beyond = [], []
    for d, c in enumerate(coords[2:], 2):
        k, s, p, e = (v[d - 2] for v in (kernel, stride, pads, dilation))
        o0, o1 = spec.out_layout.blocks(d)[c]
        line = Line(o0 * s - p[0], o1 - o0, s, e, k, layout.blocks(d)[c], *spec.sides(d, c))
        lines.append(line)
        beyond.append((line.lo - spec.windows[d][c][0], spec.windows[d][c][1] - line.hi))
    o0, o1 = spec.out_layout.blocks(1)[coords[1]]
    sound = o0 < o1 and all(
        line.count > 0 and line.a < line.b and _reads(line.block[1] - line.block[0], line.around(*line.block))
        for line in lines
    )
    edges = {d: [e for e in lines[d - 2].sides() if e.counts] or [_NONE] for d in strips} if sound else {}
    inner = sound and all(sum(e.outputs[1] for e in found) < lines[d - 2].count for d, found in edges.items())
    return Overlap(strips, tuple(lines), edges, inner, tuple(beyond))


def overlapped(x, here: Overlap, conv, w, bias, otherwise):
    """This rank's outputs, the block's part of them while the strips travel.

    Args:
        conv: (data, w, bias, padding) -> the convolution, with the layer's stride, dilation and groups.
        w, bias: its arguments.
        otherwise: window -> outputs, for a rank whose every output reads some strip.
    """
    pending = start(tuple(here.strips.values()), (x,) * len(here.strips))
    y = (
        _between_zeros(conv, x, w, bias, [line.around(*line.block) for line in here.lines], here)
        if here.inner
        else None
    )
    strips = dict(zip(here.strips, wait(pending)))
    if y is None:
        return otherwise(_window(x, here, strips))
    # Nobody else has y yet, and the gradient of index_add_, unlike that of writing into a view, copies none of it.
    fresh = not (_torch.transforms_active() or _torch.forward_mode_active() or _torch.dispatch_modes())
    add = torch.Tensor.index_add_ if fresh else torch.Tensor.index_add
    for d, strip in strips.items():
        around = [
            line.around(line.a, line.b) if i < d else line.around(line.lo, line.hi)
            for i, line in enumerate(here.lines, 2)
        ]
        for edge in here.edges[d]:
            around[d - 2] = edge.around
            z = _between_zeros(conv, strip.narrow(d, *edge.part), w.narrow(d, *edge.taps), None, around, here)
            first, count = edge.outputs
            y = add(y, d, torch.arange(first, first + count, device=y.device), z if count else z.narrow(d, 0, 0))
    return y


def _between_zeros(conv, data, w, bias, around, here: Overlap):
    """``conv`` of data with zeros before and after it in each spatial dim: its own padding where that makes no other
    outputs."""
    own, fills = [], []
    for (before, after), line in zip(around, here.lines):
        fits = before >= 0 and 0 <= before - after < line.stride
        own.append(before if fits else 0)
        fills = [*((0, 0) if fits else (before, after)), *fills]  # torch's pad takes the last dim first
    return conv(tf.pad(data, fills) if any(fills) else data, w, bias, own)


def _window(x, here: Overlap, strips):
    """The block's part of the window, grown dim by dim, and the zeros around it."""
    for d, line in enumerate(here.lines, 2):
        x = x.narrow(d, line.a - line.block[0] if line.a < line.b else 0, line.b - line.a)
    for d, strip in reversed(strips.items()):
        line = here.lines[d - 2]
        n = line.a - line.lo
        x = torch.cat([strip.narrow(d, 0, n), x, strip.narrow(d, n, line.hi - line.b)], d)
    fills = [n for pair in reversed(here.beyond) for n in pair]
    return tf.pad(x, fills) if any(fills) else x
