"""Checkpoints: one safetensors file of global tensors, written and read by boxes, which no partition leaves a trace in.

``dd.checkpoint.save(path, *dd.checkpoint.state(model, optimizer, rng=True, step=step))`` on 2×2 ranks, then
``dd.checkpoint.restore(path, model, optimizer, rng=True)`` on 1, 4×1 or any other partition; plain safetensors opens
the same file as the serial model. :mod:`.format` says what bytes go where, :mod:`.writing` and :mod:`.reading` move
them, :mod:`.state` knows modules and optimizers. Others' files: :mod:`.hub` reads a model of the Hugging Face hub, and
:mod:`.dcp` reads and writes folders of torch.distributed.checkpoint.
"""

from .._arguments import check_functions
from ..calls import public
from .dcp import load_dcp, save_dcp
from .hub import load_safetensors
from .reading import load
from .state import State, restore, state
from .writing import Pending, async_save, save

__all__ = [
    "save",
    "async_save",
    "Pending",
    "load",
    "state",
    "State",
    "restore",
    "load_safetensors",
    "load_dcp",
    "save_dcp",
]
public({f"checkpoint.{name}": globals()[name] for name in __all__}, alike=False)
check_functions(globals(), __all__)
del check_functions, public
