"""Who already sums: layers whose adjoint sums their gradients, and everything that sums gradients, meet in one
model."""

import collections
import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.prune
from registry import needs
from serial import randn
from torch.func import functional_call, grad
from training import check

import distdl as dd
import distdl.functional as F
from distdl import nn
from distdl import parallel as dp
from distdl.errors import DistdlError, InvariantError, PartitionError

D = {"dtype": torch.float64}
N, RANK = dd.world().size, dd.world().rank


def rows(x):
    """This rank's part of a batch: uneven."""
    return dd.Layout(dd.Partition((N,)), x.shape[:1]).slices()[0]


def model(kind, P):
    """Convolutions that know no partition around a layer that sums over the batch's ranks; and its serial twin."""
    torch.manual_seed(3)
    middle = torch.nn.BatchNorm2d(4) if kind == "norm" else torch.nn.Conv2d(4, 4, 3)
    serial = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3, bias=False), middle, torch.nn.Tanh(), torch.nn.Conv2d(4, 3, 2)
    ).double()
    ours = copy.deepcopy(serial)
    ours[1] = nn.BatchNorm(P, 4, **D) if kind == "norm" else nn.Conv2d(P, 4, 4, 3, **D)
    ours.load_state_dict(serial.state_dict())
    return ours, serial


X = randn(7, 2, 6, 6)


def loss_of(model, P):
    """Sum of squares over the whole batch, over 7."""
    return F.invariant_sum(model(X[rows(X)]).square().sum(), P) / 7


def serial_grads(serial):
    (serial(X).square().sum() / 7).backward()
    return {k: p.grad for k, p in serial.named_parameters()}


@pytest.mark.parametrize("kind", ["norm", "conv"])
@pytest.mark.parametrize("given", ["parameters", "module"])
def test_gradient_sync(kind, given):
    """The layer's gradients are 1 times the serial ones, not N times; so after whatever copies or moves the module."""
    line = dd.Partition((N,))
    ours, serial = model(kind, dd.Partition((N, 1, 1, 1)))
    wanted, buffer = serial_grads(serial), io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    moved = copy.deepcopy(ours).float().to("meta").to_empty(device="cpu").double()
    moved.load_state_dict(serial.state_dict(), assign=True)
    averaged = torch.optim.swa_utils.AveragedModel(ours).module
    forms = {
        "as made": ours,
        "deepcopy": copy.deepcopy(ours),
        "pickle": pickle.loads(pickle.dumps(ours)),
        "torch.save": torch.load(buffer, weights_only=False),
        "moved": moved,
        "AveragedModel": averaged,
    }
    for what, one in forms.items():
        sync = dp.GradientSync(one if given == "module" else one.parameters(), line)
        loss_of(one, line).backward()
        sync.finish()
        check({k: p.grad for k, p in one.named_parameters()}, wanted, what)


@pytest.mark.parametrize("kind", ["norm", "conv"])
def test_functional_forms(kind):
    """replicate, accumulate and reduce_gradients: of parameters, of detached ones, and told by the module or
    parameters."""
    line = dd.Partition((N,))
    ours, serial = model(kind, dd.Partition((N, 1, 1, 1)))
    wanted = serial_grads(serial)
    params = dict(ours.named_parameters())
    plain = {k: p.detach() for k, p in params.items()}
    statistics = lambda: {k: b.clone() for k, b in ours.named_buffers()}
    call = lambda p: F.invariant_sum(functional_call(ours, (p, statistics()), (X[rows(X)],)).square().sum(), line) / 7
    check(grad(lambda p: call(dp.replicate(p, line)))(plain), wanted, "replicate, inside grad")
    check(grad(lambda p: call(dp.replicate(p, line, of=ours)))(plain), wanted, "replicate, told by the module")
    check(grad(lambda p: call(F.mark_varying(p, line)))(plain), wanted, "mark_varying itself")
    call(dp.replicate(params, line)).backward()
    check({k: p.grad for k, p in params.items()}, wanted, "replicate, of leaves")
    ours.zero_grad()
    loss = lambda p, x: (functional_call(ours, (p, statistics()), (x,)).square().sum(), len(x))
    for what, given, of in (("detached", plain, None), ("leaves", params, None), ("told", plain, ours)):
        mean, grads, _ = dp.accumulate(loss, given, [X[rows(X)]], line, of=of)
        check(grads, wanted, f"accumulate, {what}")
    local = grad(lambda p: loss(p, X[rows(X)])[0] / 7)(plain)
    check(dp.reduce_gradients(local, line, of=ours)[0], wanted, "reduce_gradients by names")
    check(dp.reduce_gradients(local, line, of=params)[0], wanted, "reduce_gradients by parameters")
    (loss(params, X[rows(X)])[0] / 7).backward()
    check(dp.reduce_gradients({k: p.grad for k, p in params.items()}, line)[0], wanted, "reduce_gradients of .grad")
    with pytest.raises(PartitionError, match="names of the module's parameters"):
        dp.reduce_gradients(list(local.values()), line, of=ours)


def test_precision_and_sharding_keep_it():
    """Casts on the way hide nothing; a gathered unit is not summed twice, and one of layers that sum is refused."""
    line, P = dd.Partition((N,)), dd.Partition((N, 1, 1))
    layer, x = nn.Linear(P, 3, 2, bias=False, **D), randn(5, 3)
    plain = {"weight": layer.weight.detach()}
    serial = grad(lambda w: (x @ w.T).square().sum())(plain["weight"])
    value = lambda p: functional_call(layer, p, (x[rows(x)],)).square().sum()
    policy = dp.Precision(reduce=torch.float64, param=torch.float64)
    check(
        grad(lambda p: value(policy.replicate({k: v.float() for k, v in p.items()}, line)))(plain)["weight"],
        serial,
        "Precision",
        1e-5,
    )
    sharding = dp.Sharding.of(plain, line)
    block = sharding.block(plain).requires_grad_()
    value(sharding.gather(block)).backward()
    check(block.grad, sharding.block({"weight": serial}), "gather")
    if N > 1:
        with pytest.raises(PartitionError, match="sums these gradients"):
            dp.Sharding.of(dict(layer.named_parameters()), line)
    layer.weight.grad = serial
    if N > 1:
        with pytest.raises(PartitionError, match="sums these gradients"):
            sharding.reduce({"weight": layer.weight.grad})


def test_functions_of_layers_tell_their_leaves():
    """``params="invariant"`` with leaves of one's own: the first backward knows."""
    line, x = dd.Partition((N,)), randn(5, 3)
    w = randn(2, 3, seed=1).requires_grad_()
    sync = dp.GradientSync([w], line)
    F.dist_linear(x[rows(x)], w, dd.Partition((N, 1, 1)), params="invariant").square().sum().backward()
    sync.finish()
    check(w.grad, grad(lambda w: (x @ w.T).square().sum())(w.detach()), "gradient")


@needs(2)
def test_partly_overlapping_ranks_are_refused():
    """A layer over some of the ranks of the sum: no sum is right. Over none but this one: replicas, summed."""
    line, pair = dd.Partition((N,)), dd.Partition((2, 1, 1), (0, 1))
    alone = nn.Linear(dd.Partition((1, 1, 1), (RANK,)), 3, 2, **D)
    dp.GradientSync(alone, line)
    if N < 3:
        return
    layer = nn.Linear(pair, 3, 2, **D)
    for call in (
        lambda: dp.GradientSync(layer, line),
        lambda: dp.replicate(dict(layer.named_parameters()), line),
        lambda: dp.reduce_gradients({"weight": torch.zeros(2, 3)}, line, of=layer),
        lambda: dp.accumulate(lambda p, b: None, list(layer.parameters()), [], line),
        lambda: dp.ignore_in_ddp(layer, line),
        lambda: dp.Sharding.of([layer.weight], line),
    ):
        with pytest.raises(PartitionError, match="sums its gradient over some"):
            call()


# ---------------------------------------------------------------- what changes later


@needs(2)
def test_unfrozen_frozen_and_added_later():
    """The sum over the ranks of what each rank's gradient is: rank + 1."""
    line, total = dd.Partition((N,)), N * (N + 1) / 2
    net = torch.nn.ParameterDict({k: torch.ones(2) for k in "abc"})
    net["b"].requires_grad_(False)
    lists = dp.GradientSync(list(net.parameters()), line, limits=(1,))
    whole = dp.GradientSync(net, line, limits=(1,), hook=dp.hooks.top_k(line, 1.0))
    for sync, later in ((lists, ()), (whole, ("d",))):
        net["b"].requires_grad_(True)  # before its first step, or again
        for name in later:
            net[name] = torch.nn.Parameter(torch.ones(2))
        for frozen in ("", "a", "ab", ""):
            other = whole if sync is lists else lists
            for name, p in net.items():
                p.grad = None
                p.requires_grad_(name not in frozen)
            with other.no_sync():
                ((RANK + 1) * sum(p.sum() for p in net.values())).backward()
                sync.finish()
            for name, p in net.items():
                right = p.grad is None if name in frozen else bool((p.grad == total).all())
                dd.testing.collective_assert(right, f"{name} with {frozen!r} frozen: {p.grad}")
    net["a"] = torch.nn.Parameter(torch.ones(2))  # another one in its place
    for p in net.values():
        p.grad = None
    with lists.no_sync():
        ((RANK + 1) * sum(p.sum() for p in net.values())).backward()
        whole.finish()
    dd.testing.collective_assert(all(bool((p.grad == total).all()) for p in net.values()), "after a replacement")
    for p in net.values():
        p.grad = None
    with lists.no_sync():
        net["b"].sum().backward()
    with pytest.raises(DistdlError, match=r"no gradient came.*parameter 3, d"):
        whole.finish()


# ---------------------------------------------------------------- parametrizations


class Twice(torch.nn.Module):
    blockwise = True

    def forward(self, w):
        return 2 * w


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("kind", ["parametrize", "weight_norm", "twice", "older hook", "prune"])
def test_parametrized_layers(kind):
    """Originals, copies of them too, know what their layer sums; what would see one block is refused, unless it may."""
    line, x = dd.Partition((N,)), randn(5, 3)

    def changed(m):
        with torch.no_grad():
            m.weight.copy_(randn(2, 3, seed=1))
        if kind in ("parametrize", "twice"):
            torch.nn.utils.parametrize.register_parametrization(
                m, "weight", Twice() if kind == "twice" else torch.nn.Tanh()
            )
        elif kind == "prune":
            torch.nn.utils.prune.l1_unstructured(m, "weight", 1)
        else:
            m = (torch.nn.utils.parametrizations.weight_norm if kind == "weight_norm" else torch.nn.utils.weight_norm)(
                m
            )
        return m

    serial = changed(torch.nn.Linear(3, 2, bias=False, **D))
    serial(x).square().sum().backward()
    wanted = [p.grad for p in serial.parameters()]
    ours = changed(nn.Linear(dd.Partition((N, 1, 1)), 3, 2, bias=False, **D))
    for one in (ours, *([copy.deepcopy(ours)] if kind not in ("older hook", "prune") else [])):
        sync = dp.GradientSync(one.parameters(), line)
        one(x[rows(x)]).square().sum().backward()
        sync.finish()
        check([p.grad for p in one.parameters()], wanted, kind)
    plain = {k: p.detach() for k, p in ours.named_parameters()}
    value = lambda p, **kw: functional_call(ours, dp.replicate(p, line, **kw), (x[rows(x)],)).square().sum()
    if kind not in ("older hook", "prune"):
        check(list(grad(lambda p: value(p, of=ours))(plain).values()), wanted, "told by the module")
        if N > 1:
            with pytest.raises(PartitionError, match="marked over other ranks"):
                grad(value)(plain)
    split = changed(nn.Linear(dd.Partition((1, 1, N)), 3 * N, 2, bias=False, **D))
    if N == 1 or kind in ("twice", "prune"):
        split(randn(5, 3))
    else:
        with pytest.raises(PartitionError, match=r"would see one block of weight.*blockwise"):
            split(randn(5, 3))


# ---------------------------------------------------------------- norms


class Mixed(torch.nn.Module):
    """Torch's layer on each rank's samples, a norm over all of them, and a column- and a row-parallel layer of a
    group."""

    def __init__(self, data, tensor, grid):
        super().__init__()
        torch.manual_seed(5)
        k = tensor.size
        across = lambda *shape: dd.Partition(shape, tensor.ranks)
        self.first = torch.nn.Linear(4, 6, bias=False, **D)
        self.norm = nn.BatchNorm(dd.Partition((data.size, 1), data.ranks), 6, **D)
        self.column = nn.Linear(across(1, k, 1), 6, 5, x_layout="invariant", y_layout="replicated", **D)
        self.row = nn.Linear(across(1, 1, k), 5, 3, x_layout="replicated", y_layout="invariant", **D)
        everywhere = dd.Partition((data.size, k, 1), grid.ranks)
        self.spanning = nn.Linear(everywhere, 3, 7, x_layout="invariant", y_layout="replicated", **D)

    def forward(self, x, last):
        y = self.row(self.column(self.norm(self.first(x)).tanh()).tanh())
        return self.spanning(y).square().sum(), (y @ last.T).square().sum()


def mixed(grid):
    data, tensor = grid.along(0), grid.along(1)
    ours = Mixed(dp.topology.along(grid, 0), dp.topology.along(grid, 1), grid)
    torch.manual_seed(6)
    one = torch.nn.Linear
    serial = torch.nn.ModuleDict({"first": one(4, 6, bias=False), "norm": torch.nn.BatchNorm1d(6), "column": one(6, 5),
                                  "row": one(5, 3), "spanning": one(3, 7)}).double()  # fmt: skip
    placed, where = dict(serial.named_parameters()), nn.layouts(ours)
    with torch.no_grad():
        for name, p in ours.named_parameters():
            p.copy_(placed[name][where[name].slices()] if name in where else placed[name])
    return ours, serial, where, data, tensor


def block_of(where, name, whole):
    return whole[where[name].slices()] if name in where else whole


def test_one_mixed_model_trains_as_the_serial_one():
    """Data-parallel torch layers, dd.nn's norm, tensor-parallel linears, sharded blocks; one call for the norm, and
    clipping."""
    shape = (2, N // 2) if N % 2 == 0 else (N, 1)
    grid = dd.Partition(shape)
    ours, serial, where, data, tensor = mixed(grid)
    line = dp.topology.along(grid, 0)
    w = randn(2, 3, seed=8)
    sharding = dp.Sharding.of(w, line)
    block, last = sharding.block(w).requires_grad_(), w.clone().requires_grad_()
    x, here = randn(7, 4, seed=9), dd.Layout(dd.Partition(line.shape, line.ranks), (7,)).slices()[0]
    sync = dp.GradientSync(ours, grid, 0)
    mine, theirs = [*ours.parameters(), block], [*serial.parameters(), last]
    optimizers = torch.optim.SGD(mine, lr=0.05, momentum=0.9), torch.optim.SGD(theirs, lr=0.05, momentum=0.9)
    for step in range(4):
        a, b = ours(x[here], sharding.gather(block))
        loss = F.invariant_sum(F.invariant_sum(a, grid, 1) + b, grid, 0) / 7
        loss.backward()
        sync.finish()
        y = serial["norm"](serial["first"](x)).tanh()
        y = serial["row"](serial["column"](y).tanh())
        wanted = (serial["spanning"](y).square().sum() + (y @ last.T).square().sum()) / 7
        wanted.backward()
        named = {**dict(serial.named_parameters()), "last": last}
        grads = {k: block_of(where, k, p.grad) for k, p in serial.named_parameters()}
        check({k: p.grad for k, p in ours.named_parameters()}, grads, f"gradients of step {step}")
        for order in (2.0, 1.0, float("inf")):
            right = torch.nn.utils.get_total_norm([p.grad for p in named.values()], order)
            check(
                dp.global_norm([p.grad for p in mine], grid, of=mine, norm_type=order), right, f"norm of order {order}"
            )
        right = torch.nn.utils.clip_grad_norm_(list(named.values()), 0.3)
        check(dp.clip_grad_norm_(mine, 0.3, grid), right, "norm by clip_grad_norm_")
        grads = {k: block_of(where, k, p.grad) for k, p in serial.named_parameters()}
        check({k: p.grad for k, p in ours.named_parameters()}, grads, "clipped")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check(loss, wanted, "loss")
    check(dict(ours.named_parameters()), {k: block_of(where, k, p) for k, p in serial.named_parameters()}, "parameters")
    dd.testing.assert_copies(ours, grid)


@pytest.mark.parametrize("order", [2.0, 3.0])
def test_norms_know_blocks_from_copies(order):
    """A row-parallel layer: its weight is split, its bias a copy on every rank. ``.grad`` alone knows, or is
    refused."""
    P, line = dd.Partition((1, 1, N)), dd.Partition((N,))
    torch.manual_seed(0)
    layer = nn.Linear(P, 2 * N + 1, 3, x_layout="sharded", y_layout="invariant", x_dim=-1, **D)
    where, full = nn.layouts(layer), {"weight": randn(3, 2 * N + 1), "bias": randn(3)}
    for name, p in layer.named_parameters():
        p.grad = full[name][where[name].slices()].clone()
    grads, right = [p.grad for p in layer.parameters()], torch.nn.utils.get_total_norm(full.values(), order)
    check(dp.global_norm(grads, line, norm_type=order), right, "of .grad")
    new = [g.clone() for g in grads]
    check(dp.global_norm(new, line, of=list(layer.parameters()), norm_type=order), right, "of the parameters")
    check(dp.global_norm({"bias": new[1], "weight": new[0]}, line, of=layer, norm_type=order), right, "by name")
    check(dp.clip_grad_norm_(layer, 0.1, line, norm_type=order), right, "clip_grad_norm_")
    clipped = [block_of(where, k, 0.1 / (right + 1e-6) * full[k]) for k in ("weight", "bias")]
    check([p.grad for p in layer.parameters()], clipped, "clipped")
    if N == 1:
        return
    with pytest.raises(PartitionError, match=r"others of none that is known.*of="):
        dp.global_norm([*[p.grad for p in layer.parameters()], torch.ones(2, **D)], line)
    other = torch.nn.Parameter(torch.ones(2, **D))
    other.grad = torch.full((2,), RANK + 1.0, **D)
    with pytest.raises(PartitionError, match=r"should be equal on all ranks differs.*tensors \[1\]"):
        dp.clip_grad_norm_([layer.bias, other], 1.0, line)
    nn.declare(other, line, 0)
    check(
        dp.clip_grad_norm_([other], 100.0, line), (2 * torch.arange(1.0, N + 1, **D).square().sum()).sqrt(), "declared"
    )
    if N > 2 and RANK < 2:
        with pytest.raises(PartitionError, match="blocks on other ranks"):
            dp.global_norm([layer.weight.grad], dd.Partition((2,)))
    layer.zero_grad()
    assert float(dp.clip_grad_norm_(layer, 1.0, line)) == 0
    with pytest.raises(PartitionError, match="different blocks"):
        dp.average_parameters(list(layer.parameters()), line)
    with pytest.raises(PartitionError, match="different blocks"):
        dp.replicas(dict(layer.named_parameters()), line)


# ---------------------------------------------------------------- torch's own


def test_vectors_and_averages():
    """parameters_to_vector and back, and AveragedModel, work on blocks; the parameters know afterwards what they
    knew."""
    line = dd.Partition((N,))
    ours, serial = model("norm", dd.Partition((N, 1, 1, 1)))
    vector = torch.nn.utils.parameters_to_vector(ours.parameters())
    check(vector, torch.nn.utils.parameters_to_vector(serial.parameters()), "vector")
    torch.nn.utils.vector_to_parameters(2 * vector, ours.parameters())
    torch.nn.utils.vector_to_parameters(2 * vector, serial.parameters())
    average = lambda m: torch.optim.swa_utils.AveragedModel(
        m, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    twice, wanted = average(ours), average(serial)
    sync = dp.GradientSync(ours, line)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, serial)]
    for _ in range(2):
        loss_of(ours, line).backward()
        sync.finish()
        (serial(X).square().sum() / 7).backward()
        for optimizer, one, ema in zip(optimizers, (ours, serial), (twice, wanted)):
            optimizer.step()
            optimizer.zero_grad()
            ema.update_parameters(one)
    check(dict(twice.module.named_parameters()), dict(wanted.module.named_parameters()), "averages", 1e-9)


def test_files_of_parameters_load_anywhere():
    """What a layer tells its parameters is plain data: torch.load needs no permission."""
    buffer = io.BytesIO()
    layer = nn.Linear(dd.Partition((N, 1, 1)), 3, 2)
    torch.save(dict(layer.named_parameters()), buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer)["weight"], layer.weight)


@needs(2)
def test_ddp():
    """Torch's DDP cannot ask: a layer that sums refuses to run inside it, until its parameters are on the ignore
    list."""
    line, P = dd.Partition((N,)), dd.Partition((N, 1, 1, 1))
    dp.export_rendezvous()
    dist.init_process_group("gloo")
    try:
        ours, serial = model("norm", P)
        wanted = serial_grads(serial)
        wrapped = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(ours))
        with pytest.raises(PartitionError, match=r"weight of BatchNorm on DDP's ignore list.*ignore_in_ddp"):
            wrapped(X[rows(X)])
        assert dp.ignore_in_ddp(ours, line) == sorted(k for k in ours.state_dict() if k[0] == "1")
        wrapped = torch.nn.parallel.DistributedDataParallel(ours)
        (wrapped(X[rows(X)]).square().sum() * N / 7).backward()  # its gradients are means
        found = {k: p.grad / (N if k[0] == "1" else 1) for k, p in ours.named_parameters()}
        check(found, wanted, "DDP")
        alone = nn.Linear(dd.Partition((1, 1, 1), (RANK,)), 6, 1)
        torch.nn.parallel.DistributedDataParallel(alone)(torch.ones(1, 6)).sum().backward()
    finally:
        dist.destroy_process_group()


@needs(2)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning", "ignore:.*reshard_after_forward:UserWarning")
def test_fully_shard():
    """Torch's fully_shard takes means: a layer that sums refuses to be among its layers, and may stand beside them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dp.export_rendezvous()
    dist.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", (N,))
        ours, serial = model("norm", dd.Partition((N, 1, 1, 1)))
        wanted = serial_grads(serial)
        inside = fully_shard(copy.deepcopy(ours), mesh=mesh)
        for _ in range(2):
            with pytest.raises(PartitionError, match="BatchNorm outside of torch's fully_shard"):
                inside(X[rows(X)])
        sums = {name for name, _ in ours[1].named_parameters(prefix="1")}
        fully_shard(ours, mesh=mesh, ignored_params=set(ours[1].parameters()))
        (ours(X[rows(X)]).square().sum() * N / 7).backward()
        whole = {k: p.grad / N if k in sums else p.grad.full_tensor() for k, p in ours.named_parameters()}
        check(whole, wanted, "fully_shard")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("ordered", [dict, collections.OrderedDict])
def test_told_by_a_module_in_any_order(ordered):
    """What a dictionary holds comes in the order of its keys, and each tensor has its own parameter's mark."""
    line, P = dd.Partition((N,)), dd.Partition((N, 1))
    torch.manual_seed(3)
    head = torch.nn.Linear(3, 2, **D)
    ours = torch.nn.ModuleDict({"norm": nn.BatchNorm(P, 3, **D), "head": head})  # "norm" comes first, and sorts last
    serial = torch.nn.Sequential(torch.nn.BatchNorm1d(3, **D), copy.deepcopy(head))
    x = randn(7, 3)
    serial(x).square().sum().backward()
    grads = [p.grad for p in serial.parameters()]
    wanted = dict(zip(("norm.weight", "norm.bias", "head.weight", "head.bias"), grads))

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.both = ours

        def forward(self, x):
            return self.both["head"](self.both["norm"](x))

    whole = Both()
    for names in (list(wanted), list(wanted)[::-1], sorted(wanted)):
        plain = ordered((f"both.{k}", whole.get_parameter(f"both.{k}").detach()) for k in names)
        statistics = lambda: {k: b.clone() for k, b in whole.named_buffers()}
        loss = lambda p, x: (functional_call(whole, (p, statistics()), (x,)).square().sum(), 1)
        local = grad(lambda p: loss(p, x[rows(x)])[0])(plain)
        own = lambda found: {k: found[f"both.{k}"] for k in wanted}
        check(own(dp.reduce_gradients(local, line, of=whole)[0]), wanted, f"reduce_gradients, {names}")
        called = grad(lambda p: F.invariant_sum(loss(dp.replicate(p, line, of=whole), x[rows(x)])[0], line))(plain)
        check(own(called), wanted, f"replicate, {names}")
        mean, found, _ = dp.accumulate(loss, plain, [x[rows(x)]], line, of=whole)
        check(own(found), {k: g / N for k, g in wanted.items()}, f"accumulate, {names}")
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        reduced = dp.reduce_gradients(local, line, of=whole)[0]
        assert torch.allclose(dp.global_norm(reduced, line, of=whole), norm), "global_norm"


# ---------------------------------------------------------------- copies, by name


@needs(2)
def test_assert_copies():
    """Blocks may differ, copies may not; the error says which tensor, and on which ranks."""
    line = dd.Partition((N,))
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), nn.Conv1d(dd.Partition((1, N, 1)), 2, 2 * N + 1, 1))
    with torch.no_grad():
        for p in net[0].parameters():
            p.fill_(1)
    dd.testing.assert_copies(net, line)
    dd.testing.assert_copies({"a": torch.ones(2), "b": [torch.zeros(1)]}, line)
    with torch.no_grad():
        net[0].bias[1] += RANK == 1
    with pytest.raises(InvariantError, match=r"0\.bias: rank") as error:
        dd.testing.assert_copies(net, line)
    assert "weight" not in str(error.value) and "rank 1 (2,) of float32" in str(error.value)
    with pytest.raises(InvariantError, match=r"b\.0: "):
        dd.testing.assert_copies({"a": torch.ones(2), "b": [torch.full((1,), float(RANK))]}, line)
    with pytest.raises(InvariantError, match="other names"):
        dd.testing.assert_copies({"a" if RANK else "c": torch.ones(2)}, line)


@needs(2)
def test_checking_names_the_tensor():
    """A copy that has drifted is named: by its key, by the module's name for it, or by its layer's."""
    line = dd.Partition((N,))
    net = torch.nn.Sequential(torch.nn.Identity(), nn.Linear(dd.Partition((N, 1, 1)), 3, 2, **D))
    x = [torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)]
    with dd.checking(20):
        params = {"a": torch.ones(2), "b": torch.ones(3) + (RANK == 0), "c": torch.ones(1)}
        for mark in (F.mark_varying, dp.replicate):
            with pytest.raises(InvariantError, match="of 3 tensors these differ: b;"):
                mark(params, line)
        with torch.no_grad():
            net[1].bias += RANK
        with pytest.raises(InvariantError, match="these differ: bias of Linear"):
            net(randn(1, 3))
        dp.GradientSync(net, line)
        with pytest.raises(InvariantError, match=r"these differ: 1\.bias"):
            net(randn(1, 3))
        a, b = F.invariant_sum(x, line)
        loss = (a + (RANK + 1) * b).sum()
        with pytest.raises(InvariantError, match="of 2 tensors these differ: tensor 1 of 2"):
            loss.backward()
