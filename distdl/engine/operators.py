"""What tracers record: a movement as the torch operator ``distdl::move``, under a name that says which.

make_fx, torch.func.linearize and torch.compile see it in place of the messages, which are sent when their graph runs.
``ordered_move`` is the same in inductor's code (:func:`distdl._torch.keep_order`), ``ordered_staged_move`` where a CUDA
graph cannot hold it, and ``agree`` an agreement on the batches of vmap, which a graph makes where eager ranks make
theirs.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _torch
from ..errors import AgreementError, ShapeError
from . import transport as traffic

_library = torch.library.Library("distdl", "DEF")
_strides_as_they_come = [torch.Tag.flexible_layout] if hasattr(torch.Tag, "flexible_layout") else []
# Tags of what a CUDA graph cannot hold.
on_host = [torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else []
_library.define("move(Tensor[] xs, str movement) -> Tensor[]", tags=_strides_as_they_come)
_ORDERED = "(Tensor[] xs, str movement, Tensor? after) -> Tensor[]"
_library.define(f"ordered_move{_ORDERED}", tags=_strides_as_they_come)
_library.define(f"ordered_staged_move{_ORDERED}", tags=[*_strides_as_they_come, *on_host])
_library.define("agree(Tensor like, str question) -> Tensor[]", tags=on_host)
_library.define("ordered_agree(Tensor like, str question, Tensor? after) -> Tensor[]", tags=on_host)
_known: dict[str, Any] = {}  # by the names in graphs: steps of movements, and questions


def _name(text: str, value: Any) -> str:
    """The name of ``value`` in graphs: the text, and a number where another one has the same text."""
    name, n = text, 1
    while name in _known and _known[name] != value:
        n += 1
        name = f"{text} ({n})"
    _known[name] = value  # an equal one that was made for another world in this process has other ranks
    return name


def traced(steps, xs):
    """Move tensors by steps of one kind while a torch dispatch mode is active: the operator is recorded."""
    name = _name("; ".join(f"{m} {m.plan.digest}" for m in steps), tuple(steps))
    observer = traffic.observer
    before = None if observer is None else observer.tracing
    try:
        if observer is not None:
            observer.tracing = True
        return torch.ops.distdl.move(list(xs), name)
    except (NotImplementedError, TypeError) as error:
        if all(map(_torch.is_plain, xs)):
            raise
        raise ShapeError(
            "a tensor of a class with operators of its own, which does not know movements",
            op=str(steps[0]),
            partitions=steps[0].partitions,
            rank=steps[0].world.rank,
            expected="a plain tensor",
            actual=", ".join(type(x).__name__ for x in xs),
            next_step="pass its local part: x.to_local()",
        ) from error
    finally:
        if observer is not None:
            observer.tracing = before


def _move(xs, movement):
    steps = _known[movement]
    with _torch.no_modes():
        ys = steps[0].together(steps, xs, False)
    return [y.contiguous() for y in ys]  # as the tracer was told


def _now(xs, movement, after):
    """``ordered_move`` as inductor's code calls it."""
    steps = _known[movement]
    ys = [y.contiguous() for y in steps[0].together(steps, xs, False)]
    return [*ys, xs[0].new_empty(0) if after is None else after]


def _by_device(movement):
    """Whether the device alone moves its tensors, so that a CUDA graph can hold the movement."""
    return _known[movement][0].world.cuda == "nccl"


def _move_fake(xs, movement):
    steps = _known[movement]
    return [x.new_empty((*x.shape[: x.dim() - len(m.in_shape)], *m.out_shape)) for m, x in zip(steps, xs)]


def _move_autograd(xs, movement):
    # Alone the operator would have gradient zero and tangent zero, silently: only linear_map's Function may call it.
    if (torch.is_grad_enabled() and any(x.requires_grad for x in xs)) or any(_torch.has_tangent(x) for x in xs):
        raise AgreementError(
            "distdl::move has no derivative of its own",
            op="move",
            actual=movement,
            next_step="call the map (or the function in distdl.functional) instead",
            expected="a tensor without gradient and tangent",
        )
    with _torch.below_autograd():
        return torch.ops.distdl.move(xs, movement)


def _move_vmap(info, in_dims, xs, movement):
    # A pullback of linearize, or any trace, under vmap: the batch is one more leading axis of the plans.
    given = [x.expand(info.batch_size, *x.shape) if d is None else x.movedim(d, 0) for x, d in zip(xs, in_dims[0])]
    ys = torch.ops.distdl.move(given, movement)
    return ys, [0] * len(ys)


# ---------------------------------------------------------------- what ranks agree on while they run a graph


def asked_while_traced(rank: int, purpose: str) -> AgreementError:
    """Any other agreement: compiled code has none."""
    return AgreementError(
        "compiled code asks no other rank while it is traced",
        rank=rank,
        expected="a Layout, or shape=, which say what all ranks have",
        actual=f"an agreement on {purpose}",
        next_step="pass a Layout, or leave this call out of the compiled function",
    )


def agree(like, where, ranks, mine, step) -> None:
    """Put a question into the graph that is being traced: whether all ``ranks`` have these batches here, as its
    vmaps were traced. Nobody can be asked now, and ranks need not compile at the same time."""
    name = _name(f"{step} {ranks} {mine}", (where, ranks, mine, step))
    while _torch.of_torch_func(like):
        like = _torch.inside(like)
    torch.ops.distdl.agree(like.detach(), name)


def _agree(like, question):
    where, ranks, mine, step = _known[question]
    theirs = list(where.all_gather(mine, ranks, "sizes of vmap").values())
    if theirs.count(mine) != len(theirs):
        raise AgreementError(
            "the ranks batch differently",
            op=str(step),
            rank=where.rank,
            expected="in compiled code, the same operands batched on every rank",
            actual=dict(zip(ranks, theirs)),
            partitions=step.partitions,
            next_step="let the operand depend on what vmap maps over on every rank, or leave this call out of the "
            "compiled function",
        )
    return [like.new_empty(0)]


for _key in ("CPU", "CUDA"):
    _library.impl("move", _move, _key)
    _library.impl("agree", _agree, _key)
    for _ordered in ("ordered_move", "ordered_staged_move"):
        _library.impl(_ordered, lambda xs, movement, after: [*_move(xs, movement), xs[0].new_empty(0)], _key)
    _library.impl("ordered_agree", lambda like, question, after: _agree(like, question), _key)
_library.impl("move", _move_autograd, "Autograd")
_fakes: dict[str, Any] = {
    "move": _move_fake,
    **dict.fromkeys(
        ("ordered_move", "ordered_staged_move"),
        lambda xs, movement, after: [*_move_fake(xs, movement), xs[0].new_empty(0)],
    ),
    "agree": lambda like, question: [like.new_empty(0)],
    "ordered_agree": lambda like, question, after: [like.new_empty(0)],
}
for _name_of, _fake in _fakes.items():
    torch.library.register_fake(f"distdl::{_name_of}", _fake, lib=_library)
torch.library.register_vmap("distdl::move", _move_vmap, lib=_library)
for _operator in (torch.ops.distdl.move.default, torch.ops.distdl.agree.default):
    torch.fx.node.has_side_effect(_operator)  # its messages count, also where its output is not used
for _name_of, _function in {"now": _now, "by_device": _by_device}.items():  # no operators: for inductor's code
    setattr(torch.ops.distdl, _name_of, _function)
