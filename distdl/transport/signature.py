"""Signatures: what a rank is about to do, in a form that others can compare, and what is wrong where they differ."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import torch

from .. import _torch, errors

HEAD = struct.Struct("<Q16s16s?8sd")  # count, digests of the common and of all fields, recorded, hash and norm of an invariant


@dataclass(frozen=True)
class Field:
    """Something that must be equal: on all ranks of the call (``common``), or on those that exchange messages."""

    name: str
    value: str
    common: bool
    next_step: str
    shown: str = ""  # for errors, where that says more than the value


@dataclass(frozen=True)
class Call:
    """The signature of a movement or of an agreement, as this rank sees it."""

    op: str
    partitions: str
    ranks: tuple[int, ...]
    near: frozenset[int]  # ranks with which messages are exchanged: there everything must be equal
    copies: tuple[int, ...]  # ranks that hold the same invariant input
    waits: bool  # whether this rank waits for anyone in the movement itself
    fields: tuple[Field, ...]
    common: bytes
    key: bytes

    @classmethod
    def of(cls, op, partitions, ranks, near, copies, waits, fields):
        def digest(some):
            return hashlib.blake2b(repr([(f.name, f.value) for f in some]).encode(), digest_size=16).digest()

        return cls(op, partitions, ranks, frozenset(near), copies, waits, tuple(fields), digest([f for f in fields if f.common]),
                   digest(fields))

    def __str__(self):
        return f"{self.op} over {self.partitions}"


def leads(maps, xs):
    """The batch axes of each tensor."""
    return tuple(x.shape[: x.dim() - len(m.in_shape)] for m, x in zip(maps, xs))


def call_of(maps, leads, xs, rank) -> Call:
    """The signature of a movement."""
    first, near, waits = maps[0], set(), False
    for m in maps:
        for plan in (m.plan, m.adjoint):
            view = plan.view(rank)
            here = {message.peer for message in (*view.sends, *view.received)} - {rank}
            near |= here
            waits |= bool(here) and plan is m.plan
    copies: tuple[int, ...] = ()
    if first.domain.kind == "invariant":
        found = (m.adjoint.summing_group(rank) for m in maps)
        copies = next((g for g in found if g), ())

    def each(values):
        return ", ".join(dict.fromkeys(map(str, values)))

    digests = " ".join(m.plan.digest for m in maps)
    local = f"local {each(m.in_shape for m in maps)} -> {each(m.out_shape for m in maps)} by plan {digests[:50]}"
    fields = (
        Field("the operator called", each(maps), True, "call the same operators in the same order"),
        Field("the partitions", each(m.partitions for m in maps), True, "pass equal partitions on every rank"),
        Field("the number of tensors", str(len(maps)), True, "pass the same pytree on every rank"),
        Field("the device kind", xs[0].device.type, True, "give every rank's tensor the same device kind"),
        Field("the batch sizes (vmap)", each(map(tuple, leads)), False, "map over axes of one size on all ranks"),
        Field("the dtype", each(x.dtype for x in xs), False, "give every rank's tensor the same dtype"),
        Field("the layouts or shapes", digests, False, "give every rank the same layouts, or shapes that fit together", local),
    )
    return Call.of(str(first), first.partitions, first.ranks, near, copies, waits, fields)


def differs(call: Call, arrived: dict, tail) -> bool:
    """Whether any message that has arrived is of another call than this rank's."""
    for r, data in arrived.items():
        _, common, key, *_ = HEAD.unpack_from(data)
        if common != tail[0] or (r in call.near and key != tail[1]):
            return True
    return False


def fingerprint(xs) -> tuple[bytes, float]:
    """Hash of all bits, and norm, of some tensors."""
    found, square = hashlib.blake2b(digest_size=8), 0.0
    for x in xs:
        x = (_torch.plain(x.detach()).cpu() + 0).contiguous()  # + 0: both zeros are one value
        found.update(x.reshape(-1).view(torch.uint8).numpy().data)
        square += float(torch.linalg.vector_norm(x.to(torch.complex128 if x.is_complex() else torch.float64))) ** 2
    return found.digest(), square**0.5


def unequal_copies(call, found):
    """What is wrong where the copies of an invariant input differ: a cotangent at an adjoint, else a value or a tangent."""
    copies = {r: found[r] for r in call.copies if r in found}
    if len({head[4] for head in copies.values()}) < 2:
        return None
    norms = {r: head[5] for r, head in copies.items()}
    zero = [r for r, norm in norms.items() if norm == 0]
    what = "cotangent" if call.op.endswith(".T") else "value"
    if what == "value":
        rule = "rule 1: an invariant value is one value, stored on all its ranks"
        step = ("give parameters the same start and the same updates on every rank; values that are meant to differ are varying "
                "already, without F.mark_varying")  # fmt: skip
    elif zero:
        rule = (f"rule 2: every rank that holds an invariant value must use it, and equally; {names(zero)} gave it the cotangent 0 "
                "(0 * loss, or a loss used on some ranks only)")  # fmt: skip
        step = "use the value on all its ranks, or F.sum_reduce it to the one rank on which it is used"
    else:
        rule = ("rule 1: combine an invariant value only with values that are equal on all its ranks (or rule 3: agree on loss "
                "scales first)")  # fmt: skip
        step = "apply F.mark_varying to the invariant value before it meets a value that differs by rank"
    said = "; ".join(f"{names(rs)}: norm {norm}" for norm, rs in groups({r: f"{n:.17g}" for r, n in norms.items()}).items())
    if len(set(norms.values())) == 1:
        said += ", but other entries"
    return errors.InvariantError, dict(problem=f"the copies of an invariant {what} differ, against {rule}",
                                       expected="bitwise equal copies", actual=said, next_step=step)  # fmt: skip


def groups(values: dict) -> dict:
    """{value: ranks that have it}."""
    found: dict = {}
    for r, value in sorted(values.items()):
        found.setdefault(value, []).append(r)
    return found


def names(ranks) -> str:
    """"rank 1" or "ranks 0, 2"."""
    ranks = sorted(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
