"""The functional operators: ``import distdl.functional as F``."""

from .movement import *  # noqa: F403
from .movement import __all__ as _movement

__all__ = [*_movement]
