"""The table of the device's copy kernel, read as the kernel reads it."""

import random

import pytest
import torch

import distdl as dd
from distdl.engine import program as programs
from distdl.engine.fast import fused
from distdl.engine.local import LocalTransport


def copy_boxes(memory, table):
    """What the kernel's threads do, one for each element, over the three flat memories."""
    boxes = [table[i : i + fused._WORDS] for i in range(0, len(table), fused._WORDS)]
    begins = [0]
    for begin, source, target, a0, b0, *rest in boxes:
        sizes, a, b = (rest[i * fused._DIMS : (i + 1) * fused._DIMS] for i in range(3))
        for k in range(torch.Size(sizes).numel()):
            at, to = a0, b0
            for n, s, t in zip(reversed(sizes), reversed(a), reversed(b)):
                k, place = divmod(k, n)
                at, to = at + place * s, to + place * t
            memory[target][to] = memory[source][at]
        assert begin == begins[-1]
        begins.append(begin + torch.Size(sizes).numel())


@pytest.mark.parametrize("rank", range(8))
def test_table(rank):
    L = dd.Layout(dd.Partition((2, 2, 2)), (5, 4, 7))
    plan = dd.maps.halo_exchange(dd.HaloSpec(L, (1, 2, 1), boundary="circular")).plan
    shape = plan.view(rank).in_shape
    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape).transpose(0, 2).contiguous().transpose(0, 2)
    program = programs._program((plan,), [()], [x.stride()], [x.dtype], LocalTransport(rank, 8), x.device)
    assert all(fused.small(part) for part in (*program.packs, *(to for to, _ in program.late)))
    whole, staged, out = (
        x.transpose(0, 2).reshape(-1),
        torch.zeros(program.staging // 4),
        torch.zeros(plan.view(rank).out_shape),
    )
    wanted, y = torch.zeros(program.staging, dtype=torch.uint8), torch.zeros(plan.view(rank).out_shape)
    for part in program.packs:
        part.staged(wanted).copy_(part.of(x))
    for to, part in program.kept:
        to.of(y).copy_(part.of(x))
    early = [fused.keeping(*pair) for pair in program.kept] + [fused.packing(part) for part in program.packs]
    copy_boxes((whole, staged, out.view(-1)), fused.table_of(early))
    assert torch.equal(staged, wanted.view(torch.float32)) and staged.any() and torch.equal(y, out) and y.any()

    staged = torch.tensor([random.random() for _ in range(program.staging // 4)])
    for to, _ in program.late:
        to.of(y).copy_(to.staged(staged.view(torch.uint8)))
    copy_boxes((whole, staged, out.view(-1)), fused.table_of([fused.unpacking(to) for to, _ in program.late]))
    assert torch.equal(y, out)
