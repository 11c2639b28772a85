"""Install the peers of tools/bench/bench.py: python tools/bench/install_peers.py [FOLDER].

Takes the wheels that peers-requirements.txt pins, without their dependencies, and keeps
their kernels' Python sources in a folder of its own (default: .peers in the checkout;
15 MB), which can be carried to a machine that reaches no index. pip's environment variables
apply: with PIP_NO_INDEX=1 PIP_FIND_LINKS=DIR the wheels come from DIR.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("peers-requirements.txt")
FOLDER = Path(__file__).parents[2] / ".peers"
# The tag of the pinned wheel of sglang, not of the interpreter that runs this.
WHEEL = [
    "--only-binary=:all:", "--implementation=cp", "--python-version=3.11", "--abi=cp311",
    "--platform=manylinux_2_34_x86_64",
]  # fmt: skip
# sglang's servers, models and compiled modules are 112 of its 131 MB.
KERNELS = ("sglang/kernels/**/*.py", "fla/**/*.py", "*.dist-info/**/*")
# Never imported: a test reads in them that what replayssm.graph.engines.sglang reads is there.
ENGINE = (
    "sglang/srt/mem_cache/kv_cache_configurator.py",
    "sglang/srt/mem_cache/memory_pool.py",
    "sglang/srt/layers/attention/hybrid_linear_attn_backend.py",
    "sglang/srt/layers/attention/linear/gdn_backend.py",
    "sglang/srt/layers/attention/linear/kda_backend.py",
)
KEEP = KERNELS + ENGINE


def pins() -> dict[str, str]:
    """The pinned version of each peer."""
    return dict(re.findall(r"^([\w-]+)==(\S+)", REQUIREMENTS.read_text(), re.MULTILINE))


def installed(folder: Path) -> dict[str, str]:
    """The version of each distribution in folder."""
    found = metadata.distributions(path=[str(folder)])
    return {dist.metadata["Name"].replace("_", "-"): dist.version for dist in found}


def keep(source: Path, target: Path) -> None:
    """Copies from source what the benchmarks and the tests need."""
    for pattern in KEEP:
        for file in source.glob(pattern):
            if file.is_file():
                copy = target / file.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)


def install(folder: Path) -> None:
    """Replaces folder by the pinned peers; leaves it as it was where that fails."""
    if folder.exists() and not installed(folder).keys() & pins().keys():
        sys.exit(f"install_peers: {folder} exists and holds no peers: name another folder")
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
            "--no-deps", "--no-compile", "--require-hashes", *WHEEL,
            "--target", scratch, "--requirement", str(REQUIREMENTS),
        ]  # fmt: skip
        if subprocess.run(command).returncode:
            sys.exit("install_peers: pip failed, nothing was installed")
        if folder.exists():
            shutil.rmtree(folder)
        keep(Path(scratch), folder)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    versions = ", ".join(f"{name} {version}" for name, version in installed(folder).items())
    print(f"{folder}: {versions}; {size / 1e6:.0f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    install(parser.parse_args().folder)
