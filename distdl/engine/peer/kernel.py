"""The kernel on the device: its memory, how it is compiled and launched, and the order of its runs."""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from pathlib import Path

import torch

from ... import _torch, failure
from ...errors import TransportError
from ..fast.fused import on_device
from .region import CAPACITY, LINE, SLOTS, SMALL_SUM, Mailboxes
from .tables import PART, Table

THREADS, TEAM, UNROLL = 512, 256, 8  # of a block, of a lane's end, and words that a thread copies at once
BLOCK = THREADS * UNROLL  # words that a block copies at once
KEEPERS = 4 * 132  # blocks that copy what stays, at most
BASES, INLINE = 24, 448  # tensors of a movement, and integers of a table that goes along as an argument, at most
PEERS, _SUMMING = 15, 64  # ranks besides this one, and blocks, of a small sum, at most
OPTIONS = {
    "THREADS": f"{THREADS}u",
    "TEAM": f"{TEAM}u",
    "UNROLL": UNROLL,
    "BASES": BASES,
    "INLINE": INLINE,
    "PEERS": PEERS,
    "PART": PART,
    "SLOTS": f"{SLOTS}u",
    "CAPACITY": CAPACITY,
    "LINE": LINE,
    "PAGE": 2 * SMALL_SUM,
    "FAR": 2**31 - 1,
}


_FIELDS = (("fault", ctypes.c_uint64), ("limit", ctypes.c_uint64))


class Movement(ctypes.Structure):
    """The argument of ``move_boxes``."""

    _fields_ = (
        *_FIELDS,
        ("table", ctypes.c_uint64),
        ("movers", ctypes.c_uint32),
        ("name", ctypes.c_uint32),
        ("base", ctypes.c_uint64 * BASES),
        ("words", ctypes.c_int64 * INLINE),
    )


class Sum(ctypes.Structure):
    """The argument of ``sum_all``."""

    _fields_ = (
        *_FIELDS,
        ("x", ctypes.c_uint64),
        ("y", ctypes.c_uint64),
        ("total", ctypes.c_int64),
        *((name, ctypes.c_uint32) for name in ("name", "count", "me", "aligned")),
        ("there", ctypes.c_uint64 * PEERS),
        ("here", ctypes.c_uint64 * PEERS),
        ("number", ctypes.c_uint32 * PEERS),
        ("rank", ctypes.c_uint32 * PEERS),
    )


# How sums.cu calls the numbers that it adds, and how many of them one of torch's is.
_SUMMANDS = {
    torch.uint8: ("unsigned char", 1),
    torch.int8: ("signed char", 1),
    torch.int32: ("int", 1),
    torch.int64: ("long long", 1),
    torch.float16: ("Half", 1),
    torch.bfloat16: ("Brain", 1),
    torch.float32: ("float", 1),
    torch.float64: ("double", 1),
    torch.complex64: ("float", 2),
    torch.complex128: ("double", 2),
    torch.bool: ("Truth", 1),
}


@cache
def compiled(file: str, name: str, index: int):
    """A function of a source file here, on device ``index``, which is the current one."""
    import cupy

    code = "".join(Path(__file__).with_name(part).read_text() for part in ("device.cu", "lanes.cu", file))
    options = ("-std=c++17", *(f"-D{key}={value}" for key, value in OPTIONS.items()))
    names = (name,) if "<" in name else None  # of templates
    return cupy.RawModule(code=code, options=options, name_expressions=names).get_function(name).kernel


@cache
def driver():
    """CUDA's driver, which costs less for a launch than what stands above it."""
    found = ctypes.CDLL("libcuda.so.1")
    void, uint = ctypes.c_void_p, ctypes.c_uint
    found.cuLaunchKernel.argtypes = (void, *(uint,) * 7, void, void, void)
    found.cuEventCreate.argtypes = (ctypes.POINTER(void), uint)
    found.cuEventRecord.argtypes = (void, void)
    found.cuStreamWaitEvent.argtypes = (void, void, uint)
    found.cuDeviceGetP2PAttribute.argtypes = (ctypes.POINTER(ctypes.c_int), *(ctypes.c_int,) * 3)
    return found


def done(code: int, what: str) -> None:
    """Raise TransportError where the driver says that something failed."""
    if code:
        raise TransportError(
            f"CUDA's driver refuses {what}",
            op="a movement by peer memory",
            expected="0",
            actual=f"error {code}",
            next_step="look for the first error of the device; or set DISTDL_PEER=0",
        )


class Memory:
    """Memory of the current device that other processes of the node can open."""

    def take(self, nbytes: int) -> int:
        """Fresh memory of zeros."""
        from cupy.cuda import runtime

        address = runtime.malloc(nbytes)
        runtime.memset(address, 0, nbytes)
        runtime.deviceSynchronize()
        return address

    def give(self, address: int) -> None:
        from cupy.cuda import runtime

        runtime.free(address)

    def share(self, address: int) -> bytes:
        from cupy.cuda import runtime

        return runtime.ipcGetMemHandle(address)

    def open(self, handle: bytes) -> int:
        from cupy.cuda import runtime

        return runtime.ipcOpenMemHandle(handle)

    def close(self, address: int) -> None:
        from cupy.cuda import runtime

        runtime.ipcCloseMemHandle(address)


class Order:
    """One order of all that waits for peers on one device: where the stream changes, it waits for the last one.

    Kernels of two streams at once would take chunks from the same lanes.
    """

    def __init__(self):
        self.lock, self.stream, self.event = threading.RLock(), None, None

    def enter(self, stream: int) -> None:
        """What follows on ``stream`` comes after what was last here; the lock is held."""
        if stream == self.stream:
            return
        if self.stream is not None:
            if self.event is None:
                self.event = ctypes.c_void_p()
                done(driver().cuEventCreate(ctypes.byref(self.event), 2), "an event")  # 2: without a time
                self.leave(self.stream)
            done(driver().cuStreamWaitEvent(stream, self.event, 0), "a wait")
        self.stream = stream

    def leave(self, stream: int) -> None:
        """That is all: noted only where several streams have been here."""
        if self.event is not None:
            done(driver().cuEventRecord(self.event, stream), "an event")


@cache
def order_of(index: int) -> Order:
    """The one order of a device in this process."""
    return Order()


@cache
def fault():
    """A word that kernels can write and the host can still read when they have ended in a trap."""
    failure.notes.append(waited_in_vain)
    return torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True)  # whatever torch's default device is


_names: list[str] = []  # of what kernels do, by their numbers


def named(text: str) -> int:
    """The number by which a kernel calls what it does."""
    if text not in _names:
        _names.append(text)
    return _names.index(text)


def waited_in_vain() -> str:
    """For whom a kernel of this process waited until its limit, and in what; empty: none did."""
    word = int(fault()[0]) if fault.cache_info().currsize else 0
    if not word:
        return ""
    return f"a kernel of distdl waited in vain for rank {word % 2**32 - 1}, in {_names[word >> 32]}"


def scratch(nbytes: int) -> torch.Tensor:
    """Memory of the current device."""
    return torch.zeros(nbytes, dtype=torch.uint8, device="cuda")


def finish() -> None:
    """Wait for all that the current device has to do."""
    torch.cuda.synchronize()


def ready() -> None:
    """Compile what movements need: where that fails, ranks of this node do without."""
    compiled("boxes.cu", "move_boxes", torch.cuda.current_device())


def place() -> str:
    """Where the current device is plugged in."""
    from cupy.cuda import runtime

    return runtime.deviceGetPCIBusId(torch.cuda.current_device())


def joined(there: str) -> bool:
    """Whether NVLink joins the current device with the one plugged in ``there``: by it alone devices have atomics of
    each other's memory. One that this process does not see is not."""
    import cupy
    from cupy.cuda import runtime

    try:
        other = runtime.deviceGetByPCIBusId(there)
    except cupy.cuda.runtime.CUDARuntimeError:
        return False
    found, native_atomics = ctypes.c_int(), 3
    code = driver().cuDeviceGetP2PAttribute(ctypes.byref(found), native_atomics, torch.cuda.current_device(), other)
    return code == 0 and bool(found.value)


def multiprocessors() -> int:
    """How many the current device has."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


class Launch:
    """A kernel with its argument.

    Args:
        file, name: its source.
        blocks: how many.
        index: the device.
        argument: a structure, the fields ``fault``, ``limit`` and ``name`` of which are set here.
        limit: nanoseconds that it waits for a peer.
        text: what it does, for errors.
    """

    def __init__(self, file: str, name: str, blocks: int, index: int, argument, limit: int, text: str):
        self.index, self.order, self.argument = index, order_of(index), argument
        argument.fault, argument.limit, argument.name = fault().data_ptr(), limit, named(text)
        with _torch.on_device(index):
            self.kernel = compiled(file, name, index)
        self.launch = driver().cuLaunchKernel
        self.pointer = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        self.shape = (self.kernel.ptr, blocks, 1, 1, THREADS, 1, 1, 0)

    def run(self) -> None:
        """Launch it on torch's current stream; its argument was filled in while the order's lock was held."""
        with _torch.on_device(self.index):
            stream = _torch.current_stream(self.index)
            self.order.enter(stream)
            code = self.launch(*self.shape, stream, self.pointer, None)
            self.order.leave(stream)
        done(code, "a launch")


class Mover(Launch):
    """A movement's kernel, with its table."""

    def __init__(self, table: Table, index: int, limit: int, text: str):
        argument = Movement(movers=table.movers)
        if len(table.words) <= INLINE:
            argument.words[: len(table.words)] = table.words
        else:
            argument.table = on_device(tuple(table.words), torch.device("cuda", index)).data_ptr()
        blocks = -(-table.movers * TEAM // THREADS) + table.keepers
        super().__init__("boxes.cu", "move_boxes", blocks, index, argument, limit, text)
        self.base = argument.base

    def __call__(self, addresses) -> None:
        """Move between tensors at these addresses."""
        with self.order.lock:
            self.base[: len(addresses)] = addresses
            self.run()


class Summer(Launch):
    """The kernel of a small all-reduce.

    Args:
        dtype: of the numbers.
        count: how many they are.
        me: how many ranks come before this one.
        others: all others, in order.
        boxes: their mailboxes.
    """

    def __init__(self, dtype, count: int, me: int, others, boxes: Mailboxes, index: int, limit: int, text: str):
        name, each = _SUMMANDS[dtype]
        argument = Sum(total=count * each, count=len(others), me=me)
        for q, peer in enumerate(others):
            argument.there[q], argument.here[q] = boxes.pages(peer)
            argument.rank[q] = peer
        words = -(-count * dtype.itemsize // 8)
        blocks = min(-(-words // THREADS), _SUMMING)
        function = f"sum_all<{name}, {8 * each // dtype.itemsize}>"
        super().__init__("sums.cu", function, blocks, index, argument, limit, text)
        self.others, self.sums = list(enumerate(others)), boxes.sums

    def __call__(self, source: int, target: int) -> None:
        """Sum what is at ``source``, here and on the other ranks, to ``target``."""
        argument, sums = self.argument, self.sums
        with self.order.lock:
            argument.x, argument.y, argument.aligned = source, target, (source | target) % 8 == 0
            for q, peer in self.others:
                argument.number[q] = sums[peer] = sums[peer] % (2**32 - 2) + 1  # never 0, what memory begins with
            self.run()
