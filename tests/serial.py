"""Compare a distributed function with its serial twin: value, gradients, jvp, vmap and second derivatives.

    check_layer(lambda x, w: F.dist_something(x, L, w), torch.something, [X, W], [L, whole], L_out)

``inputs`` are *global* tensors, equal on all ranks (:func:`randn` draws them). A **place** says what this rank holds of
one:

    a Layout            its block
    ``whole``           all of it: an invariant parameter, or an invariant result
    ``along(L, 1)``     a tensor over dim 1 of L only (a bias, class weights): the slice that fits this rank's block of
    L any function        global tensor -> this rank's part

As every derivative of a right layer is the same part of the serial derivative, one place serves the tensor, its tangent
and its gradient. A parameter that several ranks hold must therefore be invariant (``params="invariant"``, or marked
inside the function). Results on ranks outside the partition are not compared, but must go through every transform.

All ranks call it; faults are gathered at the end, so that every rank fails together.
"""

from __future__ import annotations

import itertools

import torch
from torch.func import grad, jvp, vjp, vmap

import distdl as dd


def randn(*shape, seed=0, dtype=torch.float64):
    """Equal on every rank and in every process; on torch's default device."""
    draw = torch.Generator().manual_seed(seed * 1000 + len(shape))
    return torch.randn(shape, dtype=dtype, generator=draw, device="cpu").to(torch.get_default_device())


def whole(x):
    """The place of what every rank has whole."""
    return x


def along(L, *dims):
    """The place of a tensor whose dims are the dims ``dims`` of layout ``L``."""

    def part(x):
        slices = L.slices()
        return x[tuple(slices[d] for d in dims)]

    return part


def layouts(shape, dims=None, *, grids=True):
    """Layouts of a tensor of ``shape`` that are worth trying on this world: {name: Layout}.

    Each of ``dims`` (default: all) split over all ranks, balanced (so uneven or empty, as the shape has it); the first
    by unequal splits with an empty block, over all ranks but rank 0 (in reverse order), and over one rank; the first
    two as a grid.
    """
    n, dims = dd.world().size, tuple(range(len(shape)) if dims is None else dims)

    def over(*sizes, ranks=None, splits=None):
        grid = [1] * len(shape)
        for d, size in sizes:
            grid[d] = size
        return dd.Layout(dd.Partition(tuple(grid), ranks), shape, splits)

    if n == 1:
        return {"alone": over()}
    first = dims[0]
    found = {f"dim {d}": over((d, n)) for d in dims}
    uneven = [None] * len(shape)
    uneven[first] = (0, shape[first] - n + 2, *[1] * (n - 2)) if shape[first] >= n - 2 else None
    found["splits"] = over((first, n), splits=tuple(uneven))
    found["subset"] = over((dims[-1], n - 1), ranks=tuple(range(n - 1, 0, -1)))
    if grids and n == 4 and len(dims) > 1:
        for a, b in itertools.combinations(dims, 2):
            found[f"grid {a} {b}"] = over((a, 2), (b, 2), ranks=(2, 0, 3, 1))
    return found


def _cut(place, x):
    return (place.shard(x) if isinstance(place, dd.Layout) else place(x)).clone()


def _tuple(y):
    return y if isinstance(y, tuple) else (y,)


class _Comparison:
    def __init__(self, rtol):
        self.rtol, self.faults = rtol, []

    def __call__(self, what, found, expected, place, active=True):
        """``found`` is this rank's part of the global ``expected``: rtol, and atol of rtol times the global maximum."""
        if not active:
            return
        part = _cut(place, expected)
        if found.shape != part.shape or found.dtype != part.dtype:
            self.faults.append(f"{what}: {tuple(found.shape)} {found.dtype}, expected {tuple(part.shape)} {part.dtype}")
        elif not part.is_floating_point() and not part.is_complex():
            if not torch.equal(found, part):
                self.faults.append(f"{what}: other integers")
        else:
            scale = float(expected.detach().abs().max()) if expected.numel() else 0.0
            if not torch.allclose(found, part, rtol=self.rtol, atol=self.rtol * scale):
                self.faults.append(f"{what}: off by {float((found - part).abs().max()):.2e}, largest entry {scale:.2e}")


def check_layer(
    dist, serial, inputs, places, out, *, argnums=None, batched=(0,), active=None, rtol=1e-10, orders=2, name=""
):
    """Compare ``dist`` (this rank's parts -> this rank's result) with ``serial`` (global tensors -> global result).

    Args:
        inputs: global tensors; integers are passed on, and not differentiated.
        places: one for each input, see above.
        out: the place of the result, or a tuple of them where a tuple is returned. ``whole`` for an invariant result.
        argnums: which inputs are differentiated. Default: all floating ones.
        batched: which inputs get a batch under vmap (the others are shared).
        active: whether this rank's results count. Default: whether it is in the partition of the first Layout among the
            places.
        rtol: relative tolerance; absolute: the same times the largest entry of the tensor.
        orders: 2 everything; 1 neither vmap nor second derivatives; 0 the value only.
        name: put before every fault.
    """
    compare = _Comparison(rtol)
    if active is None:
        first = next((p for p in (*places, *_tuple(out)) if isinstance(p, dd.Layout)), None)
        active = first is None or first.active
    argnums = tuple(i for i, x in enumerate(inputs) if x.is_floating_point()) if argnums is None else tuple(argnums)
    outs = _tuple(out)
    parts = [_cut(p, x) for p, x in zip(places, inputs)]

    y, y_global = _tuple(dist(*parts)), _tuple(serial(*inputs))
    for i, (found, expected) in enumerate(zip(y, y_global, strict=True)):
        compare(f"value {i}", found, expected, outs[i], active)
    if orders == 0 or not argnums:
        _finish(compare, name)
        return

    smooth = [i for i, t in enumerate(y_global) if t.is_floating_point()]
    weights = [randn(*t.shape, seed=90 + i).to(t.dtype) for i, t in enumerate(y_global)]
    weight_parts = [_cut(p, t) if active else found.detach() for p, t, found in zip(outs, weights, y)]

    def only(function, base):
        """As a function of the differentiated inputs, with the differentiable outputs."""

        def reduced(*chosen):
            args = list(base)
            for i, x in zip(argnums, chosen):
                args[i] = x
            found = _tuple(function(*args))
            return tuple(found[i] for i in smooth)

        return reduced

    def scalar(function, base, weights):
        """A nonlinear function of all outputs, whose second derivative is not only the layer's."""

        def loss(*chosen):
            found = only(function, base)(*chosen)
            return sum(((weights[i] + 0.3 * t) * t).sum() for i, t in zip(smooth, found))

        return loss

    chosen, chosen_global = [parts[i] for i in argnums], [inputs[i] for i in argnums]
    tangents_global = [randn(*x.shape, seed=70 + k).to(x.dtype) for k, x in enumerate(chosen_global)]
    tangents = [_cut(places[i], t) for i, t in zip(argnums, tangents_global)]
    every = tuple(range(len(argnums)))

    def compare_grads(what, found, expected, of_active=active):
        for i, g, e in zip(argnums, found, expected):
            compare(f"{what} {i}", g, e, places[i], of_active)

    # reverse mode, by torch.func and by the engine
    pulled_global = vjp(only(serial, inputs), *chosen_global)[1](tuple(weights[i] for i in smooth))
    compare_grads("vjp", vjp(only(dist, parts), *chosen)[1](tuple(weight_parts[i] for i in smooth)), pulled_global)
    leaves = [x.clone().requires_grad_() for x in chosen]
    found = only(dist, parts)(*leaves)
    sum((weight_parts[i] * t).sum() for i, t in zip(smooth, found)).backward()
    compare_grads("backward", [x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves], pulled_global)

    # forward mode
    pushed_global = jvp(only(serial, inputs), tuple(chosen_global), tuple(tangents_global))[1]
    pushed = jvp(only(dist, parts), tuple(chosen), tuple(tangents))[1]
    for i, t, e in zip(smooth, pushed, pushed_global):
        compare(f"jvp {i}", t, e, outs[i], active)

    if orders < 2:
        _finish(compare, name)
        return

    # per-example gradients
    batched = [i for i in batched if i in argnums]
    if batched:
        scales = {
            i: randn(*inputs[i].shape, seed=50 + i).sigmoid().to(inputs[i].dtype) for i in batched
        }  # stays in [0, x]
        copies_global = [torch.stack([inputs[i], inputs[i] * scales[i]]) for i in batched]
        copies = [torch.stack([_cut(places[i], x) for x in pair]) for i, pair in zip(batched, copies_global)]

        def example(function, base, weights):
            def run(*examples):
                args = list(base)
                for i, x in zip(batched, examples):
                    args[i] = x
                return grad(scalar(function, args, weights), argnums=every)(*[args[i] for i in argnums])

            return run

        per_example = vmap(example(dist, parts, weight_parts))(*copies)
        for k in range(2):
            expected = example(serial, inputs, weights)(*[pair[k] for pair in copies_global])
            compare_grads(f"vmap(grad), example {k}:", [g[k] for g in per_example], expected)

    # second derivatives: forward over reverse, and reverse over reverse
    slope_global = grad(scalar(serial, inputs, weights), argnums=every)
    slope = grad(scalar(dist, parts, weight_parts), argnums=every)
    bent_global = vjp(slope_global, *chosen_global)[1](tuple(tangents_global))
    compare_grads("hvp (vjp of grad)", vjp(slope, *chosen)[1](tuple(tangents)), bent_global)
    compare_grads("hvp (jvp of grad)", jvp(slope, tuple(chosen), tuple(tangents))[1], bent_global)
    _finish(compare, name)


def _finish(compare, name):
    shown = "; ".join(compare.faults[:3]) + (f"; and {len(compare.faults) - 3} more" if len(compare.faults) > 3 else "")
    dd.testing.collective_assert(not compare.faults, f"{name}: {shown}")


def messages(call):
    """What this rank sends in ``call()``: (sends, elements of float64 sent, all-reduces, elements reduced,
    agreements)."""
    with dd.testing.count_messages() as sent:
        call()
    sizes = {kind: [size for _, _, size in sent.of(kind)] for kind in ("send", "all_reduce", "agree")}
    return (
        len(sizes["send"]),
        sum(sizes["send"]) // 8,
        len(sizes["all_reduce"]),
        sum(sizes["all_reduce"]) // 8,
        len(sizes["agree"]),
    )
