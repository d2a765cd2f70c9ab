"""The table of the device's copy kernel, read as the kernel reads it."""

import random

import pytest
import torch

import distdl as dd
from distdl import exchange, fused


def copy_boxes(tensor, staging, table, packing):
    """What one thread for each element does, over flat memory."""
    boxes = [table[i : i + fused._WORDS] for i in range(0, len(table), fused._WORDS)]
    for _, a0, b0, *rest in boxes:
        sizes, a, b = (rest[i * fused._DIMS : (i + 1) * fused._DIMS] for i in range(3))
        for k in range(torch.Size(sizes).numel()):
            at, to = a0, b0
            for n, s, t in zip(reversed(sizes), reversed(a), reversed(b)):
                k, place = divmod(k, n)
                at, to = at + place * s, to + place * t
            if packing:
                staging[to] = tensor[at]
            else:
                tensor[at] = staging[to]
    assert [box[0] for box in boxes] == sorted(box[0] for box in boxes) and boxes[0][0] == 0


@pytest.mark.parametrize("rank", range(8))
def test_table(rank, monkeypatch):
    monkeypatch.setattr(fused, "available", lambda: True)
    L = dd.Layout(dd.Partition((2, 2, 2)), (5, 4, 7))
    plan = dd.maps.halo_exchange(dd.HaloSpec(L, (1, 2, 1), boundary="circular")).plan
    shape = plan.view(rank).in_shape
    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape).transpose(0, 2).contiguous().transpose(0, 2)
    program = exchange._program((plan,), rank, [()], [x.stride()], [x.dtype], (), x.device)
    unpacks = [to for to, _ in program.late]
    for parts in (program.packs, unpacks):
        assert fused.fits(parts) and not fused.fits(parts[:1])
    whole, staged = x.transpose(0, 2).reshape(-1), torch.zeros(program.staging // 4)
    wanted = torch.zeros(program.staging, dtype=torch.uint8)
    for part in program.packs:
        part.staged(wanted).copy_(part.of(x))
    copy_boxes(whole, staged, fused.table_of(program.packs), packing=True)
    assert torch.equal(staged, wanted.view(torch.float32)) and staged.any()

    staged = torch.tensor([random.random() for _ in range(program.staging // 4)])
    y, found = torch.zeros(plan.view(rank).out_shape), torch.zeros(plan.view(rank).out_shape)
    for part in unpacks:
        part.of(y).copy_(part.staged(staged.view(torch.uint8)))
    copy_boxes(found.view(-1), staged, fused.table_of(unpacks), packing=False)
    assert torch.equal(y, found) and y.any()
