"""What the registry's movements give on these ranks, and their messages, written to a file: run over two engines, the
files must be equal.

    python -m distdl run -n 2 tests/engine_values.py FOLDER
"""

import sys

import torch
from registry import CASES, get_case, randn

import distdl as dd
from distdl.testing import count_messages

folder, world = sys.argv[1], dd.world()
found = {}
for name in (name for name, (needs, _) in CASES.items() if needs <= world.size):
    case = get_case(name, world.size)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool):
        x = randn(case.shape, 5, dtype=torch.complex64 if dtype.is_complex else torch.float64)
        x = case.local(x.to(dtype) if dtype != torch.bool else x > 0)
        with count_messages() as sent:
            y = case.map(x.to(dtype))
            values = [y]
            if dtype.is_floating_point:
                values.append(case.map.T(torch.ones_like(y) / 3))
        found[name, dtype] = [v.detach() for v in values], list(sent)
torch.save(found, f"{folder}/{world.rank}of{world.size}.pt")
