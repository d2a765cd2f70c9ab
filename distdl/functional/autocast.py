"""torch.autocast over layers: every rank gets the dtype that torch's own function has, also where it has no work.

torch casts inside its operators, so a rank that calls none of them (an empty block, no expert, no place in the
partition) would keep another dtype than its peers. A layer therefore casts its tensors where it is entered, on all
ranks alike; and which dtype that is, torch itself is asked, by a call of the serial function on tensors of one element:
there is no second copy of its lists.
"""

from __future__ import annotations

import contextlib
from functools import lru_cache

import torch
import torch.nn.functional as tf
from torch.amp.autocast_mode import is_autocast_available  # torch.amp does not export it in every version

from .. import _torch

__all__: list[str] = []


def _of_dims(name):
    """torch's function of 1 to 3 spatial dims, on tensors of size 1 and with a 1 for its size."""
    return lambda ones, n: getattr(tf, f"{name}{n}d")(ones(*(1,) * (n + 2)), 1)


def _of_weights(name):
    return lambda ones, n: getattr(tf, f"{name}{n}d")(ones(*(1,) * (n + 2)), ones(*(1,) * (n + 2)))


def _of_pair(name):
    return lambda ones, n: getattr(tf, name)(ones(1), ones(1), reduction="sum")  # kl_div warns of its mean


def _of_classes(name):
    return lambda ones, n: getattr(tf, name)(ones(1, 1), torch.zeros_like(ones(1), dtype=torch.int64))


def _fourier(ones, n):
    """The numbers that a transform is made of."""
    return torch.fft.fft(ones(1)).real


def _linear(ones, n):
    return tf.linear(ones(1, 1), ones(1, 1))


# The serial function of each layer with a list to be on; n: spatial dims. Of what torch refuses to autocast, the dtype
# of its twin.
_SERIAL = {
    "dist_linear": _linear,
    "dist_expert_linear": _linear,
    "dist_matmul": lambda ones, n: ones(1, 1) @ ones(1, 1),
    "dist_tsqr": lambda ones, n: torch.linalg.qr(ones(1, 1))[0],
    "dist_local_conv": _linear,
    "dist_local_conv_transpose": _linear,
    "dist_conv": _of_weights("conv"),
    "dist_conv_transpose": _of_weights("conv_transpose"),
    "dist_attention": lambda ones, n: tf.scaled_dot_product_attention(*[ones(1, 1, 1, 1)] * 3),
    "dist_max_pool": _of_dims("max_pool"),
    "dist_avg_pool": _of_dims("avg_pool"),
    "dist_l2_pool": lambda ones, n: getattr(tf, f"lp_pool{n}d")(ones(*(1,) * (n + 2)), 2, 1),
    "dist_adaptive_max_pool": _of_dims("adaptive_max_pool"),
    "dist_adaptive_avg_pool": _of_dims("adaptive_avg_pool"),
    **dict.fromkeys(("dist_fftn", "dist_ifftn", "dist_rfftn", "dist_irfftn", "dist_spectral_conv"), _fourier),
    **dict.fromkeys(("dist_dctn", "dist_idctn", "dist_dstn", "dist_idstn"), _fourier),
    "dist_interpolate": lambda ones, n: tf.interpolate(ones(*(1,) * (n + 2)), size=2),
    "dist_batch_norm": lambda ones, n: tf.batch_norm(ones(2, 1), None, None, training=True),
    "dist_instance_norm": lambda ones, n: tf.instance_norm(ones(1, 1, 2)),
    "dist_layer_norm": lambda ones, n: tf.layer_norm(ones(1, 2), (2,)),
    "dist_rms_norm": lambda ones, n: tf.rms_norm(ones(1, 2), (2,)),
    "dist_group_norm": lambda ones, n: tf.group_norm(ones(1, 1, 2), 1),
    "dist_sum": lambda ones, n: ones(1).sum(),
    "dist_mean": lambda ones, n: ones(1).mean(),
    "dist_var": lambda ones, n: ones(2).var(),
    "dist_cumsum": lambda ones, n: ones(1).cumsum(0),
    "dist_cumprod": lambda ones, n: ones(1).cumprod(0),
    "dist_logsumexp": lambda ones, n: ones(1).logsumexp(0),
    "dist_max": lambda ones, n: ones(1).amax(0),
    "dist_min": lambda ones, n: ones(1).amin(0),
    "dist_norm": lambda ones, n: torch.linalg.vector_norm(ones(1)),
    "dist_cross_entropy": _of_classes("cross_entropy"),
    "dist_nll_loss": _of_classes("nll_loss"),
    "dist_mse_loss": _of_pair("mse_loss"),
    "dist_l1_loss": _of_pair("l1_loss"),
    "dist_huber_loss": _of_pair("huber_loss"),
    "dist_smooth_l1_loss": _of_pair("smooth_l1_loss"),
    "dist_kl_div": _of_pair("kl_div"),
    "dist_bce_loss": _of_pair("binary_cross_entropy_with_logits"),
    "dist_bce_with_logits_loss": _of_pair("binary_cross_entropy_with_logits"),
    "dist_poisson_nll_loss": _of_pair("poisson_nll_loss"),
}


@lru_cache(maxsize=1024)
def _dtype(layer, n, dtype, device, _autocast_dtype):
    with torch.no_grad():
        return _SERIAL[layer](lambda *shape: torch.ones(shape, dtype=dtype, device=device), n).dtype


def autocast(layer: str | None, ndim: int, *tensors):
    """``tensors`` in the dtypes that torch.autocast, where it is on, gives those of the serial function; a tuple.

    Args:
        layer: whose function that is, see the table above; where it has none, nothing is cast.
        ndim: number of dims of the layer's x: torch's lists differ by it.
        tensors: floating ones are cast, but for float64, as torch has it; others, ``None`` and no tensors stay as they
            are.
    """
    if not _torch.any_autocast() or layer not in _SERIAL:
        return tensors
    return tuple([_cast(layer, min(max(ndim - 2, 1), 3), t) for t in tensors])


def _cast(layer, n, t):
    if (
        not isinstance(t, torch.Tensor)
        or not t.is_floating_point()
        or t.dtype == torch.float64
        or not _on(t.device.type)
    ):
        return t
    return t.to(_dtype(layer, n, t.dtype, t.device, torch.get_autocast_dtype(t.device.type)))


def _on(device: str) -> bool:
    return is_autocast_available(device) and torch.is_autocast_enabled(device)


def without_autocast(x):
    """A context in which operators on ``x`` keep its dtype: what is worked out in float32 on purpose stays so."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if _torch.any_autocast() and _on(kind) else contextlib.nullcontext()
