"""Data parallelism for plain autograd: gradients of any module's leaves, summed while backward runs."""

from __future__ import annotations

import weakref
from contextlib import contextmanager

import torch

from .. import functional as F
from ..engine.side_stream import Beside, attend
from ..errors import DistdlError
from .data import LIMITS, bucketed
from .hooks import all_reduce
from .topology import along

__all__ = ["GradientSync"]


class GradientSync:
    """Sums ``.grad`` of leaf tensors over the ranks while ``.backward()`` runs; then any ``torch.optim`` optimizer steps::

        sync = dd.parallel.GradientSync(model.parameters(), P)
        loss.backward()     # a bucket is reduced as soon as its last gradient is there
        sync.finish()       # waits; now .grad is the sum, equal on every rank
        optimizer.step(); optimizer.zero_grad()

    Buckets start in one order on all ranks, whatever the order in which gradients come. On CUDA all of it, the hook's own work too,
    goes on a stream beside backward's; MPI's all-reduce blocks. The summed gradients of a bucket are views of one vector. Its hooks
    go with it: keep it as long as gradients are to be summed.

    Args:
        params: leaf tensors; those that do not require a gradient are left out.
        P, dims: see :func:`replicate`.
        hook: see :mod:`distdl.parallel.hooks`.
        find_unused: gradients may be missing, on some ranks (they count as zero) or on all (they stay ``None``); costs one
            all-reduce of an int32 for each tensor. Without it a missing gradient is an error.

    Raises:
        DistdlError: a second backward without :meth:`finish`; gradients that were summed already; a missing gradient.
    """

    def __init__(self, params, P, dims=None, *, hook=None, find_unused: bool = False, limits=LIMITS):
        self.params = [p for p in params if p.requires_grad]
        self.P, self.find_unused = along(P, dims), find_unused
        self.hook = hook or all_reduce(self.P)
        self.buckets = bucketed(self.params, limits)
        self.states: list = [None] * len(self.buckets)
        self.syncing = True
        self._summed: dict = {}  # weak: it keeps no gradient alive
        self._bucket_of = {i: b for b, bucket in enumerate(self.buckets) for i in bucket}
        this = weakref.ref(self)  # Python's collector does not see hooks: a cycle through one would never be freed
        self._hooks: list = []
        weakref.finalize(self, _remove, self._hooks)
        for i, p in enumerate(self.params):
            self._hooks.append(p.register_post_accumulate_grad_hook(lambda _, i=i: (sync := this()) and sync._arrived(i)))
        self._begin()

    def _begin(self):
        self._left = [set(bucket) for bucket in self.buckets]
        self._under_way: list = []

    def _arrived(self, i):
        if not self.syncing:
            return
        if i not in self._left[self._bucket_of[i]]:
            raise DistdlError("a second gradient before finish()", op="GradientSync", actual=f"parameter {i}",
                              expected="one backward", next_step="call finish() after backward, or accumulate in no_sync()",
                              partitions=self.P)
        attend(self.params[i].device)  # each gradient comes on the stream on which its parameter was used
        self._left[self._bucket_of[i]].discard(i)
        while len(self._under_way) < len(self.buckets) and not self._left[len(self._under_way)]:
            self._start()

    def _start(self):
        number = len(self._under_way)
        grads = []
        for i in self.buckets[number]:
            grad = self.params[i].grad
            if grad is None and not self.find_unused:
                raise DistdlError("no gradient came", op="GradientSync", actual=f"none for parameter {i}", expected="one for each",
                                  next_step="use every parameter, F.tie the rest to the loss, or pass find_unused=True",
                                  partitions=self.P)
            if grad is not None and i in self._summed and grad is self._summed[i]():
                raise DistdlError("this gradient was summed over the ranks before", op="GradientSync", actual=f"parameter {i}",
                                  expected="a gradient of this rank", partitions=self.P,
                                  next_step="optimizer.zero_grad() after each step; with set_to_none=True, its default")
            if grad is not None and grad.layout != torch.strided:
                raise DistdlError("a sparse gradient", op="GradientSync", actual=f"{grad.layout} for parameter {i}",
                                  expected="a dense one", next_step="make the layer with sparse=False", partitions=self.P)
            grads.append(torch.zeros_like(self.params[i]) if grad is None else grad.detach())
        with Beside(grads[0].device, grads) as beside:
            reduced, self.states[number] = self.hook(grads, self.states[number])
        self._under_way.append((beside, reduced))

    @contextmanager
    def no_sync(self):
        """Backward passes inside only add to this rank's ``.grad``; the next one outside sums all of it, once."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    @torch.no_grad()
    def finish(self):
        """Wait until every gradient is the sum. ``optimizer.register_step_pre_hook(lambda *_: sync.finish())`` calls it for you."""
        used = None
        if self.find_unused:
            mine = [p.grad is not None for p in self.params]
            device = self.params[0].device if self.params else None
            used = F.all_sum_reduce(torch.tensor(mine, dtype=torch.int32, device=device), self.P).tolist()
        while len(self._under_way) < len(self.buckets):
            self._start()
        for bucket, (beside, reduced) in zip(self.buckets, self._under_way):
            beside.join(reduced)
            for i, g in zip(bucket, reduced):
                self.params[i].grad = None if used and not used[i] else g
                self._summed[i] = weakref.ref(g)
        self._begin()

    def remove(self):
        """Take the hooks off the parameters, as when nothing refers to this any more."""
        _remove(self._hooks)


def _remove(handles) -> None:
    for handle in handles:
        handle.remove()
