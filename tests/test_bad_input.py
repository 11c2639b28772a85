"""The other ops' metadata mistakes: each raises, names op and argument, and writes nothing.

The texts are pinned whole; accept changed ones with EXPECTTEST_ACCEPT=1 and read them.
"""

import pytest
import torch
from expecttest import assert_expected_inline

from calls import CALLS, gathered, named
from mistakes import cast, given, longer, moved, overlapping, rank, spaced, swapped, texts
from samples import bits_equal


def test_decode_refuses_wrong_metadata(device):
    got = texts(
        device, "decode-gdn",
        rank("q"), rank("state"), longer("k", 0), longer("a"), longer("state"),
        longer("state_indices"), cast("v", torch.float32), cast("state", torch.float64),
        moved("dt_bias"), spaced("v"), swapped("state"), overlapping("state"),
        given(lower_bound=-5.0),
        lambda x: {name: torch.cat([x[name]] * 3, 1) for name in ("q", "k")},
    )  # fmt: skip
    assert_expected_inline(
        got,
        """\
ValueError: decode: q must be [B, H, K], got 4 dimensions: [1, 3, 1, 32]
ValueError: decode: state must be [S, HV, V, K], got 5 dimensions: [1, 6, 2, 64, 32]
ValueError: decode: k must be [B, H, K] with B = 3 as in q, got [4, 1, 32]
ValueError: decode: a must be [B, HV] with HV = 2 as in v, got [3, 3]
ValueError: decode: state must be [S, HV, V, K] with K = 32 as in q, got [6, 2, 64, 33]
ValueError: decode: state_indices must be [B] with B = 3 as in q, got [4]
TypeError: decode: v must be bfloat16 like q, got float32
TypeError: decode: state must be bfloat16 or float16 or float32, got float64
ValueError: decode: dt_bias must be on DEVICE like q, got meta
ValueError: decode: v's innermost dimension must be contiguous, got shape [3, 2, 64] with strides [256, 128, 2]
ValueError: decode: state's innermost 3 dimensions must be contiguous, got shape [6, 2, 64, 32] with strides [4096, 2048, 1, 64]
ValueError: decode: state is written and must not overlap itself, got shape [6, 2, 64, 32] with strides [0, 2048, 32, 1]
ValueError: decode: lower_bound is KDA's safe gate and must be None for GDN (a is [N, HV]), got -5.0
ValueError: decode: HV must be a multiple of H, got HV = 2 (v) and H = 3 (q)""",
    )


def test_gate_refuses_wrong_metadata(device):
    got = texts(
        device, "gate-gdn",
        lambda x: {"a": x["a"][:, 0]}, rank("b"), longer("b", 0), longer("A_log"),
        longer("dt_bias"), cast("a", torch.int32), cast("dt_bias", torch.float64),
        moved("A_log"), given(lower_bound=-5.0),
    ) + "\n" + texts(
        device, "gate-kda", longer("dt_bias"), spaced("a"), given(lower_bound=1.0)
    )  # fmt: skip
    assert_expected_inline(
        got,
        """\
ValueError: gate: a must be [N, HV] (GDN) or [N, HV, K] (KDA), got 1 dimensions: [12]
ValueError: gate: b must be [N, HV], got 3 dimensions: [1, 12, 2]
ValueError: gate: b must be [N, HV] with N = 12 as in a, got [13, 2]
ValueError: gate: A_log must be [HV] with HV = 2 as in a, got [3]
ValueError: gate: dt_bias must be [HV] with HV = 2 as in a (GDN, from a), got [3]
TypeError: gate: a must be bfloat16 or float16 or float32, got int32
TypeError: gate: dt_bias must be bfloat16 or float16 or float32, got float64
ValueError: gate: A_log must be on DEVICE like a, got meta
ValueError: gate: lower_bound is KDA's safe gate and must be None for GDN (a is [N, HV]), got -5.0
ValueError: gate: dt_bias must be [HV, K] with K = 32 as in a (KDA, from a), got [2, 33]
ValueError: gate: a's innermost dimension must be contiguous, got shape [12, 2, 32] with strides [128, 64, 2]
ValueError: gate: lower_bound must be a finite number below 0, got 1.0""",
    )


def test_store_refuses_wrong_metadata(device):
    got = texts(
        device, "store-kda",
        rank("k"), rank("g"), longer("g"), longer("beta", 0), longer("v_window", 1),
        cast("v", torch.float32), cast("g", torch.bfloat16), cast("beta", torch.float16),
        cast("k_window", torch.float32), cast("window_indices", torch.float32),
        moved("beta"), spaced("g"), swapped("g_window"), overlapping("v_window"),
        lambda x: {"g": x["g"][..., 0]},
        lambda x: {"window_indices": x["window_indices"][[0, 1, 2, 0, 1]]},
        lambda x: {"window_indices": x["window_indices"][:1]},
        lambda x: {"cu_seqlens": x["window_indices"]},
    )  # fmt: skip
    assert_expected_inline(
        got,
        """\
ValueError: store: k must be [N, H, K], got 4 dimensions: [1, 12, 1, 32]
ValueError: store: g must be [N, HV] (GDN) or [N, HV, K] (KDA), got 4 dimensions: [1, 12, 2, 32]
ValueError: store: g must be [N, HV, K] with K = 32 as in k, got [12, 2, 33]
ValueError: store: beta must be [N, HV] with N = 12 as in k, got [13, 2]
ValueError: store: v_window must be [R, HV, T, V] with HV = 2 as in v, got [6, 3, 6, 64]
TypeError: store: v must be bfloat16 like k, got float32
TypeError: store: g must be float32, got bfloat16
TypeError: store: beta must be float32, got float16
TypeError: store: k_window must be bfloat16 like k, got float32
TypeError: store: window_indices must be int32 or int64, got float32
ValueError: store: beta must be on DEVICE like k, got meta
ValueError: store: g's innermost dimension must be contiguous, got shape [12, 2, 32] with strides [128, 64, 2]
ValueError: store: g_window's innermost 3 dimensions must be contiguous, got shape [6, 2, 6, 32] with strides [384, 192, 1, 6]
ValueError: store: v_window is written and must not overlap itself, got shape [6, 2, 6, 64] with strides [0, 384, 64, 1]
ValueError: store: g_window must be [R, HV, T] (GDN), got 4 dimensions: [6, 2, 6, 32]
ValueError: store: without cu_seqlens N must be a multiple of B, got N = 12 (k) and B = 5 (window_indices)
ValueError: store: D = N / B = 12 tokens a row (k, window_indices) do not fit the window's T = 6 rows (k_window)
ValueError: store: cu_seqlens must be [B + 1] with B = 3 (window_indices), got [3]""",
    )


def test_fold_refuses_wrong_metadata(device):
    """Windows without the state's layers, half a track, a short batch."""
    got = texts(
        device, "fold-gdn-layers-track",
        lambda x: {"state": x["state"][0, 0]}, lambda x: {"state": x["state"][0]},
        longer("state", 0), longer("state"), longer("k_window"), longer("v_window", 2),
        longer("g_window", 1), longer("accept_lens"), longer("window_indices"),
        rank("accept_lens"), rank("track_steps"), longer("track_indices"),
        cast("state", torch.float64), cast("state", torch.float8_e5m2),
        cast("k_window", torch.float64), cast("v_window", torch.float16),
        cast("g_window", torch.bfloat16), cast("accept_lens", torch.float32),
        cast("track_steps", torch.int8), moved("k_window"), moved("accept_lens"),
        swapped("state"), swapped("g_window"), overlapping("state"),
        lambda x: {"state": x["state"].as_strided(x["state"].shape, (4096, 4096, 2048, 32, 1))},
        lambda x: {"g_window": x["g_window"][..., None].expand(*x["g_window"].shape, 32)},
        given(track_indices=None), given(track_steps=None),
        lambda x: {"k_window": torch.cat([x["k_window"]] * 3, 2)},
        lambda x: {name: torch.cat([x[name]] * 9, -1) for name in ("state", "k_window")},
        lambda x: {"state": x["state"][..., :0, :], "v_window": x["v_window"][..., :0]},
    )  # fmt: skip
    assert_expected_inline(
        got,
        """\
ValueError: fold: state must be [S, HV, V, K] or [L, S, HV, V, K], got 3 dimensions: [2, 64, 32]
ValueError: fold: k_window must be [R, H, T, K], got 5 dimensions: [2, 5, 1, 6, 32]
ValueError: fold: k_window must be [L, R, H, T, K] with L = 3 as in state, got [2, 5, 1, 6, 32]
ValueError: fold: k_window must be [L, R, H, T, K] with K = 33 as in state, got [2, 5, 1, 6, 32]
ValueError: fold: k_window must be [L, R, H, T, K] with K = 32 as in state, got [2, 5, 1, 6, 33]
ValueError: fold: v_window must be [L, R, HV, T, V] with HV = 2 as in state, got [2, 5, 3, 6, 64]
ValueError: fold: g_window must be [L, R, HV, T] with R = 5 as in k_window (GDN), got [2, 6, 2, 6]
ValueError: fold: accept_lens must be [B] with B = 3 as in state_indices, got [4]
ValueError: fold: window_indices must be [B] with B = 3 as in state_indices, got [4]
ValueError: fold: accept_lens must be [B], got 2 dimensions: [1, 3]
ValueError: fold: track_steps must be [B], got 2 dimensions: [1, 3]
ValueError: fold: track_indices must be [B] with B = 3 as in state_indices, got [4]
TypeError: fold: state must be bfloat16 or float16 or float32, got float64
TypeError: fold: state must be bfloat16 or float16 or float32, got float8_e5m2
TypeError: fold: k_window must be bfloat16 or float16 or float32, got float64
TypeError: fold: v_window must be bfloat16 like k_window, got float16
TypeError: fold: g_window must be float32, got bfloat16
TypeError: fold: accept_lens must be int32 or int64, got float32
TypeError: fold: track_steps must be int32 or int64, got int8
ValueError: fold: k_window must be on DEVICE like state, got meta
ValueError: fold: accept_lens must be on DEVICE like state, got meta
ValueError: fold: state's innermost 3 dimensions must be contiguous, got shape [2, 8, 2, 64, 32] with strides [32768, 4096, 2048, 1, 64]
ValueError: fold: g_window's innermost 2 dimensions must be contiguous, got shape [2, 5, 2, 6] with strides [60, 12, 1, 2]
ValueError: fold: state is written and must not overlap itself, got shape [2, 8, 2, 64, 32] with strides [0, 8192, 2048, 32, 1]
ValueError: fold: state is written and must not overlap itself, got shape [2, 8, 2, 64, 32] with strides [4096, 4096, 2048, 32, 1]
ValueError: fold: g_window's innermost 3 dimensions must be contiguous, got shape [2, 5, 2, 6, 32] with strides [120, 24, 6, 1, 0]
ValueError: fold: track_steps needs track_indices beside it, got None
ValueError: fold: track_indices needs track_steps beside it, got None
ValueError: fold: HV must be a multiple of H, got HV = 2 (state) and H = 3 (k_window)
ValueError: fold: K must be 1 to 256, got 288 (state)
ValueError: fold: V must be at least 1, got 0 (state)""",
    )


def test_scatter_refuses_wrong_metadata(device):
    got = texts(
        device, "scatter-conv-track",
        lambda x: {"state": x["state"][0, 0, 0]}, rank("state"), rank("intermediate"),
        longer("intermediate", 0), longer("intermediate"), longer("step_indices"),
        longer("source_indices"), longer("track_steps"),
        cast("state", torch.float16), cast("state", torch.float8_e4m3fn),
        cast("step_indices", torch.float32), moved("intermediate"),
        moved("state_indices"), swapped("state"), swapped("intermediate"),
        overlapping("state"), given(track_indices=None), given(track_steps=None),
    )  # fmt: skip
    assert_expected_inline(
        got,
        """\
ValueError: scatter: state must be [L, S, *inner], got [3]
ValueError: scatter: intermediate must be [L, R, D, *inner] beside state of 5 dimensions, got 5: [2, 4, 3, 6, 3]
ValueError: scatter: intermediate must be [L, R, D, *inner] beside state of 4 dimensions, got 6: [1, 2, 4, 3, 6, 3]
ValueError: scatter: intermediate must be [L, R, D, inner0, inner1] with L = 2 as in state, got [3, 4, 3, 6, 3]
ValueError: scatter: intermediate must be [L, R, D, inner0, inner1] with inner1 = 3 as in state, got [2, 4, 3, 6, 4]
ValueError: scatter: step_indices must be [B] with B = 3 as in state_indices, got [4]
ValueError: scatter: source_indices must be [B] with B = 3 as in state_indices, got [4]
ValueError: scatter: track_steps must be [B] with B = 3 as in state_indices, got [4]
TypeError: scatter: intermediate must be float16 like state, got float32
TypeError: scatter: state must be bfloat16 or float16 or float32 or float64 or int8 or uint8, got float8_e4m3fn
TypeError: scatter: step_indices must be int32 or int64, got float32
ValueError: scatter: intermediate must be on DEVICE like state, got meta
ValueError: scatter: state_indices must be on DEVICE like state, got meta
ValueError: scatter: state's innermost 2 dimensions must be contiguous, got shape [2, 6, 6, 3] with strides [108, 18, 1, 6]
ValueError: scatter: intermediate's innermost 2 dimensions must be contiguous, got shape [2, 4, 3, 6, 3] with strides [216, 54, 18, 1, 6]
ValueError: scatter: state is written and must not overlap itself, got shape [2, 6, 6, 3] with strides [0, 18, 3, 1]
ValueError: scatter: track_steps needs track_indices beside it, got None
ValueError: scatter: track_indices needs track_steps beside it, got None""",
    )


@pytest.mark.parametrize("name", ["state", "accept_lens"])
def test_what_is_no_dense_tensor_is_refused_by_torch(device, name):
    """Before anything is written (docs/limits.md)."""
    op, args, kwargs = CALLS["fold-gdn"](device)
    good, function = named(op, args, kwargs), getattr(torch.ops.replayssm, op).default
    before = good["state"].clone()
    for other, error in (
        (good[name].tolist(), RuntimeError), (good[name].cpu().numpy(), RuntimeError),
        (good[name].to_sparse(), NotImplementedError),
    ):  # fmt: skip
        with pytest.raises(error, match=r"'Tensor'|Sparse"):
            function(**gathered(good | {name: other}))
    bits_equal(good["state"], before, "state")
