"""Every private torch API that distdl uses, in one place, looked up once at import."""

from __future__ import annotations

import contextlib

import torch
from torch._C import _functorch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

# True while any torch.func transform (grad, vjp, jvp, vmap, ...) is being evaluated.
transforms_active = torch._C._are_functorch_transforms_active
# Number of active __torch_dispatch__ modes (make_fx, FakeTensorMode, ...): then even plain calls must be torch operators.
dispatch_modes = torch._C._len_torch_dispatch_stack
# Context manager: operators called inside skip their Autograd kernels.
below_autograd = torch._C._AutoDispatchBelowAutograd


# A tensor of a transform that has ended (a pullback's memory, say) as the plain tensor that it now is.
unwrap_if_dead = _functorch.unwrap_if_dead


# Address of torch's current stream on a CUDA device, the current device, and whether a graph is being captured: torch.cuda's own
# functions cost several times as much. Absent in builds without CUDA.
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
    """Whether forward mode is differentiating with respect to ``tensor`` right here (not inside a Function's forward)."""
    return forward_mode_active() and torch._C._is_fwd_grad_enabled() and forward_ad.unpack_dual(tensor).tangent is not None


def fast_apply(function):
    """``function.apply`` without binding the signature on every call (17 µs instead of 53).

    Right whenever no torch.func transform is active: ``Function.apply`` then ends in this same call.
    """
    return super(torch.autograd.Function, function).apply


def opaque(function):
    """Mark a function at which torch.compile shall break its graph, without a look inside: what torch.compiler.disable does, but
    without importing the compiler, and without a wrapper."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = "a movement of distdl"
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):  # newer torch: nor are functions that it calls compiled on their own
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def vmap_levels() -> tuple[tuple[int, int], ...]:
    """(level, batch size) of every active vmap, outermost first."""
    stack = _functorch.get_interpreter_stack() or ()
    kind = _functorch.TransformType.Vmap
    return tuple((i.level(), _functorch.CVmapInterpreterPtr(i).batchSize()) for i in stack if i.key() == kind)


def grad_levels() -> tuple[tuple[int, str], ...]:
    """(level, "Grad" or "Jvp") of every active differentiating transform, outermost first."""
    stack = _functorch.get_interpreter_stack() or ()
    return tuple((i.level(), i.key().name) for i in stack if i.key().name in ("Grad", "Jvp"))


def levels_of(tensor) -> dict[int, str]:
    """Which active transforms see ``tensor`` as theirs: level -> "batched" or "tracked".

    Inside a transform every fresh tensor has its wrapper, also one that depends on nothing: only what requires a gradient, or has
    a tangent, is tracked. (Of forward mode that is known for the innermost transform; further out the wrapper must do.)
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


def innermost_vmap():
    """The interpreter of the innermost active transform if that is a vmap, else None."""
    if _functorch.peek_interpreter_stack().key() != _functorch.TransformType.Vmap:
        return None
    return retrieve_current_functorch_interpreter()


of_older_vmap = _functorch.is_legacy_batchedtensor  # what autograd.grad(is_grads_batched=True) calls a rule with
unwrap_batched = _functorch._unwrap_batched  # (tensor, level) -> (the tensor with its batch axis, where that is or None)
add_batch_dim = _functorch._add_batch_dim  # (tensor, axis, level) -> the tensor as one example of that batch


def batch_mask(level: int, size: int, device):
    """True, once per example of the vmap at ``level``: ``where(mask, x, x)`` is x, made to have that batch."""
    mask = torch.ones(size, dtype=torch.bool, device=device)
    while _functorch.is_functorch_wrapped_tensor(mask):  # made under an inner grad: levels must nest outwards
        mask = _functorch.get_unwrapped(mask)
    return _functorch._add_batch_dim(mask, 0, level)


def plain(tensor):
    """The tensor as ordinary memory: lazy conjugates, negatives and zeros written out."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return torch.zeros_like(tensor, memory_format=torch.contiguous_format) if tensor._is_zerotensor() else tensor


foreach_copy = torch._foreach_copy_  # (targets, sources): on a device one kernel copies many small tensors


def flatten(tree):
    """(leaves, structure) of a pytree; a tensor is its own only leaf."""
    return ([tree], None) if isinstance(tree, torch.Tensor) or tree is None else pytree.tree_flatten(tree)


def unflatten(leaves, structure):
    """The pytree of that structure."""
    return leaves[0] if structure is None else pytree.tree_unflatten(leaves, structure)
