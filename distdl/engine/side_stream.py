"""Work beside a device's current stream: what overlaps local computation on CUDA. Nothing here waits on the host.

Memory passes between the streams without ``record_stream``, which would hold it back for as long as the host runs ahead
of the
device: whatever begins on the side stream first waits for every stream that has used it, so that memory of the side
stream's pool which was freed there can be used again; and what the side stream reads is kept until the current stream
has waited for it.
"""

from __future__ import annotations

import contextlib

import torch

from .. import _torch


class _Side:
    """A device's side stream, first to get free multiprocessors, and the streams beside which it has worked."""

    def __init__(self, device):
        self.stream, self.device, self.homes, self.captured = torch.cuda.Stream(device, priority=-1), device, {}, None

    def current(self):
        """The device's current stream; one that is known by its address costs a third of asking torch.cuda for it."""
        return self.homes.get(_torch.current_stream(self.device.index)) or torch.cuda.current_stream(self.device)

    def join(self):
        """Know the current stream; a graph that is captured has memory of its own, and may not wait for what it does
        not hold."""
        home = self.current()
        if _torch.capturing():
            self.captured = home
        else:
            self.homes[home.cuda_stream] = home
        return home

    def wait(self):
        """Wait for what all these streams have been given so far."""
        for home in (self.captured,) if _torch.capturing() else self.homes.values():
            self.stream.wait_stream(home)


_sides: dict = {}  # of the devices on which something went beside


def side_stream(device) -> _Side:
    """The device's side stream, made on first use."""
    if device not in _sides:
        _sides[device] = _Side(device)
    return _sides[device]


def settle(device) -> None:
    """Where the side stream is the current one, let it wait as if it began: autograd runs an adjoint on the stream of
    its node."""
    side = _sides.get(device)
    if side is not None and side.stream.cuda_stream == _torch.current_stream(device.index):
        side.wait()


def attend(device) -> None:
    """Whatever goes beside from now on waits for the current stream too: what it reads was made on several streams."""
    if device.type == "cuda":
        side_stream(device).join()


class Beside:
    """A context: on a CUDA device its work goes on the side stream, after what the current stream has been given so
    far.

    Args:
        device: where; on any but a CUDA device the context changes nothing.
        kept: tensors that the work reads.
    """

    def __init__(self, device, kept=()):
        self.side = side_stream(device) if device.type == "cuda" else None
        self.stream = None if self.side is None else self.side.stream
        self.kept, self.event = kept, None

    def __enter__(self):
        if self.side is not None:
            self.home = self.side.join()
            self.side.wait()
            self.context = torch.cuda.stream(self.stream)
            self.context.__enter__()
        return self

    def __exit__(self, *error):
        if self.stream is not None:
            self.event = self.stream.record_event()
            self.context.__exit__(*error)

    def again(self):
        """A context: its work goes on the side stream once more, in order."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def join(self, results=()):
        """Let the current stream wait for the work (not for what came after it), and use ``results``."""
        if self.event is None:
            return
        current = self.side.current()
        current.wait_event(self.event)
        if current != self.home:  # another stream than the one that all this belongs to
            self._record()
            for t in results:
                t.record_stream(current)
        self.kept, self.event = (), None

    def _record(self):
        for t in self.kept:
            t.record_stream(self.stream)

    def __del__(self):
        if getattr(self, "event", None) is not None:  # nobody waited
            self._record()
