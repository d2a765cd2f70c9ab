"""Losses as modules: torch.nn's names, the partition first, then the function's keyword arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from .. import functional as F
from .._arguments import Checked
from .._types import Place
from .function import chosen
from .layer import first_line

__all__ = [
    "BCELoss",
    "BCEWithLogitsLoss",
    "CrossEntropyLoss",
    "HuberLoss",
    "KLDivLoss",
    "L1Loss",
    "Loss",
    "MSELoss",
    "NLLLoss",
    "PoissonNLLLoss",
    "SmoothL1Loss",
]


class Loss(Checked, torch.nn.Module):
    """A loss of :mod:`distdl.functional` over partition ``P``, with its keyword arguments; an invariant value.

    A tensor among the arguments (class weights: this rank's block) becomes a buffer.

    Messages and errors are those of its function.

    Example:
        >>> issubclass(dd.nn.MSELoss, dd.nn.Loss)
        True
    """

    function: ClassVar[Callable[..., torch.Tensor]]

    def __init__(self, P: Place, **options: Any) -> None:
        super().__init__()
        self.P = P
        self.options: dict[str, Any] = {}
        for name, value in chosen(self, options).items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(name, value)
            else:
                self.options[name] = value

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss of this rank's blocks."""
        return type(self).function(x, target, self.P, **dict(self.named_buffers()), **self.options)

    def extra_repr(self) -> str:
        """The partition and the options."""
        return ", ".join([first_line(self.P), *(f"{name}={value}" for name, value in self.options.items())])


class CrossEntropyLoss(Loss):
    """:func:`distdl.functional.dist_cross_entropy` as a module.

    Example:
        >>> dd.nn.CrossEntropyLoss(dd.Partition((1, 1)))(torch.zeros(1, 2), torch.tensor([1]))
        tensor(0.6931)
    """

    function = staticmethod(F.dist_cross_entropy)

    def __init__(
        self,
        P: Place,
        *,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(
            P, weight=weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )


class NLLLoss(Loss):
    """:func:`distdl.functional.dist_nll_loss` as a module.

    Example:
        >>> dd.nn.NLLLoss(dd.Partition((1, 1)))(torch.tensor([[-1.0, -2.0]]), torch.tensor([1]))
        tensor(2.)
    """

    function = staticmethod(F.dist_nll_loss)

    def __init__(
        self, P: Place, *, weight: torch.Tensor | None = None, ignore_index: int = -100, reduction: str = "mean"
    ) -> None:
        super().__init__(P, weight=weight, ignore_index=ignore_index, reduction=reduction)


class MSELoss(Loss):
    """:func:`distdl.functional.dist_mse_loss` as a module.

    Example:
        >>> dd.nn.MSELoss(dd.Partition((1,)))(torch.tensor([0.5]), torch.tensor([1.0]))
        tensor(0.2500)
    """

    function = staticmethod(F.dist_mse_loss)

    def __init__(self, P: Place, *, reduction: str = "mean") -> None:
        super().__init__(P, reduction=reduction)


class L1Loss(Loss):
    """:func:`distdl.functional.dist_l1_loss` as a module.

    Example:
        >>> dd.nn.L1Loss(dd.Partition((1,)))(torch.tensor([0.5]), torch.tensor([1.0]))
        tensor(0.5000)
    """

    function = staticmethod(F.dist_l1_loss)

    def __init__(self, P: Place, *, reduction: str = "mean") -> None:
        super().__init__(P, reduction=reduction)


class HuberLoss(Loss):
    """:func:`distdl.functional.dist_huber_loss` as a module.

    Example:
        >>> dd.nn.HuberLoss(dd.Partition((1,)))(torch.tensor([0.5]), torch.tensor([1.0]))
        tensor(0.1250)
    """

    function = staticmethod(F.dist_huber_loss)

    def __init__(self, P: Place, *, reduction: str = "mean", delta: float = 1.0) -> None:
        super().__init__(P, reduction=reduction, delta=delta)


class SmoothL1Loss(Loss):
    """:func:`distdl.functional.dist_smooth_l1_loss` as a module.

    Example:
        >>> dd.nn.SmoothL1Loss(dd.Partition((1,)))(torch.tensor([0.5]), torch.tensor([1.0]))
        tensor(0.1250)
    """

    function = staticmethod(F.dist_smooth_l1_loss)

    def __init__(self, P: Place, *, reduction: str = "mean", beta: float = 1.0) -> None:
        super().__init__(P, reduction=reduction, beta=beta)


class BCELoss(Loss):
    """:func:`distdl.functional.dist_bce_loss` as a module.

    Example:
        >>> dd.nn.BCELoss(dd.Partition((1,)))(torch.tensor([0.5]), torch.tensor([1.0]))
        tensor(0.6931)
    """

    function = staticmethod(F.dist_bce_loss)

    def __init__(self, P: Place, *, reduction: str = "mean", weight: torch.Tensor | None = None) -> None:
        super().__init__(P, reduction=reduction, weight=weight)


class BCEWithLogitsLoss(Loss):
    """:func:`distdl.functional.dist_bce_with_logits_loss` as a module.

    Example:
        >>> dd.nn.BCEWithLogitsLoss(dd.Partition((1,)))(torch.tensor([0.5]), torch.tensor([1.0]))
        tensor(0.4741)
    """

    function = staticmethod(F.dist_bce_with_logits_loss)

    def __init__(
        self,
        P: Place,
        *,
        reduction: str = "mean",
        weight: torch.Tensor | None = None,
        pos_weight: torch.Tensor | None = None,
    ) -> None:
        super().__init__(P, reduction=reduction, weight=weight, pos_weight=pos_weight)


class KLDivLoss(Loss):
    """:func:`distdl.functional.dist_kl_div` as a module.

    Example:
        >>> dd.nn.KLDivLoss(dd.Partition((1,)), reduction="sum")(torch.tensor([-1.0]), torch.tensor([1.0]))
        tensor(1.)
    """

    function = staticmethod(F.dist_kl_div)

    def __init__(self, P: Place, *, reduction: str = "mean", log_target: bool = False) -> None:
        super().__init__(P, reduction=reduction, log_target=log_target)


class PoissonNLLLoss(Loss):
    """:func:`distdl.functional.dist_poisson_nll_loss` as a module.

    Example:
        >>> dd.nn.PoissonNLLLoss(dd.Partition((1,)))(torch.tensor([0.5]), torch.tensor([1.0]))
        tensor(1.1487)
    """

    function = staticmethod(F.dist_poisson_nll_loss)

    def __init__(
        self,
        P: Place,
        *,
        reduction: str = "mean",
        log_input: bool = True,
        full: bool = False,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(P, reduction=reduction, log_input=log_input, full=full, eps=eps)
