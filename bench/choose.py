"""Quick and full sets of cases."""

import pytest
from mpi4py import MPI

SIZE = MPI.COMM_WORLD.size


def choose(names, quick, full=()):
    """Parametrize with the quick cases, and with the others only under --full."""
    return pytest.mark.parametrize(
        names,
        [
            *quick,
            *(
                pytest.param(*(one if isinstance(one, tuple) and "," in names else (one,)), marks=pytest.mark.full)
                for one in full
            ),
        ],
    )


def needs(ranks):
    """Skip where there are fewer ranks: the same on all of them."""
    if ranks > SIZE:
        pytest.skip(f"needs {ranks} ranks")
