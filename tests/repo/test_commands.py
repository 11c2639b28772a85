"""The documents' shell commands name what exists, and install what the tests need."""

import os
import re
import tomllib

import pytest

from documents import PAGES, ROOT, commands

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
CONSTRAINTS = (ROOT / "tools/constraints.txt").read_text()
LINES = [
    pytest.param(line, id=f"{page.name}: {' '.join(line)}")
    for page in (*PAGES, ROOT / "CONTRIBUTING.md")
    for line in commands(page)
]


@pytest.mark.parametrize("line", LINES)
def test_what_a_command_of_the_documents_names_is_there(line):
    """Its script, the options of that, the extras it installs, the markers of pytest."""
    words = [word for word in line if not re.match(r"[A-Z_]+=", word)]
    script = next((word for word in words if word.startswith("tools/")), None)
    if script:
        text = (ROOT / script).read_text()
        if script.endswith(".py"):
            assert all(f'"{x}"' in text for x in words if x.startswith("--"))
        assert script != "tools/run" or os.access(ROOT / script, os.X_OK)
    for extras in re.findall(r"\.\[([\w,]+)\]", " ".join(words)):
        assert set(extras.split(",")) <= EXTRAS.keys()
    if "pytest" in words and "-m" in words[3:]:
        markers = PROJECT["tool"]["pytest"]["ini_options"]["markers"]
        assert words[-1] in [marker.split(":")[0] for marker in markers]


def test_the_test_extra_brings_whatever_tests_are_skipped_without():
    """Or a machine that runs them all skips them, and nobody sees it."""
    declared = [*PROJECT["project"]["dependencies"], *EXTRAS["test"]]
    versions = dict(re.match(r"([\w-]+)>=([\d.]+)", line).groups() for line in declared)

    def numbers(version: str) -> list[int]:
        return [int(part) for part in version.split(".")]

    skips = r"importorskip\(\"(\w+)[\w.]*\"(?:, \"([\d.]+)\")?"
    text = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    needed = dict(re.findall(skips, text)) | {"cuda-python": ""}
    for name in needed.keys() - {"cuda", "pip"}:  # pip comes with an environment
        assert numbers(versions.get(name, "0")) >= numbers(needed[name] or "0.1"), name
    assert {"build", "mypy", "transformers"} <= needed.keys()


def test_the_constraints_bound_everything_the_commands_install():
    wanted = [*PROJECT["project"]["dependencies"], *EXTRAS["test"], *EXTRAS["demo"]]
    lines = CONSTRAINTS.splitlines()
    bounds = {re.match(r"[\w-]+", line)[0] for line in lines if re.search(r"[<=]=", line)}
    assert {re.match(r"[\w-]+", requirement)[0] for requirement in wanted} <= bounds
