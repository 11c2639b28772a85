"""Nothing that compute-sanitizer sees is wrong with any kernel."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sanitized

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
@pytest.mark.parametrize("half", sanitized.HALVES)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_a_sanitizer_finds_nothing(tool, half, record_property):
    """Out-of-bounds and misaligned accesses, races in shared memory, reads of memory that
    nobody wrote, barriers that some threads miss: every op of the matrix, wide heads and
    other tiles, values that are clamped or skipped, the portable kernels and debug mode's
    stop."""
    status, said = watched(tool, half)
    ran = re.findall(r"^ran (.*)$", said, re.MULTILINE)
    summaries = re.findall(r"\w+ SUMMARY: .*", said)
    for name, value in (("calls", len(ran)), ("said", "; ".join(summaries))):
        record_property(name, value)
    print(f"{tool} watched {len(ran)} calls and says {summaries}")
    assert ran == sanitized.HALVES[half], said
    assert status == 0, said[-4000:]
    clean = r"(ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards)"
    assert summaries and all(re.match(clean, x) for x in summaries), said


# What each tool says of the mistake that is planted for it. None is for synccheck: a
# barrier that threads miss may wait forever.
FINDINGS = {
    "memcheck": r"Invalid __global__ read.*\n.*\bgate\b",
    "initcheck": r"Uninitialized .*read.*\n.*\bfold\b",
    "racecheck": r"Race reported between .*\brace\b",
}


@pytest.mark.gpu
@pytest.mark.parametrize("tool", FINDINGS)
def test_a_sanitizer_finds_what_is_planted(tool):
    status, said = watched(tool, tool)
    assert re.search(FINDINGS[tool], said), said
    assert status == 9, said
