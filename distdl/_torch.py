"""Every private torch API that distdl uses, in one place, looked up once at import."""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch._C import _functorch
from torch.autograd import forward_ad
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from .errors import DistdlError

Function = TypeVar("Function", bound=Callable[..., Any])
_Kind = _functorch.TransformType
# True while any torch.func transform (grad, vjp, jvp, vmap, ...) is being evaluated.
transforms_active = torch._C._are_functorch_transforms_active
# Number of active __torch_dispatch__ modes (make_fx, FakeTensorMode, ...): then even plain calls must be torch
# operators.
dispatch_modes = torch._C._len_torch_dispatch_stack
# Whether torch.autocast is on for some kind of device.
any_autocast = torch._C._is_any_autocast_enabled
# Its ``_is_profiler_enabled`` is true while torch.profiler, or emit_nvtx, records: a look at it costs no call.
profiler = torch.autograd.profiler
# Context manager: operators called inside skip their Autograd kernels.
below_autograd = torch._C._AutoDispatchBelowAutograd


# A tensor of a transform that has ended (a pullback's memory, say) as the plain tensor that it now is.
unwrap_if_dead = _functorch.unwrap_if_dead
of_torch_func = _functorch.is_functorch_wrapped_tensor  # whether a tensor belongs to a transform, active or ended

# Address of torch's current stream on a CUDA device, the current device, and whether a graph is being captured:
# torch.cuda's own functions cost several times as much. Absent in builds without CUDA.
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device = getattr(torch._C, "_cuda_getDevice", None)
capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


_here = contextlib.nullcontext()


def on_device(index: int):
    """A context in which CUDA device ``index`` is the current one."""
    return _here if current_device() == index else torch.cuda.device(index)


def forward_mode_active() -> bool:
    """Whether a forward-mode level (torch.autograd.forward_ad) is open."""
    return forward_ad._current_level >= 0


def has_tangent(tensor) -> bool:
    """Whether forward mode is differentiating with respect to ``tensor`` right here (not inside a Function's
    forward)."""
    level = forward_ad._current_level
    return level >= 0 and torch._C._is_fwd_grad_enabled() and torch._VF._unpack_dual(tensor, level=level)[1] is not None


# A Function for one level of autograd alone: ``apply`` makes the node without binding a signature on every call (17 µs
# instead of 53). Under torch.func it must be told so, see Transform.record; a plain Function would go through all
# transforms by itself.
SingleLevelFunction = torch.autograd.function._SingleLevelFunction


_reduced: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def reduced_by_ddp() -> tuple[tuple[int, ...], frozenset]:
    """Of the DistributedDataParallel whose forward is running: its ranks, and the ids of the parameters whose gradients
    it sums."""
    ddp = torch.nn.parallel.DistributedDataParallel._active_ddp_module
    if ddp is None:
        return (), frozenset()
    if ddp not in _reduced:
        _reduced[ddp] = frozenset(map(id, ddp._module_parameters))
    return tuple(torch.distributed.get_process_group_ranks(ddp.process_group)), _reduced[ddp]


def opaque(function: Function) -> Function:
    """Mark a function at which torch.compile shall break its graph, without a look inside: what torch.compiler.disable
    does, but without importing the compiler, and without a wrapper."""
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg="a movement of distdl")
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):  # newer torch: nor are functions that it calls compiled on their own
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def vmap_levels() -> tuple[tuple[int, int], ...]:
    """(level, batch size) of every active vmap, outermost first."""
    alone = _functorch.get_dynamic_layer_stack_depth() == 1  # the whole stack takes long to build
    stack = (_functorch.peek_interpreter_stack(),) if alone else _functorch.get_interpreter_stack() or ()
    return tuple([(i.level(), _functorch.CVmapInterpreterPtr(i).batchSize()) for i in stack if i.key() == _Kind.Vmap])


def randomness() -> dict[int, tuple[int, str]]:
    """{level: (batch size, its ``randomness``: "Error", "Same" or "Different")} of every active vmap, outermost
    first."""
    stack = _functorch.get_interpreter_stack() or () if transforms_active() else ()
    vmaps = {i.level(): _functorch.CVmapInterpreterPtr(i) for i in stack if i.key() == _Kind.Vmap}
    return {level: (vmap.batchSize(), vmap.randomness().name) for level, vmap in vmaps.items()}


def drawn() -> int:
    """The next number of torch's CPU generator: it tells a place in the stream. Under vmap as all that is random there:
    an error, unless ``randomness`` says otherwise."""
    with _disable_current_modes() if dispatch_modes() else _here:
        number = torch.randint(2**62, (), device="cpu")
        while of_torch_func(number):
            number = _functorch.get_unwrapped(number)
        return int(number.reshape(-1)[0])


def in_backward() -> bool:
    """Whether autograd runs a backward pass right here: what is a forward then is run again, by a checkpoint."""
    return torch._C._current_graph_task_id() != -1


def checkpointed() -> bool:
    """Whether torch's checkpoint may run again what runs now: there are hooks on what is saved, or
    (``use_reentrant=True``) this is the forward of a Function, which has neither grad mode nor forward mode."""
    plain = torch.is_grad_enabled() or torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled()
    return not plain or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def batching_levels(tensors) -> set[int]:
    """The levels of the vmaps that map over any of the tensors."""
    found = set()
    for t in tensors:
        while _functorch.is_functorch_wrapped_tensor(t):
            if _functorch.is_batchedtensor(t):
                found.add(_functorch.maybe_get_level(t))
            t = _functorch.get_unwrapped(t)
    return found


def grad_levels() -> tuple[tuple[int, str], ...]:
    """(level, "Grad" or "Jvp") of every active differentiating transform, outermost first."""
    stack = _functorch.get_interpreter_stack() or ()
    return tuple((i.level(), i.key().name) for i in stack if i.key().name in ("Grad", "Jvp"))


def levels_of(tensor) -> dict[int, str]:
    """Which active transforms see ``tensor`` as theirs: level -> "batched" or "tracked".

    Inside a transform every fresh tensor has its wrapper, also one that depends on nothing: only what requires a
    gradient, or has a tangent, is tracked. (Of forward mode that is known for the innermost transform; further out the
    wrapper must do.)
    """
    found, kinds, outermost = {}, dict(grad_levels()), tensor
    while _functorch.is_functorch_wrapped_tensor(tensor):
        level = _functorch.maybe_get_level(tensor)
        if _functorch.is_batchedtensor(tensor):
            found[level] = "batched"
        elif _functorch.is_gradtrackingtensor(tensor):
            forward = kinds.get(level) == "Jvp"
            if (tensor is not outermost or has_tangent(tensor)) if forward else tensor.requires_grad:
                found[level] = "tracked"
        tensor = _functorch.get_unwrapped(tensor)
    return found


_POINTERS: dict[Any, Any] = {_Kind.Vmap: _functorch.CVmapInterpreterPtr, _Kind.Grad: _functorch.CGradInterpreterPtr,
             _Kind.Jvp: _functorch.CJvpInterpreterPtr}  # fmt: skip


class Transform:
    """The innermost active transform of torch.func: what torch's own operators do with it, for a rule that is not one.

    Attributes:
        batch_size: of a vmap; else ``None``.
        forward_mode: whether it is a jvp (else a vmap, or the reverse mode of grad and vjp).
    """

    __slots__ = ("_before", "_interpreter", "_modes", "_pointer", "_popped", "batch_size", "forward_mode", "level")

    def __init__(self):
        interpreter = self._interpreter = _functorch.peek_interpreter_stack()  # the pointer does not keep it alive
        kind = interpreter.key()
        if kind not in _POINTERS:
            raise DistdlError(
                f"no movement can run inside torch.func's {kind.name.lower()}",
                op="torch.func",
                actual=kind.name,
                expected="grad, vjp, jvp or vmap",
                next_step="trace with make_fx or torch.func.linearize, without it",
            )
        pointer = self._pointer = _POINTERS[kind](interpreter)
        self.level, self.batch_size, self.forward_mode, self._modes = pointer.level(), None, False, None
        if kind == _Kind.Vmap:
            self.batch_size = pointer.batchSize()
        elif kind == _Kind.Grad:
            self._modes = pointer.prevGradMode(), True
        else:
            self.forward_mode, self._modes = True, (True, pointer.prevFwdGradMode())

    def outside(self):
        """Context manager: what runs inside it runs outside of this transform (and differentiates, as far as others
        want it)."""
        return self

    def __enter__(self):
        self._popped = _functorch.pop_dynamic_layer_stack()
        if self._modes is not None:
            self._before = torch.is_grad_enabled(), _forward_mode_enabled()
            _set_modes(*self._modes)

    def __exit__(self, *_):
        if self._modes is not None:
            _set_modes(*self._before)
        _functorch.push_dynamic_layer_stack(self._popped)

    def lift(self, tensor):
        """``tensor`` as grad, vjp or jvp sees it: a constant, unless it is one of its own."""
        return self._pointer.lift(unwrap_if_dead(tensor))

    def unwrap(self, tensor):
        """What is inside such a tensor."""
        return _functorch._unwrap_for_grad(tensor, self.level)

    def wrap(self, tensor):
        """A tensor from outside as one of this grad, vjp or jvp."""
        return _functorch._wrap_for_grad(tensor, self.level)

    def unbatch(self, tensor):
        """(A vmap's tensor with its batch axis, where that is); or (the tensor, ``None``)."""
        return _functorch._unwrap_batched(unwrap_if_dead(tensor), self.level)

    def batch(self, tensor):
        """A tensor from outside, whose first axis is the batch, as one example of it."""
        return _functorch._add_batch_dim(tensor, 0, self.level)

    def unpack(self, tensor):
        """(What is inside, and inside its tangent or ``None``), for a jvp."""
        value, tangent = forward_ad.unpack_dual(self.lift(tensor))
        return self.unwrap(value), None if tangent is None else self.unwrap(self.lift(tangent))

    def dual(self, value, tangent):
        """A tensor and its tangent from outside as one of this jvp."""
        return forward_ad.make_dual(self.wrap(value), self.wrap(tangent))

    def differentiates(self, tensors) -> bool:
        """Whether grad, vjp or jvp follows any of these :meth:`lift` ed tensors."""
        if self.forward_mode:
            return _forward_mode_enabled()
        return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)

    def record(self, apply, *args):
        """``apply`` of a :data:`SingleLevelFunction`: a node of this transform."""
        before = _functorch.get_single_level_autograd_function_allowed()
        _functorch.set_single_level_autograd_function_allowed(True)
        try:
            return apply(*args)
        finally:
            _functorch.set_single_level_autograd_function_allowed(before)


# A context in which a module has other tensors as its parameters and buffers, by name.
with_tensors = _reparametrize_module
shares_memory: Any = torch._C._is_alias_of  # type: ignore[attr-defined]
transform_depth = _functorch.get_dynamic_layer_stack_depth  # how many transforms are active


def apart(depth: int, function, args):
    """``function(*args)`` of constants, and which of its results (a tuple of tensors) some transform or autograd
    follows all the
    same: they depend on tensors that the function reached by itself.

    It runs inside ``depth`` transforms that follow nothing, at the levels of those in which it was called: there a
    tensor of an outer one shows what it is (outside of all of them, its derivative would be dropped without a word),
    and one of a vmap fails.
    """
    before, opened = (torch.is_grad_enabled(), _forward_mode_enabled()), 0
    _set_modes(True, True)
    try:
        constants = [_spread(t.detach()) for t in args]
        for _ in range(depth):
            _functorch._grad_increment_nesting()
            opened += 1
        results = list(function(*constants))
        followed = [False] * len(results)
        while True:
            for i, y in enumerate(results):
                followed[i] |= y.requires_grad or has_tangent(y)
                results[i] = _functorch._unwrap_for_grad(y, opened) if opened else y
            if not opened:
                return [
                    y.clone() if any(shares_memory(y, x) for x in constants) else _spread(y) for y in results
                ], followed
            opened -= 1
            _functorch._grad_decrement_nesting()
    except RuntimeError as error:
        if "batched == nullptr" in str(error) or "escaped from inside a function being vmapped" in str(error):
            raise Escaped from error
        raise
    finally:
        for _ in range(opened):
            _functorch._grad_decrement_nesting()
        _set_modes(*before)


def _spread(tensor):
    """The tensor with memory for each element: forward mode refuses an expanded one."""
    return tensor.clone() if 0 in tensor.stride() and tensor.numel() > 1 else tensor


class Escaped(Exception):
    """A function reached an example of a vmap that is not there any more."""


_forward_mode_enabled = torch._C._is_fwd_grad_enabled
of_older_vmap = _functorch.is_legacy_batchedtensor  # what autograd.grad(is_grads_batched=True) calls a rule with


def _set_modes(grad: bool, forward: bool) -> None:
    torch._C._set_grad_enabled(grad)
    torch._C._set_fwd_grad_enabled(forward)


def examples(level: int, size: int, device):
    """The number of each example of the vmap at ``level``."""
    numbers = torch.arange(size, device=device)
    while _functorch.is_functorch_wrapped_tensor(numbers):  # made under an inner grad: levels must nest outwards
        numbers = _functorch.get_unwrapped(numbers)
    return _functorch._add_batch_dim(numbers, 0, level)


def batch_mask(level: int, size: int, device):
    """True, once per example of the vmap at ``level``: ``where(mask, x, x)`` is x, made to have that batch."""
    return examples(level, size, device) >= 0


def no_modes():
    """A context without __torch_dispatch__ modes: tensors made in it are real, under FakeTensorMode too."""
    return _disable_modes() if dispatch_modes() else _here


def is_fake(tensor) -> bool:
    """Whether a tensor has no numbers: on the meta device, or of a class with operators of its own (FakeTensor)."""
    return tensor.is_meta or type(tensor).__torch_dispatch__ is not _ordinary


_disable_modes = torch.utils._python_dispatch._disable_current_modes
_strided, _ordinary = torch.strided, torch.Tensor.__torch_dispatch__


def is_plain(tensor) -> bool:
    """Whether a tensor is dense memory of its own: not sparse, not quantized, of no transform, active or ended, and not
    of a class with operators of its own (DTensor, FakeTensor), whose memory is not theirs."""
    return (
        (type(tensor) is torch.Tensor or type(tensor).__torch_dispatch__ is _ordinary)
        and tensor.layout is _strided
        and not tensor.is_quantized
        and not of_torch_func(tensor)
    )


def plain(tensor):
    """The tensor as ordinary memory: lazy conjugates, negatives and zeros written out."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return torch.zeros_like(tensor, memory_format=torch.contiguous_format) if tensor._is_zerotensor() else tensor


def numbers(tensor) -> list[int]:
    """``tensor.tolist()`` of integers, also inside torch.func, where older torch finds no memory."""
    return [int(n) for n in tensor] if transforms_active() else tensor.tolist()


foreach_copy = torch._foreach_copy_  # (targets, sources): on a device one kernel copies many small tensors


@dataclass(frozen=True)
class Structure:
    """A pytree without its leaves. ``order``: the place, in torch's own order, of each leaf in :func:`flatten`'s."""

    spec: Any
    order: tuple[int, ...]

    @cached_property
    def text(self) -> str:
        """In words, the same for equal containers, whatever order their keys stand in."""
        return _words(self.spec)


def flatten(tree):
    """(leaves, :class:`Structure`) of a pytree; a tensor is its own only leaf, and its structure ``None``.

    What stands under a key of a dictionary comes in the order of the keys, not in that in which they were set: two
    ranks' leaves then match by their keys. The pytree that :func:`unflatten` makes has the keys in their own order.
    """
    if isinstance(tree, torch.Tensor) or tree is None:
        return [tree], None
    leaves, spec = pytree.tree_flatten(tree)
    order: list[int] = []
    _visit(spec, 0, order)
    return [leaves[place] for place in order], Structure(spec, tuple(order))


def unflatten(leaves, structure):
    """The pytree of that structure."""
    return unflatten_as_given(as_given(leaves, structure), structure)


def as_given(leaves, structure) -> list:
    """:func:`flatten`'s leaves in the order in which the containers of that structure have them."""
    if structure is None:
        return leaves
    given = list(leaves)
    for place, leaf in zip(structure.order, leaves, strict=True):
        given[place] = leaf
    return given


def unflatten_as_given(leaves, structure):
    """The pytree of leaves in the order of :func:`as_given`."""
    return leaves[0] if structure is None else pytree.tree_unflatten(leaves, structure.spec)


def _children(spec):
    """[(key or ``None``, place of its first leaf, spec)] of a node, dictionaries in the order of their keys."""
    found, first, keys = [], 0, None
    children = spec.children() if hasattr(spec, "children") else spec.children_specs  # torch 2.6 to 2.8
    if isinstance(spec.type, type) and issubclass(spec.type, dict):
        keys = spec.context[1] if issubclass(spec.type, defaultdict) else spec.context
    for i, child in enumerate(children):
        found.append((None if keys is None else keys[i], first, child))
        first += child.num_leaves
    return found if keys is None else sorted(found, key=lambda one: _place_of(one[0]))


def _place_of(key):
    """By what the keys of a dictionary are sorted, the same in every process. Keys that have no such thing stay as they
    are."""
    if isinstance(key, (str, bytes)):
        return type(key).__name__, key
    if isinstance(key, (int, float)):
        return "number", key
    if isinstance(key, (tuple, frozenset)):
        parts = map(_place_of, key)
        return type(key).__name__, tuple(parts if isinstance(key, tuple) else sorted(parts))
    text = "" if isinstance(key, (torch.Tensor, torch.nn.Module)) else repr(key)
    return type(key).__qualname__, "" if " at 0x" in text else text


def _visit(spec, first: int, order: list[int]) -> None:
    if spec.is_leaf():
        order.append(first)
        return
    for _, place, child in _children(spec):
        _visit(child, first + place, order)


def _words(spec) -> str:
    if spec.is_leaf():
        return "*"
    parts = [_words(child) if key is None else f"{key!r}: {_words(child)}" for key, _, child in _children(spec)]
    keyed = isinstance(spec.type, type) and issubclass(spec.type, dict)
    what = "" if keyed or spec.context is None else f"{' '.join(str(spec.context).split())}: "
    return f"{spec.type.__name__}({what}{', '.join(parts)})"
