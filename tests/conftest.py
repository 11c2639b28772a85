"""What every test file shares: the gpu marker and the device fixture."""

import atexit
import os
import sys

import pytest
import torch
from hypothesis import Phase, settings

# For tools/mutate.py, which wants to know that something fails and not the least that does.
settings.register_profile("unshrunk", phases=[Phase.generate], report_multiple_bugs=False)

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # or every worker would start a thread per core


@atexit.register
def close_with_the_summary() -> None:
    """triton's bindings list all that they leak once Python is gone: pages after it."""
    if "triton" in sys.modules:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests marked gpu without a CUDA device, and those marked long unasked."""
    skips = {}
    if not torch.cuda.is_available():
        skips["gpu"] = pytest.mark.skip(reason="needs a CUDA device")
    if "long" not in config.getoption("markexpr"):
        skips["long"] = pytest.mark.skip(reason="takes long; pytest -m long runs it")
    for item in items:
        for marker, skip in skips.items():
            if item.get_closest_marker(marker):
                item.add_marker(skip)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Runs a test once per device: "cpu", and "cuda" where there is one."""
    return request.param
