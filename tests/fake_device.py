"""A device played by host memory: tensors that say they are CUDA tensors, streams that take notes, and the copy kernel
in torch. So that what the executor does for a device is tested where there is none."""

from __future__ import annotations

import contextlib

import torch

from distdl import _torch
from distdl.engine import exchange, program, side_stream
from distdl.engine.fast import fused

CUDA = torch.device("cuda", 0)


class Elsewhere(torch.Tensor):
    """Host memory that says it is a device's."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cpu, is_cuda, device = False, True, CUDA

    def new_empty(self, *shape, **kwargs):
        return super().new_empty(*shape, **kwargs).as_subclass(Elsewhere)

    def to(self, dtype):
        return super().to(dtype).as_subclass(Elsewhere)

    def record_stream(self, stream):
        notes.append(("recorded", stream))


class Host(torch.Tensor):
    """Host memory that can be moved to the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def to(self, target):
        return super().to(target) if isinstance(target, torch.dtype) else on_device(self, target)


def on_device(x, device=CUDA):
    """A tensor of the fake device, with x's values and strides."""
    assert device == CUDA
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    return copy.copy_(x).as_subclass(Elsewhere)


living: list = []  # a simulated peer reads scratch memory after its owner gave it up
notes: list = []  # what was asked of streams and of memory, in order


class Stream:
    device = CUDA

    def __init__(self, name="side"):
        self.name, self.cuda_stream = name, hash(name)

    def wait_stream(self, other):
        notes.append((self.name, "waits for", other.name))

    def record_event(self):
        notes.append((self.name, "was here"))
        return self.name

    def wait_event(self, event):
        notes.append((self.name, "waits until was here", event))


CURRENT = Stream("current")
here = [CURRENT]  # the current stream is the last one


class Cuda:
    """``torch.cuda`` as the executor uses it."""

    Stream = staticmethod(lambda device, priority: Stream() if device == CUDA else None)
    current_stream = staticmethod(lambda device: here[-1] if device == CUDA else None)

    @staticmethod
    @contextlib.contextmanager
    def stream(stream):
        notes.append(("enter", stream))
        here.append(stream)
        yield
        here.pop()
        notes.append(("leave", stream))


class Torch:
    """``torch``, with memory on the device."""

    cuda = Cuda

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def empty(*shape, device=None, pin_memory=False, **kwargs):
        if pin_memory:
            notes.append("pinned")
        found = torch.empty(*shape, **kwargs)
        if device == CUDA:
            found = found.as_subclass(Elsewhere)
            living.append(found)
        return found


def _like(shape, dtype, device):
    return torch.empty(1, dtype=dtype).expand(shape).as_subclass(Elsewhere if device == CUDA else Host)


def _empty_like(like):
    return torch.full(like.shape, 1, dtype=like.dtype).as_subclass(type(like))  # never zeros by luck


class Boxes:
    """What the kernel does, box by box; ``kernels`` counts its runs."""

    kernels = 0

    def __init__(self, copies, itemsize, device):
        assert device == CUDA and len(copies) > 1, "one box needs no kernel"
        self.copies, self.itemsize = copies, itemsize

    def copy(self, x, staging, y):
        assert x.dtype.itemsize == y.dtype.itemsize and self.itemsize % x.dtype.itemsize == 0
        words = x.dtype if x.dtype.itemsize == self.itemsize else fused._WORD[self.itemsize]
        memory = [None if t is None else t.view(words) for t in (x, None if staging is None else staging[0], y)]
        for source, target, size, a, b, from_strides, to_strides in self.copies:
            a, b = (at + memory[which].storage_offset() for at, which in ((a, source), (b, target)))
            memory[target].as_strided(size, to_strides, b).copy_(memory[source].as_strided(size, from_strides, a))
        Boxes.kernels += 1


def install(monkeypatch, large=2**20, kernel=True):
    """Let the executor meet the device. ``large``: bytes from which a box is copied alone, in words."""
    side_stream._sides.clear()
    notes.clear()
    living.clear()
    Boxes.kernels = 0
    for module in (program, exchange):
        monkeypatch.setattr(module, "torch", Torch())
    monkeypatch.setattr(side_stream, "torch", Torch())
    monkeypatch.setattr(_torch, "capturing", lambda: False)
    monkeypatch.setattr(_torch, "current_stream", lambda index: here[-1].cuda_stream)
    monkeypatch.setattr(program, "_like", _like)
    monkeypatch.setattr(exchange, "_empty_like", _empty_like)
    monkeypatch.setattr(fused, "Boxes", Boxes)
    monkeypatch.setattr(fused, "available", lambda: kernel)
    monkeypatch.setattr(fused, "LARGE", large)
    monkeypatch.setattr(exchange.LocalTransport, "device_types", ("cuda",))
