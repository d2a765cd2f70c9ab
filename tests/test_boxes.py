"""Integers, runs and boxes of indices, each compared with its meaning, index by index."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distdl.boxes import balanced, collide, is_bool, is_int, joined, row_major


@pytest.mark.parametrize("value", [True, np.bool_(True), torch.tensor(True)], ids=repr)
def test_truth_values_are_no_integers(value):
    assert is_bool(value) is True and is_int(value) is False


def test_integers():
    for value in (0, -3, np.int64(2), torch.tensor(4), np.array(5)):
        assert is_int(value) is True and is_bool(value) is False
    for value in (1.0, "1", None, (1,), torch.tensor([1, 2]), torch.tensor(1.0)):
        assert is_int(value) is False and is_bool(value) is False


@given(st.integers(0, 200), st.integers(1, 40))
def test_balanced(n, p):
    sizes = balanced(n, p)
    assert sizes == tuple(len(b) for b in np.array_split(np.arange(n), p))
    assert sizes == tuple(n // p + (i < n % p) for i in range(p))


def test_joined():
    """Runs say the same as before, none is empty, and no two could be one."""
    assert joined([]) == () and joined([(3, 3, 0)]) == ()
    assert joined([(0, 2, 5), (2, 2, 9), (2, 4, 7)]) == ((0, 4, 5),), "an empty run between two"
    assert joined([(0, 2, 5), (2, 4, 8)]) == ((0, 2, 5), (2, 4, 8)), "apart where they lie"
    assert joined([(0, 2, 5), (3, 4, 7)]) == ((0, 2, 5), (3, 4, 7)), "apart in their indices"
    assert joined([(4, 6, 1), (6, 7, 3), (7, 9, 4), (1, 2, 6)]) == ((4, 9, 1), (1, 2, 6))
    for cuts in itertools.product((0, 1), repeat=4):  # a run of five, cut at some of four places, and then one apart
        ends = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), 5]
        runs = [(a + 2, b + 2, a + 7) for a, b in itertools.pairwise(ends)]
        assert joined([*runs, (9, 11, 12)]) == ((2, 7, 7), (9, 11, 12))


def test_row_major():
    """Every block of every small tensor: its elements in its own order, in runs as long as they can be."""
    for shape in [(), (4,), (2, 3), (3, 2, 2), (1, 3), (2, 0)]:
        whole = np.arange(int(np.prod(shape))).reshape(shape)
        ranges = [[(a, b) for a in range(n + 1) for b in range(a, n + 1)] for n in shape]
        for box in itertools.product(*ranges):
            size, offsets = row_major(box, shape)
            found = [o + i for o in offsets for i in range(size)]
            assert found == whole[tuple(slice(*r) for r in box)].ravel().tolist(), (shape, box)
    for box, shape, runs in [
        (((1, 3), (0, 4), (0, 5)), (6, 4, 5), (40, [20])),
        (((1, 3), (2, 4), (0, 5)), (6, 4, 5), (10, [30, 50])),
        (((0, 2), (1, 2)), (2, 3), (1, [1, 4])),
        ((), (), (1, [0])),
        (((0, 7),), (7,), (7, [0])),
    ]:
        size, offsets = row_major(box, shape)
        assert (size, list(offsets)) == runs


def test_collide():
    sides = [(a, b) for a in range(4) for b in range(a + 1, 4)]
    for ndim in (1, 2):
        boxes = [list(box) for box in itertools.product(sides, repeat=ndim)]
        for pair in itertools.combinations_with_replacement(boxes, 2):
            places = [set(itertools.product(*(range(a, b) for a, b in box))) for box in pair]
            assert collide(pair) is bool(places[0] & places[1]), pair
            far = [(9, 10)] * ndim
            assert collide([far, *pair]) is collide([pair[1], far, pair[0]]) is bool(places[0] & places[1])
    assert collide([]) is False and collide([[]]) is False and collide([[], []]) is True
