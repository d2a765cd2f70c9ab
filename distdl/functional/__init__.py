"""The functional operators: ``import distdl.functional as F``."""

from .._names import only_public
from ..calls import public
from . import (
    conv,
    dropout,
    embedding,
    expert,
    fft,
    interpolate,
    linear,
    local,
    loss,
    movement,
    norm,
    params,
    pool,
    random,
    reduce,
    transition,
)
from .conv import *  # noqa: F403
from .dropout import *  # noqa: F403
from .embedding import *  # noqa: F403
from .expert import *  # noqa: F403
from .fft import *  # noqa: F403
from .interpolate import *  # noqa: F403
from .linear import *  # noqa: F403
from .local import *  # noqa: F403
from .loss import *  # noqa: F403
from .movement import *  # noqa: F403
from .norm import *  # noqa: F403
from .params import *  # noqa: F403
from .pool import *  # noqa: F403
from .random import *  # noqa: F403
from .reduce import *  # noqa: F403
from .transition import *  # noqa: F403

_MODULES = (
    movement,
    linear,
    conv,
    local,
    pool,
    norm,
    reduce,
    loss,
    params,
    dropout,
    embedding,
    expert,
    fft,
    interpolate,
    random,
    transition,
)
__all__ = [name for module in _MODULES for name in module.__all__]
public({name: globals()[name] for name in __all__})
__getattr__ = only_public(__name__)
del only_public, public
