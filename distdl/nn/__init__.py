"""Modules: each holds parameters and calls one function of :mod:`distdl.functional`, with torch.nn's arguments after
the partition.

Parameters are this rank's blocks, the same global tensor on any number of ranks, and ``params="invariant"`` always:
gradients are right on every copy as they stand. They work under ``torch.func.functional_call``, ``state_dict``,
``deepcopy``, pickle, ``.to`` and on the meta device (``to_empty`` and ``reset_parameters`` then fill them).
"""

from .._arguments import check_functions
from .._names import only_public
from ..calls import public
from ..held import declare
from .attention import MultiheadAttention
from .conv import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    LocalConv1d,
    LocalConv2d,
    LocalConv3d,
)
from .convert import convert, stands_for
from .dropout import Dropout, FeatureDropout
from .function import LCN, Movement, Upsample
from .layer import Layer
from .layouts import layouts, shard_state
from .linear import Embedding, ExpertLinear, Linear
from .losses import (
    BCELoss,
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    HuberLoss,
    KLDivLoss,
    L1Loss,
    Loss,
    MSELoss,
    NLLLoss,
    PoissonNLLLoss,
    SmoothL1Loss,
)
from .norm import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from .pool import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveAvgPool3d,
    AdaptiveMaxPool1d,
    AdaptiveMaxPool2d,
    AdaptiveMaxPool3d,
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    L2Pool1d,
    L2Pool2d,
    L2Pool3d,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
)
from .sharded import Sharded
from .spectral import FNOBlock, SpectralConv

__all__ = [
    # with parameters
    "Layer",
    "Linear",
    "Embedding",
    "ExpertLinear",
    "MultiheadAttention",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "LocalConv1d",
    "LocalConv2d",
    "LocalConv3d",
    "SpectralConv",
    "FNOBlock",
    "BatchNorm",
    "LayerNorm",
    "RMSNorm",
    "GroupNorm",
    "InstanceNorm",
    "Sharded",
    # without
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "L2Pool1d",
    "L2Pool2d",
    "L2Pool3d",
    "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "Upsample",
    "LCN",
    "Dropout",
    "FeatureDropout",
    "Movement",
    # losses
    "Loss",
    "CrossEntropyLoss",
    "NLLLoss",
    "MSELoss",
    "L1Loss",
    "HuberLoss",
    "SmoothL1Loss",
    "BCELoss",
    "BCEWithLogitsLoss",
    "KLDivLoss",
    "PoissonNLLLoss",
    # whole models
    "convert",
    "stands_for",
    "layouts",
    "shard_state",
    "declare",
]
public({name: globals()[name] for name in __all__}, alike=False)
check_functions(globals(), __all__)
__getattr__ = only_public(__name__)
del check_functions, only_public, public
