"""Wrong calls: one clear error that names the call, what was expected and what came, never Python's own from deep
inside."""

import copy
import inspect
import pickle

import numpy as np
import pytest
import torch

import distdl as dd
import distdl.functional as F
from distdl._arguments import _KINDS, rules
from distdl.errors import DistdlError

P = dd.Partition((1, 1))
L = dd.Layout(P, (2, 3))
WRONG = (
    None,
    [1],
    "text",
    np.ones(3),
    (1.5, 2),
    0.5,
    {},
    object(),
    dd.Partition((1,)),
    dd.Layout(dd.Partition((1,)), (3,)),
)
MODULES = (F, dd.nn, dd.init, dd.checkpoint)
FUNCTIONS = [getattr(m, n) for m in MODULES for n in m.__all__ if callable(getattr(m, n))]


def checked_rules(function):
    if isinstance(function, type):
        checks = "Checked" in {c.__name__ for c in function.__mro__}
        return rules(function.__init__) if checks else {}
    return rules(function) if "check" in function.__code__.co_names and hasattr(function, "__wrapped__") else {}


CHECKED = [(f, checked_rules(f)) for f in FUNCTIONS if inspect.isfunction(f) or isinstance(f, type)]


def test_constructors_and_functions_are_checked():
    assert sum(bool(known) for _, known in CHECKED) > 70
    for name in ("Linear", "Conv2d", "BatchNorm", "Dropout", "MSELoss", "MaxPool2d", "Embedding"):
        assert checked_rules(getattr(dd.nn, name)), name


@pytest.mark.parametrize("function, known", [c for c in CHECKED if c[1]], ids=lambda v: getattr(v, "__name__", ""))
def test_arguments_of_another_kind(function, known):
    """Each argument in turn, everything else right by its kind."""
    right = {"P": P, "layout": L, "L": L, "w": torch.ones(2, 3), "module": torch.nn.ReLU(), "model": torch.nn.ReLU()}
    parameters = inspect.signature(function).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    for name, (_, kind, fits, optional) in known.items():
        for value in WRONG:
            if fits(value) or (optional and value is None):
                continue
            with pytest.raises(DistdlError) as caught:
                function(**{p.name: right.get(p.name, 1) for p in needed} | {name: value})
            assert function.__name__ in caught.value.op and caught.value.expected == kind, caught.value
            assert type(value).__name__ in caught.value.actual and caught.value.next_step


def test_right_values_of_every_kind_pass():
    for name, values in {
        "momentum": (None, 0.1, 1),
        "num_features": (3, np.int64(3), torch.tensor(3)),
        "P": (P, L),
        "eps": (1, 1e-5, np.float32(1), torch.tensor(0.1)),
        "normalized_shape": (3, (3,), [np.int64(3)], torch.Size((3,))),
        "device": ("cpu", 0, torch.device("meta")),
    }.items():
        assert all(_KINDS[name][1](value) for value in values), name


def test_copies_pickles_and_own_subclasses():
    """None is a call of ours with arguments to check; a user's subclass may give names another meaning."""
    layer = dd.nn.Linear(dd.Partition((1, 1, 1)), 3, 2)
    assert copy.deepcopy(layer).P == layer.P and pickle.loads(pickle.dumps(layer)).P == layer.P

    class Own(dd.nn.Linear):
        def __init__(self, seed, P):
            super().__init__(dd.Partition((1, 1, 1)), 3, 2)
            self.seed = seed

    assert Own("text", P=None).seed == "text"
    with pytest.raises(TypeError, match="unexpected keyword"):
        dd.nn.Dropout(P, q=1)
