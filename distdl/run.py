"""A movement on plain tensors: straight to the executor, or as the operator ``distdl::move``, which tracers record."""

from __future__ import annotations

import torch

from . import _torch, exchange
from . import transport as _transport
from .errors import AgreementError, ShapeError


def checked(maps, xs):
    """``xs`` as plain memory, also where they come out of a grad or jvp that has ended.

    Raises:
        ShapeError: something is no dense tensor, or comes out of a vmap that has ended; or they lie on several devices.
    """
    if len({x.device for x in xs}) > 1:
        raise ShapeError("the tensors of one movement lie on different devices", op=str(maps[0]), rank=maps[0].world.rank,
                         expected=f"all on {xs[0].device}", actual=", ".join(str(x.device) for x in xs),
                         partitions=maps[0].partitions, next_step="move them to one device, or in two calls")
    xs = [_torch.unwrap_if_dead(x) if _of_torch_func(x) else x for x in xs]
    for x in xs:
        if x.layout is not _strided or x.is_quantized or _of_torch_func(x):
            found = "a quantized one" if x.is_quantized else str(x.layout)
            raise ShapeError("only dense tensors can be moved", op=str(maps[0]), rank=maps[0].world.rank, expected=_strided,
                             actual="one example of a vmap that has ended" if _of_torch_func(x) else found,
                             partitions=maps[0].partitions,
                             next_step="x.to_dense(), or move a sparse tensor's parts; move a batch inside its vmap, or after it")
    return xs


_strided, _of_torch_func = torch.strided, _torch.of_torch_func


def plain(maps, xs, recorded=False):
    """Move plain tensors ``xs`` by ``maps``, outside any trace; ``recorded``: a graph holds the adjoint."""
    first = maps[0]
    plans = first._plans if len(maps) == 1 else tuple(m.plan for m in maps)
    transport = first.world.transport(xs[0], first.plan.ranks)
    if _transport.observer is not None:
        transport = _transport.observer.movement(first.world.host, transport, maps, xs, recorded)
    return exchange.run(plans, xs, transport)


# ---------------------------------------------------------------- as a torch operator

_library = torch.library.Library("distdl", "DEF")
_library.define("move(Tensor[] xs, str movement) -> Tensor[]")
_traced: dict[str, tuple] = {}


def traced(maps, xs):
    """The same while a torch dispatch mode is active: make_fx and linearize then record the operator."""
    name = "; ".join(f"{m} {m.plan.digest}" for m in maps)
    _traced[name] = tuple(maps)
    observer = _transport.observer
    before = None if observer is None else observer.tracing
    try:
        if observer is not None:
            observer.tracing = True
        return torch.ops.distdl.move(list(xs), name)
    except (NotImplementedError, TypeError) as error:
        if all(map(_torch.is_plain, xs)):
            raise
        raise ShapeError("a tensor of a class with operators of its own, which does not know movements", op=str(maps[0]),
                         partitions=maps[0].partitions, rank=maps[0].world.rank, expected="a plain tensor",
                         actual=", ".join(type(x).__name__ for x in xs), next_step="pass its local part: x.to_local()") from error
    finally:
        if observer is not None:
            observer.tracing = before


def _move_real(xs, movement):
    _transport.begun += 1  # in a graph that was traced the operator stands alone
    return [y.contiguous() for y in plain(_traced[movement], xs)]  # as the tracer was told


def _move_fake(xs, movement):
    maps = _traced[movement]
    return [x.new_empty((*x.shape[: x.dim() - len(m.in_shape)], *m.out_shape)) for m, x in zip(maps, xs)]


def _move_autograd(xs, movement):
    # Alone the operator would have gradient zero and tangent zero, silently: only linear_map's Function may call it.
    if (torch.is_grad_enabled() and any(x.requires_grad for x in xs)) or any(_torch.has_tangent(x) for x in xs):
        raise AgreementError("distdl::move has no derivative of its own", op="move", actual=movement,
                             next_step="call the map (or the function in distdl.functional) instead",
                             expected="a tensor without gradient and tangent")
    with _torch.below_autograd():
        return torch.ops.distdl.move(xs, movement)


def _move_vmap(info, in_dims, xs, movement):
    # A pullback of linearize, or any trace, under vmap: the batch is one more leading axis of the plans.
    given = [x.expand(info.batch_size, *x.shape) if d is None else x.movedim(d, 0) for x, d in zip(xs, in_dims[0])]
    ys = torch.ops.distdl.move(given, movement)
    return ys, [0] * len(ys)


for _key in ("CPU", "CUDA"):
    _library.impl("move", _move_real, _key)
_library.impl("move", _move_autograd, "Autograd")
torch.library.register_fake("distdl::move", _move_fake, lib=_library)
torch.library.register_vmap("distdl::move", _move_vmap, lib=_library)
torch.fx.node.has_side_effect(torch.ops.distdl.move.default)  # its messages count, also where its output is not used
