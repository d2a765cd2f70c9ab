"""Large boxes that stay on a device, but lie in short words (one element off, behind a halo): row by row, by a kernel.

torch copies strided memory element by element and divides for each of them, which takes up to 2.4 times as long as a
copy of one run. Here a warp divides once for a row.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ... import _torch
from . import Fast
from .fused import LARGE, available, instance, on_device, stream_of

SHORTEST, _DIMS = 64, 8  # words of a row, at least, and dims of a box, at most
_SEGMENT, _THREADS = 4096, 256  # words of a row for one warp; threads of a block
_MOST, _SEGMENTS = 2**31, 2**16 - 1  # rows, which the kernel counts in 32 bits, and a grid's second dim, are no more
SOURCE = """
template <typename T>
__global__ void copy_rows(const T* input, T* output, const long long* table) {
    const long long run = table[0];
    const unsigned int rows = table[1], dims = table[2], lane = threadIdx.x % 32;
    const unsigned int warps = gridDim.x * (blockDim.x / 32);
    const long long first = (long long)blockIdx.y * SEGMENT, stop = first + SEGMENT < run ? first + SEGMENT : run;
    for (long long row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; row < rows; row += warps) {
        unsigned int rest = row;
        long long from = 0, to = 0;
        for (unsigned int d = 0; d < dims; ++d) {  // the innermost first
            const unsigned int n = table[3 + 3 * d], k = rest % n;
            rest /= n;
            from += k * table[4 + 3 * d];
            to += k * table[5 + 3 * d];
        }
        for (long long j = first + lane; j < stop; j += 32 * AT_ONCE) {
            T v[AT_ONCE];
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) if (j + 32 * u < stop) v[u] = input[from + j + 32 * u];
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) if (j + 32 * u < stop) output[to + j + 32 * u] = v[u];
        }
    }
}
"""


def at_once(run: int) -> int:
    """Words that a thread copies at once, of a row of so many."""
    return 16 if run >= 512 else 8


@cache
def _kernel(itemsize: int, once: int, index: int) -> Any:
    """For device ``index``, the current one."""
    return instance(SOURCE, "copy_rows", itemsize, SEGMENT=_SEGMENT, AT_ONCE=once)


def takes(to, source) -> bool:
    """Whether a copy of ``source`` to ``to`` is one of long rows in short words."""
    size = to.size
    return (
        to.nbytes >= LARGE
        and to.dtype.itemsize < 16
        and not (to.cast or to.add)
        and len(size) <= _DIMS
        and to.stride[-1] == source.stride[-1] == 1
        and not (to.contiguous and source.contiguous)  # one run: torch copies it at the memory's speed
        and SHORTEST <= size[-1] <= _SEGMENTS * _SEGMENT
        and to.nbytes // (size[-1] * to.dtype.itemsize) < _MOST
    )


def table_of(to, source) -> list[int]:
    """What the kernel reads: words of a row, rows, outer dims, and (size, step there, step here) of each, innermost
    first."""
    words, rows = [], 1
    for dim in zip(to.size[-2::-1], source.stride[-2::-1], to.stride[-2::-1]):
        words += dim
        rows *= dim[0]
    return [to.size[-1], rows, len(to.size) - 1, *words]


class Rows:
    """A copy of one box, called as (address of the box there, here, bytes)."""

    def __init__(self, to, source, device):
        table = table_of(to, source)
        self.table, self.index = on_device(tuple(table), device).data_ptr(), device.index
        self.grid = min(-(-table[1] // (_THREADS // 32)), 2**16), -(-table[0] // _SEGMENT)
        with _torch.on_device(self.index):
            self.kernel = _kernel(to.dtype.itemsize, at_once(table[0]), self.index)

    def __call__(self, target: int, source: int, nbytes: int) -> None:
        with _torch.on_device(self.index), stream_of(self.index):
            self.kernel(self.grid, (_THREADS,), (source, target, self.table))


class ByRows(Fast):
    """On a device, after words are as wide as they can be."""

    def rewrite(self, program, xs):
        if xs[0].is_cpu or not available():
            return
        pairs, program.kept = program.kept, []
        for to, source in pairs:
            if takes(to, source):
                copy, size = Rows(to, source, xs[0].device), to.dtype.itemsize
                at, begin = to.offset * size, source.offset * size
                program.kept_moves.append((copy, to.leaf, at, source.leaf, begin, to.nbytes))
            else:
                program.kept.append((to, source))


path = ByRows()
