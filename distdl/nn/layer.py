"""The base of modules with parameters: this rank's blocks, drawn and held as the same global tensor on any number of
ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import _torch, init
from .. import functional as F
from .._arguments import Checked
from .._types import Device, Place
from ..calls import public
from ..compiled import traced_as
from ..errors import PartitionError
from ..held import complete, held, hold, mark_of, unmarked_dims
from ..movement.options import plain
from ..partition import Layout, Partition, partition_of
from ..world import world

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Layer"]

Draw = Callable[..., torch.Tensor]  # (layout, seed, device=, dtype=) -> this rank's block


def agreed_seed(P: Place) -> int:
    """A seed from torch's generator on the CPU, the one of ``P``'s first rank: parameters fit together also where
    generators do not. A number also where tensors have none (meta device, FakeTensorMode): what is filled in later has
    the values of a module that was made at once."""
    with _torch.no_modes():
        seed = int(torch.randint(2**62, (), device="cpu"))
    grid = partition_of(P)
    where = world(grid.world)
    if grid.size > 1 and grid.index(where.rank) is not None:
        seed = where.all_gather(seed, grid.ranks, "a seed for parameters")[grid.ranks[0]]
    return seed


def _enter(layer: Layer) -> None:
    """What a layer does before its forward: whatever tensors stand for its parameters now, functional_call's too, are
    marked."""
    layer.hold_parameters()
    layer._check_parts()
    ranks, reduced = _torch.reduced_by_ddp()
    if ranks:
        _check_ignored(layer, ranks, reduced)
    ranks = _torch.sharded_by_fsdp(layer)
    if ranks:
        _check_apart(layer, ranks)


# A graph is traced once: its parameters were marked when they were registered.
traced_as(_enter, lambda layer: None)


def _check_ignored(layer: Layer, ranks: tuple[int, ...], reduced: frozenset[int]) -> None:
    """Refuse that DistributedDataParallel sums over ``ranks`` what the layer sums over them itself."""
    R = Partition((len(ranks),), ranks, partition_of(layer.P).world)
    for name, p in layer.named_parameters():
        if id(p) in reduced and complete(held(p), R, name):
            raise PartitionError(
                "this layer sums its gradients over the ranks itself",
                partitions=layer.P,
                expected=f"{name} of {type(layer).__name__} on DDP's ignore list",
                actual=f"a sum over {ranks}, once more",
                next_step="call dd.parallel.ignore_in_ddp(model, P) before DistributedDataParallel(model)",
            )


def _check_apart(layer: Layer, ranks: tuple[int, ...]) -> None:
    """Refuse that fully_shard takes the mean over ``ranks`` of other layers' gradients, and of this one's sums."""
    R = Partition((len(ranks),), ranks, partition_of(layer.P).world)
    if any(complete(held(p), R, name) for name, p in layer.named_parameters(recurse=False)):
        raise PartitionError(
            "this layer sums its gradients over the ranks itself",
            partitions=layer.P,
            expected=f"{type(layer).__name__} outside of torch's fully_shard",
            actual=f"its parameters among those of which fully_shard takes means over {ranks}",
            next_step="fully_shard(model, ignored_params=set(layer.parameters())); the layer's gradients are sums over "
            "the ranks where torch's are means",
        )


class Layer(Checked, torch.nn.Module):
    """Base of the modules with parameters.

    Attributes:
        P: the partition (or Layout) that its function takes.
        layouts: the global layout of every parameter and buffer, by name (:func:`distdl.nn.layouts` asks a whole
            model).

    Messages: one small all-gather of a seed among P's ranks when it is made; then those of its function.

    Raises:
        PartitionError: P is no partition and no Layout.

    Example:
        >>> layer = dd.nn.Layer(dd.Partition((1,)))
        >>> layer.layouts
        {}
    """

    P: Place
    layouts: dict[str, Layout]

    def __init__(self, P: Place, device: Device = None, dtype: torch.dtype | None = None) -> None:
        torch.nn.Module.__init__(self)  # BatchNorm has torch's for a base too, whose constructor takes other arguments
        self.P, self.layouts = P, {}
        self._draws: dict[str, Draw] = {}
        self._marks: dict[str, tuple[Any, ...]] = {}
        self._seed = agreed_seed(P)
        self._kind: dict[str, Any] = {"device": device, "dtype": dtype}

    def _parameter(
        self,
        name: str,
        shape: Sequence[int],
        dims: Sequence[int | None],
        draw: Draw,
        wanted: bool = True,
        over: Place | None = None,
    ) -> None:
        """Register a parameter of global ``shape``, dim i split along dim ``dims[i]`` of ``over``; ``None``: of
        ``P``."""
        over = self.P if over is None else over
        if not wanted:
            self.register_parameter(name, None)
            return
        shape = tuple(plain(n, f"a size of {name}") for n in shape)
        layout = init.parameter_layout(over, shape, dims)
        self.layouts[name], self._draws[name] = layout, draw
        self._marks[name] = mark_of(over, [d for d in dims if d is not None])
        self.register_parameter(name, torch.nn.Parameter(self._block(name, **self._kind)))

    def _parts(self) -> Iterator[tuple[str, torch.Tensor, bool, bool]]:
        """(name, tensor that the parameter of that name is made of by torch's hooks or parametrizations, whether it is
        an original, whether the function that makes it is known to act on blocks as on the whole)."""
        for name, tensor in self._parameters.items():
            of, _, suffix = name.rpartition("_")
            if tensor is not None and of in self._marks and suffix in ("g", "v", "orig"):  # torch's older hooks
                yield of, tensor, True, f"{of}_mask" in self._buffers
        parametrizations: Any = self._modules.get("parametrizations") or {}
        for name, made in parametrizations.items():
            blockwise = all(getattr(p, "blockwise", False) for p in made)
            for tensor in made.parameters():
                yield name, tensor, any(tensor is t for t in made._parameters.values()), blockwise

    def hold_parameters(self) -> None:
        """Mark the tensors that stand for this layer's parameters now: over which ranks it sums their gradients, and of
        what they are blocks (:mod:`distdl.held`), for whoever reduces gradients. No message."""
        for name, mark in self._marks.items():
            if (tensor := self._parameters.get(name, self._buffers.get(name))) is not None:
                hold(tensor, mark, f"{name} of {type(self).__name__}")
        for name, tensor, original, _ in self._parts():
            if name in self._marks and (original or held(tensor) is None):
                hold(tensor, self._marks[name] if original or not self._marks[name][3] else mark_of(self.P, None))

    def _check_parts(self) -> None:
        """Refuse what is made of one block as if it were the whole, or of tensors whose gradients others sum too."""
        for name, tensor, _, blockwise in self._parts():
            if not blockwise and self._marks.get(name, (None,))[-1]:
                raise PartitionError(
                    f"a parametrization would see one block of {name}",
                    partitions=self.P,
                    actual=self.layouts[name].partition.shape,
                    expected="a parameter that every rank has whole",
                    next_step="if it acts on each block as on the whole tensor (element by element), give its "
                    "class the attribute blockwise = True; else compute the weight in a layer of your own",
                )
            unmarked_dims(tensor, partition_of(self.P), ())

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """As torch's."""
        super().register_parameter(name, param)
        self.hold_parameters()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        done = super()._apply(fn, recurse)  # may make new ones
        self.hold_parameters()
        return done

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.hold_parameters()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer of this rank's block; see ``forward``."""
        _enter(self)
        return super().__call__(*args, **kwargs)

    def _block(self, name: str, device: Device = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        layout, seed = self.layouts[name], F.fold_in(self._seed, list(self._draws).index(name))
        if not layout.active:  # a rank outside the partition: never used, but of a shape that its empty part accepts
            return torch.zeros(layout.local_shape(layout.partition.ranks[0]), device=device, dtype=dtype)
        if _torch.is_fake(torch.empty(0, device=device, dtype=dtype)):  # nothing to draw
            return torch.empty(layout.local_shape(), device=device, dtype=dtype)
        return self._draws[name](layout, seed, device=device, dtype=dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all parameters again, the same as at first."""
        for name in (n for n in self._draws if getattr(self, n) is not None):
            old = getattr(self, name)
            old.copy_(self._block(name, old.device, old.dtype))

    def extra_repr(self) -> str:
        shapes = ", ".join(f"{name}={tuple(self.layouts[name].shape)}" for name in self._draws)
        return f"{first_line(self.P)}, {shapes}"


public({"": Layer._check_parts, "DistributedDataParallel": _check_ignored}, alike=False)


def first_line(P: Place) -> str:
    """A partition or a layout without its drawing."""
    return str(P).splitlines()[0]


def ones(layout: Layout, seed: int, **kind: Any) -> torch.Tensor:
    """A weight of a norm."""
    return init.ones(layout, **kind)


def zeros(layout: Layout, seed: int, **kind: Any) -> torch.Tensor:
    """A bias of a norm."""
    return init.zeros(layout, **kind)


def weight(layout: Layout, seed: int, **kind: Any) -> torch.Tensor:
    """A weight as torch.nn.Linear and the convolutions draw it."""
    return init.kaiming_uniform(layout, seed, a=math.sqrt(5), **kind)


def bias_of(weight_shape: Sequence[int]) -> Draw:
    """The draw of the bias that goes with a weight of that global shape."""
    return functools.partial(init.bias_uniform, weight_shape=weight_shape)
