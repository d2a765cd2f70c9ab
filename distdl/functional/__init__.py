"""The functional operators: ``import distdl.functional as F``."""

from . import conv, linear, loss, movement, pool, reduce
from .conv import *  # noqa: F403
from .linear import *  # noqa: F403
from .loss import *  # noqa: F403
from .movement import *  # noqa: F403
from .pool import *  # noqa: F403
from .reduce import *  # noqa: F403

__all__ = [name for module in (movement, linear, conv, pool, reduce, loss) for name in module.__all__]
