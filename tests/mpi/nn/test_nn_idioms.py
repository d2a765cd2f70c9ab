"""What programs do with torch's modules, done with those of dd.nn: made without memory, copied, averaged, picked by
class."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from serial import randn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel, update_bn

import distdl as dd
import distdl.functional as F
from distdl import nn

tn = torch.nn


def line(*dims):
    """A partition of all ranks along the dim where -1 stands."""
    return dd.Partition(tuple(dd.world().size if d < 0 else d for d in dims))


def agree(ok, message):
    dd.testing.collective_assert(ok, message)


IMAGES, N = line(1, 1, -1, 1), np.int64  # numbers as NumPy has them, too
SPACE = {n: line(1, 1, -1, *(1,) * (n - 1)) for n in (1, 2, 3)}
# name -> (module, input): one for each module of dd.nn
MAKE = {
    "BatchNorm": lambda **k: nn.BatchNorm(IMAGES, N(4), **k),
    "GroupNorm": lambda **k: nn.GroupNorm(IMAGES, N(2), N(4), **k),
    "InstanceNorm": lambda **k: nn.InstanceNorm(IMAGES, N(4), affine=True, **k),
    "LayerNorm": lambda **k: nn.LayerNorm(IMAGES, np.array([9, 5]), **k),
    "RMSNorm": lambda **k: nn.RMSNorm(IMAGES, N(5), **k),
    "SpectralConv": lambda **k: nn.SpectralConv(IMAGES, N(4), N(3), (2, 2), **k),
    "FNOBlock": lambda **k: nn.FNOBlock(IMAGES, N(4), N(3), (2, 2), torch.tanh, **k),
    "Linear": lambda **k: nn.Linear(line(1, -1, 1), N(5), N(7), x_layout="replicated", **k),
    "Embedding": lambda **k: nn.Embedding(line(1, -1, 1), N(11), N(5), padding_idx=N(3), y_layout="invariant", **k),
}
CONVOLUTIONS = {
    "Conv": lambda n: (N(6), np.array([3] * n), N(1), np.array([1] * n)),
    "ConvTranspose": lambda n: (N(6), N(3), np.array([2] * n)),
    "LocalConv": lambda n: (N(2), N(3), np.array([9, 5, 4][:n]), N(1)),
}
for _n, _P in SPACE.items():
    MAKE |= {
        f"{kind}{_n}d": lambda kind=kind, n=_n, P=_P, a=a, **k: getattr(nn, f"{kind}{n}d")(P, N(4), *a(n), **k)
        for kind, a in CONVOLUTIONS.items()
    }
FREE = {"Dropout": lambda: nn.Dropout(IMAGES, 0.5), "FeatureDropout": lambda: nn.FeatureDropout(IMAGES, 0.5),
        "LCN": lambda: nn.LCN(IMAGES, N(3)), "Upsample": lambda: nn.Upsample(IMAGES, np.array([7, 8])),
        "Movement": lambda: nn.Movement(F.repartition, IMAGES, line(1, 1, 1, -1))}  # fmt: skip
for _n, _P in SPACE.items():
    FREE |= {
        f"{kind}{_n}d": lambda kind=kind, n=_n, P=_P, a=a: getattr(nn, f"{kind}{n}d")(P, *a(n))
        for kind, a in {
            "MaxPool": lambda n: (np.array([2] * n), N(2)),
            "AvgPool": lambda n: (N(2),),
            "L2Pool": lambda n: (np.array([2] * n),),
            "AdaptiveMaxPool": lambda n: (np.array([2] * n),),
            "AdaptiveAvgPool": lambda n: (N(3),),
        }.items()
    }
LOSSES = {name for name in nn.__all__ if name.endswith("Loss")}
# The first two have no parameters of their own, and the third takes two tensors: test_attention.py and test_sharded.py.
OF_LAYERS = {"MultiheadAttention", "Sharded", "ExpertLinear"}
NO_LAYERS = {"Layer", "Loss", "convert", "declare", "layouts", "shard_state", "stands_for"}


def test_every_module_is_here():
    assert {*MAKE, *FREE} | LOSSES | OF_LAYERS | NO_LAYERS == set(nn.__all__)


def batch(name):
    """This rank's block of an input for the module of that name."""
    if name == "Linear":
        return randn(3, 5).float()
    if name == "Embedding":
        return torch.arange(8) % 11
    n = int(name[-2]) if name[-1] == "d" else 2
    return SPACE[n].shard(randn(3, 4, *(9, 5, 4)[:n]).float())


def tensors(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def equal(a, b):
    """Whether two modules have the same tensors."""
    a, b = tensors(a), tensors(b)
    return a.keys() == b.keys() and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a.values(), b.values())
    )


def seeded(make, **kind):
    torch.manual_seed(dd.world().rank + 1)  # the first rank's counts
    return make(**kind)


@pytest.mark.parametrize("name", MAKE)
def test_made_without_memory(name):
    """On the meta device, by argument, context or default, and under FakeTensorMode: filled in later, the values are
    those of a module made at once."""
    make = MAKE[name]
    reference = seeded(make)

    def in_context():
        with torch.device("meta"):
            return seeded(make)

    for meta in (seeded(make, device="meta"), in_context()):
        assert all(t.is_meta for t in tensors(meta).values()), name
        filled = meta.to_empty(device="cpu")
        with torch.no_grad():
            for t in tensors(filled).values():
                t.fill_(7)
        filled.reset_parameters()
        agree(equal(filled, reference), f"{name}: other values")
    with FakeTensorMode():
        fake = seeded(make)
        fake.reset_parameters()
    assert all(isinstance(t, FakeTensor) or isinstance(t.data, FakeTensor) for t in tensors(fake).values())
    assert [t.shape for t in tensors(fake).values()] == [t.shape for t in tensors(reference).values()]
    loaded = in_context()
    loaded.load_state_dict(reference.state_dict(), assign=True)
    agree(equal(loaded, reference), f"{name}: other values after assign=True")
    agree(
        torch.equal(loaded.eval()(batch(name)), copy.deepcopy(reference).eval()(batch(name))), f"{name}: another result"
    )
    torch.set_default_dtype(torch.float64)
    try:
        double = seeded(make)
    finally:
        torch.set_default_dtype(torch.float32)
    agree(equal(double, seeded(make, dtype=torch.float64)), f"{name}: another default dtype")
    torch.set_default_device("meta")
    try:
        meta = seeded(make)
        placed = seeded(make, device="cpu")
    finally:
        torch.set_default_device(None)
    assert all(t.is_meta for t in tensors(meta).values())
    agree(equal(placed, reference), f"{name}: the default device changes the values")


def test_skip_init():
    torch.manual_seed(1)
    reference = nn.Conv2d(IMAGES, 3, 4, 3)
    torch.manual_seed(1)
    module = tn.utils.skip_init(nn.Conv2d, IMAGES, 3, 4, 3, device="cpu")
    assert module.weight.device.type == "cpu"
    module.reset_parameters()
    agree(equal(module, reference), "other values")


@pytest.mark.parametrize("name", [*MAKE, *FREE])
def test_copied_and_saved(name):
    """deepcopy, pickle, torch.save of the module, state_dict with strict, .to(dtype): the same results, nothing
    shared."""
    module = seeded({**MAKE, **FREE}[name]).eval()
    x = batch(name)
    y = module(x)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
        agree(torch.equal(other(x), y) and type(other) is type(module), f"{name}: another result")
        assert not {id(t) for t in tensors(other).values()} & {id(t) for t in tensors(module).values()}
    for assign in (False, True):
        other = {**MAKE, **FREE}[name]()  # of another seed
        strict = other.load_state_dict(copy.deepcopy(module.state_dict()), strict=True, assign=assign)
        agree(not strict.missing_keys and torch.equal(other.eval()(x), y), f"{name}: another result, assign={assign}")
    with pytest.raises(RuntimeError, match="Unexpected key"):
        module.load_state_dict({**module.state_dict(), "more": torch.ones(1)})
    double = module.to(torch.float64)
    agree(double(x.double() if x.is_floating_point() else x).dtype == torch.float64, f"{name}: dtype")
    repr(module)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_losses_copied(name):
    loss = getattr(nn, name)(line(-1, 1))
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert type(other) is type(loss) and other.P == loss.P and other.options == loss.options


def test_options_that_are_truth_values():
    """True is no number of pixels; nor are truth values row numbers."""
    x, w = IMAGES.shard(randn(1, 2, 9, 5)), randn(3, 2, 3, 3)
    here = dd.world().rank
    wrong = [
        lambda: nn.Conv2d(IMAGES, 2, 3, True),
        lambda: nn.Conv2d(IMAGES, True, 3, 3),
        lambda: nn.Conv2d(IMAGES, 2, 3, 3, groups=True),
        lambda: nn.ConvTranspose2d(IMAGES, 2, True, 3),
        lambda: nn.BatchNorm(IMAGES, True),
        lambda: nn.LayerNorm(IMAGES, np.True_),
        lambda: nn.GroupNorm(IMAGES, True, 4),
        lambda: F.dist_conv(x, w, IMAGES, stride=True),
        lambda: F.dist_conv(x, w, IMAGES, padding=(1, True)),
        lambda: F.dist_conv(x, w, IMAGES, groups=True),
        lambda: F.dist_max_pool(x, IMAGES, np.True_),
        lambda: F.dist_adaptive_avg_pool(x, IMAGES, (True, 2)),
        lambda: F.dist_interpolate(x, IMAGES, size=True),
        lambda: F.dist_pad(x, IMAGES, (True, 1)),
        lambda: dd.HaloSpec(IMAGES, (1, 2, 9, 5), True),
        lambda: IMAGES.take(True, 0),
        lambda: F.dist_embedding(torch.tensor([True, False]), randn(4, 3), dd.Partition((1, 1, 1), (here,))),
        lambda: F.dist_expert_linear(
            randn(2, 3), randn(1, 3, 3), dd.Partition((1,), (here,)), torch.tensor([False] * 2), num_experts=1
        ),
    ]
    for call in wrong:
        with pytest.raises((dd.errors.PartitionError, dd.errors.ShapeError)):
            call()


def test_numpy_options_of_functions():
    """Arrays and NumPy's integers give what Python's numbers give."""
    x, w, L = IMAGES.shard(randn(1, 2, 9, 5)), randn(4, 1, 3, 3), dd.Layout(IMAGES, (1, 2, 9, 5))
    two, pair = N(2), np.array([2, 1])
    calls = [
        (
            F.dist_conv(x, w, L, stride=pair, padding=two, dilation=N(1), groups=two),
            F.dist_conv(x, w, L, stride=(2, 1), padding=2, groups=2),
        ),
        (
            F.dist_conv_transpose(x, randn(2, 3, 2, 2), L, stride=pair, groups=two, output_padding=np.array([1, 0])),
            F.dist_conv_transpose(x, randn(2, 3, 2, 2), L, stride=(2, 1), groups=2, output_padding=(1, 0)),
        ),
        (F.dist_max_pool(x, L, two, pair), F.dist_max_pool(x, L, 2, (2, 1))),
        (F.dist_avg_pool(x, L, torch.tensor([2, 2]), pair), F.dist_avg_pool(x, L, 2, (2, 1))),
        (
            F.dist_interpolate(x, L, scale_factor=np.array([2.0, 1.5])),
            F.dist_interpolate(x, L, scale_factor=(2.0, 1.5)),
        ),
        (F.dist_pad(x, L, np.array([1, 2, 0, 1])), F.dist_pad(x, L, (1, 2, 0, 1))),
        (
            F.halo_exchange(x, dd.HaloSpec(L, np.array([0, 0, 1, 2]), two, boundary="zeros")),
            F.halo_exchange(x, dd.HaloSpec(L, (0, 0, 1, 2), 2, boundary="zeros")),
        ),
        (F.dist_layer_norm(x, L, np.array([9, 5])), F.dist_layer_norm(x, L, (9, 5))),
    ]
    for number, (found, expected) in enumerate(calls):
        agree(torch.equal(found, expected), f"call {number}")
    assert F.conv_layout(L, N(4), pair, two, np.array([1, 0])) == F.conv_layout(L, 4, (2, 1), 2, (1, 0))


# ---------------------------------------------------------------- programs that pick modules by torch's classes


def serial_network():
    torch.manual_seed(3)
    return tn.Sequential(tn.Conv2d(2, 4, 3, padding=1, bias=False), tn.BatchNorm2d(4), tn.Tanh(), tn.Conv2d(4, 3, 3),
                         tn.BatchNorm2d(3, momentum=0.3)).double()  # fmt: skip


def close(a, b):
    return torch.allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("split", [(1, 1, -1, 1), (-1, 1, 1, 1)])
def test_averaging_and_update_bn(split):
    """AveragedModel of a trained twin, its buffers averaged or not, and torch's update_bn over it: the serial ones."""
    P, serial = line(*split), serial_network()
    twin, data = nn.convert(serial, P), [randn(3, 2, 9, 6, seed=i) for i in range(3)]
    for use_buffers in (False, True):
        averages = [AveragedModel(m, use_buffers=use_buffers) for m in (serial, twin)]
        for X in data:
            for model, x, average in zip((serial, twin), (X, P.shard(X)), averages):
                model.zero_grad()
                (model(x) ** 2).sum().backward()
                with torch.no_grad():
                    for p in model.parameters():
                        p.sub_(0.01 * p.grad)
                average.update_parameters(model)
        update_bn(data, averages[0])
        update_bn([(P.shard(X), None) for X in data], averages[1])
        for (name, a), b in zip(averages[1].state_dict().items(), averages[0].state_dict().values(), strict=True):
            agree(close(a.double(), b.double()), f"{name} over {split}: {a}, not {b}")
        momenta = [m.momentum for m in averages[1].modules() if isinstance(m, _BatchNorm)]
        assert momenta == [0.1, 0.3] and averages[1].training
        agree(close(averages[1].eval()(P.shard(data[0])), P.shard(averages[0].eval()(data[0]))), "another result")


def test_flags_of_batch_norms():
    """The loops that freeze norms, change their momentum, or take their statistics away."""
    P, serial = line(1, 1, -1, 1), serial_network()
    twin, X = nn.convert(serial, P), randn(3, 2, 9, 6)

    def momentum(m):
        m.momentum = 0.7

    def untracked(m):
        m.track_running_stats = False

    for change in (tn.Module.eval, momentum, untracked, tn.Module.train, _BatchNorm.reset_running_stats):
        for model, x in ((serial, X), (twin, P.shard(X))):
            for m in model.modules():
                if isinstance(m, _BatchNorm):
                    change(m)
            model(x)
        for mode in (True, False):
            agree(
                close(twin.train(mode)(P.shard(X)), P.shard(serial.train(mode)(X))),
                f"{change.__name__}, training {mode}",
            )
        for (name, a), b in zip(twin.named_buffers(), serial.buffers(), strict=True):
            agree(close(a.double(), b.double()), f"{change.__name__}: {name}")
    for model in (serial, twin):
        torch.func.replace_all_batch_norm_modules_(model)
    agree(close(twin(P.shard(X)), P.shard(serial(X))), "without statistics")


def test_sync_batch_norm_is_refused():
    """torch's replacement would know nothing of the partition."""
    with pytest.raises(dd.errors.PartitionError, match="SyncBatchNorm"):
        tn.SyncBatchNorm.convert_sync_batchnorm(nn.convert(serial_network(), line(1, 1, -1, 1)))


def test_stands_for():
    P = line(1, 1, -1, 1)
    serial = tn.Sequential(
        tn.Conv2d(2, 2, 1),
        tn.BatchNorm2d(2),
        tn.MaxPool2d(1),
        tn.Dropout2d(),
        tn.InstanceNorm2d(2),
        tn.ReLU(),
        tn.ConvTranspose2d(2, 2, 1),
        tn.Upsample(scale_factor=2),
        tn.GroupNorm(1, 2),
        tn.Dropout(),
    )
    for m, twin in zip(serial, nn.convert(serial, P)):
        for kind in (
            *map(type, serial),
            tn.modules.conv._ConvNd,
            _BatchNorm,
            (tn.Linear, tn.Conv2d),
            tn.Conv1d,
            tn.Module,
        ):
            assert nn.stands_for(twin, kind) == isinstance(m, kind), (twin, kind)
            assert nn.stands_for(m, kind) == isinstance(m, kind)
    kinds = {"Linear": tn.Linear, "LayerNorm": tn.LayerNorm, "Embedding": tn.Embedding, "RMSNorm": tn.RMSNorm}
    for name in kinds:
        assert [nn.stands_for(MAKE[name](), kind) for kind in kinds.values()] == [other == name for other in kinds]
    assert nn.stands_for(MAKE["BatchNorm"](), tn.BatchNorm3d)
    assert nn.stands_for(nn.MSELoss(P), tn.MSELoss) and not nn.stands_for(FREE["LCN"](), tn.MaxPool2d)


def test_batch_norm_keeps_only_what_it_should():
    """reset_parameters forgets the statistics as torch does; bias=False leaves the weight alone."""
    module = nn.BatchNorm(IMAGES, 4, bias=False)
    module(IMAGES.shard(randn(2, 4, 9, 5)).float())
    assert module.bias is None and int(module.num_batches_tracked) == 1
    module.reset_parameters()
    assert int(module.num_batches_tracked) == 0 and torch.equal(module.running_mean, torch.zeros(4))
    assert torch.equal(module.running_var, torch.ones(4)) and torch.equal(module.weight, torch.ones(4))
