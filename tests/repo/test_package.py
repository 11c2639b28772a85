"""The package itself: what importing it does, who may import whom, its public surface."""

import ast
import importlib.metadata
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

import replayssm
from replayssm import graph, ops
from replayssm.ops import checks, window_rule

ROOT = Path(__file__).parents[2]
ADAPTER = "graph/engines/transformers"
SOURCES = sorted(
    p for d in ("ops", "graph", "tests", "tools") for p in (ROOT / d).rglob("*.py")
)
# The files below an op's, and what each may import of the others.
HELPERS = {
    "window_rule": set(),
    "checks": {"window_rule"},
    "reference": {"window_rule"},
    "registration": {"checks", "debug", "launch"},
    "debug": {"launch", "kernels"},
    "launch": {"select"},
    "select": {"kernels"},
}
# And what a kernel file may import of the others, where it is not step alone.
SHARED = {
    "step": set(),
    "chunks": set(),
    "gluon": {"step", "chunks"},
    "grams": {"step", "chunks"},
    "effective": {"step", "chunks", "grams"},
}
# What graph may import of the files in ops, whose public face it is.
FACES = {"checks": checks.__all__, "window_rule": window_rule.__all__}
OPTIONAL = ("triton", "cuda", "jax")

ARGUMENTS = """
N, H, HV, K, V, T, S = 4, 1, 2, 32, 64, 2, 3
q, k, v = torch.randn(N, H, K), torch.randn(N, H, K), torch.randn(N, HV, V)
a, b = torch.randn(2, N, HV)
A_log, dt_bias = torch.zeros(2, HV)
state, snapshots = torch.zeros(S, HV, V, K), torch.zeros(1, 2, T, HV, V, K)
windows = torch.zeros(S, H, T, K), torch.zeros(S, HV, T, V), *torch.zeros(2, S, HV, T)
slots, lens = torch.tensor([0, 2]), torch.tensor([1, 2])
tokens, live, outs = torch.zeros(2, T, dtype=torch.int64), slots[1:], torch.zeros(4, 2).int()
conv, conv_window = torch.zeros(1, S, 5, 3), torch.zeros(1, S, T, 5, 3)
"""
CALLS = {
    "gate": "ops.gate(a, b, A_log, dt_bias)",
    "store": "ops.store(k, v, a, b, *windows, slots)",
    "verify": "ops.verify(q, k, v, a, b, A_log, dt_bias, state, *windows, slots)",
    "fold": "ops.fold(state, *windows, slots, lens)",
    "decode": "ops.decode(q[:2], k[:2], v[:2], a[:2], b[:2], A_log, dt_bias, state, slots)",
    "scatter": "ops.scatter(state[None], snapshots, slots, lens - 1)",
    "accept": "ops.accept(tokens, tokens)",
    "commit_indices": "ops.commit_indices(lens, lens, slots, tokens[0], live, *outs)",
    "conv_commit": "ops.conv_commit([conv], [conv_window], slots, lens)",
}


def run_fresh(code: str) -> None:
    """Runs code in a process of its own, with nothing but the installed package."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def module_of(path: Path) -> str:
    """ops/kernels/step.py -> replayssm.ops.kernels.step, tools/run.py -> tools.run."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[:2] == ("ops", "_root"):
        return "replayssm"
    name = ".".join(parts).removesuffix(".__init__")
    return f"replayssm.{name}" if parts[0] in ("ops", "graph") else name


def imports(path: Path) -> Iterator[str]:
    """The full name of all that a file imports, in functions too."""
    package = module_of(path).split(".")
    if path.name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            yield from (".".join([*base, alias.name]) for alias in node.names)


def offences(allowed) -> list[str]:
    """Every import that allowed(path, name) refuses, as text."""
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in SOURCES
        for name in imports(path)
        if not allowed(path, name)
    ]


def layer(name: str) -> str:
    parts = name.split(".")
    if parts[0] != "replayssm":
        return parts[0]
    return parts[1] if parts[1:] and parts[1] in ("ops", "graph") else "root"


def test_importing_the_package_touches_no_cuda_device():
    run_fresh("""
import torch
touches = []

def touch(*args, **kwargs):
    touches.append(args)
    raise RuntimeError("CUDA was touched")

torch.cuda._lazy_init = torch.cuda.device_count = torch.cuda.is_available = touch
import replayssm, replayssm.graph
assert not touches
assert not torch.cuda.is_initialized()
""")


def test_importing_the_package_asks_for_neither_triton_nor_cuda_python_nor_jax():
    # torch may have imported some of them by itself, so its own are forgotten first.
    run_fresh(f"""
import sys, torch
for name in list(sys.modules):
    if name.split(".")[0] in {OPTIONAL}:
        del sys.modules[name]

class Recorder:
    asked = []
    def find_spec(self, name, path=None, target=None):
        self.asked.append(name)

sys.meta_path.insert(0, Recorder())
import replayssm, replayssm.graph
assert "replayssm" in Recorder.asked
asked = [name for name in Recorder.asked if name.split(".")[0] in {OPTIONAL}]
assert not asked, asked
""")


def test_every_op_runs_on_the_cpu_where_triton_and_cuda_python_cannot_be_imported():
    run_fresh(f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocker())
import torch, replayssm.graph
from replayssm import ops
{ARGUMENTS}
{"; ".join(CALLS.values())}
""")


@pytest.mark.parametrize("op", CALLS)
def test_an_op_can_be_the_first_call_of_a_process(device, op):
    """On a GPU too, where it is the first to look for kernels."""
    run_fresh(f"""
import torch
from replayssm import ops
torch.set_default_device("{device}")
{ARGUMENTS}
{CALLS[op]}
if torch.cuda.is_initialized():
    torch.cuda.synchronize()
""")


def test_every_public_op_has_a_cold_call_here():
    handles = {name for name in ops.__all__ if hasattr(torch.ops.replayssm, name)}
    assert handles == set(CALLS)


def test_the_ops_have_the_schemas_of_their_contract():
    """Another one needs another name: compilers cache by name (field case 83)."""
    schemas = [str(getattr(torch.ops.replayssm, name).default._schema) for name in CALLS]
    assert_expected_inline(
        "\n".join(schemas),
        """\
replayssm::gate(Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, *, float? lower_bound=None) -> (Tensor g, Tensor beta)
replayssm::store(Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) k_window, Tensor(b!) v_window, Tensor(c!) g_window, Tensor(d!) beta_window, Tensor window_indices, Tensor? cu_seqlens=None) -> ()
replayssm::verify(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor state, Tensor(a!) k_window, Tensor(b!) v_window, Tensor(c!) g_window, Tensor(d!) beta_window, Tensor state_indices, Tensor? cu_seqlens=None, Tensor? window_indices=None, *, float? scale=None, float? lower_bound=None, bool use_qk_l2norm=True, bool exact=True) -> Tensor
replayssm::fold(Tensor(a!) state, Tensor k_window, Tensor v_window, Tensor g_window, Tensor beta_window, Tensor state_indices, Tensor accept_lens, *, Tensor? window_indices=None, Tensor? track_indices=None, Tensor? track_steps=None, bool use_qk_l2norm=True) -> ()
replayssm::decode(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor(a!) state, Tensor state_indices, *, float? scale=None, float? lower_bound=None, bool use_qk_l2norm=True) -> Tensor
replayssm::scatter(Tensor(a!) state, Tensor intermediate, Tensor state_indices, Tensor step_indices, *, Tensor? source_indices=None, Tensor? track_indices=None, Tensor? track_steps=None) -> ()
replayssm::accept(Tensor draft_tokens, Tensor target_tokens, Tensor? cu_seqlens=None, *, Tensor? verify_lens=None) -> (Tensor accept_lens, Tensor bonus)
replayssm::commit_indices(Tensor accept_lens, Tensor seq_lens, Tensor req_indices, Tensor slot_map, Tensor live, Tensor(a!) state_indices, Tensor(b!) last_steps, Tensor(c!) track_indices, Tensor(d!) track_steps, *, Tensor? track_slot_map=None, int track_interval=0) -> ()
replayssm::conv_commit(Tensor(a!)[] conv_states, Tensor[] conv_windows, Tensor state_indices, Tensor accept_lens, *, Tensor? window_indices=None, Tensor? track_indices=None, Tensor? track_steps=None, bool channels_last=False) -> ()""",
    )


@pytest.mark.parametrize("name", CALLS)
def test_a_function_and_its_op_take_the_same_arguments(name):
    schema = getattr(torch.ops.replayssm, name).default._schema
    function = inspect.signature(getattr(ops, name)).parameters.values()
    empty = inspect.Parameter.empty
    assert [
        (p.name, p.kind is p.KEYWORD_ONLY, None if p.default is empty else p.default)
        for p in function
    ] == [(arg.name, arg.kwarg_only, arg.default_value) for arg in schema.arguments]


def test_imports_go_from_tools_and_tests_to_graph_to_ops_and_never_back():
    below = {
        "ops": {"ops"},
        "root": {"ops"},
        "graph": {"ops", "root", "graph"},
        "tools": {"ops", "root", "graph"},
        "tests": {"ops", "root", "graph"},
    }
    found = offences(
        lambda path, name: (
            not name.startswith("replayssm") or layer(name) in below[layer(module_of(path))]
        )
    )
    assert found == []


def test_inside_ops_each_file_imports_only_files_below_it():
    def allowed(path: Path, name: str) -> bool:
        own, parts = module_of(path), name.split(".")
        if not own.startswith("replayssm.ops") or parts[:2] != ["replayssm", "ops"]:
            return True
        file, target = own.removeprefix("replayssm.ops").lstrip("."), parts[2]
        if file.startswith("kernels"):
            return parts[2] == "kernels" and parts[3] in SHARED.get(file[8:], {"step"})
        if file == "":
            return target != "kernels"
        return target in HELPERS.get(file, HELPERS)

    assert offences(allowed) == []


def test_graph_builds_on_the_public_face_of_ops():
    """Its functions, and what its files name in __all__."""

    def allowed(path: Path, name: str) -> bool:
        parts = name.split(".")
        if path.relative_to(ROOT).parts[0] != "graph" or parts[:2] != ["replayssm", "ops"]:
            return True
        if not parts[2:]:  # ops itself
            return True
        names = FACES.get(parts[2], ()) if parts[3:] else (*ops.__all__, *FACES)
        return parts[-1] in names

    assert offences(allowed) == []


def test_the_engines_are_imported_by_nobody_but_their_user():
    """And a module of theirs without its engine: only what it is asked for needs that."""
    run_fresh("""
import sys
sys.modules["transformers"] = None
import replayssm.graph
assert not [name for name in sys.modules if "engines" in name]
import replayssm.graph.engines.sglang
from replayssm.graph.engines import transformers
try:
    transformers.ReplayCache
except ImportError as error:
    assert "pip install 'replayssm[transformers]'" in str(error)
else:
    raise AssertionError("ReplayCache without transformers")
""")


def test_the_package_needs_only_torch_and_triton_in_kernels_and_cuda_python_in_inspect():
    def allowed(path: Path, name: str) -> bool:
        root, where = name.split(".")[0], path.relative_to(ROOT)
        if root == "triton":
            return where.parts[0] == "tests" or where.parts[:2] == ("ops", "kernels")
        if root == "cuda":
            return where.match("graph/inspect*.py")
        if root == "transformers":
            return where.parts[0] == "tests" or where.is_relative_to(ADAPTER)
        if where.parts[0] in ("tests", "tools"):
            return root != "jax"
        return root in {"torch", "replayssm"} or root in sys.stdlib_module_names

    assert offences(allowed) == []


def test_nothing_imports_the_source_folders_by_their_bare_names():
    assert offences(lambda path, name: name.split(".")[0] not in ("ops", "graph")) == []


def test_the_version_is_that_of_the_installed_distribution():
    assert replayssm.__version__ == importlib.metadata.version("replayssm")


def test_no_source_file_is_longer_than_400_lines():
    lines = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in SOURCES}
    assert {name: count for name, count in lines.items() if count > 400} == {}


public_functions = pytest.mark.parametrize(
    "function",
    [
        pytest.param(member, id=f"{module.__name__}.{name}")
        for module in (ops, graph)
        for name in module.__all__
        if inspect.isfunction(member := getattr(module, name))
    ],
)


@public_functions
def test_every_public_function_documents_its_arguments_and_its_errors(function):
    text = inspect.getdoc(function) or ""
    sections = re.findall(r"^(Args|Raises):$", text, re.MULTILINE)
    assert sections == ["Args", "Raises"]


@public_functions
def test_every_public_function_is_annotated_in_full(function):
    """mypy holds that for replayssm.graph; in replayssm.ops it lets private ones be."""
    signature = inspect.signature(function)
    types = [p.annotation for p in signature.parameters.values()]
    assert inspect.Parameter.empty not in [*types, signature.return_annotation]
