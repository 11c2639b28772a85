"""verify's metadata mistakes: each raises, names the argument, and writes nothing.

The texts are pinned whole; accept changed ones with EXPECTTEST_ACCEPT=1 and read them.
"""

import pytest
import torch
from expecttest import assert_expected_inline

from calls import CALLS, gathered, named
from mistakes import cast, given, longer, moved, overlapping, rank, spaced, swapped, texts
from samples import WINDOWS

NAN = float("nan")


def test_verify_refuses_wrong_shapes(device):
    """Ranks, sizes and head ratios (field case 54)."""
    got = texts(
        device, "verify-gdn",
        *map(rank, ["q", "k", "v", "a", "b", "A_log", "state", "k_window", "g_window"]),
        rank("state_indices"),
        longer("k"), longer("k", 1), longer("v", 0), longer("a"), longer("b", 0),
        longer("A_log"), longer("dt_bias"), longer("state"), longer("state", 1),
        longer("v_window"), longer("k_window", 1), longer("k_window", 2),
        longer("beta_window", 0),
        lambda x: {"state_indices": x["state_indices"][[0, 1, 2, 0, 1]]},
        lambda x: {"window_indices": x["state_indices"][:2]},
        lambda x: {"cu_seqlens": x["state_indices"]},
        lambda x: {"state_indices": x["state_indices"][:0]},
        lambda x: {name: x[name][:, :, :3].contiguous() for name in x if name in WINDOWS},
        lambda x: {name: torch.cat([x[name]] * 3, 1) for name in ("q", "k")},
        lambda x: {name: torch.cat([x[name]] * 9, 2) for name in ("q", "k")},
        lambda x: {"v": x["v"][..., :0]},
        lambda x: {name: x[name][..., :0] for name in ("q", "k")},
        lambda x: {name: x[name][:, :, :0] for name in x if name in WINDOWS},
    )  # fmt: skip
    assert_expected_inline(
        got,
        """\
ValueError: verify: q must be [N, H, K], got 4 dimensions: [1, 12, 1, 32]
ValueError: verify: k must be [N, H, K], got 4 dimensions: [1, 12, 1, 32]
ValueError: verify: v must be [N, HV, V], got 4 dimensions: [1, 12, 2, 64]
ValueError: verify: a must be [N, HV, K] with N = 12 as in q, got [1, 12, 2]
ValueError: verify: b must be [N, HV], got 3 dimensions: [1, 12, 2]
ValueError: verify: A_log must be [HV], got 2 dimensions: [1, 2]
ValueError: verify: state must be [S, HV, V, K], got 5 dimensions: [1, 6, 2, 64, 32]
ValueError: verify: k_window must be [R, H, T, K], got 5 dimensions: [1, 6, 1, 6, 32]
ValueError: verify: g_window must be [R, HV, T] (GDN), got 4 dimensions: [1, 6, 2, 6]
ValueError: verify: state_indices must be [B], got 2 dimensions: [1, 3]
ValueError: verify: k must be [N, H, K] with K = 32 as in q, got [12, 1, 33]
ValueError: verify: k must be [N, H, K] with H = 1 as in q, got [12, 2, 32]
ValueError: verify: v must be [N, HV, V] with N = 12 as in q, got [13, 2, 64]
ValueError: verify: a must be [N, HV] with HV = 2 as in v, got [12, 3]
ValueError: verify: b must be [N, HV] with N = 12 as in q, got [13, 2]
ValueError: verify: A_log must be [HV] with HV = 2 as in v, got [3]
ValueError: verify: dt_bias must be [HV] with HV = 2 as in v (GDN, from a), got [3]
ValueError: verify: state must be [S, HV, V, K] with K = 32 as in q, got [6, 2, 64, 33]
ValueError: verify: state must be [S, HV, V, K] with HV = 2 as in v, got [6, 3, 64, 32]
ValueError: verify: v_window must be [R, HV, T, V] with V = 64 as in v, got [6, 2, 6, 65]
ValueError: verify: k_window must be [R, H, T, K] with H = 1 as in q, got [6, 2, 6, 32]
ValueError: verify: v_window must be [R, HV, T, V] with T = 7 as in k_window, got [6, 2, 6, 64]
ValueError: verify: beta_window must be [R, HV, T] with R = 6 as in k_window, got [7, 2, 6]
ValueError: verify: without cu_seqlens N must be a multiple of B, got N = 12 (q) and B = 5 (state_indices)
ValueError: verify: window_indices must be [B] with B = 3 as in state_indices, got [2]
ValueError: verify: cu_seqlens must be [B + 1] with B = 3 (state_indices), got [3]
ValueError: verify: N must be 0 when B is 0 (state_indices), got N = 12 (q)
ValueError: verify: D = N / B = 4 tokens a row (q, state_indices) do not fit the window's T = 3 rows (k_window)
ValueError: verify: HV must be a multiple of H, got HV = 2 (v) and H = 3 (q)
ValueError: verify: K must be 1 to 256, got 288 (q)
ValueError: verify: V must be at least 1, got 0 (v)
ValueError: verify: K must be at least 1, got 0 (q)
ValueError: verify: T must be at least 1, got 0 (k_window)""",
    )


def test_verify_refuses_wrong_dtypes_devices_and_layouts(device):
    """No silent conversion and no copy (field cases 33, 34, 45, 48)."""
    got = texts(
        device, "verify-gdn",
        cast("q", torch.float64), cast("k", torch.float16), cast("v", torch.float32),
        cast("a", torch.float64), cast("A_log", torch.int32),
        cast("state", torch.float64), cast("state", torch.float8_e4m3fn),
        cast("k_window", torch.float32), cast("v_window", torch.float16),
        cast("g_window", torch.bfloat16), cast("beta_window", torch.bfloat16),
        cast("state_indices", torch.int16), cast("state_indices", torch.float32),
        lambda x: {"cu_seqlens": torch.zeros(4, device=x["q"].device)},
        *map(moved, ["k", "A_log", "state", "v_window", "state_indices"]),
        *map(spaced, ["q", "k", "v"]), *map(swapped, ["state", "k_window", "g_window"]),
        *map(overlapping, ["k_window", "beta_window"]),
    )  # fmt: skip
    assert_expected_inline(
        got,
        """\
TypeError: verify: q must be bfloat16 or float16 or float32, got float64
TypeError: verify: k must be bfloat16 like q, got float16
TypeError: verify: v must be bfloat16 like q, got float32
TypeError: verify: a must be bfloat16 or float16 or float32, got float64
TypeError: verify: A_log must be bfloat16 or float16 or float32, got int32
TypeError: verify: state must be bfloat16 or float16 or float32, got float64
TypeError: verify: state must be bfloat16 or float16 or float32, got float8_e4m3fn
TypeError: verify: k_window must be bfloat16 like q, got float32
TypeError: verify: v_window must be bfloat16 like k_window, got float16
TypeError: verify: g_window must be float32, got bfloat16
TypeError: verify: beta_window must be float32, got bfloat16
TypeError: verify: state_indices must be int32 or int64, got int16
TypeError: verify: state_indices must be int32 or int64, got float32
TypeError: verify: cu_seqlens must be int32 or int64, got float32
ValueError: verify: k must be on DEVICE like q, got meta
ValueError: verify: A_log must be on DEVICE like q, got meta
ValueError: verify: state must be on DEVICE like q, got meta
ValueError: verify: v_window must be on DEVICE like q, got meta
ValueError: verify: state_indices must be on DEVICE like q, got meta
ValueError: verify: q's innermost dimension must be contiguous, got shape [12, 1, 32] with strides [64, 64, 2]
ValueError: verify: k's innermost dimension must be contiguous, got shape [12, 1, 32] with strides [64, 64, 2]
ValueError: verify: v's innermost dimension must be contiguous, got shape [12, 2, 64] with strides [256, 128, 2]
ValueError: verify: state's innermost 3 dimensions must be contiguous, got shape [6, 2, 64, 32] with strides [4096, 2048, 1, 64]
ValueError: verify: k_window's innermost 3 dimensions must be contiguous, got shape [6, 1, 6, 32] with strides [192, 192, 1, 6]
ValueError: verify: g_window's innermost 2 dimensions must be contiguous, got shape [6, 2, 6] with strides [12, 1, 2]
ValueError: verify: k_window is written and must not overlap itself, got shape [6, 1, 6, 32] with strides [0, 192, 32, 1]
ValueError: verify: beta_window is written and must not overlap itself, got shape [6, 2, 6] with strides [0, 6, 1]""",
    )


def test_verify_refuses_a_mix_of_gdn_and_kda(device):
    """Gates of one variant with windows or options of the other."""
    gdn = CALLS["verify-gdn"](device)[1]
    kda = CALLS["verify-kda"](device)[1]
    names = [x.name for x in torch.ops.replayssm.verify.default._schema.arguments]
    gdn, kda = (dict(zip(names, args, strict=False)) for args in (gdn, kda))
    got = texts(
        device, "verify-gdn",
        given(a=kda["a"]), given(dt_bias=kda["dt_bias"]), given(g_window=kda["g_window"]),
        given(a=kda["a"], dt_bias=kda["dt_bias"]), given(lower_bound=-5.0),
    ) + "\n" + texts(
        device, "verify-kda",
        given(a=gdn["a"]), given(dt_bias=gdn["dt_bias"]), given(g_window=gdn["g_window"]),
        spaced("a"), given(lower_bound=0.0), given(lower_bound=5.0),
        given(lower_bound=NAN), given(lower_bound=-float("inf")),
    )  # fmt: skip
    assert_expected_inline(
        got,
        """\
ValueError: verify: dt_bias must be [HV, K] (KDA, from a), got 1 dimensions: [2]
ValueError: verify: dt_bias must be [HV] (GDN, from a), got 2 dimensions: [2, 32]
ValueError: verify: g_window must be [R, HV, T] (GDN), got 4 dimensions: [6, 2, 6, 32]
ValueError: verify: g_window must be [R, HV, T, K] (KDA), got 3 dimensions: [6, 2, 6]
ValueError: verify: lower_bound is KDA's safe gate and must be None for GDN (a is [N, HV]), got -5.0
ValueError: verify: dt_bias must be [HV] (GDN, from a), got 2 dimensions: [2, 32]
ValueError: verify: dt_bias must be [HV, K] (KDA, from a), got 1 dimensions: [2]
ValueError: verify: g_window must be [R, HV, T, K] (KDA), got 3 dimensions: [6, 2, 6]
ValueError: verify: a's innermost dimension must be contiguous, got shape [12, 2, 32] with strides [128, 64, 2]
ValueError: verify: lower_bound must be a finite number below 0, got 0.0
ValueError: verify: lower_bound must be a finite number below 0, got 5.0
ValueError: verify: lower_bound must be a finite number below 0, got nan
ValueError: verify: lower_bound must be a finite number below 0, got -inf""",
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "label",
    [
        "verify-ragged", "fold-kda-layers-track", "gate-gdn", "accept-ragged",
        "commit_indices-track", "conv_commit-dense-track",
    ],
)  # fmt: skip
def test_a_cpu_tensor_among_cuda_tensors_is_refused(label):
    """Whichever it is, also right after the same call went well."""
    op, args, kwargs = CALLS[label]("cuda")
    function = getattr(torch.ops.replayssm, op).default
    function(*args, **kwargs)
    good = kwargs | named(op, args, kwargs)
    for name in named(op, args, kwargs):
        with pytest.raises(ValueError, match="must be on"):
            function(**gathered(good | {name: good[name].cpu()}))
