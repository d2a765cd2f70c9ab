"""The transforms of torch.func, and forward mode: which are active, which tensors are theirs, a rule's way through."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch._C import _functorch
from torch.autograd import forward_ad

from ..errors import DistdlError

shares_memory: Any = torch._C._is_alias_of  # type: ignore[attr-defined]  # whether two tensors do
_Kind = _functorch.TransformType
# True while any torch.func transform (grad, vjp, jvp, vmap, ...) is being evaluated.
transforms_active = torch._C._are_functorch_transforms_active
# A tensor of a transform that has ended (a pullback's memory, say) as the plain tensor that it now is.
unwrap_if_dead = _functorch.unwrap_if_dead
of_torch_func = _functorch.is_functorch_wrapped_tensor  # whether a tensor belongs to a transform, active or ended


inside = _functorch.get_unwrapped  # what is in a tensor of a transform
_traced: Any = torch._C._len_torch_dispatch_stack


def forward_mode_active() -> bool:
    """Whether a forward-mode level (torch.autograd.forward_ad) is open. While something is traced it may be: Dynamo
    opens levels without telling Python."""
    return forward_ad._current_level >= 0 or _traced() > 0


def has_tangent(tensor) -> bool:
    """Whether forward mode is differentiating with respect to ``tensor`` right here (not inside a Function's
    forward)."""
    level = max(forward_ad._current_level, _traced() - 1)  # torch has the level 0 only
    return level >= 0 and torch._C._is_fwd_grad_enabled() and torch._VF._unpack_dual(tensor, level=0)[1] is not None


# A Function for one level of autograd alone: ``apply`` makes the node without binding a signature on every call (17 µs
# instead of 53). Under torch.func it must be told so, see Transform.record; a plain Function would go through all
# transforms by itself.
SingleLevelFunction = torch.autograd.function._SingleLevelFunction


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


def recorded_beneath(tensor) -> bool:
    """Whether plain autograd, outside of all transforms, records the tensor."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor.requires_grad


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
        value, tangent = forward_ad.unpack_dual(self.lift(tensor), level=0)
        return self.unwrap(value), None if tangent is None else self.unwrap(self.lift(tangent))

    def dual(self, value, tangent):
        """A tensor and its tangent from outside as one of this jvp."""
        return forward_ad.make_dual(self.wrap(value), self.wrap(tangent), level=0)

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


transform_depth = _functorch.get_dynamic_layer_stack_depth  # how many transforms are active


def apart(depth: int, function, args):
    """``function(*args)`` of constants, and which of its results (a tuple of tensors) some transform or autograd
    follows all the same: they depend on tensors that the function reached by itself.

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
        if escaped(error):
            raise Escaped from error
        raise
    finally:
        for _ in range(opened):
            _functorch._grad_decrement_nesting()
        _set_modes(*before)


def constants(function, tensors):
    """``function(*tensors)``, a tuple of tensors, as constants of every transform and of autograd.

    It runs outside of all transforms, on plain tensors whose first axes are those of every vmap that is active, the
    outermost first (also of tensors that have no batch); so are its results.
    """
    if not transforms_active():
        with unfollowed():
            return tuple(function(*[unwrap_if_dead(t).detach() for t in tensors]))
    transform = Transform()
    size = transform.batch_size
    if size is None:
        inner = [transform.unwrap(transform.lift(t)) for t in tensors]
    else:
        pairs = [transform.unbatch(t) for t in tensors]
        inner = [t.expand(size, *t.shape) if d is None else t.movedim(d, 0) for t, d in pairs]
    with transform.outside():
        results = constants(function, inner)
    return tuple(transform.wrap(y) if size is None else transform.batch(y) for y in results)


@contextlib.contextmanager
def unfollowed():
    """A context in which neither autograd nor forward mode records anything."""
    before = torch.is_grad_enabled(), _forward_mode_enabled()
    _set_modes(False, False)
    try:
        yield
    finally:
        _set_modes(*before)


def _spread(tensor):
    """The tensor with memory for each element: forward mode refuses an expanded one."""
    return tensor.clone() if 0 in tensor.stride() and tensor.numel() > 1 else tensor


def escaped(error: RuntimeError) -> bool:
    """Whether torch says so of a tensor of a vmap, or of a grad inside of one, that is not there any more."""
    texts = "batched == nullptr", "wrapper == nullptr", "escaped from inside a function being vmapped"
    return any(text in str(error) for text in texts)


class Escaped(Exception):
    """A function reached an example of a vmap that is not there any more."""


_forward_mode_enabled = torch._C._is_fwd_grad_enabled
of_older_vmap = _functorch.is_legacy_batchedtensor  # what autograd.grad(is_grads_batched=True) calls a rule with


def _set_modes(grad: bool, forward: bool) -> None:
    torch._C._set_grad_enabled(grad)
    torch._C._set_fwd_grad_enabled(forward)


def numbers_of(tensor):
    """The numbers of ``tensor`` as a constant of no transform; ``None`` of a vmap's, which has other ones for each
    example."""
    while of_torch_func(tensor):
        if _functorch.is_batchedtensor(tensor):
            return None
        tensor = _functorch.get_unwrapped(tensor)
    with outside_all():
        return tensor.detach()


@contextlib.contextmanager
def outside_all():
    """What runs inside runs outside of all transforms of torch.func, and is followed by none, nor by autograd."""
    with contextlib.ExitStack() as left:
        while transforms_active():
            left.enter_context(Transform().outside())
        with unfollowed():
            yield


def examples(level: int, size: int, device):
    """The number of each example of the vmap at ``level``."""
    numbers = torch.arange(size, device=device)
    while _functorch.is_functorch_wrapped_tensor(numbers):  # made under an inner grad: levels must nest outwards
        numbers = _functorch.get_unwrapped(numbers)
    return _functorch._add_batch_dim(numbers, 0, level)


def batch_mask(level: int, size: int, device):
    """True, once per example of the vmap at ``level``: ``where(mask, x, x)`` is x, made to have that batch."""
    return examples(level, size, device) >= 0
