"""Every GPU kernel compiles for every card it is meant for, without that card."""

import re

import pytest

pytest.importorskip("triton", reason="needs triton")

from compiling import compiled, plan_of, usage
from configurations import BF16, COMMIT, F32, HEAD_DIMS, INEXACT_DIMS, arguments, call_of
from replayssm.ops import select

KERNELS = {name: select.load(name) for name in ("gluon", "portable")}


def build(lowering: str, op: str, target: str, safe: bool = False, **shape):
    name, args, kwargs = call_of(op, safe, **shape)
    return compiled(*plan_of(KERNELS[lowering], name, *args, **kwargs), target)


@pytest.mark.parametrize("op", ["gate", "store", "verify", "decode", "track", "scatter"])
@pytest.mark.parametrize("target", ["80", "gfx942"])
def test_portable_compiles_for_nvidia_and_amd(op, target):
    kernel = build("portable", op, target, kda=True)
    assert kernel.asm["hsaco" if target == "gfx942" else "cubin"]


@pytest.mark.parametrize("op", COMMIT)
@pytest.mark.parametrize("target", ["80", "90", "100", "gfx942"])
def test_the_commit_kernels_compile_for_nvidia_and_amd(op, target):
    kernel = build("portable", op, target)
    assert kernel.asm["hsaco" if target == "gfx942" else "cubin"]


@pytest.mark.parametrize("op", [op for op in COMMIT if op.startswith("conv_commit")])
def test_conv_states_move_16_bytes_a_thread(op):
    """Coalesced in either layout; of sliding rows only the store can be."""
    ptx = build("portable", op, "90").asm["ptx"]
    assert re.search(r"st\.global\.v4\.b32", ptx)
    reads = re.search(r"ld\.global\.v4\.b32", ptx)
    assert bool(reads) == (op != "conv_commit sliding")


@pytest.mark.parametrize(
    ("target", "batch"),
    # One batch for each choice of the tables, and of sm_80's and sm_100's some.
    [(90, 1), (90, 5), (90, 8), (90, 32), (80, 1), (80, 8), (100, 1), (100, 8)],
)
@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize(
    "op", ["gate", "verify", "inexact", "ragged", "decode", "fold", "track"]
)
def test_no_configuration_spills_registers(op, kda, target, batch):
    kernel = build("gluon", op, str(target), kda=kda, B=batch)
    used = usage(kernel, str(target))
    assert used.spilled_bytes == 0, used


@pytest.mark.parametrize("op", ["gate", "verify", "inexact", "ragged", "decode"])
def test_the_safe_gate_spills_no_registers(op):
    for B in (1, 6, 8):
        used = usage(build("gluon", op, "90", safe=True, kda=True, B=B))
        assert used.spilled_bytes == 0, (B, used)


@pytest.mark.parametrize("K, V", HEAD_DIMS)
@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("op", ["verify", "inexact", "decode", "fold"])
def test_no_head_dim_spills_registers_on_sm_90(op, kda, K, V):
    for B in (1, 64):
        used = usage(build("gluon", op, "90", kda=kda, K=K, V=V, H=8, HV=8, B=B))
        assert used.spilled_bytes == 0, (B, used)


@pytest.mark.parametrize("K, V", INEXACT_DIMS)
@pytest.mark.parametrize("D", [8, 16])
@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
def test_no_inexact_shape_spills_or_needs_more_than_a_small_card_has(K, V, D, kda):
    kernel = build("gluon", "inexact", "90", kda=kda, D=D, K=K, V=V, H=8, HV=8)
    assert usage(kernel).spilled_bytes == 0
    assert kernel.metadata.shared <= 99 * 1024  # sm_86, sm_89 and sm_120


@pytest.mark.parametrize(
    ("served", "shape"),
    [
        (True, {"D": 2}), (True, {"D": 16}), (True, {"K": 256, "V": 32}),
        (True, {"D": 9, "K": 224, "V": 96}), (False, {"D": 1}), (False, {"D": 17}),
        (False, {"D": 9, "K": 256}), (False, {"K": 144}), (False, {"V": 80}),
        (False, {"state": BF16}),
    ],
    ids=str,
)  # fmt: skip
def test_the_inexact_kernel_serves_the_shapes_that_the_documents_name(served, shape):
    """docs/limits.md; outputs of other shapes are the exact kernel's."""
    kernels = KERNELS["gluon"]
    args, kwargs = arguments("inexact", **shape)
    kernel = plan_of(kernels, "verify", *args, **kwargs)[0].kernel
    assert kernel is (kernels.effective if served else kernels.recur)
    args, kwargs = arguments("ragged", **shape)
    ragged = plan_of(kernels, "verify", *args, **kwargs, exact=False)[0].kernel
    assert ragged is kernels.recur


@pytest.mark.parametrize("op", ["verify", "decode"])
def test_the_state_of_few_heads_is_streamed(op):
    """All of the state, and nothing else, by wide loads."""
    few, many = (build("gluon", op, "90", B=B).asm["ptx"] for B in (1, 32))
    streamed = r"ld\.global\.L1::evict_first\.L2::cache_hint\.(\S+)"
    assert re.findall(streamed, few) == ["v4.b32"] * 8
    assert not re.findall(streamed, many)


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("op", ["gate", "verify", "inexact", "fold", "decode"])
@pytest.mark.parametrize("lowering", KERNELS)
def test_only_written_fma_is_contracted(lowering, op, kda):
    """fold(n) equals decode bit for bit only while no compiler fuses on its own:
    every multiplication and addition in the code says how it rounds."""
    ptx = build(lowering, op, "90", kda=kda).asm["ptx"]
    assert re.search(r"\bfma\.rn\.f32", ptx)
    loose = re.findall(r"\b(?:mul|add|sub|mad)\.f32", ptx)
    assert not loose, loose


@pytest.mark.parametrize("state", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("op", ["verify", "decode", "fold"])
def test_the_portable_layout_is_the_same_for_every_op_and_state(op, state):
    """The layout of the summed tile decides the order of its sums."""
    code = build("portable", op, "90", state=state).asm["ttgir"]
    summed = re.findall(r"\}\) : \(tensor<32x32xf32, (#blocked\d*)>\)", code)
    assert summed
    layouts = {re.search(rf"{tile} = (.*)", code)[1] for tile in set(summed)}
    assert layouts == {
        "#ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [4, 8], "
        "warpsPerCTA = [2, 1], order = [1, 0]}>"
    }
