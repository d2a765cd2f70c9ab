"""Settings of all tests."""

import freezing
import hypothesis
import pytest
import tiers
import torch

torch.set_num_threads(1)  # ranks share the cores

# The same examples on every rank and in every run; a slow machine is no failure.
hypothesis.settings.register_profile("distdl", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("distdl")


def pytest_addoption(parser):
    parser.addoption(
        "--engine",
        choices=["mpi", "nccl", "nccl-messages", "cuda", "fake-nccl", "fake-peer"],
        default="mpi",
        help="what carries the movements: MPI; NCCL on CUDA devices, "
        "with or without its collectives (tests that count messages expect none); NCCL, and all tensors are on the "
        "devices (tests of dd.parallel); or a fake of NCCL, without or with one of peer memory",
    )


@pytest.hookimpl(tryfirst=True)  # before tests of other tiers are left out
def pytest_collection_modifyitems(items):
    for item in items:
        file = item.path.stem.removeprefix("test_")
        if "mpi" not in item.path.parts and tiers.in_one_process(file, item.name) == "full":
            item.add_marker("full")


def pytest_runtest_setup(item):
    if (
        item.get_closest_marker("gpu") or item.config.getoption("--engine") == "cuda"
    ) and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    for marker in item.iter_markers("mpi"):
        import distdl as dd  # only now: tests of other kinds start no MPI

        if dd.world().size < marker.args[0]:
            pytest.skip(f"needs {marker.args[0]} ranks")
    if item.get_closest_marker("of_mpi"):
        import distdl as dd

        if type(dd.world().host).__name__ == "TorchTransport":
            pytest.skip("this is MPI's own: these are ranks of torch.distributed")


TEXTS = pytest.StashKey[freezing.Texts]()


ELSEWHERE = {"watching", "programs", "checkpoint"}


@pytest.fixture(autouse=True)
def _texts_stay(request):
    """The errors that a test makes have the frozen texts: of tests without MPI, and on 1 and 2 ranks. Not where ranks
    or jobs wait for each other, nor of broken files: who is late, and what the system says, differ. Some quote torch,
    or MPI: they are those of the versions that requirements/dev.txt pins."""
    config, file = request.config, "errors" if freezing.PINNED else None
    if file is not None and "mpi" in request.path.parts:
        import distdl as dd  # only now, too

        world = dd.world()
        file = f"errors.{world.rank}of{world.size}" if world.size < 3 else None
    if file is None or not ELSEWHERE.isdisjoint(request.path.parts) or config.getoption("--engine") != "mpi":
        yield
    else:
        texts = config.stash.setdefault(TEXTS, freezing.Texts(file))
        yield from texts.collect(f"{request.path.stem.removeprefix('test_')}: {request.node.name}")


def pytest_sessionfinish(session):
    if TEXTS in session.config.stash:
        session.config.stash[TEXTS].finish()
