"""The Python blocks of the documents, and their shell commands."""

import re
import shlex
from pathlib import Path
from types import CodeType
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


class Block(NamedTuple):
    """One fenced block. mark: what stands after "python", "gpu" or "fragment"."""

    mark: str
    text: str
    code: CodeType


def blocks(page: Path) -> list[Block]:
    """A page's blocks in order; errors in them show the page's own line numbers."""
    text, found = page.read_text(), []
    for match in re.finditer(r"^```python([^\n]*)\n(.*?)^```$", text, re.M | re.S):
        lines = text[: match.start(2)].count("\n")
        code = compile("\n" * lines + match[2], str(page), "exec")
        found.append(Block(match[1].strip(), match[2], code))
    return found


def commands(page: Path) -> list[list[str]]:
    """The words of each command of a page's sh blocks, without its comment."""
    found = re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.M | re.S)
    lines = "".join(found).replace(" && ", "\n").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]
