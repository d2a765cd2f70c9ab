"""Signatures: what must be equal on the ranks of a call, and how a difference is told.

Who compares says only what each rank has: negotiation by one all-gather (:mod:`distdl.agree`), checking point to point
before every movement (:mod:`distdl.watching.observer`), a world in every small all-gather.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from . import _torch, errors
from .engine.recognise import summing_group

NAME = "_distdl_name"  # attribute of a tensor whose name is known, for errors
HEAD = struct.Struct(
    "<Q16s16s?8sd"
)  # count, digests of the common and of all fields, recorded, hash and norm of an invariant


# What must be equal, and what to do where it is not.
EQUAL = {
    "the operator called": "call the same operators in the same order",
    "the function called": "call the same functions in the same order",
    "the arguments": "pass equal arguments on every rank",
    "the partitions": "pass equal partitions on every rank",
    "the ranks that agree": "pass equal partitions on every rank",
    "the number of tensors": "pass the same pytree on every rank",
    "the pytree": "pass the same pytree on every rank: the same containers, dictionaries with the same keys",
    "the dtype": "give every rank's tensor the same dtype",
    "the device kind": "give every rank's tensor the same device kind",
    "the number of dims": "give every rank a block with as many dims",
    "the layouts or shapes": "give every rank the same layouts, or shapes that fit together",
    "the batch sizes (vmap)": "call the operator inside the same vmaps, over axes of one size, on all ranks",
    "whether a graph is recorded": "enter torch.no_grad and inference_mode on all ranks or on none: a backward would "
    "wait for ever",
    "whether forward mode is on": "open the dual_level on all ranks",
    "what torch.func differentiates": "make the input depend on the differentiated one on every rank (F.nothing, "
    "F.tie)",
}


def disagreement(what: str, values: dict[int, Any], more: Iterable[str] = (), next_step: str = "") -> dict[str, Any]:
    """The parts of the error of ranks that differ in ``what``, of which each has ``values[rank]``; in the same words on
    every rank."""
    return dict(
        problem=f"the ranks disagree in {what}",
        expected="the same on every rank",
        actual="; ".join([*(f"{names(ranks)}: {value}" for value, ranks in groups(values).items()), *more]),
        next_step=next_step or EQUAL[what],
    )


@dataclass(frozen=True)
class Field:
    """Something that must be equal: on all ranks of the call (``common``), or on those that exchange messages."""

    name: str  # one of EQUAL
    value: str
    common: bool = True
    shown: str = ""  # for errors, where that says more than the value
    next_step: str = ""  # where it is not that of EQUAL


@dataclass(frozen=True)
class Call:
    """The signature of a movement or of an agreement, as this rank sees it."""

    op: str
    partitions: str
    ranks: tuple[int, ...]
    near: tuple[int, ...]  # ranks with which messages are exchanged: there everything must be equal
    copies: tuple[int, ...]  # ranks that hold the same invariant input
    waits: bool  # whether this rank waits for anyone in the movement itself
    fields: tuple[Field, ...]

    @cached_property
    def text(self) -> str:
        """For the board."""
        return f"{self.op} over {self.partitions}"

    @cached_property
    def digests(self) -> tuple[bytes, bytes]:
        """Of the common fields, and of all."""
        texts = [repr([(f.name, f.value) for f in self.fields if f.common or near]) for near in (False, True)]
        first, second = (hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts)
        return first, second

    @cached_property
    def packed(self) -> bytes:
        """What other ranks need to judge, and to tell, a difference: read by :func:`unpack`."""
        return pickle.dumps(self.said())

    def said(self, where: str = "") -> Said:
        """This call as told to other ranks."""
        return Said(self.op, self.partitions, self.fields, self.near, self.copies, where)


class Said(NamedTuple):
    """A call as told to other ranks; ``where`` the user called it, and what this rank last completed."""

    op: str
    partitions: str
    fields: tuple[Field, ...]
    near: tuple[int, ...]
    copies: tuple[int, ...]
    where: str = ""
    done: str = ""
    copies_of: tuple = ()  # of an invariant input: (name, hash, norm) of each tensor


def unpack(data) -> Said:
    """What followed the head of a message."""
    stream = io.BytesIO(memoryview(data)[HEAD.size :])
    said, (where, done, copies_of) = pickle.load(stream), pickle.load(stream)
    return said._replace(where=where, done=done, copies_of=copies_of)


def leads(maps, xs):
    """The batch axes of each tensor."""
    return tuple(x.shape[: x.dim() - len(m.in_shape)] for m, x in zip(maps, xs))


def told_of(called) -> tuple[Field, ...]:
    """What the user called: the same function on all ranks, on those that exchange messages with the same plain
    arguments."""
    return (
        Field("the function called", called.name, True, called.name or "none of F"),
        Field("the arguments", called.keywords, False, f"{called.name}({called.keywords})"),
        Field("the pytree", called.tree, False),
    )


def call_of(maps, leads, xs, rank, called=None) -> Call:
    """The signature of a movement; ``called``: what the user called, see :mod:`distdl.calls`."""
    first, near, waits = maps[0], set(), False
    for m in maps:
        for plan in (m.plan, m.adjoint):
            view = plan.view(rank)
            here = {message.peer for message in (*view.sends, *view.received)} - {rank}
            near |= here
            waits |= bool(here) and plan is m.plan
    copies: tuple[int, ...] = ()
    if first.domain.kind == "invariant":
        found = (summing_group(m.adjoint, rank) for m in maps)
        copies = next((g for g in found if g), ())

    def each(values):
        return ", ".join(dict.fromkeys(map(str, values)))

    plans = hashlib.sha256(" ".join(m.plan.digest for m in maps).encode()).hexdigest()[:16]
    local = f"local {each(m.in_shape for m in maps)} -> {each(m.out_shape for m in maps)} by plan {plans}"[:600]
    fields: tuple[Field, ...] = (  # the first difference is the one that is told
        Field("the operator called", each(maps)),
        Field("the partitions", each(m.partitions for m in maps)),
        Field("the number of tensors", str(len(maps))),
        Field("the device kind", xs[0].device.type),
        Field("the batch sizes (vmap)", each(map(tuple, leads)), False),
        Field("the dtype", each(x.dtype for x in xs), False),
        Field("the layouts or shapes", plans, False, local),
    )
    if called is not None:
        function, arguments, tree = told_of(called)
        fields = (fields[0], function, arguments, *fields[1:3], tree, *fields[3:])
    return Call(str(first), first.partitions, first.ranks, tuple(sorted(near)), copies, waits, fields)


def differs(call: Call, swap, rank: int) -> bool:
    """Whether this rank, and those whose messages have come, are in different calls. All of them see the same."""
    digests = {r: head[1:3] for r, head in swap.heads().items()}
    if len(set(digests.values())) == 1:
        return False
    if len({common for common, _ in digests.values()}) > 1:
        return True
    near = {r: call.near if r == rank else swap.said(r).near for r in digests}
    return any(digests[r] != digests[peer] for r in near for peer in near[r] if peer in digests)


def first_difference(said: dict[int, Said]) -> tuple[Field, dict[int, str]]:
    """The first field in which ranks differ that should not, and what each rank has."""
    for field in next(iter(said.values())).fields:
        values = {r: next((f.value for f in one.fields if f.name == field.name), None) for r, one in said.items()}
        pairs = ((r, peer) for r, one in said.items() for peer in (said if field.common else one.near) if peer in said)
        if any(values[r] != values[peer] for r, peer in pairs):
            break
    shown = {
        r: next((f.shown or f.value for f in one.fields if f.name == field.name), one.op) for r, one in said.items()
    }
    return field, {r: f"{shown[r]} at {one.where}" for r, one in said.items()}


def fingerprint(xs) -> tuple[tuple[str, bytes, float], ...]:
    """Of each tensor its name, a hash of all bits, and its norm."""
    found = []
    for i, x in enumerate(xs):
        name = getattr(x, NAME, f"tensor {i} of {len(xs)}")
        x = (_torch.plain(x.detach()).cpu() + 0).contiguous()  # + 0: both zeros are one value
        bits = hashlib.blake2b(x.reshape(-1).view(torch.uint8).numpy().data, digest_size=8).digest()
        found.append(
            (name, bits, float(torch.linalg.vector_norm(x.to(torch.complex128 if x.is_complex() else torch.float64))))
        )
    return tuple(found)


def together(prints) -> tuple[bytes, float]:
    """Hash and norm of all tensors."""
    bits = hashlib.blake2b(b"".join(one for _, one, _ in prints), digest_size=8).digest()
    return bits, sum(norm**2 for _, _, norm in prints) ** 0.5


def unequal(what: str, found: dict, groups_of_copies, copies_of: dict):
    """What is wrong where the copies of an invariant input differ; ``what``: "cotangent", or "value" (or tangent).

    ``found``: {rank: head of its message}; ``copies_of``: {rank: what :func:`fingerprint` said there}.
    """
    wrong = [group for group in groups_of_copies if len({found[r][4] for r in group}) > 1]
    if not wrong:
        return None
    norms = {r: found[r][5] for r in min(wrong)}
    zero = [r for r, norm in norms.items() if norm == 0]
    if what == "value":
        rule = "rule 1: an invariant value is one value, stored on all its ranks"
        step = (
            "give parameters the same start and the same updates on every rank; values that are "
            "meant to differ are varying "
            "already, without F.mark_varying"
        )
    elif zero:
        rule = (
            "rule 2: every rank that holds an invariant value must use it, and equally; "
            f"{names(zero)} gave it the cotangent 0 "
            "(0 * loss, or a loss used on some ranks only)"
        )
        step = "use the value on all its ranks, or F.sum_reduce it to the one rank on which it is used"
    else:
        rule = (
            "rule 1: combine an invariant value only with values that are equal on all its ranks (or "
            "rule 3: agree on loss "
            "scales first)"
        )
        step = "apply F.mark_varying to the invariant value before it meets a value that differs by rank"
    said = "; ".join(
        f"{names(rs)}: norm {norm}" for norm, rs in groups({r: f"{n:.17g}" for r, n in norms.items()}).items()
    )
    if len(set(norms.values())) == 1:
        said += ", but other entries"
    tensors = list(zip(*(copies_of[r] for r in sorted(min(wrong)))))
    which = [copies[0][0] for copies in tensors if len({bits for _, bits, _ in copies}) > 1]
    if which and (len(tensors) > 1 or not which[0].startswith("tensor ")):
        said += f"; of {len(tensors)} tensors these differ: {', '.join(which[:5])}{' ...' if which[5:] else ''}"
    return errors.InvariantError, dict(problem=f"the copies of an invariant {what} differ, against {rule}",
                                       expected="bitwise equal copies", actual=said, next_step=step)  # fmt: skip


class Left(NamedTuple):
    """How a rank has left a call by an error of its own: the call's name, and the error in words."""

    op: str
    text: str


def gave_up(rank: int, left: Left) -> dict[str, str]:
    """The parts of the error that others raise where ``rank`` has left a call."""
    return dict(
        problem=f"rank {rank} left this call, or one before, by an error of its own",
        op=left.op,
        actual=f"rank {rank}: {left.text}",
        expected="the call on all its ranks",
        next_step=f"mend rank {rank}'s call; catch an error on all ranks, or on none",
    )


def groups(values: dict) -> dict:
    """{value: ranks that have it}."""
    found: dict = {}
    for r, value in sorted(values.items()):
        found.setdefault(value, []).append(r)
    return found


def names(ranks) -> str:
    """ "rank 1" or "ranks 0, 2"."""
    ranks = sorted(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
