"""The plain Triton kernels do what the reference does, as the interpreter runs them."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import far

pytest.importorskip("triton", reason="needs triton")

CASES = [
    "verify gdn", "verify kda ragged", "verify kda-safe", "fold gdn", "fold kda",
    "decode gdn", "decode kda", "store gdn", "store kda-safe", "wide offsets", "scatter",
    "accept", "commit_indices", "conv_commit dense", "conv_commit sliding",
    "conv_commit channels_last", *(f"far {check}" for check in far.CHECKS), "debug stop",
]  # fmt: skip


def release(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version(package).split(".")[:2])


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    if release("triton") < (3, 7) and release("numpy") >= (2, 4):
        pytest.skip("triton 3.6's interpreter cannot loop with numpy 2.4")
    script = Path(__file__).with_name("interpreted.py")
    run = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return dict(json.loads(line) for line in run.stdout.splitlines())


@pytest.mark.parametrize("case", CASES)
def test_the_plain_triton_kernels_agree_with_the_reference(outcomes, case):
    assert outcomes[case] == ""


def test_every_interpreted_case_is_reported(outcomes):
    assert sorted(outcomes) == sorted(CASES)
