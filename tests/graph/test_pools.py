"""The pools: their bytes against the formulas, their layout, and what they refuse."""

import dataclasses
import gc

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from replayssm.graph import LinearAttention, Pools, memory

QWEN_27B = LinearAttention(48, 16, 48, 128, 128, "gdn")
KIMI_K3 = LinearAttention(69, 96, 96, 128, 128, "kda", lower_bound=-5.0)
SMALL = LinearAttention(2, 1, 2, 16, 32, "gdn")
SMALL_KDA = dataclasses.replace(SMALL, variant="kda", H=2)
SIZES = {"slots": 5, "requests": 3, "window": 4}


def pools_of(model=SMALL, device="cpu", **options):
    return Pools(model, device=device, **SIZES | options)


def error(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except (ValueError, TypeError) as raised:
        return f"{type(raised).__name__}: {raised}"
    return "accepted"


@pytest.mark.parametrize("model", (QWEN_27B, KIMI_K3), ids=("gdn", "kda"))
@pytest.mark.parametrize("D", (4, 8, 9, 16))
def test_windows_and_snapshots_take_the_bytes_of_the_formulas(model, D):
    H, HV, K, V = model.H, model.HV, model.K, model.V
    window = D * (HV * V + H * K) * 2 + 8 * D * HV
    if model.variant == "kda":
        window += D * HV * K * 4 - 4 * D * HV
    got = memory(model, slots=7, requests=3, window=D)
    assert got.windows == 3 * model.layers * window
    assert got.snapshots == 3 * model.layers * D * HV * V * K * 4
    assert got.state == 7 * model.layers * HV * V * K * 4


def test_qwen_27b_needs_6_mib_of_windows_for_1152_mib_of_snapshots():
    assert_expected_inline(
        str(memory(QWEN_27B, slots=1, requests=1, window=8)),
        """\
state                144.00 MiB
windows                6.14 MiB
conv_states            2.81 MiB
conv_windows           9.38 MiB
snapshots          1,152.00 MiB
conv_snapshots        22.50 MiB
total                162.33 MiB
snapshot_total     1,321.31 MiB""",
    )


@pytest.mark.parametrize("channels_last", (False, True))
@pytest.mark.parametrize("state_dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("variant", ("gdn", "kda"))
@pytest.mark.parametrize("width", (1, 2, 4))
def test_memory_says_what_is_allocated(variant, state_dtype, width, channels_last):
    model = dataclasses.replace(
        SMALL, variant=variant, conv_width=width, state_dtype=state_dtype
    )
    pools = pools_of(model, channels_last=channels_last)
    sizes = {name: b.untyped_storage().nbytes() for name, b in pools.named_buffers()}
    want = memory(model, **SIZES)
    assert pools.memory == want
    assert sum(sizes.values()) == want.total
    assert sizes["state"] == want.state
    assert sum(sizes[f"{name}_window"] for name in ("k", "v", "g", "beta")) == want.windows
    for kind in ("conv_states", "conv_windows"):
        tensors = getattr(pools, kind)
        assert sum(t.untyped_storage().nbytes() for t in tensors) == getattr(want, kind)


def test_the_snapshot_path_is_counted_for_a_draft_of_its_own():
    wide, narrow = (memory(SMALL, **SIZES, draft=D) for D in (4, 2))
    assert wide == memory(SMALL, **SIZES)
    assert narrow.snapshots * 2 == wide.snapshots
    assert narrow.conv_snapshots * 2 == wide.conv_snapshots
    channels = 2 * 16 + 2 * 32  # of the convolution, with 3 inputs each, at both layers
    assert narrow.conv_snapshots == 2 * SIZES["requests"] * 2 * channels * 3 * 2
    assert narrow.total == wide.total


@pytest.mark.parametrize("model", (SMALL, SMALL_KDA), ids=("gdn", "kda"))
@pytest.mark.parametrize("channels_last", (False, True))
def test_every_buffer_has_the_shape_of_the_contract(model, channels_last):
    shapes = [list(b.shape) for b in pools_of(model, channels_last=channels_last).buffers()]
    gates = [2, 3, 2, 4] if model is SMALL else [2, 3, 2, 4, 16]
    channels = [96] if model is SMALL else [32, 32, 64]
    want = [
        [2, 5, 2, 32, 16],
        [2, 3, model.H, 4, 16],
        [2, 3, 2, 4, 32],
        gates,
        [2, 3, 2, 4],
    ]
    for C in channels:
        for rows, taps in ((5, 3), (3, 6)):
            want.append([2, rows, taps, C] if channels_last else [2, rows, C, taps])
    assert shapes == want


def test_buffers_are_zero_dense_alone_in_their_storage_and_in_no_checkpoint(device):
    pools = pools_of(SMALL_KDA, device)
    assert pools.state_dict() == {}
    storages = set()
    for name, buffer in pools.named_buffers():
        assert buffer.device.type == device
        assert buffer.storage_offset() == 0 and buffer.is_contiguous(), name
        assert not buffer.any(), name
        storages.add(buffer.untyped_storage().data_ptr())
    assert len(storages) == len(list(pools.buffers()))
    dtypes = [x.dtype for x in pools.windows]
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]


def test_pools_made_in_inference_mode_can_be_written_outside_it():
    with torch.inference_mode():
        pools = pools_of()
    with torch.no_grad():
        pools.state.add_(1)


@pytest.mark.parametrize(
    "model, ranks, heads",
    [(KIMI_K3, 8, (12, 12)), (QWEN_27B, 2, (8, 24)), (QWEN_27B, 1, (16, 48))],
)
def test_ranks_share_the_heads(model, ranks, heads):
    pools = Pools(model, **SIZES, tensor_parallel=ranks, device="meta")
    got = {(pools.model.H, pools.model.HV), (pools.k_window.shape[2], pools.state.shape[2])}
    assert got == {heads}
    whole = memory(model, **SIZES)
    share = memory(model, **SIZES, tensor_parallel=ranks)
    assert [x * ranks for x in share] == list(whole)


def test_impossible_requests_are_refused_before_anything_is_allocated(monkeypatch):
    def allocated(*args, **kwargs):
        raise AssertionError("something was allocated")

    monkeypatch.setattr(torch, "zeros", allocated)
    bad_models = (
        {"HV": 20}, {"K": 512}, {"H": 0}, {"layers": -1}, {"V": 1.5}, {"conv_width": 0},
        {"variant": "mamba2"}, {"lower_bound": -5.0}, {"state_dtype": torch.float64},
        {"variant": "kda", "lower_bound": 1.0}, {"activation_dtype": torch.int8},
    )  # fmt: skip
    bad_pools = (
        {"slots": 0}, {"requests": 0}, {"window": 0}, {"window": True},
        {"tensor_parallel": 3}, {"tensor_parallel": 0},
    )  # fmt: skip
    lines = [error(dataclasses.replace, QWEN_27B, **bad) for bad in bad_models]
    lines += [error(pools_of, QWEN_27B, **bad) for bad in bad_pools]
    lines += [error(memory, QWEN_27B, **SIZES, draft=0)]
    assert_expected_inline(
        "\n".join(lines),
        """\
ValueError: LinearAttention: HV must be a multiple of H, got HV = 20 and H = 16
ValueError: LinearAttention: K must be 1 to 256, got 512
ValueError: LinearAttention: H must be at least 1, got 0
ValueError: LinearAttention: layers must be at least 1, got -1
TypeError: LinearAttention: V must be an int, got 1.5
ValueError: LinearAttention: conv_width must be at least 1, got 0
ValueError: LinearAttention: variant must be 'gdn' or 'kda', got 'mamba2'
ValueError: LinearAttention: lower_bound is KDA's safe gate and must be None for 'gdn', got -5.0
TypeError: LinearAttention: state_dtype must be bfloat16 or float16 or float32, got torch.float64
ValueError: LinearAttention: lower_bound must be a finite number below 0, got 1.0
TypeError: LinearAttention: activation_dtype must be bfloat16 or float16 or float32, got torch.int8
ValueError: Pools: slots must be at least 1, got 0
ValueError: Pools: requests must be at least 1, got 0
ValueError: Pools: window must be at least 1, got 0
TypeError: Pools: window must be an int, got True
ValueError: LinearAttention.rank: tensor_parallel must divide the heads, got 3 for H = 16 and HV = 48
ValueError: LinearAttention.rank: tensor_parallel must be at least 1, got 0
ValueError: memory: draft must be at least 1, got 0""",
    )


def test_pools_larger_than_the_devices_free_memory_are_refused(monkeypatch):
    """What the allocator has cached and does not use counts as free."""
    need = memory(SMALL, **SIZES).total

    def allocated(*args, **kwargs):
        raise AssertionError("allocated")

    for name, value in {
        "mem_get_info": (need - 301, 2 * need),
        "memory_reserved": 700,
        "memory_allocated": 400,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch, "zeros", allocated)
    assert_expected_inline(
        error(pools_of, SMALL, "cuda:0"),
        """ValueError: Pools: 57856 bytes wanted on cuda:0, 57855 are free: lower slots = 5 (46720 bytes) or requests = 3 (11136 bytes)""",
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (need - 300, need))
    with pytest.raises(AssertionError, match="allocated"):
        pools_of(SMALL, "cuda:0")


@pytest.mark.gpu
def test_the_device_is_asked_for_its_memory():
    free, _ = torch.cuda.mem_get_info()
    layers = free // memory(SMALL, **SIZES).total * 4
    gc.collect()  # or what earlier tests left may be freed in between
    before = torch.cuda.memory_allocated()
    with pytest.raises(ValueError, match="bytes wanted on cuda"):
        pools_of(dataclasses.replace(SMALL, layers=layers), "cuda")
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.double(),
        lambda m: m.float(), lambda m: m.to(memory_format=torch.channels_last_3d),
        lambda m: nn.Sequential(m).to("cpu", torch.float16),
    ],
)  # fmt: skip
def test_a_cast_or_another_memory_format_is_refused(change):
    pools = pools_of()
    before = {name: (b.dtype, b.stride()) for name, b in pools.named_buffers()}
    with pytest.raises(TypeError, match=r"Pools: \w+ must stay torch"):
        change(pools)
    assert {name: (b.dtype, b.stride()) for name, b in pools.named_buffers()} == before


def test_pools_can_be_moved_to_a_device():
    moved = nn.Sequential(pools_of()).to("meta")[0]
    assert {b.device.type for b in moved.buffers()} == {"meta"}
    assert moved.g_window.dtype == torch.float32
