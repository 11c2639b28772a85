"""The demo's command, tools/demo/decode.py, run as a user runs it."""

import subprocess
import sys
from pathlib import Path

from process import environment

TOOLS = Path(__file__).parents[2] / "tools/demo"
WEIGHTS = TOOLS / "weights"


def run(
    *arguments, code: str | None = None, device: str = "cpu"
) -> subprocess.CompletedProcess:
    """The command with its output piped, or Python code that stands in for it."""
    head = [str(TOOLS / "decode.py")] if code is None else ["-c", code]
    command = [sys.executable, *head, "--device", device, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, timeout=300, env=environment())
