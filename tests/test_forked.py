"""Derivatives on ranks that differ, as forks of this process: nobody waits in vain, no message is left, and values are right."""

import pytest
import torch
from forked import every_rank
from registry import randn
from ties import MOVEMENTS, ROUTES, SETTINGS, expected, local, serial, the_maps

import distdl as dd


def rank():
    return dd.world().rank


@pytest.mark.parametrize("turn", [0, 1])
def test_one_rank_alone_is_nonlinear(turn):
    """Derivatives of order two and three, on ranks whose local functions differ; each route with another movement in each turn."""
    X, Y, W = (randn((2, 3), k) / 2 for k in (1, 2, 3))
    chosen = {route: (MOVEMENTS[(i + 3 * turn) % len(MOVEMENTS)], SETTINGS[(i + turn) % 4]) for i, route in enumerate(ROUTES)}
    # First: the forks inherit what torch loads for it.
    wanted = {route: ROUTES[route][1](serial(*how), X, Y, W) for route, how in chosen.items()}

    def program():
        r = rank()
        return {route: ROUTES[route][1](local(the_maps()[name], settings[r]), X[r], Y[r], W[r]).detach()
                for route, (name, settings) in chosen.items()}

    both = every_rank(2, program)
    for route, (kind, _) in ROUTES.items():
        found = [one[route] for one in both]
        if kind == "sum":
            found = [sum(found)] * 2
        for r in range(2):
            assert torch.allclose(found[r], expected(kind, wanted[route], r), rtol=1e-11, atol=1e-11), (route, chosen[route], r)
