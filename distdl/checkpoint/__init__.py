"""Checkpoints: one safetensors file of global tensors, written and read by boxes, which no partition leaves a trace in.

``dd.checkpoint.save(path, *dd.checkpoint.state(model, optimizer, rng=True, step=step))`` on 2×2 ranks, then
``dd.checkpoint.restore(path, model, optimizer, rng=True)`` on 1, 4×1 or any other partition; plain safetensors opens
the same file as the serial model. :mod:`.format` says what bytes go where, :mod:`.writing` and :mod:`.reading` move
them, :mod:`.state` knows modules and optimizers. Others' files: :mod:`.hub` reads a model of the Hugging Face hub, and
:mod:`.dcp` reads and writes folders of torch.distributed.checkpoint.
"""

from .dcp import load_dcp, save_dcp
from .hub import load_safetensors
from .reading import load
from .state import State, restore, state
from .writing import Pending, async_save, save

__all__ = [
    "Pending",
    "State",
    "async_save",
    "load",
    "load_dcp",
    "load_safetensors",
    "restore",
    "save",
    "save_dcp",
    "state",
]
