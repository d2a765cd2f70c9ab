"""What tests of engines share."""

import pytest


@pytest.fixture
def only_here(request):
    """A fake engine reads host memory, and its tests bring it themselves."""
    if request.config.getoption("--engine") != "mpi":
        pytest.skip("another engine carries everything in this run")
