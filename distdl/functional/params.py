"""How layers take parameters that several ranks hold: as the caller marks them, or marked here."""

from __future__ import annotations

from ..agree import partition_of
from ..errors import PartitionError, ShapeError
from .movement import mark_varying

__all__ = ["check_bias", "replicated"]


def check_bias(op, P, bias, features: int) -> None:
    """Raise unless ``bias`` has one number for each of this rank's output features: nothing is broadcast, or left out."""
    if bias is not None and tuple(getattr(bias, "shape", ())) != (features,):
        raise ShapeError("bias is not this rank's block", op=op, partitions=P, expected=(features,),
                         actual=tuple(getattr(bias, "shape", ())) or type(bias).__name__,
                         next_step="split the bias as w's output features are")


def replicated(params, P, dims, *tensors):
    """Parameters that are equal on all ranks along partition dims ``dims``, ready to meet varying tensors.

    Args:
        params: ``"varying"``: the caller has marked or broadcast them, and they are returned as they are. ``"invariant"``: each
            is one logical value stored on every rank, and :func:`mark_varying` makes its gradient the sum over those ranks.
        P, dims: the layer's partition (or layout), and the dims along which the parameters are copies.
        tensors: the parameters, this rank's blocks; ``None`` stays ``None``.

    Returns:
        A tuple of the tensors. Messages: none forward; backward one all-reduce over ``dims`` for all tensors together.

    Raises:
        PartitionError: another value of ``params``.
    """
    if params == "varying":
        return tensors
    if params != "invariant":
        raise PartitionError("unknown kind of parameters", op="replicated", expected='"varying" or "invariant"', actual=params,
                             next_step="see \"The cotangent convention\" in the documentation", partitions=P)
    if partition_of(P).index() is None:  # a rank outside keeps its own: its empty part needs their shapes
        return tensors
    present = [t for t in tensors if t is not None]
    marked = iter(mark_varying(present, partition_of(P), dims) if present else ())
    return tuple(None if t is None else next(marked) for t in tensors)
