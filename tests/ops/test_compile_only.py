"""Every GPU kernel compiles for every card it is meant for, without that card."""

import re

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from compiling import compiled, meta, plan_of, usage
from replayssm.ops import select

F32, BF16, I32 = torch.float32, torch.bfloat16, torch.int32
KERNELS = {name: select.load(name) for name in ("gluon", "portable")}


def arguments(op: str, *, B=32, D=8, H=16, HV=32, K=128, V=128, kda=False, state=F32):
    """(args, kwargs) of one op at a model's shape, on meta tensors."""
    N, S, T, L = B * D, 64, 8, 3
    tokens = N if op != "decode" else B
    q, k = (meta(tokens, H, K, dtype=BF16) for _ in range(2))
    v = meta(tokens, HV, V, dtype=BF16)
    a = meta(tokens, *((HV, K) if kda else (HV,)), dtype=BF16)
    b, A_log = meta(tokens, HV, dtype=BF16), meta(HV, dtype=F32)
    dt_bias = meta(*((HV, K) if kda else (HV,)), dtype=F32)
    pool = meta(L, S, HV, V, K, dtype=state)
    windows = (
        meta(L, S, H, T, K, dtype=BF16), meta(L, S, HV, T, V, dtype=BF16),
        meta(L, S, HV, T, *((K,) if kda else ()), dtype=F32), meta(L, S, HV, T, dtype=F32),
    )  # fmt: skip
    one = [window[0] for window in windows]
    slots = meta(B, dtype=I32)
    gates = (a, b, A_log, dt_bias)
    index = {"track_indices": slots, "track_steps": slots}
    tokens, live = meta(B, D, dtype=torch.int64), meta(1, dtype=I32)
    # q, k and v of KDA; the sizes are not multiples of a block.
    channels = (H * K, H * K, HV * V - 16)
    conv = [meta(L, S, C, 3, dtype=BF16) for C in channels]
    conv_last = [meta(L, S, 3, C, dtype=BF16) for C in channels]
    return {
        "gate": (gates, {}),
        "store": ((k, v, a.float(), b.float(), *one, slots), {}),
        "verify": ((q, k, v, *gates, pool[0], *one, slots), {}),
        "inexact": ((q, k, v, *gates, pool[0], *one, slots), {"exact": False}),
        "ragged": ((q, k, v, *gates, pool[0], *one, slots, meta(B + 1, dtype=I32)), {}),
        "decode": ((q, k, v, *gates, pool[0], slots), {}),
        "fold": ((pool, *windows, slots, slots), {}),
        "track": ((pool, *windows, slots, slots), index),
        "scatter": ((pool, meta(L, 4, 8, HV, V, K, dtype=state), slots, slots), index),
        "accept": ((tokens, tokens), {"verify_lens": slots}),
        "accept packed": ((tokens[0], tokens[0].int(), meta(B + 1, dtype=I32)), {}),
        "commit_indices": (
            [slots] * 4 + [live] + [slots] * 4,
            {"track_slot_map": slots, "track_interval": 256},
        ),
        "conv_commit dense": (
            (conv, [meta(L, S, D, C, 3, dtype=BF16) for C in channels], slots, slots),
            index,
        ),
        "conv_commit sliding": (
            (conv, [meta(L, S, C, D + 2, dtype=BF16) for C in channels], slots, slots),
            {"window_indices": slots},
        ),
        "conv_commit channels_last": (
            (conv_last, [meta(L, S, D + 2, C, dtype=BF16) for C in channels], slots, slots),
            {"channels_last": True, **index},
        ),
    }[op]


COMMIT = (
    "accept", "accept packed", "commit_indices", "conv_commit dense",
    "conv_commit sliding", "conv_commit channels_last",
)  # fmt: skip


def build(lowering: str, op: str, target: str, safe: bool = False, **shape):
    args, kwargs = arguments(op, **shape)
    kwargs |= {"lower_bound": -5.0} if safe else {}
    name = {"ragged": "verify", "inexact": "verify", "track": "fold"}.get(op, op.split()[0])
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


@pytest.mark.parametrize("K, V", [(32, 64), (64, 64), (96, 96), (192, 128), (256, 256)])
@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("op", ["verify", "inexact", "decode", "fold"])
def test_no_head_dim_spills_registers_on_sm_90(op, kda, K, V):
    for B in (1, 64):
        used = usage(build("gluon", op, "90", kda=kda, K=K, V=V, H=8, HV=8, B=B))
        assert used.spilled_bytes == 0, (B, used)


@pytest.mark.parametrize("K, V", [(32, 64), (64, 128), (96, 96), (128, 128), (192, 32)])
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
