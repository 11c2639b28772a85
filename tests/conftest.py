"""What every test file shares: the gpu marker and the device fixture."""

import atexit
import os
import sys

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # or every worker would start a thread per core


@atexit.register
def close_with_the_summary() -> None:
    """triton's bindings list all that they leak once Python is gone: pages after it."""
    if "triton" in sys.modules:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests marked gpu where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Runs a test once per device: "cpu", and "cuda" where there is one."""
    return request.param
