"""The functional operators: ``import distdl.functional as F``. This rank's tensor in, this rank's result out.

Wherever a partition stands, a Layout is accepted too; then (or with ``shape``) no rank asks another, and the caller
promises equal shape, dtype, device and requires_grad. A movement's ``x`` may be a tensor or a pytree of tensors, which
go as one set of messages. What a rank outside the source partition passes is ignored; outside the destination it gets a
connected tensor without elements. Every function raises ShapeError or PartitionError on bad local input and, where it
negotiates, AgreementError on every rank.
"""

from .._arguments import check_functions
from .._names import only_public
from ..calls import public
from ..compiled import constants, in_graphs, outside
from ..index import Index
from ..movement.blocks import gather, repartition, roll, scatter
from ..movement.copies import all_sum_reduce, broadcast, invariant_sum, mark_varying, sum_reduce
from ..movement.gathers import all_gather, reduce_scatter
from ..movement.halo import HaloSpec, halo_exchange
from ..movement.peers import permute, shift
from ..movement.reorder import block_cyclic, positions, reorder, reorder_layout, zigzag, zigzag_positions
from ..movement.rows import gather_rows, scatter_add_rows
from ..movement.split_phase import start, wait
from ..partition import Layout, Partition
from ..ties import nothing, tie
from .attention import attention_needs, dist_attention
from .class_loss import dist_cross_entropy, dist_nll_loss
from .conv import conv_layout, dist_conv
from .conv_transpose import conv_transpose_layout, dist_conv_transpose
from .dropout import dist_dropout, dist_feature_dropout
from .embedding import dist_embedding
from .enter import check_bias, layout_of, replicated
from .expert import dist_expert_linear, expert_parallel
from .fft import (
    dist_fftfreq,
    dist_fftn,
    dist_ifftn,
    dist_irfftn,
    dist_rfftfreq,
    dist_rfftn,
    fft_layout,
    fft_stages,
)
from .interpolate import dist_interpolate, interpolate_layout
from .linear import dist_linear
from .loss import (
    dist_bce_loss,
    dist_bce_with_logits_loss,
    dist_huber_loss,
    dist_kl_div,
    dist_l1_loss,
    dist_mse_loss,
    dist_poisson_nll_loss,
    dist_smooth_l1_loss,
)
from .matmul import dist_matmul, matmul_layout
from .neighborhood import dist_neighborhood_attention
from .neon import dist_lcn, dist_local_conv, dist_local_conv_transpose
from .norm import dist_batch_norm, dist_group_norm, dist_instance_norm, dist_layer_norm, dist_rms_norm
from .pad import dist_pad, dist_unpad, pad_layout
from .pool import (
    dist_adaptive_avg_pool,
    dist_adaptive_max_pool,
    dist_avg_pool,
    dist_l2_pool,
    dist_max_pool,
    pool_layout,
)
from .qr import dist_tsqr
from .random import fold_in, normal, uniform
from .reduce import dist_argmax, dist_logsumexp, dist_max, dist_mean, dist_min, dist_norm, dist_sum, dist_var
from .reshape import (
    cat_layout,
    dist_cat,
    dist_flatten,
    dist_stack,
    dist_unflatten,
    stack_layout,
)
from .rotary import rotary_embedding
from .sample import dist_deposit, dist_sample, sample_index
from .scan import associative_scan, dist_cumprod, dist_cumsum, dist_scan
from .sparse import dist_spmv
from .spectral import dist_spectral_conv, spectral_layout
from .trigonometric import dist_dctn, dist_dstn, dist_idctn, dist_idstn

__all__ = [
    # movements: blocks of a global tensor
    "repartition",
    "scatter",
    "gather",
    "roll",
    "reorder",
    "zigzag",
    "block_cyclic",
    "reorder_layout",
    "positions",
    "zigzag_positions",
    "halo_exchange",
    # movements: copies and sums
    "broadcast",
    "sum_reduce",
    "all_sum_reduce",
    "mark_varying",
    "invariant_sum",
    "all_gather",
    "reduce_scatter",
    # movements: whole tensors from rank to rank
    "shift",
    "permute",
    # movements: rows by their numbers
    "gather_rows",
    "scatter_add_rows",
    "dist_spmv",
    # values of a grid between its points
    "dist_sample",
    "dist_deposit",
    "sample_index",
    # movements in two phases; dependence without a value
    "start",
    "wait",
    "nothing",
    "tie",
    # linear layers and embeddings
    "dist_linear",
    "dist_embedding",
    "dist_expert_linear",
    "expert_parallel",
    # for layers of your own
    "layout_of",
    "check_bias",
    "replicated",
    # dense linear algebra
    "dist_matmul",
    "matmul_layout",
    "dist_tsqr",
    # windows: convolution, pooling, interpolation
    "dist_conv",
    "conv_layout",
    "dist_conv_transpose",
    "conv_transpose_layout",
    "dist_local_conv",
    "dist_local_conv_transpose",
    "dist_lcn",
    "dist_max_pool",
    "dist_avg_pool",
    "dist_l2_pool",
    "pool_layout",
    "dist_adaptive_max_pool",
    "dist_adaptive_avg_pool",
    "dist_interpolate",
    "interpolate_layout",
    # Fourier transforms
    "dist_fftn",
    "dist_ifftn",
    "dist_rfftn",
    "dist_irfftn",
    "fft_layout",
    "fft_stages",
    "dist_fftfreq",
    "dist_rfftfreq",
    "dist_dctn",
    "dist_idctn",
    "dist_dstn",
    "dist_idstn",
    "dist_spectral_conv",
    "spectral_layout",
    # attention
    "dist_attention",
    "attention_needs",
    "dist_neighborhood_attention",
    "rotary_embedding",
    # norms
    "dist_batch_norm",
    "dist_group_norm",
    "dist_instance_norm",
    "dist_layer_norm",
    "dist_rms_norm",
    # reductions
    "dist_sum",
    "dist_mean",
    "dist_var",
    "dist_norm",
    "dist_max",
    "dist_min",
    "dist_argmax",
    "dist_logsumexp",
    # scans
    "dist_scan",
    "dist_cumsum",
    "dist_cumprod",
    "associative_scan",
    # losses
    "dist_mse_loss",
    "dist_l1_loss",
    "dist_smooth_l1_loss",
    "dist_huber_loss",
    "dist_cross_entropy",
    "dist_nll_loss",
    "dist_bce_loss",
    "dist_bce_with_logits_loss",
    "dist_kl_div",
    "dist_poisson_nll_loss",
    # shapes
    "dist_flatten",
    "dist_unflatten",
    "dist_cat",
    "cat_layout",
    "dist_stack",
    "stack_layout",
    "dist_pad",
    "pad_layout",
    "dist_unpad",
    # random numbers
    "uniform",
    "normal",
    "fold_in",
    "dist_dropout",
    "dist_feature_dropout",
]
public({name: globals()[name] for name in __all__})
constants(Partition, Layout, HaloSpec, Index)
in_graphs(globals(), set(__all__) - {"layout_of"})
outside(globals(), ("layout_of",), "distdl: ask for layouts outside of compiled functions")
check_functions(globals(), __all__)
__getattr__ = only_public(__name__)
del HaloSpec, Index, Layout, Partition, check_functions, constants, in_graphs, only_public, outside, public
