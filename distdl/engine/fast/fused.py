"""Many small boxes copied by one CUDA kernel: a 3-D halo has up to 26 of them, and each launch costs more than its
bytes.

A table on the device says, for each box, where its elements begin in the kernel's work, which memory they come from and
go to (the input, the staging memory or the output), and its sizes and strides there. Large boxes are left to torch's
copies, which reach the memory's speed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, lru_cache

import torch

from ... import _torch
from . import Fast

LARGE = 2**22  # bytes from which a box is copied alone: without words the kernel takes twice as long for them
_DIMS = 8
_WORDS = 5 + 3 * _DIMS
_WORD = {2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
INPUT, STAGING, OUTPUT = range(3)
_SOURCE = """
template <typename T>
__global__ void copy_boxes(T* input, T* staging, T* output, const long long* table, int boxes, long long total) {
    T* memory[3] = {input, staging, output};
    long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < total; i += step) {
        int low = 0, high = boxes - 1;  // the last box that begins at or before i
        while (low < high) {
            int middle = (low + high + 1) / 2;
            if (table[middle * WORDS] <= i) low = middle; else high = middle - 1;
        }
        const long long* box = table + low * WORDS;
        unsigned int rest = i - box[0];  // boxes are small: 32 bits, since long divisions take many times as long
        long long from = box[3], to = box[4];
        for (int d = DIMS - 1; d >= 0; --d) {
            unsigned int n = box[5 + d];
            if (n == 1) continue;
            unsigned int k = rest % n;
            rest /= n;
            from += k * box[5 + DIMS + d];
            to += k * box[5 + 2 * DIMS + d];
        }
        memory[box[2]][to] = memory[box[1]][from];
    }
}
"""
_TYPES = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long", 16: "ulonglong2"}


def instance(source: str, template: str, itemsize: int, **numbers: int):
    """A template of CUDA source, for words of ``itemsize`` bytes; ``numbers`` stand for their names in the source."""
    import cupy

    for name, number in numbers.items():
        source = source.replace(name, str(number))
    name = f"{template}<{_TYPES[itemsize]}>"
    return cupy.RawModule(code=source, options=("-std=c++17",), name_expressions=(name,)).get_function(name)


@cache
def _kernel(itemsize: int):
    return instance(_SOURCE, "copy_boxes", itemsize, WORDS=_WORDS, DIMS=_DIMS)


class _Handle:
    """A stream's address, by the CUDA stream protocol."""

    def __init__(self, address: int):
        self.address = address

    def __cuda_stream__(self):
        return 0, self.address


@lru_cache(maxsize=256)
def _stream(address: int):
    """CuPy's view of a stream that torch owns."""
    import cupy

    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Handle(address))
    return cupy.cuda.ExternalStream(address)  # older CuPy


def stream_of(index: int):
    """A context in which torch's current stream on device ``index`` is CuPy's too."""
    return _stream(_torch.current_stream(index))


@cache
def available() -> bool:
    """Whether CuPy, which compiles the kernel, can be loaded."""
    try:
        import cupy
    except ImportError:
        return False
    return cupy is not None


def small(part) -> bool:
    """Whether a box is a candidate."""
    return part.nbytes <= LARGE and len(part.size) <= _DIMS and not part.cast and not part.add


def packing(part):
    """A box of the input, to its place in the staging memory."""
    return INPUT, STAGING, part.size, part.offset, part.place // part.dtype.itemsize, part.stride, part.dense


def unpacking(part):
    """A box of the output, from its place in the staging memory."""
    return STAGING, OUTPUT, part.size, part.place // part.dtype.itemsize, part.offset, part.dense, part.stride


def keeping(to, source):
    """A box of the input, to a box of the output."""
    return INPUT, OUTPUT, to.size, source.offset, to.offset, source.stride, to.stride


def table_of(copies) -> list[int]:
    """The kernel's table: per copy its begin in the work, the two memories, offsets, sizes and strides, in elements."""
    words, begin = [], 0
    for source, target, size, a, b, from_strides, to_strides in copies:
        fill = (0,) * (_DIMS - len(size))
        words += [begin, source, target, a, b, *(1 for _ in fill), *size, *fill, *from_strides, *fill, *to_strides]
        begin += math.prod(size)
    return words


@cache
def on_device(table: tuple[int, ...], device):
    """A table in the device's memory. It stays there: a captured graph may hold its address, or a kernel still read
    it."""
    return torch.tensor(table, dtype=torch.int64, device=device)


class Boxes:
    """Copies between one input, the staging memory and one output, of elements of ``itemsize`` bytes."""

    def __init__(self, copies, itemsize: int, device):
        self.count, self.total = len(copies), sum(math.prod(copy[2]) for copy in copies)
        self.address, self.index = on_device(tuple(table_of(copies)), device).data_ptr(), device.index
        self.grid, self.kernel = (min(-(-self.total // 256), 1024),), _kernel(itemsize)

    def copy(self, x, staging, y) -> None:
        """Copy, on torch's current stream."""
        with _torch.on_device(self.index), stream_of(self.index):
            self.kernel(
                self.grid,
                (256,),
                (
                    x.data_ptr(),
                    0 if staging is None else staging[0].data_ptr(),
                    y.data_ptr(),
                    self.address,
                    self.count,
                    self.total,
                ),
            )


# ---------------------------------------------------------------- programs in words, and fused


def factor(part, shape, most: int) -> int:
    """How many elements of a box can be copied as one word of at most 16 bytes, in a tensor of this shape."""
    if part.add or part.cast or not part.size or part.stride[-1] != 1:
        return 1
    return math.gcd(most, shape[-1], part.size[-1], part.offset, *part.stride[:-1])


def in_words(part, k: int):
    """The same box, ``k`` elements at a time."""
    if k == 1:
        return part

    def shrink(numbers):
        return tuple(n // k for n in numbers[:-1])

    return replace(
        part,
        size=(*part.size[:-1], part.size[-1] // k),
        stride=(*shrink(part.stride), 1),
        offset=part.offset // k,
        dense=(*shrink(part.dense), 1),
        dtype=_WORD[k * part.dtype.itemsize],
        words=True,
    )


class Fused(Fast):
    """On a device: small boxes by one kernel, and the others in words."""

    def rewrite(self, program, xs):
        if not xs[0].is_cpu:
            fuse(program, xs)
            widen(program, xs)


def fuse(program, xs) -> None:
    """Let one kernel copy many small boxes, in the widest words that all of them allow."""
    if len(program.likes) > 1 or program.casts or not available():
        return
    x = xs[0]
    kept = [(to, source) for to, source in program.kept if small(to)]
    packs = [part for part in program.packs if small(part)]
    if len(kept) + len(packs) > 1:
        read = [*(source for _, source in kept), *packs]
        k = math.gcd(*(_factor(program, to) for to, _ in kept), *(_factor(program, part, x) for part in read))
        copies = [keeping(in_words(to, k), in_words(source, k)) for to, source in kept]
        copies += [packing(in_words(part, k)) for part in packs]
        program.fused_early = Boxes(copies, k * x.dtype.itemsize, x.device)
        program.kept = [(to, source) for to, source in program.kept if not small(to)]
        program.packs = [part for part in program.packs if not small(part)]
    late = [to for to, _ in program.late if small(to)]
    if len(late) > 1:  # no sums then: they add to one box at most that is copied, the first
        k = math.gcd(*(_factor(program, to) for to in late))
        program.fused_late = Boxes([unpacking(in_words(to, k)) for to in late], k * x.dtype.itemsize, x.device)
        program.late = [(to, None) for to, _ in program.late if not small(to)]


def _factor(program, part, x=None):
    """How many elements one word can hold in a box of ``x``, or of a fresh output."""
    size = part.dtype.itemsize
    if x is None:
        return factor(part, program.likes[part.leaf].shape, 16 // size)
    return factor(part, x.shape, max(math.gcd(16, x.data_ptr(), x.storage_offset() * size) // size, 1))


def widen(program, xs) -> None:
    """Copy what is left in words of up to 16 bytes: a device copies strided memory element by element."""
    for i, (to, source) in enumerate(program.kept):
        k = math.gcd(_factor(program, to), _factor(program, source, xs[source.leaf]))
        program.kept[i] = in_words(to, k), in_words(source, k)
    program.packs = [in_words(part, _factor(program, part, xs[part.leaf])) for part in program.packs]
    program.late = [
        (in_words(to, _factor(program, to)), None) if source is None else (to, source) for to, source in program.late
    ]


path = Fused()
