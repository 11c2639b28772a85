"""The Python blocks of the documents."""

import re
from pathlib import Path
from types import CodeType
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
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
