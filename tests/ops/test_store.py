"""store: the same bits in the same rows as verify; and its mistakes."""

import pytest
import torch
from expecttest import assert_expected_inline

from mistakes import cast, longer, moved, overlapping, rank, spaced, swapped, texts
from replayssm import ops
from samples import VARIANTS, bits_equal, make

variants = pytest.mark.parametrize("variant", VARIANTS)


@variants
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_verify_stores_the_bits_gate_returns(device, variant, dtype):
    """And k and v as they came, not a mantissa bit less (field cases 18, 34)."""
    p = make(device, variant, R=4, dtype=dtype)
    p.verify()
    g, beta = ops.gate(p.a, p.b, p.A_log, p.dt_bias, lower_bound=p.lower_bound)
    rows = p.window_indices.long()
    for window, value in zip(p.windows, (p.k, p.v, g, beta), strict=True):
        stored = window[rows, :, :4].transpose(1, 2).flatten(0, 1)
        bits_equal(stored, value, "window")


@variants
@pytest.mark.parametrize("lengths", [None, [3, 0, 5]], ids=["uniform", "ragged"])
def test_store_writes_what_verify_writes(device, variant, lengths):
    """Given verify's gates; padding and rows out of range skipped."""
    p = make(device, variant, lengths=lengths, tail=0 if lengths is None else 2, T=4, R=5)
    rows = p.window_indices.clone()
    rows[0] = -1
    p = p.with_(window_indices=rows)
    stored = p.copy()
    p.verify()
    gates = ops.gate(p.a, p.b, p.A_log, p.dt_bias, lower_bound=p.lower_bound)
    ops.store(p.k, p.v, *gates, *stored.windows, rows, p.cu_seqlens)
    p.assert_untouched(stored.memory())


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
