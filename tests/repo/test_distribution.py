"""The wheel and the sdist: what they hold, that they install and run, and their types.

Each is built and installed once, into an empty environment that sees this one's torch.
"""

import ast
import functools
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from email.message import Message
from email.parser import Parser
from pathlib import Path
from types import SimpleNamespace

import pytest
import setuptools
import torch
from expecttest import assert_expected_inline

from documents import blocks
from process import SUPPORT

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "LICENSE", "CONTRIBUTING.md")
FOLDERS = ("ops", "graph", "tests", "tools", "docs")
FILES = ("pyproject.toml", "MANIFEST.in", ".ci/run", *DOCUMENTS)
# Who installs what a package imports, where that is not named alike.
INSTALLED_BY = {"cuda": "cuda-python"}

SMOKE = """
import importlib.metadata, importlib.resources, pathlib, sys
import replayssm, replayssm.graph
assert pathlib.Path(sys.prefix) in pathlib.Path(replayssm.__file__).parents
assert replayssm.__version__ == importlib.metadata.version("replayssm")
assert (importlib.resources.files("replayssm") / "py.typed").is_file()
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The sdist, the wheel that is built from it, and the names in each; of a copy."""
    pytest.importorskip("build")
    tree = tmp_path_factory.mktemp("tree")
    for name in FOLDERS:
        skip = shutil.ignore_patterns("__pycache__", ".*_cache", "*.bak")
        shutil.copytree(ROOT / name, tree / name, ignore=skip)
    for name in FILES:
        (tree / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "out"]
    subprocess.run(build, cwd=tree, check=True, capture_output=True)
    (wheel,), (sdist,) = (tree / "out").glob("*.whl"), (tree / "out").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = [m.name.split("/", 1)[-1] for m in archive.getmembers() if m.isfile()]
    return SimpleNamespace(
        files={"wheel": wheel, "sdist": sdist},
        wheel=set(zipfile.ZipFile(wheel).namelist()), sdist=set(members),
    )  # fmt: skip


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The Python of an environment that holds the wheel, or the sdist, alone."""
    pytest.importorskip("pip")

    @functools.cache
    def install(kind: str) -> Path:
        home = tmp_path_factory.mktemp(kind)
        venv.create(home, symlinks=True)
        python = home / "bin" / "python"
        # Of the folders that a .pth file names their own .pth files are left alone: torch
        # and setuptools are seen, and the editable install beside them is not.
        (packages,) = home.glob("lib/python*/site-packages")
        seen = {str(Path(module.__file__).parents[1]) for module in (torch, setuptools)}
        (packages / "seen.pth").write_text("\n".join(sorted(seen)))
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        offline = ["--no-index", "--no-deps", "--no-build-isolation"]
        subprocess.run(
            [*pip, *offline, str(built.files[kind])], check=True, capture_output=True,
            cwd=home,
        )  # fmt: skip
        return python

    return install


def test_the_wheel_holds_the_package_with_its_type_marker_and_nothing_else(built):
    package = {
        "replayssm/" + str(path.relative_to(ROOT)).removeprefix("ops/_root/")
        for name in ("ops", "graph")
        for path in (ROOT / name).rglob("*.py")
    }
    files = {name for name in built.wheel if ".dist-info/" not in name}
    assert files == package | {"replayssm/py.typed"}


def test_the_wheel_carries_the_licence(built):
    assert [n for n in built.wheel if n.endswith(".dist-info/licenses/LICENSE")]


def test_the_sdist_holds_the_tests_the_tools_and_the_documents(built):
    junk = re.compile(r"__pycache__|_cache/|\.bak$")
    tree = {
        str(path.relative_to(ROOT))
        for name in FOLDERS
        for path in (ROOT / name).rglob("*")
        if path.is_file() and not junk.search(str(path.relative_to(ROOT)))
    }
    assert tree | set(FILES) <= built.sdist


def metadata_of(built: SimpleNamespace) -> tuple[Message, list[str]]:
    """The wheel's metadata, and what it needs without any extra."""
    (name,) = (n for n in built.wheel if n.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(zipfile.ZipFile(built.files["wheel"]).read(name).decode())
    needs = metadata.get_all("Requires-Dist", [])
    return metadata, [need for need in needs if "extra ==" not in need]


def test_the_wheel_needs_what_its_files_import_and_nothing_else(built):
    """But transformers, which only its adapter imports: an extra."""
    wheel, found = zipfile.ZipFile(built.files["wheel"]), set()
    for name in built.wheel:
        for node in ast.walk(ast.parse(wheel.read(name) if name.endswith(".py") else "")):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(node.module.split(".")[0])
    imported = found - sys.stdlib_module_names - {"replayssm", "transformers"}
    needs = {re.match(r"[\w-]+", need)[0] for need in metadata_of(built)[1]}
    assert needs == {INSTALLED_BY.get(name, name) for name in imported}


def test_the_metadata_names_what_an_installer_needs(built):
    metadata, needs = metadata_of(built)
    fields = ("Name", "Summary", "License-Expression", "Requires-Python")
    lines = [f"{field}: {metadata[field]}" for field in fields]
    assert_expected_inline(
        "\n".join([*needs, *lines]),
        """\
torch>=2.11
triton>=3.6; platform_system == "Linux"
cuda-python>=12.8; platform_system == "Linux"
Name: replayssm
Summary: Exact, small, capturable state commits for speculative decoding on linear-attention models
License-Expression: Apache-2.0
Requires-Python: >=3.11""",
    )
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert metadata["Description-Content-Type"] == "text/markdown"


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_what_is_installed_runs_the_call_of_the_readme(installed, tmp_path, kind):
    call = next(block.text for block in blocks(ROOT / "README.md") if not block.mark)
    done = subprocess.run(
        [installed(kind), "-c", SMOKE + call], cwd=tmp_path, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def mypy(installed, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs mypy over the installed wheel; what one run learns of torch the next one knows."""
    pytest.importorskip("mypy")
    home = tmp_path_factory.mktemp("mypy")

    def run(*arguments: str | Path) -> str:
        command = [
            sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml",
            "--cache-dir", home / "cache", "--python-executable", installed("wheel"),
            *arguments,
        ]  # fmt: skip
        done = subprocess.run(
            command, cwd=home, capture_output=True, text=True, timeout=300
        )
        return (done.stdout + done.stderr).strip()

    return run


def test_mypy_finds_nothing_wrong_in_the_package(mypy):
    assert re.fullmatch(
        r"Success: no issues found in \d+ source files", mypy("-p", "replayssm")
    )


def test_a_user_sees_the_types_of_the_public_functions(mypy):
    """typed_user.py asserts them; where it expects an error, none would be one."""
    user = SUPPORT / "typed_user.py"
    assert mypy(user) == "Success: no issues found in 1 source file"
