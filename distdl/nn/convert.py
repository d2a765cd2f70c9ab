"""Turn a serial torch model into its distributed twin."""

from __future__ import annotations

import copy

import torch

from .._arguments import checked
from ..agree import partition_of
from ..errors import PartitionError
from . import layers

nn = torch.nn


@checked
def convert(module, P, *, containers=()):
    """The twin of a convolutional network whose tensors are split over ``P`` = (batch, 1, *space): a copy, with its weights.

    Convolutions, pooling, batch, group and instance norms, upsampling and dropout become this package's; modules that act on each
    element alone stay as they are, and Sequential, ModuleList and ModuleDict are converted inside. Weights are whole on
    every rank.

    Args:
        containers: your own module classes to convert inside; you promise that their ``forward`` combines children's results
            element by element or along channels only (a residual block, a U-Net's concatenation). It is not read.

    Raises:
        PartitionError: split channels, or a module that would need another partition (Linear, LayerNorm, flattening, ...): put
            a repartition and the layer itself there.
    """
    if partition_of(P).shape[1] != 1:
        raise PartitionError("convert keeps channels whole", op="convert", partitions=P, expected="(batch, 1, *space)",
                             actual=partition_of(P).shape,
                             next_step="use 1 for the channel dim, or build the layers of dd.nn by hand")
    twin = _twin(module, P)
    if twin is None:
        container = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict, *containers))
        if not _elementwise(module) and not (container and not module._parameters and not module._buffers):
            raise PartitionError(f"{type(module).__name__} has no twin over this partition", op="convert", partitions=P,
                                 expected="a layer of a convolutional network", actual=repr(module),
                                 next_step="build this part by hand")
        twin = copy.copy(module)
        twin._modules = {k: child and convert(child, P, containers=containers) for k, child in module._modules.items()}
        return twin
    twin.train(module.training)
    with torch.no_grad():
        twin.load_state_dict(module.state_dict())
    return twin


def _elementwise(module) -> bool:
    ours = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.LogSigmoid,
            nn.Tanh, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Threshold, nn.Identity)
    return isinstance(module, ours)


def _twin(m, P):
    name, options = type(m).__name__, {}
    for key in ("device", "dtype"):
        weight = next(m.parameters(recurse=False), None)
        if weight is not None:
            options[key] = getattr(weight, key)
    if isinstance(m, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        return getattr(layers, name)(P, m.in_channels, m.out_channels, m.kernel_size, m.stride, m.padding, m.output_padding,
                                     m.groups, m.bias is not None, m.dilation, **options)
    if isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return getattr(layers, name)(P, m.in_channels, m.out_channels, m.kernel_size, m.stride, m.padding, m.dilation, m.groups,
                                     m.bias is not None, m.padding_mode, **options)
    if isinstance(m, (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)):
        return getattr(layers, name)(P, m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode,
                                     return_indices=m.return_indices)
    if isinstance(m, (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)):
        return getattr(layers, name)(P, m.kernel_size, m.stride, m.padding, m.ceil_mode, m.count_include_pad,
                                     divisor_override=getattr(m, "divisor_override", None))
    if name.startswith("Adaptive") and hasattr(layers, name):
        return getattr(layers, name)(P, m.output_size)
    if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
        return layers.BatchNorm(P, m.num_features, m.eps, m.momentum, m.affine, m.track_running_stats, **options)
    if isinstance(m, nn.GroupNorm):
        return layers.GroupNorm(P, m.num_groups, m.num_channels, m.eps, m.affine, **options)
    if isinstance(m, (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)) and not m.track_running_stats:
        return layers.InstanceNorm(P, m.num_features, m.eps, m.affine, **options)
    if isinstance(m, nn.Upsample):
        return layers.Upsample(P, m.size, m.scale_factor, m.mode, m.align_corners,
                               recompute_scale_factor=m.recompute_scale_factor)
    if isinstance(m, nn.Dropout):
        return layers.Dropout(P, m.p)
    if isinstance(m, (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)):
        return layers.FeatureDropout(P, m.p)
    return None
