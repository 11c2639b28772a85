"""REPLAYSSM_DEBUG=1: what only device values show is refused; without it it is clamped.

The flag is read at import, so checked calls run in processes of their own: debugged.py.
"""

import json
import re
import subprocess

import pytest
import torch

from calls import CALLS, mutated
from debugged import GRAPHS, call, digest
from process import ROOT, SUPPORT, python
from replayssm.ops import debug
from samples import WINDOWS, bits_equal, pages
from wrong_values import CASES, HARMLESS

SCRIPT = SUPPORT / "debugged.py"


def run(*arguments: object, flag: str = "1") -> subprocess.CompletedProcess:
    return python(*arguments, REPLAYSSM_DEBUG=flag)


@pytest.fixture(scope="module")
def checked() -> dict:
    """What became of every call on the CPU, in one process."""
    done = run(SCRIPT)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_names_op_argument_and_row_and_writes_nothing(checked, name):
    """On the CPU, before the op (field cases 5, 38, 39, 40)."""
    assert checked[name] == [CASES[name].error, []]


@pytest.mark.parametrize("name", HARMLESS)
def test_what_padding_rows_hold_is_never_refused(checked, name):
    """Nor what the contract allows otherwise (field case 36)."""
    assert checked[name][0] == ""


@pytest.mark.parametrize("label", CALLS)
def test_a_right_call_gives_the_same_bits_with_and_without_the_checks(checked, label):
    assert checked[label] == digest(label)


def test_an_argument_that_is_another_ones_memory_is_refused(checked):
    """Eager it is a copy; Inductor drops the copy, and says nothing (field case 74)."""
    eager, compiled = checked["aliased"]
    assert eager == ""
    text = "replayssm.scatter: intermediate is state's own memory, which the op writes"
    assert compiled in ("", text)


def test_a_mistake_is_refused_behind_torch_compile(checked):
    assert checked["compiled"] == CASES["a slot twice"].error


@pytest.mark.parametrize("name", CASES)
def test_without_the_flag_the_same_call_is_clamped_as_documented(device, name):
    """The bits of the call it means, or just no error (field cases 5, 38)."""
    case = CASES[name]
    op, values, arguments = call(case.label, case.change, device)
    outputs = op(**arguments)
    if case.means is None:
        return
    _, wanted, arguments = call(case.label, case.means, device)
    want = op(**arguments)
    for i, (one, other) in enumerate(zip(flat(outputs), flat(want), strict=True)):
        bits_equal(one, other, f"output {i}")
    for written in mutated(op._schema.name.split("::")[1], values):
        bits_equal(pages(values[written]), pages(wanted[written]), written)


def flat(outputs) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(outputs)
    return [x for x in leaves if x is not None]


def test_without_the_flag_no_op_is_wrapped_and_no_check_kernel_is_loaded():
    code = """
import sys
from replayssm.ops import debug
for name in ("guarded", "offsets", "slots", "rows", "stored_rows", "lengths", "tracks"):
    setattr(debug, name, None)
from debugged import CALLS, call
for label in CALLS:
    op, _, arguments = call(label, {})
    op(**arguments)
assert not debug.ENABLED and "replayssm.ops.kernels.debug" not in sys.modules
"""
    for flag in ("0", ""):
        done = run("-c", code, flag=flag)
        assert done.returncode == 0, done.stderr


def test_a_flag_that_is_neither_on_nor_off_is_refused_at_import():
    done = run("-c", "import replayssm", flag="yes")
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: REPLAYSSM_DEBUG must be 0 or 1, got 'yes'\n")


def stop_of(n: int):
    pytest.importorskip("triton", reason="needs triton")
    from compiling import meta

    values, holds = meta(n, dtype=torch.int64), meta(n, dtype=torch.bool)
    rule = debug.Rule("state_indices", values, holds, "is no slot of 16")
    return debug.stop("fold", rule), [values, holds]


@pytest.mark.parametrize("target", ["80", "90", "100", "gfx942"])
def test_the_stop_compiles_to_a_print_a_message_and_a_trap(target):
    """A row a lane: thread 3 of block 1 is row 35, as the message says."""
    from compiling import compiled

    made, tensors = stop_of(40)
    assert made.programs == (2, 1, 1)
    code = compiled(made, [*tensors, *made.scalars], target).asm
    message = "replayssm.fold: state_indices[32 * block + thread] is no slot of 16"
    assert re.search(rf'tt\.assert .*"{re.escape(message)}"', code["ttgir"])
    assert re.search(r'tt\.print " replayssm\.fold: state_indices: "', code["ttgir"])
    assert "sizePerThread = [1]" in code["ttgir"]
    assert "warpsPerCTA = [1]" in code["ttgir"]
    assert re.search(r"\b(trap;|s_trap 2)", code.get("ptx") or code["amdgcn"])


def test_a_batch_of_none_launches_no_stop():
    made, _ = stop_of(0)
    assert made.programs == (0, 1, 1)


ON_GPU = [
    "a slot past the pool", "a slot twice", "a snapshot over a live slot",
    "offsets that fall", "more accepted than a sliding conv window has",
    "a window row past the pool", "more accepted than the window has",
    "a slot past the pool in a large batch",
]  # fmt: skip
WRITTEN = {
    "a slot past the pool": ["state"],
    "verify's window row past the pool": [*WINDOWS],
    "scatter's step past the window": ["state"],
}


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["eager", "captured"])
@pytest.mark.parametrize("name", ON_GPU)
def test_a_mistake_stops_the_gpu_with_the_message_and_the_row(name, how):
    """Capturable, and the right call before it passed (field cases 5, 38, 39, 40)."""
    argument, row, value, text = re.fullmatch(
        r"(.*)\[(\d+)\] = (-?\d+) (.*)", CASES[name].error
    ).groups()
    block, thread = divmod(int(row), 32)
    done = run(SCRIPT, name, how)
    assert done.returncode != 0
    assert "the right call passed" in done.stdout
    assert "the wrong call passed" not in done.stdout
    assert f"{argument}[32 * block + thread] {text}" in done.stderr
    assert re.search(
        rf"block: \[{block},0,0\], thread: \[{thread},0,0\] Assertion", done.stderr
    )
    assert re.search(rf"idx \( *{thread}\) {re.escape(argument)}: {value}\b", done.stdout)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["eager", "captured"])
@pytest.mark.parametrize("name", WRITTEN)
def test_the_call_that_stops_the_gpu_writes_nothing(name, how):
    """Its other requests' states and windows neither, as the host sees in memory of its
    own."""
    done = run(SCRIPT, name, how, "mapped")
    assert f"the right call wrote {WRITTEN[name]}" in done.stdout, done.stderr
    assert "the wrong call wrote []" in done.stdout, done.stderr


@pytest.mark.gpu
def test_the_op_of_a_captured_call_waits_for_every_stop():
    """By edges of the graph: the op's own kernel, and nothing else, comes after all."""
    pytest.importorskip("cuda.bindings", reason="needs cuda-python")
    done = run(SCRIPT, "graphs")
    assert done.returncode == 0, done.stderr
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert all(stops for stops, _ in found.values()), found
    assert {x: names for x, (_, names) in found.items()} == {
        label: [kernel] for label, kernel in GRAPHS.items()
    }


@pytest.mark.gpu
def test_right_calls_pass_on_the_gpu_eager_and_captured():
    """Nothing waits for the device: the tests of capturing, with the checks on."""
    done = run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not warmup",
        ROOT / "tests/ops/test_capture.py",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
