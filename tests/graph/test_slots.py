"""Slots that change hands: a reset zeroes the named ones and no others."""

import dataclasses

import pytest
import torch

from replayssm import ops
from replayssm.graph import LinearAttention, Pools
from samples import WINDOWS, bits, bits_equal, make, make_tokens, unsynced

GDN = LinearAttention(2, 1, 2, 16, 32, "gdn")
KDA = dataclasses.replace(GDN, variant="kda", H=2)


def pools_of(model=GDN, device="cpu", **options):
    return Pools(model, slots=5, requests=3, window=4, device=device, **options)


@pytest.mark.parametrize("index", (torch.int32, torch.int64))
@pytest.mark.parametrize("channels_last", (False, True))
def test_reset_zeroes_the_named_slots_and_nothing_else(device, index, channels_last):
    """-1 is not slot 0 and not the last slot (field cases 11, 12, 35)."""
    pools = pools_of(KDA, device, channels_last=channels_last)
    for buffer in pools.buffers():
        buffer.fill_(float("nan"))
    want = {name: b.clone() for name, b in pools.named_buffers()}
    pools.reset(torch.tensor([3, -1, 1, 5, -7], dtype=index, device=device))
    for name, value in want.items():
        if "state" in name:
            value[:, [1, 3]] = 0
        bits_equal(getattr(pools, name), value, name)


@pytest.mark.parametrize("slots", ([], [-1, -1]))
def test_reset_of_padding_or_of_nothing_writes_nothing(device, slots):
    """Field case 37."""
    pools = pools_of(device=device)
    pools.state.fill_(1)
    pools.reset(torch.tensor(slots, dtype=torch.int32, device=device))
    assert (pools.state == 1).all()


@pytest.mark.parametrize(
    "slots, text",
    [
        (torch.tensor([1.0]), "reset: slots must be int32 or int64, got float32"),
        (torch.tensor(1), "reset: slots must be [B], got 0 dimensions: []"),
        (torch.zeros(1, dtype=torch.int32, device="meta"),
         "reset: slots must be on cpu like pools, got meta"),
    ],
)  # fmt: skip
def test_reset_refuses_what_is_no_index_and_writes_nothing(slots, text):
    pools = pools_of()
    pools.state.fill_(1)
    with pytest.raises((ValueError, TypeError)) as raised:
        pools.reset(slots)
    assert str(raised.value) == text
    assert (pools.state == 1).all()


def commit(pools, slot, seed):
    """One verify and fold of 4 tokens in a slot, window row 1, at every layer."""
    device, model = pools.state.device.type, pools.model
    tokens = make_tokens(
        device, seed, N=4, H=model.H, HV=model.HV, K=model.K, V=model.V,
        kda=model.variant == "kda", dtype=model.activation_dtype,
    )  # fmt: skip
    indices, row = (torch.tensor([x], device=device) for x in (slot, 1))
    A_log = torch.zeros(model.HV, device=device)
    dt_bias = torch.zeros(tokens["a"].shape[1:], device=device)
    outputs = [
        ops.verify(
            *tokens.values(), A_log, dt_bias, pools.state[i],
            *(window[i] for window in pools.windows), indices, window_indices=row,
        )
        for i in range(model.layers)
    ]  # fmt: skip
    accept = torch.full_like(indices, 3)
    ops.fold(pools.state, *pools.windows, indices, accept, window_indices=row)
    return torch.stack(outputs)


@pytest.mark.parametrize("model", (GDN, KDA), ids=("gdn", "kda"))
def test_a_recycled_slot_serves_its_new_request_like_a_fresh_one(device, model):
    """Whatever the last one left in slot and window row, NaN too (field cases 11, 12)."""
    used, fresh = pools_of(model, device), pools_of(model, device)
    commit(used, slot=2, seed=1)
    for window in used.windows:
        window.fill_(float("nan"))
    used.reset(torch.tensor([2], device=device))
    bits_equal(commit(used, 2, seed=2), commit(fresh, 2, seed=2), "outputs")
    bits_equal(used.state[:, 2], fresh.state[:, 2], "state")
    assert bits(used.state[:, 2]).any()


@pytest.mark.gpu
def test_a_captured_reset_zeroes_the_slots_of_its_replay_and_never_waits():
    pools, slots = pools_of(device="cuda"), torch.tensor([0, -1], device="cuda")
    pools.reset(slots)
    with unsynced():
        pools.reset(slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pools.reset(slots)
    pools.state.fill_(1)
    slots.copy_(torch.tensor([-1, 3]))
    graph.replay()
    assert (pools.state != 0).flatten(2).all(2).tolist() == [
        [True, True, True, False, True]
    ] * 2


@pytest.mark.parametrize("variant", ["gdn", "kda"])
@pytest.mark.parametrize("ends", [[0, 3, 2**32 + 1], [-(2**32) + 2, 3, 5]], ids=str)
def test_offsets_of_64_bits_are_clamped_and_not_cut(device, variant, ends):
    """The low 32 bits of such a cu_seqlens would be other offsets."""
    p = make(device, variant, lengths=[3, 2], R=4)
    wide = torch.tensor(ends, device=device)
    one = p.copy().with_(cu_seqlens=wide)
    other = p.copy().with_(cu_seqlens=wide.clamp(0, 5))
    bits_equal(one.verify(), other.verify(), "outputs")
    for name in WINDOWS:
        bits_equal(getattr(one, name), getattr(other, name), name)
