"""Fuzz, all ranks in one process: random movements x kinds of partitions x pairs of transforms against serial torch.

Every case passes at least one message between ranks; the slow run has more than 5,000 of them, and prints how many each
cell had.
"""

import random
from collections import Counter

import hypothesis
import pytest
from fuzzing import BUILDERS, DTYPES, KINDS, PAIRS, Simulated, compare, describe, draw, seed_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import distdl as dd

EACH, EXAMPLES = (
    20,
    26,
)  # how many cases a cell needs, and how many are drawn: one in eight has no elements, and no message


def check(name, kind, pair, rng, zero=False) -> bool:
    """One case; whether a message passed between ranks."""
    case = draw(name, kind, rng, rng.randint(4, 6), zero)
    if case is None:
        return False
    dtype = rng.choice(DTYPES)
    with dd.testing.count_messages() as sent:
        faults = compare(case, pair, Simulated(case), dtype, rng.randrange(1000))
    assert not faults, f"{faults} in {describe(case, pair, dtype)}"
    return sent.sends > 0


@pytest.mark.parametrize("name", BUILDERS)
def test_a_few_of_every_cell(name):
    for kind in KINDS:
        for pair in PAIRS:
            assert check(name, kind, pair, random.Random(seed_of(name, kind, pair)))


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDERS)
def test_many_of_every_cell(name, capsys):
    """hypothesis draws, so that a failure is shown at its smallest."""
    cells = Counter()
    for kind in KINDS:
        for pair in PAIRS:

            @hypothesis.seed(seed_of(name, kind, pair, "many"))
            @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
            @given(st.randoms(use_true_random=False))
            def run(rng):
                cells[kind, pair] += check(name, kind, pair, rng, zero=rng.randrange(8) == 7)

            while cells[kind, pair] < EACH:
                before = cells[kind, pair]
                run()
                run = hypothesis.seed(seed_of(name, kind, pair, before))(run)
                assert cells[kind, pair] > before, f"no message in {kind} {pair}"
    with capsys.disabled():
        for kind in KINDS:
            print(f"\nfuzz {name} {kind}: " + ", ".join(f"{pair} {cells[kind, pair]}" for pair in PAIRS), end="")
    assert len(BUILDERS) * len(KINDS) * len(PAIRS) * EACH >= 5000 and min(cells.values()) >= EACH
