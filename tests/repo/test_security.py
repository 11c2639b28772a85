"""The edges: weights are data, never code; nothing talks to a network or writes unasked."""

import ast
import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import decode
from model import Config, HybridLM
from process import environment

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"
GOOD = TOOLS / "demo/weights/gdn.safetensors"
PACKAGE, SHIPPED = (
    sorted(p for d in folders for p in (ROOT / d).rglob("*.py"))
    for folders in (("ops", "graph"), ("ops", "graph", "tools"))
)
# What runs the code in what it reads, and what talks to a network.
MODULES = {
    "pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "runpy",
    "socket", "socketserver", "ssl", "http", "urllib", "ftplib", "smtplib", "xmlrpc",
    "asyncio", "requests", "urllib3", "httpx", "aiohttp", "huggingface_hub",
    "transformers", "datasets", "wandb",
}  # fmt: skip
CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load",
    "torch.save", "torch.hub.load", "torch.jit.load", "torch.export.load", "np.load",
    "numpy.load",
}  # fmt: skip
# What writes a file or starts a program, by the last part of its name.
EFFECTS = {
    "open", "write_text", "write_bytes", "mkdir", "touch", "unlink", "rmdir", "rmtree",
    "rename", "chmod", "save_file", "Popen", "check_call", "check_output",
}  # fmt: skip


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.split(".")[0]


def called(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield ast.unparse(node.func)


def test_nothing_shipped_imports_pickle_or_a_network():
    found = [(p, m) for p in SHIPPED for m in imported(p) if m in MODULES]
    # transformers' classes alone: models are given, or built from configurations.
    adapter = ROOT / "graph/engines/transformers"
    assert {m for p, m in found if p.is_relative_to(adapter)} <= {"transformers"}
    assert [(p.name, m) for p, m in found if not p.is_relative_to(adapter)] == []


def test_no_tool_asks_a_hub_for_anything():
    found = [
        (p.name, name) for p in SHIPPED for name in called(p) if "from_pretrained" in name
    ]
    assert found == []


def test_nothing_shipped_runs_what_it_reads():
    found = [
        (path.name, name)
        for path in SHIPPED
        for name in called(path)
        if name in CALLS or name.endswith(".from_pretrained")
    ]
    assert found == []


def test_the_package_writes_no_file_and_starts_no_program():
    found = [
        (path.name, name)
        for path in PACKAGE
        for name in called(path)
        if name.rsplit(".", 1)[-1] in EFFECTS
    ]
    assert found == []
    assert not [p.name for p in PACKAGE if {"subprocess", "shutil"} & set(imported(p))]


def test_only_three_tools_start_programs_and_one_of_them_asks_a_network():
    """install_peers.py runs pip, mutate.py the suite, timing.py nvidia-smi and git."""
    found = {
        p.name for p in SHIPPED if {"subprocess", "multiprocessing"} & set(imported(p))
    }
    assert found == {"install_peers.py", "mutate.py", "timing.py"}
    asking = {
        path.name
        for path in SHIPPED
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and node.value in ("pip", "uv", "curl", "wget", "clone", "fetch", "pull")
    }
    assert asking == {"install_peers.py"}


AUDITED = """
import importlib, os, sys
import torch._dynamo  # its import makes torch's cache folder
import matplotlib.font_manager  # makes matplotlib's, and asks for the fonts of the system
tool = importlib.import_module(sys.argv[1])

CALLS = ("socket.", "subprocess.", "pickle.find_class", "os.system", "os.exec", "os.fork",
         "os.posix_spawn", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.chmod",
         "urllib.", "ftplib.", "smtplib.", "http.")

def watch(event, args):
    writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes or event.startswith(CALLS):
        print("audit:", event, args, file=sys.stderr)

sys.argv.pop(0)
sys.addaudithook(watch)
sys.exit(tool.main())
"""
FIGURES = str(ROOT / "docs" / "benchmarks" / "h200.json")
RUNS = {
    "decode": ["--device", "cpu", "--model", "gdn", "--algo", "dflash", "--tokens", "4"],
    "memory": ["--tp", "2"],
    "table": [FIGURES],
    "plot": [FIGURES, "--out", "plots"],
}


@pytest.mark.parametrize("tool", RUNS)
def test_a_tool_writes_what_it_is_asked_for_starts_nothing_and_asks_nobody(tmp_path, tool):
    """By Python's own audit events, and in an empty folder with an empty home."""
    folders = {name: tmp_path / name for name in ("HOME", "TMPDIR", "MPLCONFIGDIR", "PWD")}
    for folder in folders.values():
        folder.mkdir()
    homes = {name: str(folder) for name, folder in folders.items()}
    done = subprocess.run(
        [sys.executable, "-c", AUDITED, tool, *RUNS[tool]], capture_output=True, text=True,
        cwd=folders["PWD"], env=environment(**homes, PYTHONDONTWRITEBYTECODE="1"),
    )  # fmt: skip
    events = [line for line in done.stderr.splitlines() if "'plots" not in line]
    assert (done.returncode, events) == (0, [])
    assert [*folders["HOME"].iterdir()] == []
    written = {path.name for path in folders["PWD"].rglob("*")}
    plots = {"plots", "latency.png", "share.png", "step-speedup.png"}
    assert written == (plots if tool == "plot" else set())


def load(path: Path) -> torch.nn.Module:
    return decode.load_weights(path, lambda fields: HybridLM(Config(**fields)))


def config(**changes: object) -> dict[str, str]:
    with safe_open(GOOD, "pt") as file:
        fields = json.loads(file.metadata()["config"])
    return {"config": json.dumps(fields | changes)}


def resaved(change, **fields: object):
    """The good file, its tensors changed in place, its configuration too."""

    def write(path: Path) -> None:
        tensors = load_file(GOOD)
        change(tensors)
        save_file(tensors, path, metadata=config(**fields))

    return write


def header(text: bytes, length: int | None = None):
    """A file of nothing but a header, which may lie about its length."""

    def write(path: Path) -> None:
        size = struct.pack("<Q", len(text) if length is None else length)
        path.write_bytes(size + text)

    return write


def one(dtype: str, shape: list[int], end: int) -> bytes:
    tensor = {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}
    return json.dumps({"embed.weight": tensor}).encode()


def untouched(tensors: dict) -> None:
    pass


def entry(value: float):
    return lambda tensors: tensors["embed.weight"].view(-1)[:1].fill_(value)


def cast(dtype: torch.dtype):
    return lambda x: x.update({"embed.weight": x["embed.weight"].to(dtype)})


MALFORMED = {
    "empty": (lambda path: path.write_bytes(b""), "header"),
    "cut in the header": (lambda path: path.write_bytes(GOOD.read_bytes()[:99]), "header"),
    "cut in a tensor": (lambda path: path.write_bytes(GOOD.read_bytes()[:-1]), ""),
    "bytes behind the end": (lambda path: path.write_bytes(GOOD.read_bytes() + b"x"), ""),
    "a folder": (Path.mkdir, ""),
    "a header of 2^63 bytes": (header(b"{}", 2**63), "header"),
    "a header that is no JSON": (header(b"{]"), "header"),
    "a pickle": (lambda path: torch.save({"a": torch.ones(1)}, path), "header"),
    "a tensor past the end": (header(one("F16", [8], 16)), ""),
    "a shape that overflows": (header(one("F16", [2**40, 2**40], 16)), ""),
    "no configuration": (lambda path: save_file(load_file(GOOD), path), "missing"),
    "a configuration that is a list": (
        lambda path: save_file(load_file(GOOD), path, metadata={"config": "[1]"}), "list",
    ),
    "a configuration that is no JSON": (
        lambda path: save_file(load_file(GOOD), path, metadata={"config": "{"}), "Expecting",
    ),
    "an unknown field": (resaved(untouched, secret=1), "secret"),
    "an unknown kind": (resaved(untouched, kind="rnn"), "config does not fit together"),
    "a text for a size": (resaved(untouched, dim="128"), "str"),
    "no heads": (resaved(untouched, key_heads=0), "zero"),
    "a negative size": (resaved(untouched, mlp=-1), "negative"),
    "more layers than tensors": (resaved(untouched, layers=10**9), "config asks for"),
    "a size of a terabyte": (resaved(untouched, mlp=2**31), "size mismatch"),
    "a tensor missing": (resaved(lambda x: x.pop("norm.weight")), "Missing key"),
    "a tensor too many": (
        resaved(lambda x: x.update(extra=torch.ones(1).half())), "Unexpected key",
    ),
    "another shape": (
        resaved(lambda x: x.update({"norm.weight": torch.ones(7).half()})), "size mismatch",
    ),
    "whole numbers": (resaved(cast(torch.int8)), "embed.weight must be 16 or 32 bit floats"),
    "fp64": (resaved(cast(torch.float64)), "embed.weight must be 16 or 32 bit floats"),
    "fp8": (resaved(cast(torch.float8_e4m3fn)), "embed.weight must be 16 or 32 bit floats"),
    "a NaN": (resaved(entry(float("nan"))), "embed.weight holds inf or nan"),
    "an infinity": (resaved(entry(float("-inf"))), "embed.weight holds inf or nan"),
}  # fmt: skip


@pytest.mark.parametrize("how", MALFORMED)
def test_malformed_weights_are_refused_with_their_path_and_reason(tmp_path, how):
    """As one line, and nothing of the folder is changed."""
    write, reason = MALFORMED[how]
    path = tmp_path / "gdn.safetensors"
    write(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(decode.WeightsError) as raised:
        load(path)
    text = str(raised.value)
    assert text.startswith(f"{path}: ")
    assert reason in text
    assert "\n" not in text
    assert (path.read_bytes() if path.is_file() else None) == before
    assert list(tmp_path.iterdir()) == [path]


def test_any_cut_of_a_weights_file_is_refused(tmp_path):
    whole, path = GOOD.read_bytes(), tmp_path / "gdn.safetensors"
    for size in (*range(12), *range(12, len(whole), len(whole) // 40), len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(decode.WeightsError):
            load(path)


def test_the_committed_weights_load_to_real_memory():
    """The control of the tests above; no tensor is left without values."""
    model = load(GOOD)
    tensors = load_file(GOOD)
    for name, value in model.state_dict().items():
        assert torch.equal(value, tensors[name].float()), name
        assert value.device.type == "cpu"
