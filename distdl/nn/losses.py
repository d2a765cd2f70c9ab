"""Losses as modules: torch.nn's names, the partition first."""

from __future__ import annotations

import torch

from .. import functional as F
from .._arguments import Checked

__all__ = ["Loss"]


class Loss(Checked, torch.nn.Module):
    """A loss of :mod:`distdl.functional` over partition ``P``, with its keyword arguments; an invariant value.

    A tensor among the arguments (class weights: this rank's block) becomes a buffer.
    """

    function: staticmethod

    def __init__(self, P, **options):
        super().__init__()
        self.P, self.options = P, {}
        for name, value in options.items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(name, value)
            else:
                self.options[name] = value

    def forward(self, x, target):
        """The loss of this rank's blocks."""
        return type(self).function(x, target, self.P, **dict(self.named_buffers()), **self.options)

    def extra_repr(self):
        return ", ".join([str(self.P).splitlines()[0], *(f"{k}={v}" for k, v in self.options.items())])


for _name, _function in {
    "BCELoss": F.dist_bce_loss,
    "BCEWithLogitsLoss": F.dist_bce_with_logits_loss,
    "CrossEntropyLoss": F.dist_cross_entropy,
    "HuberLoss": F.dist_huber_loss,
    "KLDivLoss": F.dist_kl_div,
    "L1Loss": F.dist_l1_loss,
    "MSELoss": F.dist_mse_loss,
    "NLLLoss": F.dist_nll_loss,
    "PoissonNLLLoss": F.dist_poisson_nll_loss,
    "SmoothL1Loss": F.dist_smooth_l1_loss,
}.items():
    _doc = f":func:`distdl.functional.{_function.__name__}` as a module."
    globals()[_name] = type(
        _name, (Loss,), {"function": staticmethod(_function), "__doc__": _doc, "__module__": __name__}
    )
    __all__.append(_name)
