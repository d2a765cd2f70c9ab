"""The kinds of arguments: for each name in a public signature what it must be, in words, and a test."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterable, Mapping
from numbers import Number, Real
from operator import index
from typing import Any, NamedTuple

import torch

from .boxes import is_int
from .errors import DistdlError, PartitionError, ShapeError
from .index import Index
from .linear_map import LinearMap
from .movement.halo import HaloSpec
from .partition import Layout, Partition
from .plan import Plan
from .world import world


class Kind(NamedTuple):
    """What an argument must be, in words, and the test."""

    words: str
    fits: Callable[[Any], bool]
    error: type[DistdlError] = ShapeError


def _is_number(value) -> bool:
    return (isinstance(value, Real) and not isinstance(value, bool)) or (
        isinstance(value, torch.Tensor) and value.ndim == 0 and value.dtype != torch.bool
    )


def _is_count(value, least: int = 0) -> bool:
    return is_int(value) and least <= index(value) < 2**40


def _is_size(value) -> bool:
    return _is_count(value, 1)


def _several(fits) -> Callable[[Any], bool]:
    """Whether a value is a sequence of what fits."""
    return lambda value: isinstance(value, (tuple, list)) and all(map(fits, value))


def _one_or_several(fits) -> Callable[[Any], bool]:
    return lambda value: fits(value) or _several(fits)(value)


def _or_none(fits) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


def _mapping(keys, values) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Mapping) and all(keys(k) and values(v) for k, v in value.items())


def _is(*types) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types)


def _is_dims(value) -> bool:
    if isinstance(value, dict):
        return all(map(is_int, (*value, *value.values())))
    return value is None or is_int(value) or (isinstance(value, (tuple, list, set, range)) and all(map(is_int, value)))


def _is_modes(value) -> bool:
    return value is None or is_int(value) or (_several(is_int)(value) and len(value) == 2)


def is_tree(value) -> bool:
    leaves = torch.utils._pytree.tree_leaves(value)
    return bool(leaves) and all(isinstance(leaf, torch.Tensor) for leaf in leaves)


def _has_specs(value) -> bool:
    leaves = torch.utils._pytree.tree_leaves(value)
    return bool(leaves) and all(isinstance(leaf, HaloSpec) for leaf in leaves)


def _is_device(value) -> bool:
    try:
        device = torch.device(value)
    except (TypeError, RuntimeError):
        return False
    # "cuda" alone is one everywhere: where there is none, torch says why.
    there = device.type != "cuda" or device.index is None or device.index < torch.cuda.device_count()
    return there and not isinstance(value, bool)


def _is_iterable(value) -> bool:
    return isinstance(value, Iterable)


def _is_sharding(value) -> bool:
    return hasattr(value, "gather") and hasattr(value, "layout")


def _pickles(value) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # of any kind: a value says itself how it is pickled
        return False
    return True


def _has_plan(value) -> bool:
    return isinstance(value, (LinearMap, Plan))


def _is_drawn(value) -> bool:
    return _has_plan(value) or isinstance(value, (Partition, Layout, HaloSpec))


def _has_gain(value) -> bool:
    torch.nn.init.calculate_gain(value)
    return True


_PLACE = Kind("a Partition or a Layout", _is(Partition, Layout), PartitionError)
_LAYOUT = Kind("a Layout", _is(Layout), PartitionError)
_TENSOR = Kind("a tensor, this rank's block", _is(torch.Tensor))
_TENSOR_OR_NONE = Kind("a tensor, or None", lambda v: v is None or isinstance(v, torch.Tensor))
_TENSORS = Kind("a sequence of tensors", _several(_is(torch.Tensor)))
_TREE = Kind("a tensor, or containers of tensors", is_tree)
_INTEGER = Kind("an integer", is_int)
_COUNT = Kind("an integer, at least 1", lambda v: _is_count(v, 1))
_SIZE = Kind("an integer, at least 0", _is_count)
_NUMBER = Kind("a number", _is_number)
_TRUTH = Kind("True or False", lambda v: isinstance(v, bool) or (is_int(v) and index(v) in (0, 1)))
_TEXT = Kind("a string", _is(str))
_FUNCTION = Kind("a function", callable)
_MODULE = Kind("a torch.nn.Module", _is(torch.nn.Module))
_SHAPE = Kind("a sequence of sizes", _several(_is_count))
_SIZES = Kind("an integer, at least 0, or one for each dim", _one_or_several(_is_count))
_STEPS = Kind("an integer, at least 1, or one for each dim", _one_or_several(lambda v: _is_count(v, 1)))
_DIMS = Kind("an integer, or several", _is_dims)
_RANKS = Kind("ranks of the world", _several(lambda v: _is_count(v) and v < world().size))
_PATH = Kind("a path", lambda v: isinstance(v, str) or hasattr(v, "__fspath__"))

# By the argument's name, or by ``function.name`` where that is another thing there.
KINDS: dict[str, Kind] = {
    **dict.fromkeys(("P", "P_in", "P_out", "P_src", "P_dst"), _PLACE),
    **dict.fromkeys(("L", "layout", "where", "x_layout", "y_layout", "idx_layout", "L_in", "L_out"), _LAYOUT),
    "spec": Kind("a HaloSpec", _is(HaloSpec), PartitionError),
    "halo_exchange.spec": Kind("a HaloSpec, or containers of them like those of x", _has_specs, PartitionError),
    "index": Kind("an Index", _is(Index), PartitionError),
    **dict.fromkeys(("wanted", "rows", "values"), _TENSOR),
    "known.wanted": _TENSORS,
    "points": _TENSOR,
    **dict.fromkeys((f"{op}.order" for op in ("dist_sample", "dist_deposit", "sample_index")), _SIZE),
    "tail_shape": _SHAPE,
    "weights": Kind("{dim: a weight for each index}", _mapping(is_int, _is_iterable), PartitionError),
    **dict.fromkeys(("x", "tree"), _TREE),
    **dict.fromkeys(("w", "y", "idx", "logits", "log_probs", "target", "weight", "bias", "pos_weight"), _TENSOR),
    **dict.fromkeys(("q", "k", "positions", "dist_attention.v", "dist_neighborhood_attention.v"), _TENSOR),
    **dict.fromkeys(("L_q", "L_kv"), _LAYOUT),
    "window": _SIZE,
    "documents": Kind("a sequence of bounds", _several(_is_count)),
    "mask": Kind("a tensor, or a function of positions", lambda v: isinstance(v, torch.Tensor) or callable(v)),
    "method": Kind("the name of a method, or a pair of one and a number", lambda v: isinstance(v, (str, tuple))),
    "kv_shape": Kind("a shape, or a Layout", lambda v: isinstance(v, Layout) or _SHAPE.fits(v)),
    **dict.fromkeys(("dist_attention.scale", "dist_neighborhood_attention.scale", "base", "rotary_base"), _NUMBER),
    **dict.fromkeys(("embed_dim", "num_heads", "num_kv_heads"), _COUNT),
    **dict.fromkeys(("running_mean", "running_var", "num_batches_tracked"), _TENSOR),
    **dict.fromkeys(("tensors", "xs"), _TENSORS),
    **dict.fromkeys(("root", "offset", "start_dim", "padding_idx", "ignore_index"), _INTEGER),
    **dict.fromkeys(("in_features", "out_features", "in_channels", "groups", "num_features", "num_groups"), _COUNT),
    **dict.fromkeys(("num_channels", "num_embeddings", "embedding_dim", "num_experts", "features"), _COUNT),
    **dict.fromkeys(("eps", "p", "a", "b", "low", "high", "mean", "std", "gain", "delta", "beta"), _NUMBER),
    **dict.fromkeys(("label_smoothing", "correction", "momentum", "max_norm", "norm_type", "ord", "tol"), _NUMBER),
    **dict.fromkeys(("divisor_override",), _COUNT),
    **dict.fromkeys(("shape", "in_shape", "out_shape", "weight_shape"), _SHAPE),
    **dict.fromkeys(("kernel_size", "stride", "dilation", "input_size"), _STEPS),
    **dict.fromkeys(("output_padding", "size"), _SIZES),
    "output_size": Kind("an integer, or one (or None) for each dim", _one_or_several(_or_none(_is_count))),
    "padding": Kind(
        'integers, "same" or "valid"', lambda v: v in ("same", "valid") if isinstance(v, str) else _SIZES.fits(v)
    ),
    "pad": Kind("a sequence of integers, two for each dim from the last", _several(is_int)),
    "scale_factor": Kind("a number, or one for each dim", _one_or_several(_is_number)),
    "out_channels": Kind(
        "an integer, or a tuple: one for each block",
        lambda v: _is_count(v, 1) or (isinstance(v, tuple) and _several(lambda n: _is_count(n))(v)),
    ),
    "normalized_shape": Kind("an integer or a sequence of them", _one_or_several(lambda v: _is_count(v, 1))),
    **dict.fromkeys(("dim", "dims"), _DIMS),
    **dict.fromkeys(("cat_layout.layouts",), Kind("a sequence of Layouts", _several(_is(Layout)), PartitionError)),
    "layouts": Kind("{name: Layout}", _mapping(_is(str), _is(Layout)), PartitionError),
    "shard_state.state": Kind("{name: global tensor}", _mapping(_is(str), _is(torch.Tensor))),
    "names": Kind("a sequence of names", _several(_is(str))),
    "optimizer": Kind("a torch.optim.Optimizer", _is(torch.optim.Optimizer)),
    "parameter": _TENSOR,
    "transport": Kind("an engine (distdl.engine.transport)", lambda v: hasattr(v, "all_gather") and hasattr(v, "wait")),
    **dict.fromkeys(("cuda", "half_sums"), _TEXT),
    **dict.fromkeys(("share", "simulate.forward", "simulate.backward", "out_weight", "in_weight"), _NUMBER),
    "check_grads.step": _NUMBER,
    "rank": _COUNT,
    **dict.fromkeys(("param", "reduce", "output"), Kind("a torch.dtype", _is(torch.dtype))),
    "pairs": Kind("pairs of ranks", _several(lambda v: isinstance(v, (tuple, list)) and len(v) == 2)),
    "seed": Kind("an integer, or a tensor of one", lambda v: is_int(v)),
    "dtype": Kind("a torch.dtype", _is(torch.dtype)),
    "device": Kind("a device, or its name", _is_device),
    **dict.fromkeys(("module", "model"), _MODULE),
    "Sharded.layer": Kind("a layer of dd.nn", lambda v: _MODULE.fits(v) and hasattr(v, "layouts"), PartitionError),
    **dict.fromkeys(("f", "fn", "forward", "adjoint", "loss", "hook", "function", "begin"), _FUNCTION),
    "expert": Kind("a tensor: the expert of each token", _is(torch.Tensor)),
    **dict.fromkeys(("dist_cat.dim", "dist_stack.dim", "cat_layout.dim", "stack_layout.dim"), _INTEGER),
    "shapes": Kind("a sequence of shapes", _several(_several(_is_count))),
    "dist_matmul.shapes": Kind(
        "two shapes, or Layouts", lambda v: _several(lambda s: isinstance(s, Layout) or _SHAPE.fits(s))(v)
    ),
    **dict.fromkeys(("dist_matmul.a", "dist_matmul.b", "dist_tsqr.a"), _TENSOR),
    **dict.fromkeys(("matmul_layout.L_a", "matmul_layout.L_b"), _LAYOUT),
    "panels": _COUNT,
    # dd.solve
    **dict.fromkeys(("cg.A", "lsqr.A", "lanczos.A", "preconditioner", "lbfgs.f", "progress"), _FUNCTION),
    **dict.fromkeys(("cg.b", "cg.x0", "lsqr.b", "v0"), _TENSOR),
    **dict.fromkeys(("P_range", "P_domain"), _PLACE),
    **dict.fromkeys(("cg.order", "lsqr.order", "max_iter"), Kind("an integer, at least 0", _is_count)),
    **dict.fromkeys(("lanczos.k", "steps", "history"), _COUNT),
    **dict.fromkeys(("damp",), _NUMBER),
    "lbfgs.x0": _TREE,
    "lbfgs.loss": _TEXT,
    **dict.fromkeys(("align_corners", "recompute_scale_factor"), _TRUTH),
    **dict.fromkeys(
        ("keyed.held_P", "keyed.wanted_P", "Layout.partition", "gathering.P", "pipeline.P"),
        Kind("a Partition", _is(Partition), PartitionError),
    ),
    **dict.fromkeys(
        ("keyed.held_shapes", "keyed.wanted_shapes"), Kind("a tuple of shapes", _several(_several(_is_count)))
    ),
    "keyed.source": Kind("a tuple of places, or None", _several(_or_none(is_int))),
    **dict.fromkeys(("name", "op", "world", "world_name", "kind", "addr"), _TEXT),
    "parameter_layout.dims": Kind("for each dim a dim of the partition, or None", _several(_or_none(is_int))),
    "nonlinearity": Kind("one that torch.nn.init.calculate_gain knows", _has_gain),
    "containers": Kind("classes of torch.nn.Module", _several(_is(type))),
    "twins": Kind("{class: function of a layer and P}", _mapping(_is(type), callable)),
    "classes": Kind("a class, or a tuple of them", _one_or_several(_is(type))),
    "s": Kind("None, or a size (or None) for each dim", _or_none(_one_or_several(_or_none(is_int)))),
    **dict.fromkeys(("keep", "modes"), Kind("for each dim a number, or (low, high)", _one_or_several(_is_modes))),
    "d": _NUMBER,
    "type": Kind("1, 2, 3 or 4", lambda v: is_int(v) and 1 <= v <= 4, PartitionError),
    **dict.fromkeys(
        ("reorder.order", "reorder_layout.order", "positions.order", "dist_attention.order"),
        Kind('"zigzag", a block size, or ranges of each coordinate', _is(str, int, tuple, list)),
    ),
    **dict.fromkeys(("reorder.dim", "reorder_layout.dim", "positions.dim", "zigzag.dim", "block_cyclic.dim"), _INTEGER),
    "zigzag_positions.dim": _INTEGER,
    "block_cyclic.block": _COUNT,
    **dict.fromkeys(("dist_scan.a", "dist_scan.b", "initial"), _TENSOR),
    "associative_scan.xs": _TREE,
    **dict.fromkeys(("dist_scan.dim", "dist_cumsum.dim", "dist_cumprod.dim", "associative_scan.dim"), _INTEGER),
    **dict.fromkeys(("dist_fftfreq.dim", "dist_rfftfreq.dim"), _INTEGER),
    # the same names, as other things
    **dict.fromkeys((f"{op}.where" for op in ("all_sum_reduce", "invariant_sum", "mark_varying", "shift")), _PLACE),
    **dict.fromkeys((f"dist_batch_norm.running_{what}" for what in ("mean", "var")), _TENSOR_OR_NONE),
    "gathering.pairs": Kind("{tensor dim: partition dim}", _mapping(is_int, is_int)),
    "gathering.sizes": Kind("{tensor dim: block sizes}", _mapping(is_int, _several(_is_count))),
    **dict.fromkeys(("x_dim", "y_dim"), _INTEGER),
    **dict.fromkeys(
        ("dist_local_conv_transpose.output_size", "dist_interpolate.size", "interpolate_layout.size"),
        Kind(
            "an integer, at least 0, one for each dim, or a Layout", lambda v: isinstance(v, Layout) or _SIZES.fits(v)
        ),
    ),
    "replicated.params": _TEXT,
    "HaloSpec.shape": Kind("a shape; with a Layout the widths", _one_or_several(_is_count)),
    **dict.fromkeys(
        ("save.tensors", "async_save.tensors", "save_dcp.tensors"),
        Kind("{name: tensor}", _mapping(_is(str), _is(torch.Tensor))),
    ),
    "assert_copies.tensors": _TREE,
    "pipeline.stages": Kind("a sequence of functions", _several(callable)),
    "pipeline.shapes": _FUNCTION,
    "GradientSync.params": Kind("a module, or tensors", lambda v: _MODULE.fits(v) or _TREE.fits(v)),
    "tie.value": _TREE,
    # dd.parallel
    **dict.fromkeys(("params", "grads", "yes", "no", "v"), _TREE),
    **dict.fromkeys(("total", "norm"), Kind("a tensor of one number", lambda v: _TENSOR.fits(v) and v.numel() == 1)),
    "condition": Kind("a tensor of one truth value", lambda v: v.dtype == torch.bool and v.numel() == 1),
    "collective_assert.condition": Kind("a truth value", lambda v: isinstance(bool(v), bool)),
    "average_parameters.weight": _NUMBER,
    "batches": Kind("batches to iterate over, at least one", lambda v: _is_iterable(v) and len(tuple(v)) > 0),
    "states": Kind("the list that the last call returned", _is(list)),
    "limits": Kind("two numbers of bytes", lambda v: _several(_is_count)(v) and len(v) == 2),
    "periods": Kind("{number of steps: dims}", _mapping(lambda v: _is_count(v, 1), _is_dims)),
    **dict.fromkeys((f"{op}.ranks" for op in ("check_grads", "collective_assert", "gather_objects")), _RANKS),
    **dict.fromkeys(("processes", "ranks"), Kind("a sequence of integers, at least 0", _several(_is_count))),
    "nodes": Kind("the ranks of each node", _several(_several(_is_count))),
    "leaves": _TENSORS,
    "layers": Kind("a sequence of functions", _several(callable)),
    "shardings": Kind("a Sharding for each layer, or a tuple of them", _several(_one_or_several(_is_sharding))),
    "parameters": Kind("a module, or tensors", lambda v: _MODULE.fits(v) or _TREE.fits(v)),
    "table": Kind("dd.parallel.schedule(...)", _several(_several(lambda v: isinstance(v, tuple) and len(v) == 3))),
    # dd.interop
    "mesh": Kind("a DeviceMesh", lambda v: hasattr(v, "mesh_dim_names"), PartitionError),
    "t": Kind("a DTensor", lambda v: hasattr(v, "placements") and hasattr(v, "device_mesh")),
    "tensor": Kind("a DTensor, or a DeviceMesh", lambda v: hasattr(v, "placements") or hasattr(v, "mesh_dim_names")),
    "placements": Kind("Shard, Replicate or Partial for each mesh dim", _several(lambda v: hasattr(v, "is_shard"))),
    "block": _TENSOR,
    "device_type": Kind("a kind of device: cpu or cuda", lambda v: isinstance(v, str) and _is_device(v)),
    # dd.trace, dd.suggest
    "trace.rank": Kind('a rank, some ranks, or "classes"', lambda v: v == "classes" or _one_or_several(_is_count)(v)),
    **dict.fromkeys(("trace.size", "suggest.size", "suggest_chain.size"), Kind("a number of ranks", _is_size)),
    "candidates": Kind("partitions, shapes of grids, or a number of ranks", lambda v: is_int(v) or _is_iterable(v)),
    "suggest.ndim": Kind("an integer, at least 0", _is_count),
    "machine": Kind("a dd.machines.Machine", lambda v: hasattr(v, "near_bandwidth")),
    "suggest_chain.first": _PLACE,
    # dd.viz
    "plan": Kind("a plan, or a map of dd.maps", _has_plan),
    "titles": Kind("a sequence of texts", _several(_is(str))),
    "what": Kind("a Partition, a Layout, a HaloSpec, a plan or a map", _is_drawn),
    **dict.fromkeys(("count", "growth", "backoff", "scale", "good"), _NUMBER),
    **dict.fromkeys(("stages", "microbatches", "chunks", "interval", "n", "step", "order", "port"), _COUNT),
    "path": _PATH,
    "gather_objects.value": Kind("something that can be pickled", _pickles),
    "value": Kind("a number", lambda v: isinstance(v, Number) or _is_number(v)),
    "A": Kind("a map", lambda v: isinstance(v, LinearMap) or _several(_is(LinearMap))(v)),
}


# What an argument must be beside others of the call, where each by itself is of its kind; by names as above.
BESIDE: dict[str, tuple[str, Callable[[Any, Mapping[str, Any]], bool]]] = {
    **dict.fromkeys(
        (f"{op}.{name}" for op in ("dist_bce_loss", "dist_bce_with_logits_loss") for name in ("weight", "pos_weight")),
        ("a tensor that broadcasts to x", lambda v, given: _broadcasts(v, given["x"])),
    ),
    "v": ("containers and shapes as x has", lambda v, given: _shapes(v) == _shapes(given["x"])),
    "yes": ("containers and shapes as no has", lambda v, given: _shapes(v) == _shapes(given["no"])),
    "w": ("a matrix of each expert on this rank", lambda v, given: "expert" not in given or v.dim() == 3),
    "P": ("a partition of batch, channels and space", lambda v, given: _ndim(v) == given["self"].n + 2),
}


def _broadcasts(a: torch.Tensor, b: torch.Tensor) -> bool:
    try:
        return torch.broadcast_shapes(a.shape, b.shape) == b.shape
    except RuntimeError:
        return False


def _shapes(tree):
    leaves, spec = torch.utils._pytree.tree_flatten(tree)
    return [leaf.shape for leaf in leaves], str(spec)


def _ndim(place) -> int:
    return getattr(place, "partition", place).ndim


def kind_of(function: str, parameter: inspect.Parameter) -> Kind | None:
    """What the parameter must be. Its default says it where it is a truth value or a text, and that None will do."""
    name, default = parameter.name, parameter.default
    kind = KINDS.get(f"{function}.{name}")
    if kind is None and isinstance(default, bool):
        kind = _TRUTH
    if kind is None:
        kind = KINDS.get(name)
        if isinstance(default, str) and (kind is None or not kind.fits(default)):  # the name is another thing here
            kind = _TEXT
    if kind is None or default is not None:
        return kind
    return kind._replace(words=f"{kind.words}, or None", fits=_or_none(kind.fits))
