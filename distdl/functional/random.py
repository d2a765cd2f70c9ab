"""Random numbers that do not depend on the partition: element i of a global tensor is a hash of (seed, i).

So a rank draws its own block only, no message is sent, and 1, 2 or 1000 ranks draw the same global tensor. There is no
state: the same seed gives the same numbers, and :func:`fold_in` makes a new seed for each layer and each step. The hash
is SplitMix64's finaliser (Steele, Lea & Flood, OOPSLA 2014) of seed' + i·γ, all in int64, which wraps alike on every
device; normal numbers go through erfinv, and may differ in the last bit between CPU and CUDA.
"""

from __future__ import annotations

import functools
import math
from operator import index as as_int

import torch

from .. import _torch
from .._arguments import checked
from .._types import Device
from ..compiled import constants
from ..engine.operators import on_host
from ..errors import DistdlError, ShapeError
from ..partition import Layout
from ..remat import Regions

__all__ = ["fold_in", "normal", "uniform"]

_CHUNK = 1 << 16  # elements at a time: temporaries stay in the cache, and small beside the block


def _signed(n: int) -> int:
    """``n`` modulo 2^64 as an int64."""
    n &= (1 << 64) - 1
    return n - (1 << 64) if n >> 63 else n


_GAMMA, _MIX1, _MIX2 = (_signed(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def shift_right(z, n: int):
    """Logical shift to the right: torch's keeps the sign."""
    return (z >> n) & ((1 << (64 - n)) - 1)


def _times(z, n: int):
    """Their product modulo 2^64, as int64 tensors wrap by themselves."""
    return z * n if isinstance(z, torch.Tensor) else _signed(z * n)


def _mix(z):
    z = _times(z ^ shift_right(z, 30), _MIX1)
    z = _times(z ^ shift_right(z, 27), _MIX2)
    return z ^ shift_right(z, 31)


def _key(seed, device):
    """``seed`` (an int, or an integer tensor without dims, perhaps under vmap), well mixed: an int of 64 bits, or an
    int64 tensor.

    Of an int no tensor is made: it stays a number on the meta device and under FakeTensorMode.
    """
    if isinstance(seed, torch.Tensor):
        if seed.dim() or seed.is_floating_point() or seed.is_complex():
            raise ShapeError(
                "a seed is one integer",
                expected="an int, or an integer tensor of shape ()",
                actual=f"{seed.dtype} of shape {tuple(seed.shape)}",
                next_step="use the same int on every rank",
            )
        seed = seed.to(device, torch.int64)
    else:
        try:
            return _mix(_signed(_times(_signed(as_int(seed)), _GAMMA) + _MIX1))
        except TypeError:
            raise ShapeError(
                "a seed is one integer",
                expected="an int, or an integer tensor of shape ()",
                actual=seed,
                next_step="draw one number and give every rank the same",
            ) from None
    return _mix(seed * _GAMMA + _MIX1)


def fold_in(seed: int | torch.Tensor, *numbers: int | torch.Tensor) -> int | torch.Tensor:
    """A new seed from ``seed`` and integers (number of a layer, of a step): ``fold_in(seed, layer, step)``.

    Order matters. Returns an int, or a tensor where ``seed`` or a number is one.

    Raises:
        ShapeError: a seed or number that is no integer.

    Example:
        >>> F.fold_in(7, 1)  # the seed of layer 1
        -4196405110082178282
    """
    for n in numbers:
        device = next((t.device for t in (seed, n) if isinstance(t, torch.Tensor)), None)
        seed = _mix(_key(seed, device) ^ _times(_key(n, device), _MIX2))
    return seed


def examples(device):
    """The number of the example, for each vmap whose ``randomness`` is "different"."""
    found = _torch.randomness().items()
    return [_torch.examples(level, size, device) for level, (size, kind) in found if kind == "Different"]


class Calls(_torch.Constant):
    """Numbers of calls: 1, 2, ... and, where a call is run again, the number that it had.

    They are counted, as ranks' generators may differ: the same calls have the same numbers on all ranks. But each call
    also draws a number of torch's generator, which every kind of checkpoint puts back before it runs a region again,
    and which vmap puts back between the chunks of a batch whose ``randomness`` is "same". So a number that comes again
    names the call.

    Attributes:
        count: of the calls so far.
    """

    most = 1 << 14  # calls to remember

    def __init__(self):
        self.count = 0
        self._known: dict[int, tuple[int | None, bool]] = {}  # {number drawn: (call, whether it has been run again)}

    def __getstate__(self):
        return {"count": self.count, "_known": {}}

    def in_graph(self) -> torch.Tensor:
        """The number of each call of a graph that is traced: :meth:`next` of when it runs."""
        if _torch.vmap_levels():
            raise DistdlError(
                "compiled code draws one mask for all examples of a vmap",
                op="Dropout",
                expected="a call outside of vmap",
                actual="a vmap",
                next_step="use F.dist_dropout, and give it a seed for each example",
            )
        name = next((name for name, calls in _counted.items() if calls is self), f"calls {len(_counted) + 1}")
        _counted[name] = self
        return torch.ops.distdl.count(name)[0]

    def next(self) -> int:
        """The number of this call."""
        drawn, same = _torch.drawn(), any(kind == "Same" for _, kind in _torch.randomness().values())
        again = _torch.in_backward()
        call, seen = self._known.get(drawn, (0, True))
        if again and not call:
            what = "another" if call == 0 else "two calls began with the same"
            raise DistdlError(
                "this call cannot be told from others: it is run again in backward, and needs its mask",
                expected="the state that torch's generator had in forward",
                actual=f"{what} state",
                next_step="checkpoint with preserve_rng_state=True, and never seed two regions alike; or use "
                "dist_dropout, and give it a seed",
            )
        if call and (again or same):
            self._known[drawn] = call, True
            return call
        self.count += 1
        if same or Regions.under_way or _torch.checkpointed():
            self._known[drawn] = (self.count if seen or call == self.count else None), False
            if len(self._known) > self.most:
                del self._known[next(iter(self._known))]
        return self.count


_counted: dict[str, Calls] = {}  # by their names in graphs
constants(Calls)


def _merged(box, shape):
    """The block as (start, size, stride in the global tensor) of as few dims as possible: a dim that is whole joins the
    one before it."""
    dims, stride = [], 1
    for (start, stop), n in reversed(list(zip(box, shape))):
        if dims and dims[-1][0] == 0 and dims[-1][1] * dims[-1][2] == stride:
            _, size, inner = dims.pop()
            dims.append((start * size, (stop - start) * size, inner))
        else:
            dims.append((start, stop - start, stride))
        stride *= n
    return dims[::-1]


def bits(box, shape, seed, device, make):
    """``make`` of 63 random bits (int64 >= 0) for each element of a block, chunk by chunk.

    Args:
        box: ((start, stop), ...) of the block.
        shape: the global shape.
        make: elementwise function of an int64 tensor.
    """
    key = _key(seed, device)
    if not (_torch.dispatch_modes() and _torch.compiling()):
        return _bits(box, shape, key, device, make)
    # One operator of a graph: inductor 2.13 draws other numbers, where products of places wrap.
    starts, stops = zip(*box) if box else ((), ())
    number, tensor = (0, key) if isinstance(key, torch.Tensor) else (key, None)
    return make(torch.ops.distdl.bits(tensor, number, starts, stops, shape, device or torch.get_default_device()))


def _bits(box, shape, key, device, make):
    local = tuple(stop - start for start, stop in box)
    dims, parts = _merged(box, shape), []
    if isinstance(key, torch.Tensor):
        key = key.unsqueeze(-1)
    for at in range(0, max(math.prod(local), 1), _CHUNK):
        place = torch.arange(at, min(at + _CHUNK, math.prod(local)), device=device)
        index = 0 if dims else place  # one number has no dims, and place 0
        for d, (start, size, stride) in reversed(list(enumerate(dims))):
            here = place % size if d else place
            index, place = index + (here + start) * stride, place // size if d else place
        parts.append(make(shift_right(_mix(key + index * _GAMMA), 1)))
    flat = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return flat.reshape((*flat.shape[:-1], *local))


# ---------------------------------------------------------------- as a torch operator; keys may be a batch of vmap

_library = torch.library.Library("distdl", "FRAGMENT")
_library.define("bits(Tensor? keys, int key, int[] starts, int[] stops, int[] shape, Device device) -> Tensor")


def _real_number(calls):
    with _torch.no_modes():
        return torch.tensor(_counted[calls].next(), device="cpu")


_DEVICES = "CompositeExplicitAutograd"
# On the host, once for each time that the graph runs: inductor's code calls ``ordered_count``, as ``ordered_move``.
_library.define("count(str calls) -> Tensor[]", tags=on_host)
_library.define("ordered_count(str calls, Tensor? after) -> Tensor[]", tags=on_host)
_library.impl("count", lambda calls: [_real_number(calls)], _DEVICES)
_library.impl("ordered_count", lambda calls, after: [_real_number(calls), torch.empty(0, device="cpu")], _DEVICES)
_number = functools.partial(torch.empty, (), dtype=torch.int64, device="cpu")
torch.library.register_fake("distdl::count", lambda calls: [_number()], lib=_library)
torch.library.register_fake(
    "distdl::ordered_count", lambda calls, after: [_number(), torch.empty(0, device="cpu")], lib=_library
)


def _bits_real(keys, key, starts, stops, shape, device):
    with _torch.no_modes():
        return _bits(tuple(zip(starts, stops)), shape, key if keys is None else keys, device, lambda h: h)


def _bits_fake(keys, key, starts, stops, shape, device):
    local = [stop - start for start, stop in zip(starts, stops)]
    return torch.empty((*(() if keys is None else keys.shape), *local), dtype=torch.int64, device=device)


def _bits_vmap(info, in_dims, keys, *others):
    return torch.ops.distdl.bits(keys.movedim(in_dims[0], 0), *others), 0


_library.impl("bits", _bits_real, _DEVICES)
torch.library.register_fake("distdl::bits", _bits_fake, lib=_library)
torch.library.register_vmap("distdl::bits", _bits_vmap, lib=_library)


def _block(layout):
    return layout.box() or tuple((0, n) for n in layout.local_shape())


def _unit(dtype):
    """Uniform in [0, 1), with as many bits as the dtype can hold."""
    digits = 1 - int(math.log2(torch.finfo(dtype).eps))
    return lambda h: shift_right(h, 63 - digits).to(dtype) * 2.0**-digits


def _open_unit(h):
    """Uniform in (0, 1), float64, symmetric about 1/2."""
    return (shift_right(h, 11).to(torch.float64) + 0.5) * 2.0**-52


@checked
def uniform(
    layout: Layout,
    seed: int | torch.Tensor,
    dtype: torch.dtype | None = None,
    device: Device | None = None,
    low: float = 0.0,
    high: float = 1.0,
) -> torch.Tensor:
    """This rank's block of a global tensor of numbers uniform in [low, high). No message.

    Args:
        layout: the :class:`distdl.Layout` of the global tensor.
        seed: an int, or an integer tensor without dims (a batch of them under vmap).
        dtype: a floating one; default torch's default dtype. Each draws its own numbers: as many bits as it can hold.

    Example:
        >>> L = dd.Layout(dd.Partition((1,)), (3,))
        >>> torch.equal(F.uniform(L, seed=1), F.uniform(L, seed=1))
        True
    """
    dtype = dtype or torch.get_default_dtype()
    unit = _unit(dtype)
    return bits(_block(layout), layout.shape, seed, device, lambda h: unit(h) * (high - low) + low)


@checked
def normal(
    layout: Layout,
    seed: int | torch.Tensor,
    dtype: torch.dtype | None = None,
    device: Device | None = None,
    mean: float = 0.0,
    std: float = 1.0,
) -> torch.Tensor:
    """As :func:`uniform`, normally distributed: √2 erfinv(2u - 1), worked out in float64, |z| < 8.3.

    Example:
        >>> F.normal(dd.Layout(dd.Partition((1,)), (3,)), seed=1).shape
        torch.Size([3])
    """
    return trunc_normal(layout, seed, dtype, device, mean, std, -math.inf, math.inf)


@checked
def trunc_normal(
    layout: Layout,
    seed: int | torch.Tensor,
    dtype: torch.dtype | None = None,
    device: Device | None = None,
    mean: float = 0.0,
    std: float = 1.0,
    a: float = -2.0,
    b: float = 2.0,
) -> torch.Tensor:
    """Normal numbers between ``a`` and ``b``: the inverse of the distribution function, so no draw is rejected."""
    dtype = dtype or torch.get_default_dtype()
    return normal_box(_block(layout), layout.shape, seed, dtype, device, mean, std, a, b)


def normal_box(box, shape, seed, dtype, device, mean=0.0, std=1.0, a=-math.inf, b=math.inf):
    """The same for any box of a global ``shape``."""
    low, high = (math.erf((v - mean) / (std * math.sqrt(2))) if std else (1 if v > mean else -1) for v in (a, b))

    def make(h):
        z = mean + std * math.sqrt(2) * torch.erfinv(low + (high - low) * _open_unit(h))
        return z.clamp(a, b).to(dtype)

    return bits(box, shape, seed, device, make)
