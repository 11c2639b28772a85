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


@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_a_sanitizer_finds_nothing(tool):
    """Out-of-bounds and misaligned accesses, races in shared memory, reads of memory that
    nobody wrote, barriers that some threads miss: every op of the matrix, and wide heads."""
    program = sanitizer()
    if program is None:
        pytest.skip("needs compute-sanitizer, of the CUDA toolkit")
    done = subprocess.run(
        [program, f"--tool={tool}", "--target-processes=application-only",
         "--error-exitcode=9", "--kernel-regex=kns=recur|effective|fold|gate|store|scatter|"
         "accept|commit_indices|conv", sys.executable, SCRIPT],
        capture_output=True, text=True, timeout=900,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )  # fmt: skip
    said = done.stdout + done.stderr
    if "Device not supported" in said:
        pytest.skip("compute-sanitizer does not support this device")
    assert len(re.findall(r"^ran ", said, re.MULTILINE)) == len(CALLS | sanitized.MORE), (
        said
    )
    assert done.returncode == 0, said[-4000:]
    assert re.search(r"(ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards)", said), said
