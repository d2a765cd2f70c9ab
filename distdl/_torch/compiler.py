"""What torch.compile is told of the library: nodes, constants, and the order of messages in inductor's code."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._guards import TracingContext

register_opaque_type: Any = None  # of a class whose instances are constants of a graph; None in older torch
read_while_tracing: Any = None  # how a member of such a class is looked up


class Constant:
    """The base of such classes: equal is what is the same, where they do not say more."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        name = f"{type(self).__name__}_{id(self):x}"
        return name, {name: self}


try:
    from torch._library import opaque_object as _constants

    _register, _read = _constants.register_opaque_type, _constants.MemberType.USE_REAL
    if "hoist" in (_register.__kwdefaults__ or ()):
        try:
            _register(type("_Tried", (Constant,), {}), typ="value")
        except TypeError:  # 2.11 wants a base of its own
            from torch import _opaque_base

            _Base: Any = _opaque_base.OpaqueBase
            Constant = type(_Base)("Constant", (Constant, _Base), {})  # type: ignore[misc]
        register_opaque_type, read_while_tracing = _register, _read
except (ImportError, AttributeError):
    pass

_under_way = TracingContext.try_get
_modes = torch._C._get_dispatch_mode
_keys = torch._C._TorchDispatchModeKey


def compiling() -> bool:
    """Whether torch.compile traces what runs now: tensors have no numbers, and no message may be sent."""
    return _under_way() is not None


def dynamo_runs() -> bool:
    """Whether it is Dynamo that does: then a call may still be left out of the graph."""
    return compiling() and _modes(_keys.FUNCTIONAL) is None and _modes(_keys.PROXY) is None


def in_subgraph() -> bool:
    """Whether Dynamo traces the body of a higher-order operator (checkpoint, cond): there messages have no order."""
    if not dynamo_runs():
        return False
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return not InstructionTranslator.current_tx().output.is_root_tracer()


@contextlib.contextmanager
def without_numbers() -> Iterator[None]:
    """A context in which Dynamo's tensors give no numbers, not even unknown ones: what needs them raises."""
    shapes = _under_way().fake_mode.shape_env if dynamo_runs() else None
    before = None if shapes is None else shapes.settings
    if before is not None:
        shapes.settings = dataclasses.replace(before, allow_scalar_outputs=False)
    try:
        yield
    finally:
        if before is not None:
            shapes.settings = before


def of_dynamo(error: Exception) -> bool:
    """Whether an error is Dynamo's own."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def as_node(function: Callable[..., Any]) -> None:
    """What ``torch._dynamo.nonstrict_trace`` does, but for the function itself: a call of it is one node of Dynamo's
    graph, and AOTAutograd traces what is inside."""
    from torch._dynamo import trace_rules

    trace_rules._allowed_callable_ids.add(id(function))
    trace_rules._nonstrict_trace_callable_ids.add(id(function))


@functools.cache
def keep_order(operators: Any) -> None:
    """Calls of ``move``, ``agree`` and ``count`` keep their order, and are all made: in AOTAutograd's graphs by effect
    tokens, in inductor's code by an argument.

    torch 2.13 keys the dependence that a token stands for by the buffer's name, where its scheduler looks for the
    operation's: with the tokens alone only data would order messages. So inductor's code calls another operator, which
    takes and gives an empty tensor besides: a dependence like any other. Of a movement the code calls the function
    itself: torch's dispatcher, and its way back into Python, would take half as long as a small movement.
    """
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import V

    def lower(operator: Any, ordered: Callable[..., Any], results: int | None, direct: str = "") -> None:
        _register_effectful_op(operator, _EffectType.ORDERED)

        @register_lowering(operator, type_promotion_kind=None)
        def lowered(*args: Any) -> Any:
            graph: Any = V.graph
            after = getattr(graph, "distdl_order", None)
            made: Any = ir.FallbackKernel.create(ordered(args[-1]), *args, after)
            if direct and not graph.cpp_wrapper:
                made[0].inputs[0].python_kernel_name = direct
            made = [ir.TensorBox.create(one) for one in made]
            graph.distdl_order = made[-1]
            return made[:results]

    def ordered_move(name: str) -> Any:
        return (operators.ordered_move if operators.by_device(name) else operators.ordered_staged_move).default

    lower(operators.move.default, ordered_move, -1, "torch.ops.distdl.now")
    lower(operators.agree.default, lambda name: operators.ordered_agree.default, None)
    lower(operators.count.default, lambda name: operators.ordered_count.default, -1)
