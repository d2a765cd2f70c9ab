"""Every public function × every property: it holds, against serial torch or the loop over a batch, or the call is
refused on every rank with an error that names it, for the reason in a table. Arguments and serial meanings:
tests/sweep.py."""

from functools import cached_property

import pytest
import torch
from fuzzing import seed_of
from serial import randn
from sweep import BUILDERS, SCALARS, SETTINGS, Setting, _tuple, public_names, variants
from torch.func import grad, jvp, vjp, vmap

import distdl as dd
from distdl.errors import DistdlError

N = dd.world().size


class Checked:
    """One call in one setting; faults are gathered, so that all ranks go on together."""

    def __init__(self, name, setting):
        self.name, self.setting, self.faults = name, setting, []

    @cached_property
    def call(self):
        return BUILDERS[self.name](Setting(self.setting))

    def fault(self, what):
        self.faults.append(f"{self.setting}, {what}")

    def close(self, what, found, expected, rtol=1e-9):
        if found.shape != expected.shape or found.dtype != expected.dtype:
            self.fault(f"{what}: {tuple(found.shape)} {found.dtype}, expected {tuple(expected.shape)} {expected.dtype}")
        elif found.numel() and not torch.allclose(
            found, expected, rtol=rtol, atol=rtol * max(float(expected.abs().max()), 1)
        ):
            self.fault(f"{what}: off by {float((found - expected).abs().max()):.1e}")

    def results(self, what, ys, wished, rtol=1e-9):
        """``ys`` are this rank's results: of the right number, shapes and dtypes on every rank, values where it has
        any."""
        if len(ys) != len(wished):
            self.fault(f"{what}: {len(ys)} results, expected {len(wished)}")
            return
        for y, (value, shape, dtype) in zip(ys, wished):
            if value is not None:
                self.close(what, y, value, rtol)
            elif (y.dtype != dtype and self.call.known) or (
                tuple(y.shape) != shape and not (self.unknown and not y.numel())
            ):
                self.fault(f"{what}: {tuple(y.shape)} {y.dtype} outside, expected {shape} {dtype}")

    @property
    def unknown(self):
        """Whether a rank outside cannot know the result's shape: a bare partition does not tell it."""
        return "bare" in self.setting or not self.call.known

    @property
    def smooth(self):
        return [i for i, X in enumerate(self.call.inputs) if X.is_floating_point()]

    @property
    def differentiable(self):
        return any(y.is_floating_point() for y in self.call.whole(*self.call.inputs))

    def of_smooth(self, f, base):
        """``f`` as a function of the differentiable inputs alone."""

        def reduced(*chosen):
            args = list(base)
            for i, x in zip(self.smooth, chosen):
                args[i] = x
            return f(*args)

        return reduced

    def gradients(self, what, found, expected):
        for i, g, e in zip(self.smooth, found, expected):
            if self.call.counts(i):
                self.close(f"{what} {i}", g, self.call.back(e) if hasattr(self.call, "back") else self.call.part(i, e))


def value(t):
    t.results("value", _tuple(t.call.run(*t.call.parts())), t.call.cut(t.call.whole(*t.call.inputs)))


def batched(t):
    """vmap at every place of the first input's batch axis, and over all inputs."""
    call = t.call
    others = [randn(*X.shape, seed=30 + i) if X.is_floating_point() else X for i, X in enumerate(call.inputs)]
    positive = [i in t.smooth and bool((X > 0).all()) for i, X in enumerate(call.inputs)]
    others = [Y.sigmoid() if p else Y for p, Y in zip(positive, others)]
    first = t.smooth[0]
    x, other = call.parts(), call.parts(others)
    examples = [call.inputs, [others[i] if i == first else X for i, X in enumerate(call.inputs)]]
    wished = [call.cut(call.whole(*e)) for e in examples]
    for d in range(call.inputs[first].dim() + 1):
        at = min(d, x[first].dim())
        ys = _tuple(
            vmap(lambda v: call.run(*[v if i == first else p for i, p in enumerate(x)]), in_dims=at, randomness="same")(
                torch.stack([x[first], other[first]], at)
            )
        )
        for k in range(2):
            t.results(f"vmap at {d}, example {k}", [y[k] for y in ys], wished[k])
    if len(t.smooth) > 1:
        ys = _tuple(
            vmap(t.of_smooth(call.run, x), randomness="same")(*[torch.stack([x[i], other[i]]) for i in t.smooth])
        )
        for k, e in enumerate((call.inputs, others)):
            t.results(f"vmap of all, example {k}", [y[k] for y in ys], call.cut(call.whole(*e)))


def tangents(t):
    return [randn(*t.call.inputs[i].shape, seed=60 + i) for i in t.smooth]


def forward(t):
    if not t.differentiable:
        unconnected(t)
        return
    call, V = t.call, tangents(t)
    x, v = call.parts(), [call.part(i, V_i) for i, V_i in zip(t.smooth, V)]
    floating = lambda ys: [y for y in ys if y.is_floating_point()]
    ys = list(call.whole(*call.inputs))
    serial = t.of_smooth(lambda *a: floating(call.whole(*a)), call.inputs)
    pushed = iter(jvp(serial, tuple(call.inputs[i] for i in t.smooth), tuple(V))[1])
    wished = call.cut([next(pushed) if y.is_floating_point() else y for y in ys])
    found = jvp(t.of_smooth(lambda *a: floating(_tuple(call.run(*a))), x), tuple(x[i] for i in t.smooth), tuple(v))[1]
    t.results("jvp", found, [w for w in wished if w[2].is_floating_point])


def unconnected(t):
    """Integers have no derivative, in no mode."""
    x = [p.requires_grad_() if p.is_floating_point() else p for p in t.call.parts()]
    if any(y.requires_grad for y in _tuple(t.call.run(*x))):
        t.fault("integers that require a gradient")


def reverse(t):
    """grad, jvp of grad, grad of jvp: the serial product of Hessian and tangent stands for both."""
    if not t.differentiable:
        unconnected(t)
        return
    call, V = t.call, tangents(t)
    X = tuple(call.inputs[i] for i in t.smooth)
    parts = call.parts()
    x, v = tuple(parts[i] for i in t.smooth), tuple(call.part(i, V_i) for i, V_i in zip(t.smooth, V))
    every = tuple(range(len(x)))
    slope_global, pull = vjp(grad(t.of_smooth(call.total, call.inputs), every), *X)
    product = pull(tuple(V))
    loss = t.of_smooth(lambda *a: call.loss(_tuple(call.run(*a))), parts)
    t.gradients("grad", grad(loss, every)(*x), slope_global)
    t.gradients("jvp of grad", jvp(grad(loss, every), x, v)[1], product)
    t.gradients("grad of jvp", grad(lambda *x: jvp(loss, x, v)[1], every)(*x), product)


def formats(t):
    """A channels_last input has the same result, and where torch keeps the format, so does each rank (but of a block
    whose format cannot be seen: of one channel, say)."""
    call = t.call
    last = {4: torch.channels_last, 5: torch.channels_last_3d}
    parts = [p.contiguous(memory_format=last[p.dim()]) if p.dim() in last else p for p in call.parts()]
    kept = lambda x: x.dim() in last and x.is_contiguous(memory_format=last[x.dim()])
    seen = any(kept(p) and not p.is_contiguous() for p in parts)
    ys, wished = _tuple(call.run(*parts)), call.cut(call.whole(*call.inputs))
    t.results("channels_last", ys, wished)
    serial = call.whole(*[X.contiguous(memory_format=last[X.dim()]) if X.dim() in last else X for X in call.inputs])
    for y, (value, _, _), Y in zip(ys, wished, serial):
        same = value is not None and y.numel() and y.dim() == Y.dim() and y.is_floating_point()
        if seen and same and kept(Y) and not kept(y):
            t.fault("channels_last: the result is not")
    if not t.differentiable or not any(p.dim() in last for p in parts):
        return
    x = tuple(parts[i] for i in t.smooth)
    run = t.of_smooth(lambda *a: call.loss(_tuple(call.run(*a))), parts)
    slopes = grad(t.of_smooth(call.total, call.inputs), tuple(range(len(x))))(*(call.inputs[i] for i in t.smooth))
    t.gradients("channels_last, grad", grad(run, tuple(range(len(x))))(*x), slopes)
    jvp(run, x, tuple(p.clone() for p in x))


def inference(t):
    wished = t.call.cut(t.call.whole(*t.call.inputs))
    with torch.inference_mode():
        t.results("inference mode", _tuple(t.call.run(*t.call.parts())), wished)


def autocast(t):
    """The dtypes of torch, on every rank."""
    call = t.call
    inputs = [X.float() if X.is_floating_point() else X for X in call.inputs]
    with torch.autocast("cpu", torch.bfloat16):
        t.results("autocast", _tuple(call.run(*call.parts(inputs))), call.cut(call.whole(*inputs)), 0.05)


def complex_numbers(t):
    call = t.call
    inputs = [
        torch.complex(X, randn(*X.shape, seed=40 + i)) if X.is_floating_point() else X
        for i, X in enumerate(call.inputs)
    ]
    t.results("complex", _tuple(call.run(*call.parts(inputs))), call.cut(call.whole(*inputs)))


def jacobian(t):
    """The Jacobian across ranks of a varying result, also where a rank is outside."""
    call = t.call
    if not t.differentiable or not all(isinstance(place, dd.Layout) for place in (*call.outs, *call.places[:1])):
        return
    if len(call.outs) > 1 or t.smooth[0]:
        return
    others = call.parts()[1:]
    found = dd.func.jacrev(lambda x: call.run(x, *others), call.outs[0])(call.parts()[0])
    if call.counts(0):
        wished = torch.func.jacrev(lambda X: call.serial(X, *call.inputs[1:]))(call.inputs[0])
        t.close("jacrev", found, wished[(..., *call.places[0].slices())])


PROPERTIES = dict(
    value=value,
    vmap=batched,
    jvp=forward,
    grad=reverse,
    channels_last=formats,
    inference=inference,
    autocast=autocast,
    complex=complex_numbers,
    jacrev=jacobian,
)

# What is refused, and why: in a whole setting, or one property in all settings. Such a call raises on every rank.
POOLS = "; ".join(n for n in BUILDERS if "Pool" in n or "_pool" in n or n == "pool_layout")
NORMS = "; ".join(n for n in BUILDERS if n.endswith(("_norm", "Norm")) and n != "dist_norm")
LOSSES = "; ".join(
    n
    for n in BUILDERS
    if any(word in n for word in ("_loss", "Loss", "cross_entropy", "kl_div"))
    and n not in ("dist_l1_loss", "nn.L1Loss")
)
RESAMPLED = "; ".join(n for n in BUILDERS if "interpolate" in n or n in ("nn.Upsample", "dist_lcn", "nn.LCN"))
HALF = "dist_rfftn; dist_spectral_conv; spectral_layout; nn.SpectralConv; nn.FNOBlock"
ORDERED = "; ".join(n for n in BUILDERS if n.startswith(("dist_max/", "dist_min/", "dist_argmax/", "dist_logsumexp/")))
ATTENTIVE = ("dist_attention", "dist_neighborhood", "nn.Multihead")
ATTENTION = "; ".join(n for n in BUILDERS if n.startswith(ATTENTIVE))
REFUSED = {
    "complex": {
        "complex scores have no order": ATTENTION,
        "it turns pairs of real numbers": "rotary_embedding",
        "torch has none of complex numbers": "; ".join((POOLS, NORMS, LOSSES, RESAMPLED, "nn.Sharded")),
        "complex numbers have no order": ORDERED,
        "half a spectrum is of real numbers": HALF,
    },
    "scalar": {"it needs more dims": "; ".join(name for name in BUILDERS if name not in SCALARS)},
    "one": {"one value has no variance": "dist_instance_norm; nn.InstanceNorm; nn.BatchNorm"},
}
NOT_OUTSIDE = ("dist_spectral_conv", "spectral_layout")  # refused by its weight, of which ranks outside have none


def listed(table, name, what):
    return any(name in names.split("; ") for names in table.get(what, {}).values())


def refused(t, what, call):
    """The call raises one of distdl's errors, which names it."""
    try:
        call()
        t.fault(f"{what}: not refused")
    except DistdlError as error:
        called = t.name.partition("/")[0]
        if error.op != called if called.startswith("dist_") else not error.op:
            t.fault(f"{what}: the error names another call: {error}")


def examine(name, setting, what):
    """The faults of one property of one call in one setting."""
    t = Checked(name, setting)
    if listed(REFUSED, name, setting):
        if what == "value":
            refused(t, what, lambda: t.call.run(*t.call.parts()))
    elif listed(REFUSED, name, what):
        if name in NOT_OUTSIDE and not t.call.L.active:
            return t.faults
        refused(t, what, lambda: PROPERTIES[what](t))
    else:
        try:
            PROPERTIES[what](t)
        except DistdlError as error:
            hint = "if that is meant, list it in REFUSED of tests/mpi/functional/test_sweep.py"
            raise AssertionError(f"{name}, {setting}, {what} is refused ({hint}): {error}") from error
    return t.faults


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "every"])
@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_sweep(name, every):
    """Slowly, every property in every setting. Else values in every setting and each other property in one, another one
    for each name and property; of names that call another one of the table (modules, layouts, maps), some of that."""
    faults, settings = [], [s for s in SETTINGS if N > 1 or s in ("last", "one", "scalar")]
    wrapper = name.startswith(("nn.", "maps.")) or "_layout" in name
    for k, what in enumerate(PROPERTIES):
        chosen = [s for s in settings if not listed(REFUSED, name, s)]
        some = settings if what == "value" and not wrapper else chosen[seed_of(name, what) % len(chosen) :][:1]
        if every or not wrapper or (seed_of(name) + k) % 3 == 0:
            for setting in settings if every else some:
                faults += examine(name, setting, what)
    dd.testing.collective_assert(not faults, "\n".join(faults[:8]))


def test_every_public_name_has_a_builder():
    missing = sorted(name for name in public_names() if not variants(name))
    assert not missing, f"give them a builder in tests/sweep.py: {missing}"
