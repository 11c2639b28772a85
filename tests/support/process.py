"""Scripts of this folder, and pieces of code, in a process of their own."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
# As pytest's pythonpath in pyproject.toml.
FOLDERS = (SUPPORT, ROOT / "tools/bench", ROOT / "tools/demo", ROOT / "tools")


def environment(**changes: str) -> dict[str, str]:
    """This process's, where Python also finds what tests import."""
    paths = [*map(str, FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | changes


def python(*arguments: object, **changes: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments and changes to the environment."""
    command = [sys.executable, *map(str, arguments)]
    environ = environment(**changes)
    return subprocess.run(command, capture_output=True, text=True, env=environ)


def skip_where_triton_cannot_interpret() -> None:
    def release(package: str) -> tuple[int, ...]:
        return tuple(int(part) for part in version(package).split(".")[:2])

    if release("triton") < (3, 7) and release("numpy") >= (2, 4):
        pytest.skip("triton 3.6's interpreter cannot loop with numpy 2.4")
