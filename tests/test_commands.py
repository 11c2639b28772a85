"""The documents' shell commands: a tool takes its arguments, and what is named exists.

And what they install is what the tests need, within bounds.
"""

import argparse
import os
import re
import runpy
import sys
import tomllib
from pathlib import Path

import expecttest
import pytest

from documents import PAGES, ROOT, commands
from replayssm.ops import debug

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINES = [
    pytest.param(line, id=f"{page.name}: {' '.join(line)}")
    for page in (*PAGES, ROOT / "CONTRIBUTING.md")
    for line in commands(page)
]
# Tools that need no GPU and take no time.
QUICK = ("memory.py", "table.py")
# Who reads a variable that a command sets.
READERS = {"REPLAYSSM_DEBUG": debug, "EXPECTTEST_ACCEPT": expecttest}


class Parsed(Exception):
    """The arguments are good; what would follow takes a GPU, a network or minutes."""


def tool(name: str, arguments: list[str], monkeypatch, capsys) -> None:
    """Runs a tool as a script: a quick one whole, others until they have their arguments."""
    path, parse = ROOT / "tools" / name, argparse.ArgumentParser.parse_args
    if "parse_args" not in path.read_text():
        assert path.exists() and arguments == []
        return

    def parsed(parser, *given):
        options = parse(parser, *given)
        if name not in QUICK:
            raise Parsed
        return options

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.chdir(ROOT)
    try:
        runpy.run_path(str(path), run_name="__main__")
    except Parsed:
        return
    assert name in QUICK and "\n|" in capsys.readouterr().out


def pip(arguments: list[str]) -> None:
    """Constraints, editable folder with its extras, and requirements that are one."""
    words = iter(arguments)
    assert next(words) == "install"
    bounds = (ROOT / "tools/constraints.txt").read_text()
    for word in words:
        if word == "--constraint":
            assert (ROOT / next(words)).samefile(ROOT / "tools/constraints.txt")
        elif word == "-e":
            extras = re.fullmatch(r"\.\[([\w,]+)\]", next(words))[1]
            known = PROJECT["project"]["optional-dependencies"]
            assert set(extras.split(",")) <= known.keys()
        else:
            name = re.match(r"[\w-]+", word)[0]
            assert re.search(rf"^{name}[<=]=", bounds, re.MULTILINE), word


def pytest_command(arguments: list[str]) -> None:
    """-m names a marker of this project, -k a word of some test's name."""
    flag, word = arguments or (None, None)
    if flag == "-m":
        markers = PROJECT["tool"]["pytest"]["ini_options"]["markers"]
        assert word in [marker.split(":")[0] for marker in markers]
    elif flag == "-k":
        tests = (path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
        assert any(re.search(rf"^def test_\w*{word}", text, re.M) for text in tests)
    else:
        assert flag is None


def ruff(arguments: list[str]) -> None:
    assert arguments in (["check", "."], ["format", "--check", "."])


@pytest.mark.parametrize("line", LINES)
def test_a_command_of_the_documents_can_be_given(line, monkeypatch, capsys):
    while "=" in line[0]:
        variable, *line = line
        name = variable.split("=")[0]
        assert name in Path(READERS[name].__file__).read_text()
    program, *arguments = line
    match Path(program).name, arguments:
        case "run", [("demo" | "test") as what, *rest]:
            assert program == "tools/run" and os.access(ROOT / program, os.X_OK)
            if what == "test":
                pytest_command(rest)
            else:
                tool("decode.py", rest, monkeypatch, capsys)
        case "python" | "python3", ["-m", "pytest", *rest]:
            pytest_command(rest)
        case "python" | "python3", ["-m", "venv", _]:
            pass
        case "python", ["serve.py"]:  # the reader's own
            pass
        case "python", [script, *rest]:
            folder, name = script.split("/")
            assert folder == "tools"
            tool(name, rest, monkeypatch, capsys)
        case "pip", rest:
            pip(rest)
        case "ruff", rest:
            ruff(rest)
        case _:
            pytest.fail(f"no test of {program}: add one")


def test_every_shell_block_is_one_whose_commands_are_tested():
    """Under another name, bash, console, or under none it would be one that nobody finds."""
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        marks = re.findall(r"^[ \t]*(?:```|~~~)[ \t]*(\w*)", page.read_text(), re.MULTILINE)
        assert set(marks[::2]) <= {"python", "sh"} and not any(marks[1::2]), page.name


def test_the_test_extra_brings_whatever_tests_are_skipped_without():
    """Or a machine that runs them all skips them, and nobody sees it."""
    project = PROJECT["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    versions = dict(re.match(r"([\w-]+)>=([\d.]+)", line).groups() for line in declared)

    def numbers(version: str) -> list[int]:
        return [int(part) for part in version.split(".")]

    skips = r"importorskip\(\"(\w+)[\w.]*\"(?:, \"([\d.]+)\")?"
    text = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    needed = dict(re.findall(skips, text)) | {"cuda-python": ""}
    for name in needed.keys() - {"cuda", "pip"}:  # pip comes with an environment
        assert numbers(versions.get(name, "0")) >= numbers(needed[name] or "0.1"), name
    assert {"build", "mypy", "transformers"} <= needed.keys()


def test_the_constraints_bound_everything_the_commands_install():
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["test"], *extras["demo"]]
    lines = (ROOT / "tools/constraints.txt").read_text().splitlines()
    bounds = {re.match(r"[\w-]+", line)[0] for line in lines if re.search(r"[<=]=", line)}
    assert {re.match(r"[\w-]+", requirement)[0] for requirement in wanted} <= bounds
