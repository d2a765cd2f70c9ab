"""Options in NumPy's numbers and arrays: every function and module gives what it gives for Python's own, and modules
keep Python's own."""

import copy
import functools
import importlib.util
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import distdl as dd
import distdl.functional as F
from distdl.errors import DistdlError

SETTINGS = ("last", "first")
FACES = {"F": F, "nn": dd.nn, "init": dd.init}
KINDS = {"int64": np.int64, "int32": np.int32, "uint8": np.uint8}


def in_numpy(value, kind):
    """Integers as ``kind``, tuples and lists of integers (or of pairs of them) as arrays, floats as float64; truth
    values stay Python's, as torch has it."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return kind(value) if np.can_cast(np.min_scalar_type(value), kind) else np.int64(value)
    if isinstance(value, float):
        return np.float64(value)
    if isinstance(value, dict) and not isinstance(value, Counter):
        return {in_numpy(k, kind): in_numpy(v, kind) for k, v in value.items()}
    if type(value) in (tuple, list) and value:
        try:
            array = np.array(value)
        except ValueError:
            return value
        if array.dtype.kind == "i":
            return array.astype(kind) if np.array_equal(array.astype(kind), array) else array
    return value


def sweep_of(change):
    """tests/sweep.py, each of whose calls of a public name goes through ``change(args, kwargs)``; the names called."""
    called, depth = Counter(), Counter()

    def through(name, function):
        @functools.wraps(function, updated=())
        def call(*args, **kwargs):
            if depth["in"]:
                return function(*args, **kwargs)
            called[name] += 1
            depth["in"] += 1
            try:
                args, kwargs = change(args, kwargs)
                return function(*args, **kwargs)
            finally:
                depth["in"] -= 1

        return call

    places = [(prefix, face, name, getattr(face, name)) for prefix, face in FACES.items() for name in face.__all__]
    places = [(p, m, n, f) for p, m, n, f in places if callable(f) and n not in ("Layer", "Loss")]
    for prefix, module, name, function in places:
        setattr(module, name, through(f"{prefix}.{name}", function))
    try:
        spec = importlib.util.spec_from_file_location("sweep_of_numpy", Path(__file__).parent / "sweep.py")
        sweep = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sweep)
        yield sweep, called
    finally:
        for _, module, name, function in places:
            setattr(module, name, function)


def results(change):
    """{name [setting]: results} of every builder, or the error's text."""
    found = {}
    for sweep, names in sweep_of(change):
        called = names
        for name, build in sweep.BUILDERS.items():
            if name.startswith("maps."):
                continue  # found again by their arguments: tuples, not arrays
            for setting in SETTINGS:
                torch.manual_seed(0)
                try:
                    call = build(sweep.Setting(setting))
                    found[f"{name} [{setting}]"] = sweep._tuple(call.run(*call.parts()))
                except DistdlError as error:
                    found[f"{name} [{setting}]"] = str(error)
                except Exception as error:
                    found[f"{name} [{setting}]"] = f"{type(error).__name__}: {error}"
    return found, called


@pytest.fixture(scope="module")
def own():
    return results(lambda args, kwargs: (args, kwargs))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_every_option(own, kind):
    """The same results, bit for bit."""
    expected, names = own
    assert len(names) > 150 and not [v for v in expected.values() if isinstance(v, str) and "Error: " in v]

    def change(args, kwargs):
        args = tuple(in_numpy(a, KINDS[kind]) for a in args)
        return args, {name: in_numpy(value, KINDS[kind]) for name, value in kwargs.items()}

    found, _ = results(change)
    wrong = {}
    for name, wanted in expected.items():
        got = found[name]
        same = type(got) is type(wanted) and len(got) == len(wanted)
        if not isinstance(wanted, str):
            same = same and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, wanted))
        if not same:
            wrong[name] = got if isinstance(got, str) else "another result"
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(f"{n}: {t}"[:300] for n, t in wrong.items())


CONSTRUCTED = {
    "Linear": lambda n, a: dd.nn.Linear(dd.Partition((1, 1, 1)), n(3), n(4)),
    "Embedding": lambda n, a: dd.nn.Embedding(dd.Partition((1, 1, 1)), n(3), n(4), padding_idx=n(1)),
    "ExpertLinear": lambda n, a: dd.nn.ExpertLinear(dd.Partition((1,)), n(3), n(4), n(5)),
    "Conv2d": lambda n, a: dd.nn.Conv2d(
        dd.Partition((1,) * 4), n(4), n(6), a(3, 2), a(1, 2), a(2, 1), n(1), groups=n(2)
    ),
    "ConvTranspose2d": lambda n, a: dd.nn.ConvTranspose2d(
        dd.Partition((1,) * 4), n(4), n(6), a(3, 2), a(2, 3), a(1, 0), a(1, 2)
    ),
    "LayerNorm": lambda n, a: dd.nn.LayerNorm(dd.Partition((1,) * 3), a(4, 5)),
    "RMSNorm": lambda n, a: dd.nn.RMSNorm(dd.Partition((1,) * 3), n(5)),
    "GroupNorm": lambda n, a: dd.nn.GroupNorm(dd.Partition((1,) * 3), n(2), n(4)),
    "BatchNorm": lambda n, a: dd.nn.BatchNorm(dd.Partition((1,) * 3), n(4)),
    "InstanceNorm": lambda n, a: dd.nn.InstanceNorm(dd.Partition((1,) * 3), n(4), affine=True),
    "MaxPool2d": lambda n, a: dd.nn.MaxPool2d(dd.Partition((1,) * 4), a(2, 3), n(1), a(1, 1)),
    "AvgPool2d": lambda n, a: dd.nn.AvgPool2d(dd.Partition((1,) * 4), n(2), a(1, 2), divisor_override=n(3)),
    "AdaptiveAvgPool2d": lambda n, a: dd.nn.AdaptiveAvgPool2d(dd.Partition((1,) * 4), a(2, 3)),
    "Upsample": lambda n, a: dd.nn.Upsample(dd.Partition((1,) * 4), a(7, 5)),
    "LCN": lambda n, a: dd.nn.LCN(dd.Partition((1,) * 4), n(3)),
    "SpectralConv": lambda n, a: dd.nn.SpectralConv(dd.Partition((1,) * 4), n(2), n(3), a(2, 2)),
    "MultiheadAttention": lambda n, a: dd.nn.MultiheadAttention(dd.Partition((1,) * 3), n(8), n(4), n(2)),
}


@pytest.mark.parametrize("name", CONSTRUCTED)
def test_modules(name):
    """Parameters, copies and pickles are those of Python's own numbers."""
    make = CONSTRUCTED[name]
    torch.manual_seed(0)
    wanted = make(int, lambda *sizes: sizes)
    torch.manual_seed(0)
    found = make(np.int32, lambda *sizes: np.array(sizes))
    for other in (found, copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert {n: p.shape for n, p in other.named_parameters()} == {n: p.shape for n, p in wanted.named_parameters()}
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), wanted.parameters()))
    for module in found.modules():
        for attribute, value in vars(module).items():
            if isinstance(value, (dict, tuple, list, np.generic, np.ndarray)):
                assert "array(" not in repr(value) and "np." not in repr(value), (attribute, value)
