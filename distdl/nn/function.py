"""Functions without parameters as modules: the function's own arguments, the partition first."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch

from .. import functional as F
from .._arguments import Checked
from .._types import Place, Size
from ..partition import Layout
from .layer import first_line

__all__ = ["LCN", "Movement", "Upsample"]
Result = TypeVar("Result")


def chosen(module: torch.nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """Those of the options that are not the defaults of the module's function: what it keeps, and shows."""
    function = getattr(type(module), "function", None)
    known = {} if function is None else inspect.signature(function).parameters
    return {name: v for name, v in options.items() if name not in known or v is not known[name].default}


class Function(Checked, torch.nn.Module, Generic[Result]):
    """A function of :mod:`distdl.functional` without parameters: ``Module(P, *args, **options)(x)`` is ``function(x, P,
    *args, **options)``."""

    function: ClassVar[Callable[..., Any]]

    def __init__(self, P: Place, *args: Any, **options: Any) -> None:
        super().__init__()
        self.P, self.args = P, args
        self.kwargs = chosen(self, options)

    def forward(self, x: torch.Tensor) -> Result:
        """The function of this rank's block."""
        y: Result = type(self).function(x, self.P, *self.args, **self.kwargs)
        return y

    def extra_repr(self) -> str:
        """The partition and the arguments."""
        return ", ".join(
            [first_line(self.P), *map(str, self.args), *(f"{name}={value}" for name, value in self.kwargs.items())]
        )


class Movement(torch.nn.Module):
    """A data movement as a module: ``Movement(F.repartition, P_in, P_out)``.

    Messages and errors are those of its function.

    Example:
        >>> layer = dd.nn.Movement(F.roll, dd.Partition((1,)), 0, 1)
        >>> layer(torch.arange(3))
        tensor([2, 0, 1])
    """

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.function, self.args, self.kwargs = function, args, kwargs

    def forward(self, x: Any) -> Any:
        """The movement of this rank's block."""
        return self.function(x, *self.args, **self.kwargs)

    def extra_repr(self) -> str:
        """The function and its arguments."""
        return ", ".join([self.function.__name__, *(str(a).splitlines()[0] for a in self.args)])


class Upsample(Function[torch.Tensor]):
    """:func:`distdl.functional.dist_interpolate`.

    Example:
        >>> layer = dd.nn.Upsample(dd.Partition((1, 1, 1)), scale_factor=2)
        >>> layer(torch.ones(1, 2, 8)).shape
        torch.Size([1, 2, 16])
    """

    function = staticmethod(F.dist_interpolate)

    def __init__(
        self,
        P: Place,
        size: Size | Layout | None = None,
        scale_factor: float | Sequence[float] | None = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
        *,
        recompute_scale_factor: bool | None = None,
        shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__(
            P,
            size=size,
            scale_factor=scale_factor,
            mode=mode,
            align_corners=align_corners,
            recompute_scale_factor=recompute_scale_factor,
            shape=shape,
        )


class LCN(Function[torch.Tensor]):
    """:func:`distdl.functional.dist_lcn`: local contrast normalisation.

    Example:
        >>> layer = dd.nn.LCN(dd.Partition((1, 1, 1, 1)), 3)
        >>> layer(torch.ones(1, 2, 8, 8)).shape
        torch.Size([1, 2, 8, 8])
    """

    function = staticmethod(F.dist_lcn)

    def __init__(self, P: Place, kernel_size: Size, *, shape: Sequence[int] | None = None) -> None:
        super().__init__(P, kernel_size, shape=shape)
