"""Check agreement before every message: ``with dd.checking(): ...``, or ``DISTDL_CHECK=1`` in the environment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..engine import transport as _transport
from ..errors import AgreementError
from .observer import Observer, default_timeout
from .recorder import Recorder


@contextmanager
def checking(timeout: float | None = None) -> Iterator[None]:
    """Compare, before every movement inside the block, what its ranks are about to do; for all threads of this process.

    Every movement (forward, adjoint, tangent, batch) and every negotiation first swaps one small message with each of
    its ranks: operator, partitions, number of tensors, batch axes, dtype, device kind and layouts must be equal. Where
    a cotangent is invariant, and where a value is marked varying, the copies must be equal to the last bit. Results and
    graphs do not change. Enter it on all ranks.

    Args:
        timeout: seconds that a rank may be late (default: ``DISTDL_CHECK_TIMEOUT``, else 60).

    Raises:
        AgreementError: inside the block, on every rank of the movement: the ranks disagree.
        AbsenceError: a rank did not come in time; the error says what it last completed, and where the others are.
        InvariantError: copies of an invariant cotangent or value differ; the error names the rule that was broken.

    Example:
        >>> with dd.checking():
        ...     y = F.dist_sum(torch.ones(3), dd.Partition((1,)))
        ...
        >>> y
        tensor(3.)
    """
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        raise AgreementError(
            "not a time limit",
            op="checking",
            expected="seconds, more than 0",
            actual=timeout,
            next_step="dd.checking(timeout=30), or leave it out",
        )
    before = _transport.observer
    checks = Observer(default_timeout() if timeout is None else timeout)
    _transport.observer = before.over(checks) if isinstance(before, Recorder) else checks
    try:
        yield
    finally:
        _transport.observer = before
