"""Plant bugs in a copy of the package; each must make a test fail.

    python tools/mutate.py [--gpu] [WORDS]   only the bugs whose description holds WORDS

The checkout is only read: a run that is interrupted leaves nothing behind. Bugs in the
reference and the graphs are caught by the tests that mutants.py
names, bugs in kernels by the contract in Triton's interpreter: of plain Triton as it is, of the tuned kernels on a
stand-in for Gluon. --gpu runs the GPU test of each bug in a kernel instead.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernel_mutants import BUGS as KERNELS
from kernel_mutants import GLUON, PORTABLE
from mutants import MUTATIONS, Mutation

ROOT = Path(__file__).parents[1]
# Folders of the checkout and their places in the package, see pyproject.toml.
LAYOUT = {"ops/_root": "replayssm", "ops": "replayssm/ops", "graph": "replayssm/graph"}
FIND = "import importlib.util as u; print(u.find_spec('replayssm').origin)"
SUPPORT = ROOT / "tests/support"


def copy_package(folder: Path) -> None:
    """The package as PYTHONPATH=folder imports it."""
    for source, place in LAYOUT.items():
        skip = shutil.ignore_patterns("_root", "__pycache__")
        shutil.copytree(ROOT / source, folder / place, ignore=skip, dirs_exist_ok=True)


def plant(mutation: Mutation, folder: Path) -> None:
    """Edit a copy of the package.

    Raises:
        ValueError: the old text is not there exactly once.
    """
    path = folder / "replayssm" / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"{mutation.file} must hold the old text of {mutation.bug!r} once, "
            f"got {text.count(mutation.old)} times"
        )
    path.write_text(text.replace(mutation.old, mutation.new))


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with a copy of the package in place of the installed one."""
    paths = [folder, SUPPORT, ROOT / "tools/bench", ROOT / "tools/demo", ROOT / "tools"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )  # fmt: skip


def failure(folder: Path, by: str, words: tuple[str, ...] = ()) -> str | None:
    """What is wrong with a copy of the package, by a test or a lowering; None: nothing.

    Raises:
        RuntimeError: it could not run, or ran with another package.
    """
    imported = Path(run(folder, "-c", FIND).stdout.strip())
    if imported != folder / "replayssm/__init__.py":
        raise RuntimeError(f"Python imports {imported}, not the copy in {folder}")
    if by in (PORTABLE, GLUON):
        done = run(folder, str(SUPPORT / "interpreted.py"), by, *words)
        found = [json.loads(line) for line in done.stdout.splitlines()]
        if done.returncode or not found:
            # A wild store may end the process: the bug was seen, if another case ran well.
            return f"the interpreter ends with {done.returncode}: {done.stderr[-80:]}"
        return next((f"{case}: {wrong}" for case, wrong in found if wrong), None)
    gpu = () if "-k" in by or by.startswith("gpu ") else ("-m", "not gpu and not long")
    done = run(
        folder, "-m", "pytest", *by.removeprefix("gpu ").split(), "-x", "-q", *gpu,
        "-p", "no:cacheprovider", "--hypothesis-profile=unshrunk",
    )  # fmt: skip
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{by} did not run:\n{done.stdout}{done.stderr}")
    if done.returncode == 0:
        return None
    return re.search(r"^E +(.*)", done.stdout, re.MULTILINE)[1]


def attempt(mutation: Mutation | None, by: str, words: tuple[str, ...] = ()) -> str | None:
    """``failure`` of a fresh copy with a bug or, with None, without one."""
    with tempfile.TemporaryDirectory(prefix="replayssm-") as name:
        folder = Path(name)
        copy_package(folder)
        if mutation:
            plant(mutation, folder)
        return failure(folder, by, words)


def checks(mutation: Mutation, gpu: bool) -> tuple[str, tuple[str, ...]]:
    """Who must catch a bug, and by which cases."""
    return (f"gpu {mutation.gpu}", ()) if gpu else (mutation.by, mutation.words)


def main(words: str, gpu: bool) -> int:
    start = time.perf_counter()
    chosen = [m for m in (KERNELS if gpu else [*MUTATIONS, *KERNELS]) if words in m.bug]
    chosen = [m for m in chosen if m.gpu or not gpu]
    workers = 1 if gpu else os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        tried = {} if gpu else dict.fromkeys(m.by for m in chosen)
        for by, text in zip(
            tried, pool.map(lambda by: attempt(None, by), tried), strict=True
        ):
            if text:
                print(f"{by} fails without any bug: {text}")
                return 1
        missed = 0
        print(f"{'caught':<8}{'file':<26}{'bug':<58}first failure")
        texts = pool.map(lambda m: attempt(m, *checks(m, gpu)), chosen)
        for mutation, text in zip(chosen, texts, strict=True):
            missed += text is None
            caught, said = ("no", mutation.gpu) if text is None else ("yes", text)
            said = " ".join(said.split())[:80]
            print(f"{caught:<8}{mutation.file:<26}{mutation.bug:<58}{said}", flush=True)
    seconds = time.perf_counter() - start
    print(f"{len(chosen) - missed} of {len(chosen)} bugs caught in {seconds:.0f} s")
    return 1 if missed or not chosen else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--gpu", action="store_true", help="run the GPU tests, on a GPU")
    options = parser.parse_args()
    sys.exit(main(" ".join(options.words), options.gpu))
