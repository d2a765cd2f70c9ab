"""Many small boxes copied by one CUDA kernel: a 3-D halo has up to 26 of them, and each launch costs more than its bytes.

A table on the device says, for each box, where its elements begin in the kernel's work, in the tensor and in the staging memory,
and its sizes and strides. Large boxes are left to torch's copies, which reach the memory's speed.
"""

from __future__ import annotations

import importlib.util
import math
from functools import cache

import torch

MOST_BYTES = 2**21  # above this, the sum of separate copies is faster
_DIMS = 8
_WORDS = 3 + 3 * _DIMS
_SOURCE = """
template <typename T>
__global__ void copy_boxes(T* tensor, T* staging, const long long* table, int boxes, long long total, int packing) {
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < total; i += (long long)gridDim.x * blockDim.x) {
        int low = 0, high = boxes - 1;  // the last box that begins at or before i
        while (low < high) {
            int middle = (low + high + 1) / 2;
            if (table[middle * WORDS] <= i) low = middle; else high = middle - 1;
        }
        const long long* box = table + low * WORDS;
        long long rest = i - box[0], a = box[1], b = box[2];
        for (int d = DIMS - 1; d >= 0; --d) {
            long long n = box[3 + d];
            if (n == 1) continue;
            long long k = rest % n;
            rest /= n;
            a += k * box[3 + DIMS + d];
            b += k * box[3 + 2 * DIMS + d];
        }
        if (packing) staging[b] = tensor[a]; else tensor[a] = staging[b];
    }
}
"""
_TYPES = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long", 16: "ulonglong2"}


@cache
def _kernel(itemsize: int):
    import cupy

    source = _SOURCE.replace("WORDS", str(_WORDS)).replace("DIMS", str(_DIMS))
    name = f"copy_boxes<{_TYPES[itemsize]}>"
    return cupy, cupy.RawModule(code=source, options=("-std=c++17",), name_expressions=(name,)).get_function(name)


@cache
def available() -> bool:
    """Whether CuPy, which compiles the kernel, is installed."""
    return importlib.util.find_spec("cupy") is not None


def fits(parts) -> bool:
    """Whether these boxes of one tensor are better copied together."""
    plain = not any(part.add or part.cast or len(part.size) > _DIMS for part in parts)
    alone = len({part.leaf for part in parts}) == 1
    return len(parts) > 1 and available() and plain and alone and sum(part.nbytes for part in parts) <= MOST_BYTES


def table_of(parts) -> list[int]:
    """The kernel's table, in elements: per box its begin in the work, tensor and staging offsets, sizes, strides of both."""
    words, begin = [], 0
    for part in parts:
        fill = (0,) * (_DIMS - len(part.size))
        words += [begin, part.offset, part.place // part.dtype.itemsize]
        words += [*(1 for _ in fill), *part.size, *fill, *part.stride, *fill, *part.dense]
        begin += math.prod(part.size)
    return words


class Boxes:
    """The boxes ``parts`` of one tensor, and their places in the staging memory."""

    def __init__(self, parts, device):
        self.leaf, self.count, self.total = parts[0].leaf, len(parts), sum(math.prod(part.size) for part in parts)
        self.table = torch.tensor(table_of(parts), dtype=torch.int64, device=device)
        self.cupy, self.kernel = _kernel(parts[0].dtype.itemsize)

    def copy(self, tensor, staging, packing: bool) -> None:
        """From the tensor into the staging memory (``packing``), or back, on torch's current stream."""
        address = tensor.data_ptr()
        with self.cupy.cuda.ExternalStream(torch.cuda.current_stream(tensor.device).cuda_stream):
            self.kernel((min(-(-self.total // 256), 1024),), (256,),
                        (address, staging.data_ptr(), self.table.data_ptr(), self.count, self.total, int(packing)))
