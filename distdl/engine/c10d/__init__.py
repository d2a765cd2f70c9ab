"""The engine ``torch``: process groups of torch.distributed (gloo for CPU tensors, NCCL for CUDA tensors) behind the
transport protocol.

A world needs the job's store and no other rank: gloo's connections are made when two ranks first speak (its lazy
device), and groups by their members alone, under keys of the store. No group stands in torch's own tables.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import json
import os
import platform
import struct
import sys
import threading
import time
import weakref
from collections import defaultdict
from typing import Any

import torch

from ... import _distributed
from ..._distributed import dist
from ...errors import DistdlError, TransportError
from ..transport import Call, Transport, Unwatched, Waiting, no_sum
from .meeting import Meeting, StoreChannel
from .messages import REST, Handle, Messages, told
from .slots import tensor_at

_FOREVER = datetime.timedelta(days=365)  # checking and the watchdog say when it is too long
_AGREE = 2 * REST  # bit of the tags of agreements
_QUIET, _TICK, _LISTEN = 0.1, 0.1, 1.0  # seconds since the last message to a rank until it can read what was sent to it
_CAUSE, _GRACE = 3.0, 5.0  # seconds for another rank to say why it ended; and for the launcher to end this one
_LATE = 10.0  # seconds after which a rank says that another has not come to its first movement
_PAIRS = 8  # ranks, at most, that agree by messages of all pairs
# The torch dtypes that gloo sums, and as what.
_SUMS = {torch.uint8: torch.uint8, torch.int8: torch.int8, torch.int32: torch.int32, torch.int64: torch.int64,
         torch.float32: torch.float32, torch.float64: torch.float64, torch.complex64: torch.float32,
         torch.complex128: torch.float64, torch.bool: torch.uint8}  # fmt: skip
_made: dict[tuple, int] = defaultdict(int)  # worlds by name and ranks: each has keys of its own
_alive: weakref.WeakSet = weakref.WeakSet()


class TorchTransport(Transport):
    """A world by gloo. ``meeting``: what :func:`.meeting.meet` has found; ``name``: the world's."""

    device_types: tuple[str, ...] = ("cpu",)
    collectives: tuple[str, ...] = ("all_reduce",)
    sums = frozenset(_SUMS)
    takes_types = False
    wide = True
    chunk = 2**62  # messages are cut by what carries them
    tags = REST - 1

    def __init__(self, meeting: Meeting, name: str = "default"):
        self.meeting, self.rank, self.size = meeting, meeting.rank, len(meeting.ranks)
        _made[name, meeting.ranks] += 1
        members = "all" if self.size == meeting.place[1] else "-".join(map(str, meeting.ranks))
        self.store = dist.PrefixStore(f"{name}/{members}/{_made[name, meeting.ranks]}", meeting.store)
        self.groups: dict[tuple[int, ...], Any] = {}
        self.messages = Messages(self.group(tuple(range(self.size))), self.rank)
        self.waiting: Waiting = Unwatched()
        self.met = {self.rank}
        self.last: Handle | None = None  # what was posted last, until it is waited for
        self.sums_of: dict[tuple, Any] = {}
        self.closed = threading.Event()
        self.store.set(f"here/{self.rank}", "")
        self.ticker = threading.Thread(target=self._tick, name="distdl-store", daemon=True)
        self.ticker.start()
        _alive.add(self)

    # ------------------------------------------------------------ what a world asks

    def serve(self, wide, waiting):
        self.wide = wide
        if waiting is not None:
            self.waiting = waiting

    def channel(self):
        return StoreChannel(self.store, self.rank)

    def publish(self, notice):
        self.store.set(f"notice/{self.rank}", notice)

    def notice(self, rank):
        return self.store.get(key) if self.store.check([key := f"notice/{rank}"]) else None

    def peek(self, peer):
        if not self.store.check([key := f"sent/{peer}/{self.rank}"]):
            return None
        return self.messages.unexpected(peer, struct.iter_unpack("<qi", self.store.get(key)))

    def discard(self, peer, tag):
        self.messages.discard(peer, tag)

    def engines_on(self, world, index):
        from ..nccl import Cuda, NcclEngines, engines_on
        from .nccl import TorchNccl

        found = engines_on(world, index)
        if found.nccl is not None or found.wrong or not dist.is_nccl_available():
            return found
        return NcclEngines(world, Cuda(index), TorchNccl(self.store, self.rank, index))  # CuPy is not needed

    def node(self) -> str:
        with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {platform.node()}"  # names of machines need not differ
        return platform.node()

    def job(self):
        return self.meeting.place

    # ------------------------------------------------------------ movements

    def post(self, sends, receives, call=None, memory=None):
        if call is None:
            call = Call(0, tuple({peer for peer, _, _ in (*sends, *receives)}))
        messages, waiting = self.messages, self.waiting
        numbers, recent, step, wrap, mark = waiting.numbers, waiting.recent, waiting.step, waiting.wrap, waiting.mark
        mark |= call.code & waiting.codes
        for peer in call.peers:
            numbers[peer] += step
            recent[peer].append(call)
        if not self.met.issuperset(call.peers):
            self._meet(call.peers)
        handle, era = Handle(call, mark, memory), waiting.era << 40
        try:
            for peer, address, nbytes in receives:
                number = numbers[peer]
                tag, number = number & wrap | mark, number | era
                handle.missing.append(messages.receive(peer, tag, number, address, nbytes))
            for peer, address, nbytes in sends:
                number = numbers[peer]
                large = messages.send(peer, number & wrap | mark, number | era, address, nbytes, memory)
                if large is not None:
                    handle.sending.append(large)
        except RuntimeError as error:
            messages.abandon(handle)
            raise self._failed(error, f"messages to and from ranks {call.peers}") from error
        self.last = handle
        return handle

    def pause(self):
        if self.last is not None:
            self.messages.go_on(self.last)
            self.last = None

    def _meet(self, ranks) -> None:
        """Wait until ``ranks`` have made their world: to speak to one before would wait, too, and in silence."""
        began, said = time.monotonic(), False
        for rank in ranks:
            while rank not in self.met and not self.store.check([f"here/{rank}"]):
                waited = time.monotonic() - began
                if not said and waited > _LATE:
                    said = True
                    print(
                        f"distdl: rank {self.rank} has waited {_LATE:g} s for rank {rank}, which has not come to its "
                        "first movement, or dd.world()",
                        file=sys.stderr,
                        flush=True,
                    )
                time.sleep(0.001 if waited < 1 else 0.01)
            self.met.add(rank)

    def wait(self, handle):
        self.last = None
        if handle is None:  # a collective, which is done
            return
        waiting, messages = self.waiting, self.messages

        def look(waited, missing):
            waiting.look(handle.call, handle.mark, waited, missing)

        try:
            if handle.missing:
                messages.arrive(handle, look, waiting.interval)
            here = {one.peer for one in handle.coming}  # these are in this movement, and take what they are sent
            wrong = messages.take(handle)
            while handle.sending:
                one, began = handle.sending[-1], time.monotonic()
                if one.done is None and here.issuperset(one.peers):
                    one.wait()
                else:
                    messages.let_go(one)
                    while not one.done.wait(min(waiting.interval, 1.0)):
                        look(time.monotonic() - began, [])
                handle.sending.pop()
                if one.error is not None:
                    raise one.error
        except DistdlError:
            messages.abandon(handle)
            raise
        except RuntimeError as error:
            messages.abandon(handle)
            raise self._failed(error, f"messages of ranks {handle.call.peers}") from error
        if wrong is not None:
            raise wrong

    def abandon(self, handle, memory):
        if handle is not None:
            self.messages.abandon(handle)

    def all_gather(self, data, ranks):
        if not self.met.issuperset(ranks):
            self._meet(ranks)
        me, size, swap = ranks.index(self.rank), len(ranks), self.messages.swap
        tag = _AGREE | hash(ranks) & (REST - 1)  # a hash of numbers is the same in every process
        try:
            if size <= _PAIRS:
                others = [r for r in ranks if r != self.rank]
                found = swap(data, tag, others, others)
                return [data if r == self.rank else found[r] for r in ranks]
            parts, step = {me: data}, 1
            while step < size:  # each round doubles what a rank knows: of itself, and of those after it
                to, source = ranks[(me - step) % size], ranks[(me + step) % size]
                known = [(me + i) % size for i in range(min(step, size - step))]
                letter = b"".join(struct.pack("<iq", i, len(parts[i])) + parts[i] for i in known)
                letter, at = swap(letter, tag, [to], [source])[source], 0
                while at < len(letter):
                    i, n = struct.unpack_from("<iq", letter, at)
                    at += 12 + n
                    parts[i] = letter[at - n : at]
                step *= 2
            return [parts[i] for i in range(size)]
        except RuntimeError as error:
            raise self._failed(error, f"a small message of each of ranks {ranks}") from error

    def group(self, ranks):
        """The process group of ``ranks``, made by its members on first use."""
        found = self.groups.get(ranks)
        if found is None:
            store = dist.PrefixStore(f"group/{'-'.join(map(str, ranks))}", self.store)
            found = self.groups[ranks] = _distributed.gloo(store, ranks.index(self.rank), len(ranks), _FOREVER)
        return found

    def collective(self, kind, source, target, count, dtype, ranks):
        if dtype not in _SUMS:
            raise no_sum("gloo", kind, self.rank, dtype, _SUMS)
        if not self.met.issuperset(ranks):
            self._meet(ranks)
        nbytes = count * dtype.itemsize
        if source != target:
            ctypes.memmove(target, source, nbytes)
        found = self.sums_of.get((target, nbytes, dtype))
        if found is None:
            if len(self.sums_of) > 1024:
                self.sums_of.clear()
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX if dtype == torch.bool else dist.ReduceOp.SUM  # "or", as in torch
            found = self.sums_of[target, nbytes, dtype] = [tensor_at(target, nbytes, _SUMS[dtype])], options
        try:
            self.group(ranks).allreduce(*found).wait()
        except RuntimeError as error:
            raise self._failed(error, f"{count} numbers of {dtype} from each of ranks {ranks}") from error

    # ------------------------------------------------------------ failures, and the end

    def abort(self, code: int = 1, cause: str = ""):
        """Tell the others and torchrun why, give both a second, and end; the launcher then ends the others."""
        number, lines = self.meeting.place[0], cause.strip().splitlines() or [f"exit code {code}"]
        with contextlib.suppress(RuntimeError):  # the store may be what has failed
            self.meeting.store.compare_set("cause", "", f"rank {number} has failed: {lines[-1]}")
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            # torchrun's last words are the error of the earliest whole second, and of equals that of the smallest rank.
            more = {"py_callstack": cause, "timestamp": str(int(time.time()))}
            with open(path, "w") as file:
                json.dump({"message": {"message": cause, "extraInfo": more}}, file)
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(1)
        os._exit(code)

    def _failed(self, error: RuntimeError, expected: str) -> DistdlError:
        """The error of a message that cannot come; where another rank has failed it says why."""
        if isinstance(error, DistdlError):
            return error
        until, why = time.monotonic() + _CAUSE, ""
        with contextlib.suppress(RuntimeError):  # the store may be gone too
            while not (why := self._cause()) and time.monotonic() < until:
                time.sleep(0.05)
        return TransportError(
            why or f"gloo failed: {told(error)}",
            op="exchange",
            rank=self.rank,
            expected=expected,
            actual="an error",
            next_step="see why another rank has ended",
        )

    def _cause(self) -> str:
        """Why the job fails, where some rank has said so."""
        store = self.meeting.store
        return store.get("cause").decode(errors="replace") if store.check(["cause"]) else ""

    def _tick(self) -> None:
        """Let ranks to which nothing was sent for a while read what was: one may wait in vain for something else. And
        end this rank when another has failed and no launcher ends it."""
        heard, listened, unread = None, 0.0, self.messages.unread
        while not self.closed.wait(_TICK):
            now = time.monotonic()
            try:
                for peer, since in list(unread.items()):
                    if now - since > _QUIET:
                        unread.pop(peer)
                        letters = tuple(self.messages.sent[peer])
                        self.store.set(
                            f"sent/{self.rank}/{peer}", b"".join(struct.pack("<qi", *one) for one in letters)
                        )
                if heard is None and now - listened > _LISTEN:
                    listened = now
                    heard = now if self._cause() else None
                if heard is not None and now - heard > _GRACE:
                    os.write(2, f"distdl: rank {self.meeting.place[0]} ends: {self._cause()}\n".encode())
                    os._exit(1)
            except RuntimeError:  # the store is gone, and with it the job: whatever needs it says so
                return

    def close(self):
        """Not collective: this rank goes when those that may still come have taken what it has sent."""
        if self.closed.is_set():
            return
        self.messages.hand_over()
        with contextlib.suppress(RuntimeError):  # whoever has the store may have gone
            self.store.set(f"left/{self.rank}", "")
            while any(not self._left(one.peers) for one in list(self.messages.out)):
                time.sleep(0.01)
            while self.meeting.hosts and not self._left(r for r in range(self.size) if self.store.check([f"here/{r}"])):
                time.sleep(0.01)  # the others need the store
        self.closed.set()
        self.ticker.join()
        self.messages.stop()
        self.groups.clear()
        self.messages.group = None

    def _left(self, ranks) -> bool:
        return all(self.store.check([f"left/{r}"]) for r in set(ranks) if r != self.rank)


def _forked() -> None:
    """A fork has none of gloo's threads: what ends them would wait for ever, so nothing is ended there."""
    for engine in list(_alive):
        for thing in (*engine.groups.values(), engine.meeting.store, engine.store):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
        engine.closed.set()


@atexit.register
def _close() -> None:
    """Also of worlds that others have taken the names of: no thread may come back from C++ while Python ends."""
    for engine in list(_alive):
        engine.close()


os.register_at_fork(after_in_child=_forked)
