"""How layers take parameters that several ranks hold: as the caller marks them, or marked here."""

from __future__ import annotations

from ..agree import partition_of
from ..errors import PartitionError, ShapeError
from ..held import hold, mark_of, unmarked_dims
from ..movement.copies import mark_varying

__all__ = ["check_bias", "replicated"]


def check_bias(op, P, bias, features: int) -> None:
    """Raise unless ``bias`` has one number for each of this rank's output features: nothing is broadcast, or left
    out."""
    if bias is not None and tuple(getattr(bias, "shape", ())) != (features,):
        raise ShapeError(
            "bias is not this rank's block",
            op=op,
            partitions=P,
            expected=(features,),
            actual=tuple(getattr(bias, "shape", ())) or type(bias).__name__,
            next_step="split the bias as w's output features are",
        )


def replicated(params, P, dims, *tensors):
    """Parameters that are equal on all ranks along partition dims ``dims``, ready to meet varying tensors.

    Args:
        params: ``"varying"``: the caller has marked or broadcast them, and they are returned as they are.
            ``"invariant"``: each is one logical value stored on every rank, and :func:`mark_varying` makes its gradient
            the sum over those ranks (over the rest of them, where the caller has marked it over some).
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
        raise PartitionError(
            "unknown kind of parameters",
            op="replicated",
            expected='"varying" or "invariant"',
            actual=params,
            next_step='see "The cotangent convention" in the documentation',
            partitions=P,
        )
    where = partition_of(P)
    if not where.active:
        return tensors
    mark = mark_of(where, set(range(where.ndim)).difference(where.dims(dims)))
    left: dict[tuple, list] = {}  # those that are to be marked along the same dims: all of them, mostly
    for i, t in enumerate(tensors):
        if t is not None:
            hold(t, mark)
            left.setdefault(unmarked_dims(t, where, dims), []).append(i)
    marked = list(tensors)
    for over, places in left.items():
        for i, y in zip(places, mark_varying([tensors[i] for i in places], where, over)):
            marked[i] = y
    return tuple(marked)
