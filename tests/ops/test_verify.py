"""verify: outputs of a draft window, what it stores, exact=False; and its mistakes.

That it equals decode bit for bit is test_exactness.py's.
"""

import pytest
import torch
from expecttest import assert_expected_inline

import oracle
from calls import CALLS
from mistakes import cast, given, longer, moved, overlapping, rank, spaced, swapped, texts
from samples import VARIANTS, WINDOWS, bits_equal, make

variants = pytest.mark.parametrize("variant", VARIANTS)
NAN = float("nan")


@variants
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("D", "K", "V"),
    [
        (2, 32, 96), (5, 96, 32), (8, 128, 128), (9, 64, 64), (16, 128, 64),
        (8, 256, 64), (16, 224, 64), (8, 192, 128), (8, 64, 256),
    ],
)  # fmt: skip
def test_inexact_outputs_are_near_fp64_and_change_nothing_else(
    device, variant, dtype, D, K, V
):
    exact = make(device, variant, D=D, HV=3, K=K, V=V, dtype=dtype)
    inexact = exact.copy()
    want, _ = oracle.run(exact)
    exact.verify()
    oracle.assert_outputs(inexact.verify(exact=False), want, relative=1e-5)
    exact.assert_untouched(inexact.memory(*WINDOWS))
    for problem in (exact, inexact):
        problem.fold([D, D // 2, 0])
    exact.assert_untouched(inexact.memory("state"))


@variants
@pytest.mark.parametrize("D", [4, 12])
def test_an_inexact_result_does_not_depend_on_the_batch(device, variant, D):
    """Nor on the tile chosen for it; padding rows give zeros and touch nothing."""
    p = make(device, variant, B=5, D=D, H=8, HV=16, K=128, V=128)
    p.state_indices[3] = -1
    outputs = p.copy().verify(exact=False).unflatten(0, (5, D))
    assert not outputs[3].any()
    for row in range(5):
        alone = p.copy().take([row]).verify(exact=False)
        bits_equal(alone, outputs[row], f"outputs of row {row}")


@variants
def test_verify_leaves_the_state_and_other_window_rows_untouched(device, variant):
    """Three verifies without a commit, all memory compared as bits (field case 9)."""
    p = make(device, variant, lengths=[3, 1, 4], R=7)
    untouched, want = p.memory("state"), p.memory(*WINDOWS)
    for seed in range(3):
        p.next_tokens(seed).verify()
    p.assert_untouched(untouched)
    for name in WINDOWS:
        got = p.memory(name)[name]
        for row, span in zip(p.window_indices.tolist(), p.spans(), strict=True):
            live = got[row, 1, :, : len(span)]
            assert not live.isnan().any(), f"{name} row {row} was not written"
            want[name][row, 1, :, : len(span)] = live
        bits_equal(got, want[name], name)


@variants
def test_ragged_and_uniform_batches_agree(device, variant):
    """Equal lengths through cu_seqlens, and each request of a mixed batch alone."""
    uniform = make(device, variant, B=3, D=4)
    ragged = uniform.copy().with_(cu_seqlens=uniform.indices([0, 4, 8, 12]))
    bits_equal(ragged.verify(), uniform.verify(), "outputs")
    ragged.assert_untouched(uniform.memory())

    mixed = make(device, variant, lengths=[4, 0, 1, 3], tail=2)
    start, accept = mixed.copy(), [3, 0, 1, 3]
    outputs = mixed.verify()
    mixed.fold(accept)
    assert not outputs[8:].any(), "tokens no request covers get zero"
    for i, span in enumerate(start.spans()):
        if not span:
            continue
        tokens = slice(span.start, span.stop)
        alone = start.with_(
            **{name: getattr(start, name)[tokens] for name in ("q", "k", "v", "a", "b")},
            cu_seqlens=None, state_indices=start.state_indices[i : i + 1],
        )  # fmt: skip
        bits_equal(alone.verify(), outputs[tokens], f"outputs of request {i}")
        alone.fold(accept[i : i + 1])
    start.assert_untouched(mixed.memory("state"))


def test_a_ragged_row_longer_than_the_window_is_verified_but_not_stored(device):
    p = make(device, "gdn", lengths=[2, 5], T=3)
    want, trajectories = oracle.run(p)
    oracle.assert_outputs(p.verify(), want)
    p.fold([2, 5])  # clamped to T = 3
    for slot, n, states in zip(p.state_indices.tolist(), [2, 3], trajectories, strict=True):
        assert oracle.state_error(p.state[slot], states[n]) <= 1e-6


def test_verify_refuses_wrong_metadata(device):
    """Ranks, sizes and head ratios; dtypes, devices and layouts, without a silent conversion
    or copy; gates of one variant beside windows or options of the other (field cases 33, 34,
    45, 48, 54)."""
    gdn = CALLS["verify-gdn"](device)[1]
    kda = CALLS["verify-kda"](device)[1]
    names = [x.name for x in torch.ops.replayssm.verify.default._schema.arguments]
    gdn, kda = (dict(zip(names, args, strict=False)) for args in (gdn, kda))
    got = "\n".join([
        texts(
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
    ),
        texts(
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
    ),
        texts(
        device, "verify-gdn",
        given(a=kda["a"]), given(dt_bias=kda["dt_bias"]), given(g_window=kda["g_window"]),
        given(a=kda["a"], dt_bias=kda["dt_bias"]), given(lower_bound=-5.0),
    ), texts(
        device, "verify-kda",
        given(a=gdn["a"]), given(dt_bias=gdn["dt_bias"]), given(g_window=gdn["g_window"]),
        spaced("a"), given(lower_bound=0.0), given(lower_bound=5.0),
        given(lower_bound=NAN), given(lower_bound=-float("inf")),
    ),
    ])  # fmt: skip
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
ValueError: verify: T must be at least 1, got 0 (k_window)
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
ValueError: verify: beta_window is written and must not overlap itself, got shape [6, 2, 6] with strides [0, 6, 1]
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
