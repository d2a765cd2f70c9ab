"""Every private torch API that distdl uses, in one place, looked up once at import.

Here modes, streams, memory, and what else of torch runs around us; :mod:`transforms` has those of torch.func,
:mod:`trees` pytrees. Callers know this module alone.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C import _functorch
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _disable_current_modes

from .compiler import Constant as Constant
from .compiler import as_node as as_node
from .compiler import compiling as compiling
from .compiler import dynamo_runs as dynamo_runs
from .compiler import in_subgraph as in_subgraph
from .compiler import keep_order as keep_order
from .compiler import of_dynamo as of_dynamo
from .compiler import read_while_tracing as read_while_tracing
from .compiler import register_opaque_type as register_opaque_type
from .compiler import without_numbers as without_numbers
from .transforms import Escaped as Escaped
from .transforms import SingleLevelFunction as SingleLevelFunction
from .transforms import Transform as Transform
from .transforms import apart as apart
from .transforms import batch_mask as batch_mask
from .transforms import batching_levels as batching_levels
from .transforms import constants as constants
from .transforms import escaped as escaped
from .transforms import examples as examples
from .transforms import forward_mode_active as forward_mode_active
from .transforms import grad_levels as grad_levels
from .transforms import has_tangent as has_tangent
from .transforms import inside as inside
from .transforms import levels_of as levels_of
from .transforms import numbers_of as numbers_of
from .transforms import of_older_vmap as of_older_vmap
from .transforms import of_torch_func as of_torch_func
from .transforms import outside_all as outside_all
from .transforms import randomness as randomness
from .transforms import recorded_beneath as recorded_beneath
from .transforms import shares_memory as shares_memory
from .transforms import transform_depth as transform_depth
from .transforms import transforms_active as transforms_active
from .transforms import unfollowed as unfollowed
from .transforms import unwrap_if_dead as unwrap_if_dead
from .transforms import vmap_levels as vmap_levels
from .trees import Structure as Structure
from .trees import as_given as as_given
from .trees import flatten as flatten
from .trees import spread as spread
from .trees import unflatten as unflatten
from .trees import unflatten_as_given as unflatten_as_given

Function = TypeVar("Function", bound=Callable[..., Any])
# Number of active __torch_dispatch__ modes (make_fx, FakeTensorMode, ...): then even plain calls must be torch
# operators.
dispatch_modes = torch._C._len_torch_dispatch_stack
# Whether torch.autocast is on for some kind of device.
any_autocast = torch._C._is_any_autocast_enabled
# Its ``_is_profiler_enabled`` is true while torch.profiler, or emit_nvtx, records: a look at it costs no call.
profiler = torch.autograd.profiler
# Context manager: operators called inside skip their Autograd kernels.
below_autograd = torch._C._AutoDispatchBelowAutograd


# Address of torch's current stream on a CUDA device, the current device, and whether a graph is being captured:
# torch.cuda's own functions cost several times as much. Absent in builds without CUDA.
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device = getattr(torch._C, "_cuda_getDevice", None)
capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


_here = contextlib.nullcontext()


def on_device(index: int):
    """A context in which CUDA device ``index`` is the current one."""
    return _here if current_device() == index else torch.cuda.device(index)


_reduced: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_sharded: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # module: (all states there were, its ranks)


def reduced_by_ddp() -> tuple[tuple[int, ...], frozenset]:
    """Of the DistributedDataParallel whose forward is running: its ranks, and the ids of the parameters whose gradients
    it sums."""
    ddp = torch.nn.parallel.DistributedDataParallel._active_ddp_module
    if ddp is None:
        return (), frozenset()
    if ddp not in _reduced:
        _reduced[ddp] = frozenset(map(id, ddp._module_parameters))
    return tuple(torch.distributed.get_process_group_ranks(ddp.process_group)), _reduced[ddp]


def sharded_by_fsdp(module: torch.nn.Module) -> tuple[int, ...]:
    """The ranks over which torch's fully_shard takes the mean of the gradients of this very module's parameters; none:
    it does not."""
    if "torch.distributed.fsdp" not in sys.modules:
        return ()
    from torch.distributed._composable_state import _module_state_mapping as states

    there = list(states.values())  # weak references; what was found holds while these are the same
    known, found = _sharded.get(module, (None, ()))
    if known != there:
        found = ()
        for state in (ref() for ref in there):
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            for group in filter(None, groups):
                infos = [p._module_info for p in group.fsdp_params]
                if any(module is m for info in infos for m in (info.module, *info.shared_modules)):
                    found = tuple(group.mesh_info.mesh.mesh.flatten().tolist())
        _sharded[module] = there, found
    return found


def opaque(function: Function, reason: str = "a movement of distdl") -> Function:
    """Mark a function at which torch.compile shall break its graph, without a look inside: what torch.compiler.disable
    does, but without importing the compiler, and without a wrapper."""
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
    return unseen(function)


def unseen(function: Function) -> Function:
    """Let torch.compile not look into a call of the function that is no part of a graph; newer torch only."""
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):  # nor into functions that it calls
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


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


vars(in_backward)["_torchdynamo_inline"] = lambda: False  # a graph is not run again piece by piece


_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: True)  # 2.6 does not tell


def checkpointed() -> bool:
    """Whether torch's checkpoint may run again what runs now: there are hooks on what is saved, or
    (``use_reentrant=True``) this is the forward of a Function, which has neither grad mode nor forward mode."""
    plain = torch.is_grad_enabled() or torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled()
    return not plain or _hooks(True) is not None


def literal(tensor):
    """A tensor of numbers that were planned, as one of what runs now: in a graph a constant of its own."""
    if not dispatch_modes() or is_fake(tensor):
        return tensor
    with no_modes():
        numbers = tensor.tolist()
    return torch.tensor(numbers, dtype=tensor.dtype, device=tensor.device)


# A context in which a module has other tensors as its parameters and buffers, by name.
with_tensors = _reparametrize_module


def no_modes():
    """A context without __torch_dispatch__ modes: tensors made in it are real, under FakeTensorMode too."""
    return _disable_current_modes() if dispatch_modes() else _here


def real(function: Function) -> Function:
    """The function without __torch_dispatch__ modes around it: what it makes has numbers."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with no_modes():
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def is_fake(tensor) -> bool:
    """Whether a tensor has no numbers: on the meta device, or of a class with operators of its own (FakeTensor)."""
    return tensor.is_meta or type(tensor).__torch_dispatch__ is not _ordinary


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


def storage(tensor) -> int:
    """What tells a tensor's memory from others'; also of one that has no numbers."""
    return tensor.untyped_storage()._cdata


def plain(tensor):
    """The tensor as ordinary memory: lazy conjugates, negatives and zeros written out."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return torch.zeros_like(tensor, memory_format=torch.contiguous_format) if tensor._is_zerotensor() else tensor


def numbers(tensor) -> list[int]:
    """``tensor.tolist()`` of integers, also inside torch.func, where older torch finds no memory."""
    return [int(n) for n in tensor] if transforms_active() else tensor.tolist()


def constant(values, dtype, device) -> torch.Tensor:
    """A few numbers that nobody writes into, as a tensor. On CUDA devices it is made once: to bring numbers of the host
    there waits for all that the device has to do."""
    device = torch.device(device)
    if device.type != "cuda" or dispatch_modes():
        return torch.tensor(values, dtype=dtype, device=device)
    found = _constant_on_device(tuple(values), dtype, device)
    if capturing():
        _of_graphs[id(found)] = found
    return found


_of_graphs: dict[int, torch.Tensor] = {}  # constants whose addresses captured graphs hold: these stay


@functools.lru_cache(maxsize=4096)
def _constant_on_device(values: tuple, dtype, device) -> torch.Tensor:
    with outside_all(), torch.inference_mode(False):  # whoever needs it first, it is everybody's
        return torch.tensor(values, dtype=dtype, device=device)


foreach_copy = torch._foreach_copy_  # (targets, sources): on a device one kernel copies many small tensors
