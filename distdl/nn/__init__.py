"""Modules: each holds parameters and calls one function of :mod:`distdl.functional`, with torch.nn's arguments after
the partition.

Parameters are this rank's blocks, the same global tensor on any number of ranks, and ``params="invariant"`` always:
gradients are right on every copy as they stand. They work under ``torch.func.functional_call``, ``state_dict``,
``deepcopy``, pickle, ``.to`` and on the meta device (``to_empty`` and ``reset_parameters`` then fill them).
"""

from .._names import only_public
from ..held import declare
from .convert import convert, stands_for
from .layers import *  # noqa: F403
from .layers import __all__ as _layers
from .layouts import layouts
from .losses import *  # noqa: F403
from .losses import __all__ as _losses

__all__ = [*_layers, *_losses, "convert", "declare", "layouts", "stands_for"]
__getattr__ = only_public(__name__)
del only_public
