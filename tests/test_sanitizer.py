"""Nothing that compute-sanitizer sees is wrong with any kernel."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sanitized
from calls import CALLS

SCRIPT = Path(sanitized.__file__)


def sanitizer() -> str | None:
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    path = os.pathsep.join([os.environ["PATH"], *(f"{home}/bin" for home in homes)])
    return shutil.which("compute-sanitizer", path=path)


def watched(tool: str, *arguments: str) -> tuple[int, str]:
    """The exit status and the output of the script under a tool of compute-sanitizer."""
    program = sanitizer()
    if program is None:
        pytest.skip("needs compute-sanitizer, of the CUDA toolkit")
    done = subprocess.run(
        [program, f"--tool={tool}", "--target-processes=application-only",
         "--error-exitcode=9", sys.executable, SCRIPT, *arguments],
        capture_output=True, text=True, timeout=900,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )  # fmt: skip
    said = done.stdout + done.stderr
    if "Device not supported" in said:
        pytest.skip("compute-sanitizer does not support this device")
    return done.returncode, said


@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_a_sanitizer_finds_nothing(tool):
    """Out-of-bounds and misaligned accesses, races in shared memory, reads of memory that
    nobody wrote, barriers that some threads miss: every op of the matrix, and wide heads."""
    status, said = watched(tool)
    ran = re.findall(r"^ran ", said, re.MULTILINE)
    assert len(ran) == len(CALLS | sanitized.MORE), said
    assert status == 0, said[-4000:]
    assert re.search(r"(ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards)", said), said


@pytest.mark.gpu
def test_a_sanitizer_watches_our_kernels():
    status, said = watched("memcheck", "--planted")
    assert status == 9, said
    assert re.search(r"Invalid __global__ read.*\n.*\bgate\b", said), said
