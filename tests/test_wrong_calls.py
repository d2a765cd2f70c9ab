"""Wrong calls: one clear error that names the call, what was expected and what came, never Python's own from deep
inside. Every argument of every public function, beginning with valid ones (tests/sweep.py's, and those below), is
replaced by wrong things of many kinds."""

import copy
import functools
import importlib.util
import inspect
import pickle
import sys
import warnings
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

import distdl as dd
import distdl.functional as F
from distdl import viz
from distdl._arguments import _misfit
from distdl._kinds import KINDS, kind_of
from distdl.calls import wrappers
from distdl.errors import DistdlError, PartitionError, ShapeError

P, LINE = dd.Partition((1, 1)), dd.Partition((1,))
L, SHORT = dd.Layout(P, (2, 3)), dd.Layout(LINE, (3,))
X = torch.ones(2, 3, dtype=torch.float64)
MANY = 4096
WRONG = (
    None,
    "text",
    b"bytes",
    object(),
    0.5,
    float("nan"),
    (1.5, 2),
    [1],
    {},
    {"a": [1]},
    {1},
    -1,
    MANY,
    lambda: 0,
    torch.ones(2, 3, 4, 5, 6),
    LINE,
    SHORT,
)
# Sizes: a million of them is a valid wish, and takes its time or memory.
SIZES = {"kernel_size", "output_size", "size", "input_size", "num_experts", "in_channels", "out_channels", "padding"}
SIZES |= {"stride", "dilation", "output_padding", "in_features", "out_features", "num_features", "num_embeddings"}
SIZES |= {"embedding_dim", "num_channels", "microbatches", "stages", "chunks", "n", "order", "rank"}


def modules():
    """{prefix: (module, its public names)}"""
    return {
        "F": (F, F.__all__),
        "maps": (dd.maps, dd.maps.__all__),
        "nn": (dd.nn, dd.nn.__all__),
        "init": (dd.init, dd.init.__all__),
        "parallel": (dd.parallel, dd.parallel.__all__),
        "checkpoint": (dd.checkpoint, dd.checkpoint.__all__),
        "func": (dd.func, dd.func.__all__),
        "solve": (dd.solve, dd.solve.__all__),
        "testing": (dd.testing, dd.testing.__all__),
        "viz": (viz, viz.__all__),
        "interop": (dd.interop, dd.interop.__all__),
    }


def public():
    """{name: function or class} of all that can be called."""
    found = {f"{p}.{n}": getattr(m, n) for p, (m, names) in modules().items() for n in names}
    return {name: thing for name, thing in found.items() if callable(thing)}


def spied():
    """{name: (function, args, kwargs)}: the first call of each public function by the builders of tests/sweep.py."""
    calls, depth = {}, Counter()

    def spy(name, function):
        @functools.wraps(function, updated=())
        def call(*args, **kwargs):
            if not depth["in"]:
                calls.setdefault(name, (function, args, kwargs))
            depth["in"] += 1
            try:
                return function(*args, **kwargs)
            finally:
                depth["in"] -= 1

        return call

    places = [(p, m, n, getattr(m, n)) for p, (m, names) in modules().items() for n in names]
    places = [(p, m, n, f) for p, m, n, f in places if callable(f) and n not in ("Layer", "Loss")]
    try:
        for prefix, module, name, function in places:
            if prefix in ("F", "maps", "nn", "init"):
                setattr(module, name, spy(f"{prefix}.{name}", function))
        spec = importlib.util.spec_from_file_location("spied_sweep", Path(__file__).parent / "sweep.py")
        sweep = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sweep)
        for build in sweep.BUILDERS.values():
            for setting in ("last", "scalar"):
                try:
                    call = build(sweep.Setting(setting))
                    call.run(*call.parts())
                except DistdlError:  # not for this setting
                    continue
    finally:
        for _, module, name, function in places:
            setattr(module, name, function)
    return calls


def loss(x):
    return (x**2).sum()


def layer(block, x):
    return x


def sharded(layer, dims=None):
    """Which takes its layer over: a fresh one each time."""
    return dd.nn.Sharded(copy.deepcopy(layer), dims)


def written(folder):
    """The same, by hand."""
    A, w = dd.maps.repartition(L, L), [X.clone()]
    model = torch.nn.Linear(2, 3)
    path = str(folder / "file")
    dd.checkpoint.save(path, {"x": X}, {"x": L})
    dd.checkpoint.save(path + ".model", *dd.checkpoint.state(model, P=LINE))
    dd.checkpoint.save_dcp(path + ".dcp", {"x": X}, {"x": L})
    table, par = dd.parallel.schedule("gpipe", 1, 2), dd.parallel
    mesh = dd.interop.device_mesh(P)
    whole = dd.interop.to_dtensor(X, L, mesh)
    sharding = par.Sharding.of(w, LINE) if hasattr(par.Sharding, "of") else None
    return {
        "F.layout_of": (F.layout_of, (X, P), {}),
        "F.fft_stages": (F.fft_stages, (L, (0, 1)), {}),
        "checkpoint.load_safetensors": (dd.checkpoint.load_safetensors, (path, {"x": L}), {}),
        "checkpoint.load_dcp": (dd.checkpoint.load_dcp, (path + ".dcp", {"x": L}), {}),
        "checkpoint.save_dcp": (dd.checkpoint.save_dcp, (path + ".new", {"x": X}, {"x": L}), {}),
        "F.cat_layout": (F.cat_layout, ([L, L], 0), {}),
        "F.stack_layout": (F.stack_layout, (L, 0, 2), {}),
        "F.matmul_layout": (F.matmul_layout, (L, dd.Layout(P, (3, 4))), {}),
        "F.pad_layout": (F.pad_layout, (L, (1, 1)), {}),
        "nn.Sharded": (sharded, (dd.nn.Linear(dd.Partition((1, 1, 1)), 3, 2),), {"dims": 0}),
        "nn.Layer": (dd.nn.Layer, (P,), {}),
        "nn.Loss": (dd.nn.Loss, (P,), {}),
        "nn.stands_for": (dd.nn.stands_for, (model, torch.nn.Linear), {}),
        "nn.shard_state": (dd.nn.shard_state, (model, model.state_dict()), {}),
        "nn.declare": (dd.nn.declare, (torch.nn.Parameter(X), P), {"split": (1,)}),
        **{f"init.{n}": (getattr(dd.init, n), (L, 1), {}) for n in dd.init.__all__ if "normal" in n or "uniform" in n},
        **{f"init.{n}": (getattr(dd.init, n), (L,), {}) for n in ("zeros", "ones", "eye")},
        "init.orthogonal": (dd.init.orthogonal, (L, 1), {}),
        "init.dirac": (dd.init.dirac, (dd.Layout(dd.Partition((1, 1, 1)), (2, 3, 3)),), {"groups": 2}),
        "init.bias_uniform": (dd.init.bias_uniform, (L, 1, (2, 3)), {}),
        "init.fans": (dd.init.fans, ((2, 3),), {}),
        "parallel.replicas": (par.replicas, (w, LINE), {}),
        "parallel.replicate": (par.replicate, (w, LINE), {}),
        "parallel.global_mean": (par.global_mean, (X.sum(), 3, LINE), {}),
        "parallel.accumulate": (par.accumulate, (lambda p, b: (loss(p[0]), 1), w, [1, 2], LINE), {}),
        "parallel.reduce_gradients": (par.reduce_gradients, (w, LINE), {}),
        "parallel.GradientSync": (par.GradientSync, (torch.nn.Linear(2, 3), LINE), {}),
        "parallel.ignore_in_ddp": (par.ignore_in_ddp, (model, LINE), {}),
        "parallel.bucketed": (par.bucketed, (w,), {}),
        "parallel.Sharding": (par.Sharding, (sharding.structure, sharding.shapes, sharding.layout), {}),
        "parallel.chain": (par.chain, ([layer], [sharding]), {}),
        "parallel.global_norm": (par.global_norm, (w, LINE), {}),
        "parallel.clip_grad_norm_": (par.clip_grad_norm_, (model, 1.0, LINE), {}),
        "parallel.clip_by_norm": (par.clip_by_norm, (w, X.norm(), 1.0), {}),
        "parallel.pipeline": (par.pipeline, (table, [layer], lambda y, m: loss(y), LINE, lambda s, m: (2, 3)), {}),
        "parallel.schedule": (par.schedule, ("gpipe", 1, 2), {}),
        "parallel.simulate": (par.simulate, (table,), {}),
        "parallel.average_parameters": (par.average_parameters, (w, LINE), {}),
        "parallel.average_due": (par.average_due, (w, 2, LINE, {2: 0}), {}),
        "parallel.Precision": (par.Precision, (), {}),
        "parallel.LossScale": (par.LossScale, (), {}),
        "parallel.select": (par.select, (torch.tensor(True), w, w), {}),
        "parallel.spread_overflow": (par.spread_overflow, (w, LINE), {}),
        "parallel.along": (par.along, (LINE,), {}),
        "parallel.block_mapping": (par.block_mapping, ((1, 2),), {}),
        "parallel.cyclic_mapping": (par.cyclic_mapping, ((1, 2),), {}),
        "parallel.hierarchical_all_reduce": (par.hierarchical_all_reduce, (X, [[0]]), {}),
        "parallel.export_rendezvous": (par.export_rendezvous, (), {"addr": "localhost", "port": 1234}),
        **{f"hooks.{n}": (getattr(par.hooks, n), (LINE,), {}) for n in par.hooks.__all__ if n != "Hook"},
        "checkpoint.save": (dd.checkpoint.save, (path, {"x": X}, {"x": L}), {}),
        "checkpoint.load": (dd.checkpoint.load, (path, {"x": L}), {}),
        "checkpoint.state": (dd.checkpoint.state, (model,), {"P": LINE}),
        "checkpoint.restore": (dd.checkpoint.restore, (path + ".model", model), {"P": LINE}),
        "func.hessian": (lambda *a, **k: dd.func.hessian(*a, **k)(X), (loss, L), {}),
        "func.hvp": (dd.func.hvp, (loss, X, X), {}),
        "func.inner": (dd.func.inner, (X, X, P), {}),
        "func.jacfwd": (dd.func.jacfwd, (torch.sin, L), {}),
        "func.jacrev": (dd.func.jacrev, (torch.sin, L), {}),
        "func.linear_transpose": (dd.func.linear_transpose, (lambda x: 2 * x, X), {}),
        "solve.cg": (dd.solve.cg, (lambda x: 2 * x, X, L), {"x0": X, "preconditioner": lambda r: 0.5 * r}),
        "solve.lsqr": (dd.solve.lsqr, (lambda x: 2 * x, X, L, L), {"damp": 0.1}),
        "solve.lanczos": (dd.solve.lanczos, (lambda x: 2 * x, X, L, 2), {}),
        "solve.lbfgs": (dd.solve.lbfgs, (loss, X, L), {"steps": 2, "progress": lambda k, value, size: None}),
        "testing.assert_copies": (dd.testing.assert_copies, (X, P), {}),
        "testing.check_grads": (dd.testing.check_grads, (torch.sin, X), {"order": 1}),
        "testing.check_map": (dd.testing.check_map, (A,), {}),
        "testing.collective_assert": (dd.testing.collective_assert, (True,), {}),
        "testing.dot_test": (dd.testing.dot_test, (A,), {}),
        "testing.gather_objects": (dd.testing.gather_objects, (1,), {}),
        "interop.partition": (dd.interop.partition, (mesh,), {}),
        "interop.device_mesh": (dd.interop.device_mesh, (P,), {"names": ("a", "b")}),
        "interop.layout": (dd.interop.layout, (mesh, whole.placements, (2, 3)), {}),
        "interop.from_dtensor": (dd.interop.from_dtensor, (whole,), {}),
        "interop.to_dtensor": (dd.interop.to_dtensor, (X, L, mesh), {"placements": whole.placements}),
        "viz.show": (viz.show, (L,), {"titles": ["a layout"], "adjoint": False}),
        "viz.text": (viz.text, (L,), {}),
        "viz.matrix": (viz.matrix, (A,), {}),
        "viz.messages": (viz.messages, (A,), {}),
        "Partition": (dd.Partition, ((1,),), {"ranks": (0,), "world": "default"}),
        "Layout": (dd.Layout, (P, (2, 3), ((2,), (3,))), {}),
        "Layout.weighted": (dd.Layout.weighted, (P, (2, 3), {1: [1, 2, 3]}), {}),
        "HaloSpec": (dd.HaloSpec, (L, 1, 1), {"boundary": "zeros", "corners": False}),
        "Staggered": (dd.Staggered, (L, 0), {"periodic": 1}),
        "Staggered.to": (dd.Staggered(L, 0).to, (dd.Staggered(L), "replicate"), {"width": 2}),
        "F.halo_exchange of several": (F.halo_exchange, ((X, X), (dd.HaloSpec(L, 1), dd.HaloSpec(L, 2))), {}),
        "Index": (dd.Index, (SHORT, torch.tensor([2, 0])), {}),
        "Index.known": (dd.Index.known, (SHORT, [torch.tensor([2, 0])]), {}),
        "World": (dd.World, (), {"transport": dd.world().host}),
        "launch": (dd.launch, (layer,), {"n": 1}),
        "linear_map": (dd.linear_map, (layer, layer, (3,), (3,)), {"ranks": (0,)}),
        "remat": (dd.remat, (loss,), {}),
        "trace": (dd.trace, (loss, L), {}),
        "suggest": (dd.suggest, (lambda P: X, [(1, 1)]), {"machine": dd.machines.cluster}),
        "suggest_chain": (
            dd.suggest_chain,
            ([lambda x, L: (x, L)], (2, 3), [(1, 1)]),
            {"machine": dd.machines.cluster},
        ),
        "world": (dd.world, ("default",), {}),
    }


# Not called with arguments that could be wrong, or drawn on a canvas.
WITHOUT = {"nn.Movement", "checkpoint.Pending", "checkpoint.State", "checkpoint.async_save", "parallel.Task"}
WITHOUT |= {"solve.Info", "solve.Descent", "parallel.Timeline", "testing.count_messages", "viz.draw", "viz.spy"}


@pytest.fixture(autouse=True)
def apart(monkeypatch, tmp_path):
    """Some wrong things are right all the same: save(path="text") writes, and World(name="text") is one more world."""
    monkeypatch.chdir(tmp_path)
    module = sys.modules["distdl.world"]
    monkeypatch.setattr(module, "_worlds", dict(module._worlds))


def own(name, wrong, error) -> bool:
    """Whether this is the answer of the call, or of the user's own function, and not an error in the library's words:
    a check of dd.testing that fails; a function that takes other arguments than it is called with."""
    return (isinstance(error, AssertionError) and name.startswith("testing.")) or (
        inspect.isfunction(wrong) and str(error).startswith("<lambda>() takes")
    )


@pytest.fixture(scope="module")
def torchs_ranks():
    """torch.distributed with this one rank, for dd.interop."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def valid(tmp_path_factory, torchs_ranks):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {**spied(), **written(tmp_path_factory.mktemp("wrong"))}
    return {name: call for name, call in found.items() if name not in WITHOUT}


def fresh(value):
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def outcomes(name, function, args, kwargs):
    """(argument, wrong thing, error or ``None``) of each call with one argument replaced."""
    signature = inspect.signature(function)
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        for wrong in WRONG:
            if wrong is MANY and (parameter.name in SIZES or (name.startswith("nn.") and parameter.name == "modes")):
                continue
            bound = signature.bind(*args, **kwargs)
            bound.arguments[parameter.name] = wrong
            try:
                function(*map(fresh, bound.args), **{k: fresh(v) for k, v in bound.kwargs.items()})
                yield parameter.name, wrong, None
            except Exception as error:
                yield parameter.name, wrong, error


def test_every_public_function_has_valid_arguments(valid):
    assert {name for name in public() if name not in valid} == WITHOUT
    for name, (function, args, kwargs) in valid.items():
        if name != "F.wait":  # once only
            function(*map(fresh, args), **{k: fresh(v) for k, v in kwargs.items()})


def test_valid_arguments_are_of_their_kinds(valid):
    """Else a call that fails for another reason would be told that a right argument is wrong."""
    wrong = {}
    for name, (function, args, kwargs) in valid.items():
        if isinstance(function, type):
            function, args = function.__init__, (function.__new__(function), *args)
        if getattr(function, "__code__", None) in wrappers:
            wrong[name] = _misfit(function, args, kwargs, RuntimeError())
    for name, thing in public().items():
        for p in inspect.signature(thing).parameters.values():
            kind = kind_of(name.rpartition(".")[2], p)
            if p.default is not p.empty and kind is not None and not kind.fits(p.default):
                wrong[name, p.name] = kind.words
    assert not any(wrong.values()), {name: str(fault) for name, fault in wrong.items() if fault}


def test_tensors_of_two_dtypes(valid):
    """Taken, or refused by the dtypes of each."""
    refused = {}
    for name, (function, args, kwargs) in valid.items():
        if not name.startswith("F.") or name == "F.expert_parallel":  # whose function is the user's
            continue
        bound = inspect.signature(function).bind(*args, **kwargs)
        for argument, value in bound.arguments.items():
            if isinstance(value, torch.Tensor) and value.dtype == torch.float64:
                call = inspect.BoundArguments(bound.signature, {**bound.arguments, argument: value.float()})
                try:
                    function(*call.args, **call.kwargs)
                except DistdlError as error:
                    refused[name, argument] = str(error)
    assert all("torch.float32" in text or "torch.complex64" in text for text in refused.values()), refused
    assert {("F.dist_conv", "x"), ("F.dist_linear", "w"), ("F.dist_local_conv", "w")} <= refused.keys()


@pytest.mark.filterwarnings("ignore")
def test_wrong_arguments(valid):
    """Each is refused in the library's own words, or taken."""
    raw, count = defaultdict(list), Counter()
    for name, call in sorted(valid.items()):
        for argument, wrong, error in outcomes(name, *call):
            count[type(error).__name__] += 1
            if error is not None and not isinstance(error, DistdlError) and not own(name, wrong, error):
                raw[name, argument].append(
                    f"{name}: {argument}={str(wrong)[:30]!r} -> {type(error).__name__}: {str(error)[:90]}"
                )
            elif isinstance(error, DistdlError):
                assert error.op and error.next_step and "expected " in str(error), f"{name}, {argument}: {error}"
    where = "KINDS of distdl/_kinds.py says what an argument must be"
    assert not raw, f"{sum(map(len, raw.values()))} errors of Python's own ({where}):\n" + "\n".join(
        f"{len(v)} {v[-1]}" for v in raw.values()
    )
    assert sum(count[e.__name__] for e in (ShapeError, PartitionError)) > 5000, count


def test_copies_pickles_and_own_subclasses():
    """None is a call of ours with arguments to compare; a user's subclass may give names another meaning, and unknown
    arguments are Python's own errors."""
    layer = dd.nn.Linear(dd.Partition((1, 1, 1)), 3, 2)
    assert copy.deepcopy(layer).P == layer.P and pickle.loads(pickle.dumps(layer)).P == layer.P

    class Own(dd.nn.Linear):
        def __init__(self, seed, P):
            super().__init__(dd.Partition((1, 1, 1)), 3, 2)
            self.seed = seed + 1

    assert Own(1, P=None).seed == 2
    with pytest.raises(TypeError, match="can only concatenate str"):
        Own("text", P=None)
    for call in (lambda: dd.nn.Dropout(P, q=1), lambda: F.shift(X, P, 0, sideways=True), lambda: F.shift(X)):
        with pytest.raises(TypeError, match="argument"):
            call()


def test_errors_of_a_users_function_go_on_as_they_are():
    def f(x):
        raise KeyError("mine")

    for call in (
        lambda: dd.remat(f)(X),
        lambda: dd.func.jacfwd(f, L)(X),
        lambda: dd.linear_map(f, f, (2, 3), (2, 3))(X),
    ):
        with pytest.raises(KeyError, match="mine"):
            call()


def test_the_error_says_which_argument():
    for call, op, argument, expected, actual in (
        (
            lambda: F.dist_avg_pool(X[None], dd.Partition((1, 1, 1)), "wide"),
            "dist_avg_pool",
            "kernel_size",
            "integer",
            "str",
        ),
        (lambda: F.dist_conv(X, None, None, LINE), "dist_conv", "w", "a tensor", "NoneType None"),
        (lambda: dd.nn.declare("weight", P), "declare", "parameter", "a tensor", "str 'weight'"),
        (
            lambda: dd.checkpoint.state(torch.nn.Linear(2, 3), "adam"),
            "checkpoint.state",
            "optimizer",
            "Optimizer",
            "str",
        ),
    ):
        with pytest.raises(ShapeError) as caught:
            call()
        error = caught.value
        assert error.op == op and error.problem.startswith(f"{argument} is not ") and expected in error.expected
        assert error.actual.startswith(actual) and error.next_step and isinstance(error.__cause__, Exception)


def test_a_device_that_is_not_there():
    """A number of which there is no device is a wrong argument; of a kind without devices torch says why."""
    absent = f"cuda:{torch.cuda.device_count()}"
    assert not KINDS["device"].fits(absent) and not KINDS["device"].fits(4096)
    assert all(KINDS["device"].fits(one) for one in ("cpu", "cuda", torch.device("cuda")))
    assert KINDS["device_type"].fits("cuda") and not KINDS["device_type"].fits("disk")
