"""neon's models on 8 and 16 ranks (`make test-all`): more ranks than some layers have rows, filters or classes."""

import pytest
from neon_models import classifier, convnet_dist, gb_dist, mlp_dist, pretraining

import distdl as dd

SIZE = dd.world().size
GRIDS = {8: ["halopar", "halodatapar", "modelpar"], 16: ["halopar", (4, 1, 2, 2), (1, 2, 4, 2)]}.get(SIZE, ["halopar"])
pytestmark = [pytest.mark.slow, pytest.mark.mpi(8)]


@pytest.mark.parametrize("kind", GRIDS, ids=str)
def test_convnet(kind):
    classifier(convnet_dist, kind, SIZE, size=4)


@pytest.mark.parametrize("kind", GRIDS, ids=str)
def test_gb(kind):
    pretraining(kind, SIZE, 0, tied=True, size=4)
    pretraining(kind, SIZE, 1, tied=False, size=4)
    classifier(gb_dist, kind, SIZE, size=4, rate=0.02)


@pytest.mark.parametrize("kind", ["modelpar", "datapar", "halopar"])
def test_mlp(kind):
    classifier(mlp_dist, kind, SIZE, size=7, rate=0.3)
