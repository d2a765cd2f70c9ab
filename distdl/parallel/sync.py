"""Data parallelism for plain autograd: gradients of any module's leaves, summed while backward runs."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .. import functional as F
from .._types import Dims, Place
from ..calls import public
from ..engine.side_stream import Beside, attend
from ..errors import DistdlError
from ..held import ask, complete, held
from .data import LIMITS, bucketed
from .hooks import Hook, all_reduce
from .topology import along

__all__ = ["GradientSync", "ignore_in_ddp"]


def ignore_in_ddp(module: torch.nn.Module, P: Place, dims: Dims = None) -> list[str]:
    """Tell torch's DistributedDataParallel, *before* it is put around ``module``, what is not its: on its ignore list
    go parameters that are complete over the ranks ``P`` of its process group, as their layers sum them, and buffers of
    these layers.

    Returns:
        Their names. What the list had before stays.

    Raises:
        PartitionError: a layer sums over some of these ranks, and not over others.

    No messages; parameters of any shape.

    Example:
        >>> model, P = torch.nn.Linear(2, 2), dd.Partition((2,))
        >>> w = dd.nn.declare(model.weight, P)  # whose adjoint sums over P: the bias is left to DDP
        >>> dd.parallel.ignore_in_ddp(model, P)
        ['weight']
    """
    R = along(P, dims)
    ask(module)
    names = {name for name, p in module.named_parameters(remove_duplicate=False) if complete(held(p), R, name)}
    for prefix, layer in module.named_modules(remove_duplicate=False):
        own = [complete(held(p), R) for p in layer.parameters(recurse=False)]
        if own and all(own):
            names.update(f"{prefix}.{name}" if prefix else name for name, _ in layer.named_buffers(recurse=False))
    before = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        module, sorted(names.union(before))
    )
    return sorted(names)


class GradientSync:
    """Sums ``.grad`` of leaf tensors over the ranks while ``.backward()`` runs; then any ``torch.optim`` optimizer
    steps::

        sync = dd.parallel.GradientSync(model, P)
        loss.backward()     # a bucket is reduced as soon as its last gradient is there
        sync.finish()       # waits; now .grad is the sum, equal on every rank
        optimizer.step(); optimizer.zero_grad()

    Parameters whose layer sums over these ranks itself (those of ``dd.nn`` over a grid that spans them, blocks of a
    ``Sharding``) are left as they are. Frozen parameters are left alone, for as long as they are frozen; unfrozen ones,
    and those that a module gets later, are summed from the next backward on, on every rank alike.

    Buckets start in one order on all ranks, whatever the order in which gradients come. On CUDA all of it, the hook's
    own work too, goes on a stream beside backward's; MPI's all-reduce blocks. The summed gradients of a bucket are
    views of one vector. Its hooks go with it: keep it as long as gradients are to be summed.

    Args:
        params: a module, whose parameters of later are seen too, and named in errors; or leaf tensors
            (``model.parameters()``).
        P, dims: see :func:`replicate`.
        hook: see :mod:`distdl.parallel.hooks`.
        find_unused: gradients may be missing, on some ranks (they count as zero) or on all (they stay ``None``); costs
            one all-reduce of an int32 for each tensor. Without it a missing gradient is an error.

    Raises:
        DistdlError: a second backward without :meth:`finish`; gradients that were summed already; a missing gradient.
        PartitionError: a parameter whose layer sums over some of these ranks, and not over others.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> sync = dd.parallel.GradientSync(model, dd.Partition((1,)))
        >>> model(torch.ones(2)).sum().backward()
        >>> sync.finish()
        >>> model.weight.grad
        tensor([[1., 1.]])
    """

    def __init__(
        self,
        params: torch.nn.Module | Iterable[torch.Tensor],
        P: Place,
        dims: Dims = None,
        *,
        hook: Hook | None = None,
        find_unused: bool = False,
        limits: Sequence[int] = LIMITS,
    ) -> None:
        self.module = params if isinstance(params, torch.nn.Module) else None
        self.params: list[torch.Tensor] = [] if isinstance(params, torch.nn.Module) else list(params)
        self.P, self.find_unused, self.limits = along(P, dims), find_unused, limits
        self.hook = hook or all_reduce(self.P)
        self.buckets: list[list[int]] = []
        self.states: list[Any] = []
        self.syncing = True
        self._summed: dict[int, weakref.ref[torch.Tensor]] = {}  # weak: it keeps no gradient alive
        self._bucket_of: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._hooks: dict[int, Any] = {}  # by number of the parameter
        self._ours: set[int] = set()  # the parameters of this backward, by number
        weakref.finalize(self, _remove, self._hooks)
        self._look()
        self._begin()

    def _look(self) -> list[int]:
        """What there is now: hook what requires a gradient; returns the numbers of those that are to be summed."""
        there: set[int] | None = None
        if self.module is not None:
            ask(self.module)
            now, known = dict(self.module.named_parameters()), {id(p) for p in self.params}
            for name, parameter in now.items():
                if id(parameter) not in known:
                    self._names[len(self.params)] = name
                    self.params.append(parameter)
            there = {id(p) for p in now.values()}  # others have been replaced
        this = weakref.ref(self)  # Python's collector does not see hooks: a cycle through one would never be freed
        ours = []
        for i, p in enumerate(self.params):
            if p.requires_grad and (there is None or id(p) in there):
                if not complete(held(p), self.P, self._name(i)):
                    ours.append(i)
                if i not in self._hooks:
                    self._hooks[i] = p.register_post_accumulate_grad_hook(functools.partial(_tell, this, i))
        return ours

    def _name(self, i: int) -> str:
        return f"parameter {i}" + (f", {self._names[i]}" if i in self._names else "")

    def _begin(self) -> None:
        # Of each bucket, whose gradients have yet to come: known from the first gradient on.
        self._left: list[set[int]] | None = None
        self._under_way: list[tuple[Beside, list[torch.Tensor]]] = []

    def _open(self) -> list[set[int]]:
        """The buckets of this backward, and the gradients that each lacks. One keeps its parameters for ever, as its
        hook's state does; new ones get new buckets."""
        self._ours = set(self._look())
        fresh = sorted(self._ours - self._bucket_of.keys())
        for bucket in bucketed([self.params[i] for i in fresh], self.limits):
            self._bucket_of.update((fresh[i], len(self.buckets)) for i in bucket)
            self.buckets.append([fresh[i] for i in bucket])
            self.states.append(None)
        self._left = [self._ours.intersection(bucket) for bucket in self.buckets]
        return self._left

    def _arrived(self, i: int) -> None:
        if not self.syncing:
            return
        left = self._open() if self._left is None else self._left
        if i not in self._ours:
            return
        if i not in left[self._bucket_of[i]]:
            raise DistdlError(
                "a second gradient before finish()",
                actual=self._name(i),
                expected="one backward",
                next_step="call finish() after backward, or accumulate in no_sync()",
                partitions=self.P,
            )
        attend(self.params[i].device)  # each gradient comes on the stream on which its parameter was used
        left[self._bucket_of[i]].discard(i)
        while len(self._under_way) < len(self.buckets) and not left[len(self._under_way)]:
            self._start()

    def _start(self) -> None:
        number = len(self._under_way)
        grads = []
        for i in self.buckets[number]:
            if i not in self._ours:  # frozen: its place stays
                grads.append(torch.zeros_like(self.params[i]))
                continue
            grad = self.params[i].grad
            if grad is None and not self.find_unused:
                raise DistdlError(
                    "no gradient came",
                    actual=f"none for {self._name(i)}",
                    expected="one for each",
                    partitions=self.P,
                    next_step="use every parameter, F.tie the rest to the loss, or pass find_unused=True",
                )
            if grad is not None and i in self._summed and grad is self._summed[i]():
                raise DistdlError(
                    "this gradient was summed over the ranks before",
                    actual=self._name(i),
                    expected="a gradient of this rank",
                    partitions=self.P,
                    next_step="optimizer.zero_grad() after each step; with set_to_none=True, its default",
                )
            if grad is not None and grad.layout != torch.strided:
                raise DistdlError(
                    "a sparse gradient",
                    actual=f"{grad.layout} for {self._name(i)}",
                    expected="a dense one",
                    next_step="make the layer with sparse=False",
                    partitions=self.P,
                )
            grads.append(torch.zeros_like(self.params[i]) if grad is None else grad.detach())
        with Beside(grads[0].device, grads) as beside:
            reduced, self.states[number] = self.hook(grads, self.states[number])
        self._under_way.append((beside, reduced))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only add to this rank's ``.grad``; the next one outside sums all of it, once."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    @torch.no_grad()
    def finish(self) -> None:
        """Wait until every gradient is the sum. ``optimizer.register_step_pre_hook(lambda *_: sync.finish())`` calls it
        for you."""
        if self._left is None:
            self._open()
        used = None
        if self.find_unused:
            ours = sorted(self._ours)
            present = [self.params[i].grad is not None for i in ours]
            device = self.params[ours[0]].device if ours else None
            counts = F.all_sum_reduce(torch.tensor(present, dtype=torch.int32, device=device), self.P).tolist()
            used = dict(zip(ours, counts))
        while len(self._under_way) < len(self.buckets):
            self._start()
        for bucket, (beside, reduced) in zip(self.buckets, self._under_way):
            beside.join(reduced)
            for i, g in zip(bucket, reduced):
                if i in self._ours:
                    self.params[i].grad = None if used and not used[i] else g
                    self._summed[i] = weakref.ref(g)
        self._begin()

    def remove(self) -> None:
        """Take the hooks off the parameters, as when nothing refers to this any more."""
        _remove(self._hooks)


def _tell(sync: weakref.ref[GradientSync], i: int, _: torch.Tensor) -> None:
    listening = sync()
    if listening is not None:
        listening._arrived(i)


public({"GradientSync": _tell}, alike=False)  # errors in backward


def _remove(handles: Mapping[int, Any]) -> None:
    for handle in handles.values():
        handle.remove()
