"""The kernel on the device: its memory, how it is compiled and launched, and the order of its runs."""

from __future__ import annotations

import ctypes
import os
import threading
from functools import cache
from pathlib import Path

import torch

from ... import _torch
from ...errors import TransportError
from .region import CAPACITY, LINE, SLOTS
from .tables import PART, Table

THREADS, UNROLL = 512, int(os.environ.get("P_UNROLL", 4))
BLOCK, KEEPERS = (
    THREADS * UNROLL,
    2 * 132,
)  # words that a block copies at once, and blocks that copy what stays, at most
BASES, INLINE = 24, 448  # tensors of a movement, and integers of a table that goes along as an argument, at most
_OPTIONS = {"THREADS": f"{THREADS}u", "UNROLL": UNROLL, "BASES": BASES, "INLINE": INLINE, "PART": PART}
_OPTIONS |= {"SLOTS": f"{SLOTS}u", "CAPACITY": CAPACITY, "LINE": LINE, "FAR": 2**31 - 1}


class Movement(ctypes.Structure):
    """The kernel's argument."""

    _fields_ = (
        ("table", ctypes.c_uint64),
        ("fault", ctypes.c_uint64),
        ("limit", ctypes.c_uint64),
        ("movers", ctypes.c_uint32),
        ("name", ctypes.c_uint32),
        ("base", ctypes.c_uint64 * BASES),
        ("words", ctypes.c_int64 * INLINE),
    )


@cache
def compiled(name: str, *names: str):
    """A function of the kernel's source for the current device."""
    import cupy

    options = ("-std=c++17", *(f"-D{key}={value}" for key, value in _OPTIONS.items()))
    source = Path(__file__).with_name("source.cu").read_text()
    return cupy.RawModule(code=source, options=options, name_expressions=names or None).get_function(name)


@cache
def driver():
    """CUDA's driver, which costs less for a launch than what stands above it."""
    found = ctypes.CDLL("libcuda.so.1")
    void, uint = ctypes.c_void_p, ctypes.c_uint
    found.cuLaunchKernel.argtypes = (void, *(uint,) * 7, void, void, void)
    found.cuEventCreate.argtypes = (ctypes.POINTER(void), uint)
    found.cuEventRecord.argtypes = (void, void)
    found.cuStreamWaitEvent.argtypes = (void, void, uint)
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
    return torch.zeros(1, dtype=torch.int64, pin_memory=True)


def finish() -> None:
    """Wait for all that the current device has to do."""
    torch.cuda.synchronize()


def multiprocessors() -> int:
    """How many the current device has."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


class Launch:
    """A movement's kernel with its table.

    Args:
        table: what it reads.
        index: the device.
        order: with what else of this device it has one order.
        limit: nanoseconds that it waits for a peer.
        call: what the movement is called.
    """

    def __init__(self, table: Table, index: int, order: Order, limit: int, call):
        self.index, self.order = index, order
        self.movement = Movement(0, fault().data_ptr(), limit, table.movers, call.code)
        if len(table.words) <= INLINE:
            self.movement.words[: len(table.words)] = table.words
        else:
            self.held = torch.tensor(table.words, dtype=torch.int64, device=f"cuda:{index}")
            self.movement.table = self.held.data_ptr()
        self.base = self.movement.base
        with _torch.on_device(index):
            self.kernel = compiled("move_boxes").kernel
        self.launch = driver().cuLaunchKernel
        self.argument = (ctypes.c_void_p * 1)(ctypes.addressof(self.movement))
        self.shape = (self.kernel.ptr, table.movers + table.keepers, 1, 1, THREADS, 1, 1, 0)

    def __call__(self, addresses) -> None:
        """Move between tensors at these addresses, on torch's current stream."""
        order, index = self.order, self.index
        with order.lock, _torch.on_device(index):
            stream = _torch.current_stream(index)
            order.enter(stream)
            self.base[: len(addresses)] = addresses
            code = self.launch(*self.shape, stream, self.argument, None)
            order.leave(stream)
        if code:
            done(code, "a launch")
