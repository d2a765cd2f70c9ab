"""dd.nn.convert: every class that it names gives the serial module's values, gradients and parameters, and all else is
refused."""

import copy

import pytest
import torch
from serial import randn
from torch.nn.utils import parametrizations, parametrize, prune

import distdl as dd
import distdl.functional as F
from distdl import nn
from distdl.nn.convert import _CONTAINERS, _ELEMENTWISE, _OURS

tn = torch.nn
CHANNELS, SIZES = 4, (9, 6, 5)
OPTIONS = {
    "Conv": [((CHANNELS, 6, 3), {"padding": 1, "padding_mode": "circular"}),
             ((CHANNELS, 4, 2), {"stride": 2, "groups": 2, "bias": False})],
    "ConvTranspose": [((CHANNELS, 6, 3), {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2})],
    "MaxPool": [((3, 2, 1), {}), ((2,), {"return_indices": True, "ceil_mode": True})],
    "AvgPool": [((3, 2, 1), {"count_include_pad": False})],
    "AdaptiveMaxPool": [((2,), {"return_indices": True})], "AdaptiveAvgPool": [((2,), {}), ((1,), {})],
    "BatchNorm": [((CHANNELS,), {"momentum": 0.3}), ((CHANNELS,), {"affine": False, "momentum": None}),
                  ((CHANNELS,), {"track_running_stats": False, "eps": 0.1})],
    "InstanceNorm": [((CHANNELS,), {"affine": True}), ((CHANNELS,), {})], "Dropout": [((0.5,), {})],
}  # fmt: skip
ROWS = [(f"{name}{n}d", n, args, kwargs) for name, rows in OPTIONS.items() for n in (1, 2, 3) for args, kwargs in rows]
ROWS += [
    ("GroupNorm", 2, (2, CHANNELS), {}),
    ("GroupNorm", 1, (1, CHANNELS), {"affine": False}),
    ("Dropout", 3, (0.5,), {}),
    ("Upsample", 1, (), {"size": 13}),
    ("Upsample", 2, (), {"scale_factor": 2, "mode": "bilinear"}),
    ("UpsamplingNearest2d", 2, (2,), {}),
    ("UpsamplingBilinear2d", 2, (), {"scale_factor": 1.5}),
]
ROWS += [(kind.__name__, 2, (0.1, 0.2) if kind is tn.Threshold else (), {}) for kind in sorted(_ELEMENTWISE, key=str)]


def partitions(n):
    """The batch or a dim of space over all ranks, a grid of them, and all ranks but the first: uneven, some empty."""
    size = dd.world().size
    found = {(size, 1, *(1,) * n): None, **{(1, 1, *(size if d == e else 1 for e in range(n))): None for d in range(n)}}
    if size == 4 and n > 1:
        found[(1, 1, 2, 2, *(1,) * (n - 2))] = (2, 0, 3, 1)
    if size > 1:
        found[(size - 1, 1, *(1,) * n)] = tuple(range(size - 1, 0, -1))
    return [dd.Partition(shape, ranks) for shape, ranks in found.items()]


def rows():
    return dd.Partition((1, 1, dd.world().size, 1))


def agree(ok, message):
    dd.testing.collective_assert(ok, message)


def close(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-10, atol=1e-11)


def test_every_class_is_proved():
    assert {getattr(tn, name) for name, *_ in ROWS} == set(_OURS) | _ELEMENTWISE


@pytest.mark.parametrize("name, n, args, kwargs", ROWS, ids=[f"{r[0]}-{i}" for i, r in enumerate(ROWS)])
def test_every_class(name, n, args, kwargs):
    """Values, gradients of x and of each parameter, buffers, names and flags, in training and in evaluation."""
    torch.manual_seed(7)
    serial = getattr(tn, name)(*args, **kwargs).double()
    with torch.no_grad():
        for p in serial.parameters():
            p.add_(torch.rand_like(p) / 4)
    X = randn(3, CHANNELS, *SIZES[:n]) / 2
    for P in [rows()] if getattr(tn, name) in _ELEMENTWISE else partitions(n):
        reference, L = copy.deepcopy(serial), dd.Layout(P, X.shape)
        twin = nn.convert(serial, P)
        for mode in (True, False):
            if mode and "Dropout" in name:
                continue  # another mask than torch's, see test_dropout
            reference.train(mode), twin.train(mode)
            x, whole = L.shard(X).clone().requires_grad_(), X.clone().requires_grad_()
            found, expected = twin(x), reference(whole)
            if isinstance(expected, tuple):
                agree(not P.active or torch.equal(found[1], P.shard(expected[1])), f"{P}: other indices")
                found, expected = found[0] if isinstance(found, tuple) else found, expected[0]
            agree(not P.active or close(found, P.shard(expected)), f"{P}: another value, training {mode}")
            c = randn(*expected.shape, seed=1)
            (found * (P.shard(c) if P.active else 1)).sum().backward()
            (expected * c).sum().backward()
            agree(not P.active or close(x.grad, L.shard(whole.grad)), f"{P}: another gradient of x, training {mode}")
        for (key, a), (other, b) in zip(twin.named_parameters(), reference.named_parameters(), strict=True):
            agree(key == other and (not P.active or (torch.equal(a, b) and close(a.grad, b.grad))), f"{P}: {key}")
        for (key, a), (other, b) in zip(twin.named_buffers(), reference.named_buffers(), strict=True):
            agree(key == other and (not P.active or close(a, b)), f"{P}: {key} is {a}, not {b}")
        shared = {id(t) for t in (*serial.parameters(), *serial.buffers())} & {
            id(t) for t in (*twin.parameters(), *twin.buffers())
        }
        agree(
            not shared and list(twin.state_dict()) == list(serial.state_dict()), f"{P}: shared tensors, or other names"
        )


@pytest.mark.parametrize("kind", [tn.Dropout, tn.Dropout2d])
def test_dropout(kind):
    """The twin drops with the serial p, whole channels where torch does, another mask at each call."""
    P = rows()
    torch.manual_seed(3)
    twin = nn.convert(tn.Sequential(kind(0.25)), P)
    masks = [dd.functional.gather(twin(P.shard(torch.ones(20, 30, 4, 3))), P) for _ in range(2)]
    if dd.world().rank == 0:
        assert not torch.equal(*masks) and all(
            set(m.unique().tolist()) == {0, float(torch.tensor(1 / 0.75))} for m in masks
        )
        assert abs(float((masks[0] == 0).double().mean()) - 0.25) < 0.1
        assert (kind is tn.Dropout2d) == torch.equal(masks[0], masks[0][:, :, :1, :1].expand_as(masks[0]))


class Residual(tn.Module):
    """Uses one convolution twice, and ties another's weight to it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = tn.Conv2d(3, 3, 3, padding=1), tn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.again, self.norm, self.gate = self.a, tn.BatchNorm2d(3), tn.ReLU(inplace=True)
        self.b.weight = self.a.weight
        self.turned = tn.ConvTranspose2d(3, 3, 3, padding=1)
        self.turned.weight = self.a.weight
        self.note = {"layer": self.a, "weights": [self.a.weight]}

    def forward(self, x):
        x = x + self.gate(self.norm(self.a(x)))
        return self.turned(x + self.again(self.b(x)))


def test_sharing():
    """One module used twice is one, and a tied weight one parameter; a step of an optimiser is the serial one."""
    torch.manual_seed(0)
    serial = tn.Sequential(Residual(), tn.Tanh()).double()
    X = randn(3, 3, 9, 5)
    for P in partitions(2):
        reference, twin = copy.deepcopy(serial), nn.convert(serial, P, containers=[Residual])
        block = twin[0]
        assert block.again is block.a and block.b.weight is block.turned.weight is block.a.weight
        assert block.note["layer"] is block.a and block.note["weights"][0] is block.a.weight
        assert [n for n, _ in twin.named_parameters()] == [n for n, _ in serial.named_parameters()]
        optimisers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (twin, reference)]
        for _ in range(2):
            (twin(P.shard(X) if P.active else X[:0]) ** 2).sum().backward()
            (reference(X) ** 2).sum().backward()
            for optimiser in optimisers:
                optimiser.step()
        for (name, a), b in zip(twin.named_parameters(), reference.parameters(), strict=True):
            agree(not P.active or close(a, b), f"{P}: {name}")
        assert serial[0].a.weight.grad is None


def test_flags_dtypes_and_attributes():
    inner = tn.Sequential(tn.BatchNorm2d(4), tn.ReLU())
    serial = tn.Sequential(tn.Conv2d(2, 4, 3), tn.BatchNorm2d(4, affine=False), inner).double()
    serial[0].weight.requires_grad_(False)
    serial[2][0].eval()
    serial[2][0].weight.data = serial[2][0].weight.data.float()
    serial[0].weight.scale, serial[0].tag, serial[2].notes = 3, {"a": [1]}, ["n"]
    serial[0].register_buffer("seen", torch.ones(2), persistent=False)
    serial[1].num_batches_tracked += 5
    twin = nn.convert(serial, rows())
    assert [p.requires_grad for p in twin.parameters()] == [p.requires_grad for p in serial.parameters()]
    assert [m.training for m in twin.modules()] == [m.training for m in serial.modules()]
    kinds = [{k: (t.dtype, t.device) for k, t in (*m.named_parameters(), *m.named_buffers())} for m in (twin, serial)]
    assert kinds[0] == kinds[1] and kinds[0]["1.running_var"][0] == torch.float64
    assert list(twin.state_dict()) == list(serial.state_dict()) and twin[0].seen.tolist() == [1, 1]
    assert twin[0].weight.scale == 3 and twin[0].tag == serial[0].tag and twin[0].tag is not serial[0].tag
    assert twin[2].notes == ["n"] and twin[2].notes is not serial[2].notes and twin[0].kernel_size == (3, 3)
    assert int(twin[1].num_batches_tracked) == 5
    assert nn.convert(tn.Conv1d(1, 1, 1, device="meta"), partitions(1)[0]).weight.is_meta


def test_hooks():
    """Of modules and of parameters: called on the twin with its blocks, and those of one are not the other's."""
    torch.manual_seed(0)
    seen = []

    def note(name):
        return lambda *args: seen.append(name)

    serial = tn.Sequential(tn.Conv2d(2, 2, 3, padding=1), tn.Sequential(tn.MaxPool2d(2), tn.ReLU())).double()
    for m, name in ((serial[0], "conv"), (serial[1], "inside"), (serial[1][0], "pool"), (serial, "all")):
        m.register_forward_pre_hook(note(f"{name} before"))
        m.register_forward_hook(note(f"{name} after"))
        m.register_full_backward_hook(note(f"{name} backward"))
        m._register_state_dict_hook(note(f"{name} saved"))
        m.register_load_state_dict_pre_hook(note(f"{name} loads"))
        m.register_load_state_dict_post_hook(note(f"{name} loaded"))
    serial[0].register_forward_hook(lambda m, args, y: y * 2)
    serial[0].weight.register_hook(lambda g: g * 3)
    serial[0].bias.register_post_accumulate_grad_hook(note("accumulated"))
    X, P = randn(2, 2, 8, 5), rows()
    reference = copy.deepcopy(serial)
    reference[0].weight.register_hook(lambda g: g * 3)  # deepcopy drops these two
    reference[0].bias.register_post_accumulate_grad_hook(note("accumulated"))
    twin = nn.convert(serial, P)
    orders = []
    for model, x in ((reference, X), (twin, P.shard(X))):
        seen.clear()
        model(x.clone().requires_grad_()).square().sum().backward()
        model.load_state_dict(model.state_dict())
        orders.append(list(seen))
    agree(orders[0] == orders[1] and len(orders[0]) == 25, f"{orders}")
    agree(all(close(a.grad, b.grad) for a, b in zip(twin.parameters(), reference.parameters())), "gradients")
    counts = [len(m._forward_hooks) for m in serial.modules()]
    for m in twin.modules():
        m.register_forward_hook(note("twin"))
        m.mine = 1
    assert counts == [len(m._forward_hooks) for m in serial.modules()] and not hasattr(serial[0], "mine")


def test_hook_bound_to_a_module():
    """A bound method is bound to the copy."""

    class Counts(tn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.calls = tn.Sequential(tn.Conv1d(1, 1, 1)), 0
            self.inside[0].register_forward_hook(self.count)

        def count(self, *_):
            self.calls += 1

        def forward(self, x):
            return self.inside(x)

    P = partitions(1)[0]
    serial = Counts()
    twin = nn.convert(serial, P, containers=(Counts,))
    twin(P.shard(torch.ones(5, 1, 3)))
    assert (twin.calls, serial.calls) == (1, 0)


class Clamped(tn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


class Doubled(tn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


class Steep(tn.ReLU):
    def forward(self, x):
        return x.cumsum(-1)


def replaced():
    m = tn.Conv2d(3, 3, 1)
    m.forward = lambda x: x.flip(-1)
    return m


def with_tensor():
    m = Residual()
    m.scale = tn.Parameter(torch.ones(1))
    return m


def hidden():
    m = tn.Sequential(tn.ReLU())
    m.layers = [tn.Conv2d(3, 3, 3)]
    return m


def with_lock():
    import threading

    m = tn.Sequential(tn.ReLU())
    m.lock = threading.Lock()
    return m


def named():
    m = tn.Conv2d(3, 3, 1)
    m.layouts = "mine"
    return m


REFUSED = {
    "linear": (lambda: tn.Linear(3, 3), "no twin"),
    "layer norm": (lambda: tn.LayerNorm(3), "no twin"),
    "flatten": (lambda: tn.Flatten(), "no twin"),
    "softmax": (lambda: tn.Softmax(1), "no twin"),
    "prelu": (lambda: tn.PReLU(), "no twin"),
    "ours": (lambda: nn.Conv2d(rows(), 3, 3, 1), "no twin"),
    "a subclass": (lambda: Clamped(3), "a subclass of BatchNorm2d"),
    "of a container": (lambda: Doubled(), "a subclass of Sequential"),
    "of an activation": (lambda: Steep(), "a subclass of ReLU"),
    "another forward": (replaced, "forward was replaced"),
    "a lazy layer": (lambda: tn.LazyConv2d(3, 3), "not there yet"),
    "own tensors": (with_tensor, "tensors of its own"),
    "parametrized": (lambda: parametrizations.weight_norm(tn.Conv2d(3, 3, 1)), "parametrized"),
    "pruned": (lambda: prune.l1_unstructured(tn.Conv2d(3, 3, 1), "weight", 0.5), "no parameter"),
    "spectral norm": (lambda: tn.utils.spectral_norm(tn.Conv2d(3, 3, 1)), "no parameter"),
    "running instance norm": (lambda: tn.InstanceNorm2d(3, track_running_stats=True), "running statistics"),
    "in place": (lambda: tn.Dropout2d(0.5, inplace=True), "in place"),
    "other dims": (lambda: tn.Conv1d(3, 3, 1), "1 spatial dims"),
    "more dims": (lambda: tn.MaxPool3d(2), "3 spatial dims"),
    "in a list": (hidden, "not registered"),
    "a lock": (with_lock, "cannot be copied"),
    "our name": (named, "one of the twin's own"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    """A clear error that says which module, alone and inside others, and nothing is changed."""
    make, text = REFUSED[what]
    P, containers = rows(), (Residual,)
    for wrap in (lambda m: m, lambda m: tn.Sequential(tn.ReLU(), tn.ModuleDict({"x": m}))):
        with pytest.raises(dd.errors.PartitionError, match=text) as caught:
            nn.convert(wrap(make()), P, containers=containers)
        assert caught.value.next_step and caught.value.op == "convert"


def test_refused_partitions():
    for P in (dd.Partition((1,)), dd.Partition((1, dd.world().size + 1, 1, 1))):
        with pytest.raises(dd.errors.PartitionError, match="keeps channels whole"):
            nn.convert(tn.ReLU(), P)


def test_what_a_refusal_says_works():
    """Parametrizations taken off before, and registered on the twin; a subclass named as a container."""
    X, P = randn(3, 3, 9, 5), rows()
    torch.manual_seed(0)
    serial = tn.Sequential(Doubled(tn.Conv2d(3, 4, 3, bias=False))).double()
    twin = nn.convert(serial, P, containers=[Doubled])
    for model in (serial, twin):
        parametrizations.weight_norm(model[0][0])
    assert parametrize.is_parametrized(twin[0][0]) and type(twin[0]) is Doubled
    y, expected = twin(P.shard(X)), serial(X)
    agree(close(y, P.shard(expected)), "another value")
    y.square().sum().backward()
    expected.square().sum().backward()
    agree(
        all(close(a.grad, b.grad) for a, b in zip(twin.parameters(), serial.parameters(), strict=True)),
        "another gradient",
    )
    assert {tn.Sequential, tn.ModuleList, tn.ModuleDict} == _CONTAINERS


class Fit(tn.Module):
    """A layer of the user's own, with a child: convert knows neither."""

    def __init__(self):
        super().__init__()
        self.scale = tn.Linear(1, 1)

    def forward(self, x, like):
        return self.scale(tn.functional.interpolate(x, like.shape[2:])[..., None])[..., 0]


class FitBlocks(tn.Module):
    def __init__(self, fit, P):
        super().__init__()
        self.P, self.scale = P, copy.deepcopy(fit.scale)

    def forward(self, x, like):
        y = F.dist_interpolate(x, self.P, F.layout_of(like, self.P))
        w, b = F.replicated("invariant", self.P, range(self.P.ndim), self.scale.weight, self.scale.bias)
        return tn.functional.linear(y[..., None], w, b)[..., 0]


class Net(tn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.pool, self.up, self.fit = (
            tn.Conv2d(3, 4, 3, padding=1),
            tn.MaxPool2d(2),
            tn.Conv2d(4, 4, 1),
            Fit(),
        )
        self.again = self.fit

    def forward(self, x):
        x = self.down(x)
        return torch.cat([x, self.again(self.fit(self.up(self.pool(x)), x), x)], 1)


def test_twins_of_ones_own_layers():
    """Odd sizes, and blocks as the skip has them; one layer used twice is one twin; what is below is the twin's."""
    torch.manual_seed(0)
    serial, X = Net().double(), randn(3, 3, 9, 5)
    for P in (rows(), dd.Partition((1, 1, dd.world().size, 1))):
        serial.zero_grad()
        twin = nn.convert(serial, P, containers=[Net], twins={Fit: FitBlocks})
        assert type(twin.fit) is FitBlocks and twin.fit is twin.again
        y, expected = twin(P.shard(X)), serial(X)
        agree(close(y, P.shard(expected)), "another value")
        y.square().sum().backward()
        expected.square().sum().backward()
        agree(
            all(close(a.grad, dict(serial.named_parameters())[k].grad) for k, a in twin.named_parameters()),
            "another gradient",
        )
    with pytest.raises(dd.errors.PartitionError, match="twins= gives for Fit is no module"):
        nn.convert(serial, rows(), containers=[Net], twins={Fit: lambda fit, P: None})
    with pytest.raises(dd.errors.PartitionError, match="none that convert knows") as caught:
        nn.convert(serial, rows(), twins={Fit: FitBlocks})
    assert "containers=[Net]" in caught.value.next_step and "Net" in caught.value.actual
    assert "twins=" in caught.value.next_step and len(str(caught.value)) < 500


def test_a_container_that_reads_across_elements():
    with pytest.warns(UserWarning, match="Fit0 is named in containers=, and calls interpolate itself"):
        nn.convert(tn.ModuleList([Fit0()]), rows(), containers=[Fit0])


class Fit0(tn.Module):
    def forward(self, x, like):
        return tn.functional.interpolate(x, like.shape[2:])
