"""The hand-off: whole slots overwritten by the states that prefills ended in."""

import dataclasses

import pytest
import torch
from expecttest import assert_expected_inline

from prefills import KDA, LIVE, MODELS, ROWS, SLOTS, SQUARE, pools_of, put, random
from replayssm.graph import put_prefill
from samples import bits_equal, unsynced


def final_states(model, device, **options):
    m = model
    return random(m.layers, 3, m.HV, m.V, m.K, device=device, **options)


def conv_inputs(model, device, channels_last=False):
    """The last 3 inputs of 3 prompts, for every convolution."""
    states = [random(2, 3, C, 3, device=device, seed=C) for C in model.conv_groups]
    return [x.mT.contiguous() if channels_last else x for x in states]


@MODELS
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_kv_is_vk_transposed(device, model, dtype):
    model = dataclasses.replace(model, state_dtype=dtype)
    vk, kv = pools_of(model, device), pools_of(model, device)
    states = final_states(model, device)
    put(vk, SLOTS, states, None)
    put(kv, SLOTS, states.mT.contiguous(), None, layout="kv")
    bits_equal(kv.state, vk.state, "state")
    bits_equal(vk.state[:, LIVE], states[:, ROWS].to(dtype), "state")


def test_the_layout_is_never_guessed():
    pools = pools_of(SQUARE, "cpu")
    slots, states = torch.tensor(SLOTS), final_states(SQUARE, "cpu")
    with pytest.raises(TypeError, match="layout"):
        put_prefill(pools, slots, states, None)
    with pytest.raises(TypeError, match="positional"):
        put_prefill(pools, slots, states, None, "vk")


@pytest.mark.parametrize("index", (torch.int32, torch.int64))
@pytest.mark.parametrize("slots", (SLOTS, [0, 5, -1], [-1, 6, -9], [5, -3, 0]))
def test_only_the_named_slots_are_written(device, slots, index):
    """-1 is not slot 0 and not the last; slots past the pool are skipped (field case 35)."""
    pools = pools_of(KDA, device)
    states, convs = final_states(KDA, device), conv_inputs(KDA, device)
    want = {name: buffer.clone() for name, buffer in pools.named_buffers()}
    for row, slot in enumerate(slots):
        if 0 <= slot < 6:
            want["state"][:, slot] = states[:, row]
            for i, x in enumerate(convs):
                want[f"conv_state_{i}"][:, slot] = x[:, row]
    indices = torch.tensor(slots, dtype=index, device=device)
    put_prefill(pools, indices, states, convs, layout="vk")
    for name, value in want.items():
        bits_equal(getattr(pools, name), value, name)


@pytest.mark.parametrize("rows", (0, 3))
def test_padding_alone_or_nobody_writes_nothing(device, rows):
    """Field case 37."""
    pools = pools_of(KDA, device)
    before = pools.state.clone()
    convs = [x[:, :rows] for x in conv_inputs(KDA, device)]
    put(pools, [-1] * rows, final_states(KDA, device)[:, :rows], convs)
    bits_equal(pools.state, before, "state")


@MODELS
@pytest.mark.parametrize("given", (False, True))
@pytest.mark.parametrize("own", (False, True))
def test_conv_inputs_reach_the_pools_form_from_either(device, model, own, given):
    pools = pools_of(model, device, channels_last=own)
    states, convs = final_states(model, device), conv_inputs(model, device, given)
    put(pools, SLOTS, states, convs, channels_last=given)
    for pool, x in zip(pools.conv_states, convs, strict=True):
        x = x if own == given else x.mT
        bits_equal(pool[:, LIVE], x[:, ROWS], "conv state")
    put(pools, LIVE, states[:, :2] * 2, None)
    bits_equal(pools.conv_states[-1][:, LIVE], x[:, ROWS], "conv state kept by None")


@pytest.mark.parametrize("own", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("given", (torch.float32, torch.bfloat16, torch.float16))
def test_values_are_rounded_once_to_nearest_and_none_twice(device, given, own):
    pools = pools_of(dataclasses.replace(SQUARE, state_dtype=own), device)
    states = final_states(SQUARE, device).to(given)
    states[..., 0] = 1 + 2**-8 + 2**-20  # just above the middle of two bf16 numbers
    put(pools, SLOTS, states, None)
    bits_equal(pools.state[:, LIVE], states[:, ROWS].to(own), "state")
    if (given, own) == (torch.float32, torch.bfloat16):
        assert (pools.state[:, LIVE, ..., 0] == 1 + 2**-7).all()


def test_strides_of_what_a_prefill_returns_are_free(device):
    pools, want = pools_of(KDA, device), pools_of(KDA, device)
    states = final_states(KDA, device)
    put(want, SLOTS, states, None)
    put(
        pools,
        SLOTS,
        states.permute(1, 4, 0, 3, 2).contiguous().permute(2, 0, 4, 3, 1),
        None,
    )
    bits_equal(pools.state, want.state, "state")


def test_wrong_metadata_is_refused_and_nothing_is_written():
    pools = pools_of(KDA, "cpu")
    before = pools.state.clone()
    x, convs = final_states(KDA, "cpu"), conv_inputs(KDA, "cpu")
    lines = []
    for state, conv, options in (
        (x, convs, {"layout": "KV"}), (x, convs, {"layout": "kv"}),
        (x.mT, convs, {}), (x[0], convs, {}), (x[:, :2], convs, {}),
        (x[:1], convs, {}), (x.int(), convs, {}), (x.to("meta"), convs, {}),
        (x.clone().requires_grad_(), convs, {}), (x, convs[:2], {}),
        (x, [x.mT for x in convs], {}), (x, convs, {"channels_last": True}),
        (x, [*convs[:2], convs[0]], {}),
    ):  # fmt: skip
        try:
            put(pools, SLOTS, state, conv, **options)
            lines.append("accepted")
        except (ValueError, TypeError) as error:
            lines.append(f"{type(error).__name__}: {error}")
        bits_equal(pools.state, before, "state")
    assert_expected_inline(
        "\n".join(lines),
        """\
ValueError: put_prefill: layout must be 'vk' or 'kv', got 'KV'
ValueError: put_prefill: state must be [L, B, HV, K, V] with K = 32 as in pools (layout 'kv'), got [2, 3, 2, 64, 32]
ValueError: put_prefill: state must be [L, B, HV, V, K] with V = 64 as in pools (layout 'vk'), got [2, 3, 2, 32, 64]
ValueError: put_prefill: state must be [L, B, HV, V, K] (layout 'vk'), got 4 dimensions: [3, 2, 64, 32]
ValueError: put_prefill: state must be [L, B, HV, V, K] with B = 3 as in slots (layout 'vk'), got [2, 2, 2, 64, 32]
ValueError: put_prefill: state must be [L, B, HV, V, K] with L = 2 as in pools (layout 'vk'), got [1, 3, 2, 64, 32]
TypeError: put_prefill: state must be bfloat16 or float16 or float32, got int32
ValueError: put_prefill: state must be on cpu like pools, got meta
ValueError: put_prefill: state requires grad: the ops are inference only, call them under torch.no_grad() or torch.inference_mode()
ValueError: put_prefill: conv_states must be 3 tensors for these pools, got 2
ValueError: put_prefill: conv_states[0] must be [L, B, C0, W-1] with C0 = 32 as in pools, got [2, 3, 3, 32]
ValueError: put_prefill: conv_states[0] must be [L, B, W-1, C0] with W-1 = 3 as in pools, got [2, 3, 32, 3]
ValueError: put_prefill: conv_states[2] must be [L, B, C2, W-1] with C2 = 128 as in pools, got [2, 3, 32, 3]""",
    )


@pytest.mark.gpu
def test_a_captured_hand_off_takes_the_slots_and_states_of_its_replay_and_never_waits():
    pools, want = (pools_of(KDA, "cuda") for _ in range(2))
    states, convs = final_states(KDA, "cuda"), conv_inputs(KDA, "cuda")
    slots = torch.tensor([-1, -1, -1], device="cuda")
    call = lambda: put_prefill(pools, slots, states, convs, layout="vk")  # noqa: E731
    call()  # compiles
    with unsynced():
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    slots.copy_(torch.tensor(SLOTS))
    states.mul_(2)
    graph.replay()
    put(want, SLOTS, states, convs)
    for name, buffer in want.named_buffers():
        bits_equal(getattr(pools, name), buffer, name)
