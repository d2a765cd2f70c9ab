"""One rank for each CUDA device: ``python -m distdl run -n 2 -m pytest tests/gpu``. The whole MPI suite runs there as
well, with
every movement on the devices: ``python -m distdl run -n 2 -m pytest tests/mpi --engine=nccl``."""

from mpi.conftest import pytest_configure

__all__ = ["pytest_configure"]
