"""Training of a network beside its serial twin."""

import torch
from torch.func import grad_and_value

import distdl as dd

STEPS = 20


def compare(
    dist_loss,
    serial_loss,
    params,
    places=None,
    *,
    has_loss=True,
    steps=STEPS,
    rate=0.05,
    rtol=1e-10,
    after=lambda p: p,
    ranks=None,
):
    """Train both side by side from ``params`` (global tensors; ``places`` cut this rank's blocks, default: whole).
    ``after`` follows each update of either; ``ranks`` are those that take part, by default the first four."""
    places = places or {}
    cut = lambda name, value: places[name](value).clone() if name in places else value.clone()
    mine, theirs = {name: cut(name, value) for name, value in params.items()}, dict(params)
    faults = []
    for step in range(steps):
        grads, loss = grad_and_value(dist_loss)(mine, step)
        serial_grads, serial_loss_ = grad_and_value(serial_loss)(theirs, step)
        if has_loss and abs(float(loss) - float(serial_loss_)) > rtol * max(1, abs(float(serial_loss_))):
            faults.append(f"step {step}: loss {float(loss)} instead of {float(serial_loss_)}")
        for name, g in grads.items():
            expected = cut(name, serial_grads[name])
            scale = max(1e-6, float(serial_grads[name].abs().max()))
            if not torch.allclose(g, expected, rtol=rtol, atol=rtol * scale):
                faults.append(
                    f"step {step}: gradient of {name} off by {float((g - expected).abs().max()):.1e} of {scale:.1e}"
                )
        mine = after({name: value - rate * grads[name] for name, value in mine.items()})
        theirs = after({name: value - rate * serial_grads[name] for name, value in theirs.items()})
    for name, value in mine.items():
        if not torch.allclose(value, cut(name, theirs[name]), rtol=rtol, atol=rtol):
            faults.append(f"parameter {name}")
    dd.testing.collective_assert(not faults, f"{faults[:3]} and {len(faults)} in all", ranks or range(world_of()))


def world_of(most=4):
    """This world's size and ranks, at most ``most`` of them."""
    return min(dd.world().size, most)
