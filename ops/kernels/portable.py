"""The portable lowering: plain Triton, for ROCm, older NVIDIA cards and the interpreter.

Same arguments and arithmetic as the Gluon kernels, one token at a time straight from
device memory. The layout is the compiler's choice and decides the order of sums, so
addresses carry a contiguity hint that fixes it: 4 numbers a lane for state of any
dtype, 1 for tokens of any alignment. verify, fold and decode then sum in one order.
"""

import triton
import triton.language as tl

from .step import (
    advance,
    clamped,
    decay_rate,
    decays,
    dot_rows,
    log_decay,
    normalized,
    outside,
    row_of,
    rows_read,
    rows_stored,
    sigmoid,
)


@triton.jit
def _load_chunks(p_row, o_k, mask_row, K: tl.constexpr, WIDTH: tl.constexpr = 1):
    """Rows of K numbers at p_row [rows] as chunks of 32."""
    out = ()
    for c in tl.static_range((K + 31) // 32):
        mask = mask_row[:, None] & (c * 32 + o_k < K)[None, :]
        p = tl.max_contiguous(p_row[:, None] + (c * 32 + o_k)[None, :], [1, WIDTH])
        out = out + (tl.load(p, mask=mask, other=0.0),)
    return out


@triton.jit
def _store_chunks(p_row, o_k, mask_row, tiles, K: tl.constexpr, WIDTH: tl.constexpr = 1):
    for c in tl.static_range((K + 31) // 32):
        mask = mask_row[:, None] & (c * 32 + o_k < K)[None, :]
        p = tl.max_contiguous(p_row[:, None] + (c * 32 + o_k)[None, :], [1, WIDTH])
        tl.store(p, tiles[c].to(p_row.dtype.element_ty), mask=mask)


@triton.jit
def _load_state(p_row, o_k, mask_row, K: tl.constexpr):
    raw = _load_chunks(p_row, o_k, mask_row, K, 4)
    out = ()
    for c in tl.static_range(len(raw)):
        out = out + (raw[c].to(tl.float32),)
    return out


@triton.jit
def _zero_tokens(o, first, last, i_hv, o_v, mask_v, HV: tl.constexpr, V: tl.constexpr):
    zero = (o_v * 0).to(o.dtype.element_ty)
    for t in range(first, last):
        token = tl.zeros([], tl.int64) + t
        tl.store(o + (token * HV + i_hv) * V + o_v, zero, mask=mask_v)


@triton.jit(do_not_specialize=["B", "N", "D", "S", "R", "T", "si_s", "cu_s", "wi_s"])
def recur(
    q, k, v, a, b, A_log, dt_bias, state, k_window, v_window, g_window, beta_window,
    state_indices, cu_seqlens, window_indices, o, scale, lower_bound,
    B, N, D, S, R, T,
    q_n, q_h, k_n, k_h, v_n, v_h, a_n, a_h, b_n, b_h, A_s, dt_h, dt_k,
    state_s, kw_s, vw_s, gw_s, bw_s, si_s, cu_s, wi_s,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KDA: tl.constexpr, SAFE: tl.constexpr, L2NORM: tl.constexpr,
    BV: tl.constexpr, TB: tl.constexpr, NW: tl.constexpr,
):  # fmt: skip
    """verify writes windows; decode, whose windows are None, writes the state."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_v = pid % NV
    i_hv = (pid // NV) % HV
    i_b = pid // (NV * HV)
    i_h = i_hv // (HV // H)
    o_v = i_v * BV + tl.arange(0, BV)
    mask_v = o_v < V
    if cu_seqlens is not None:
        if i_b == B:  # one program more than rows: the tokens no row covers
            first = clamped(cu_seqlens, N)
            last = clamped(cu_seqlens + B * cu_s, N)
            _zero_tokens(o, 0, first, i_hv, o_v, mask_v, HV, V)
            _zero_tokens(o, tl.maximum(first, last), N, i_hv, o_v, mask_v, HV, V)
            return
        start = clamped(cu_seqlens + i_b * cu_s, N)
        n = tl.maximum(clamped(cu_seqlens + (i_b + 1) * cu_s, N) - start, 0)
    else:
        start = i_b * D
        n = D
    slot = tl.load(state_indices + i_b * si_s).to(tl.int64)
    if outside(slot, S):
        _zero_tokens(o, start, start + n, i_hv, o_v, mask_v, HV, V)
        return
    o_k = tl.arange(0, 32)
    one = tl.arange(0, 1)
    p_state = state + slot * state_s + (i_hv * V + o_v) * K
    h = _load_state(p_state, o_k, mask_v, K)
    rate = decay_rate(tl.load(A_log + i_hv * A_s))
    if k_window is not None:
        row = row_of(slot, window_indices, i_b * wi_s)
        stored = rows_stored(row, n, R, T)

    for t in range(0, n):
        token = (start + t + one).to(tl.int64)
        live = one < 1
        b_k = _load_chunks(k + token * k_n + i_h * k_h, o_k, live, K)
        b_q = _load_chunks(q + token * q_n + i_h * q_h, o_k, live, K)
        p_v = v + (start + t).to(tl.int64) * v_n + i_hv * v_h + o_v
        b_v = tl.load(p_v, mask=mask_v, other=0.0)
        beta = sigmoid(tl.load(b + token * b_n + i_hv * b_h).to(tl.float32))
        if KDA:
            b_a = _load_chunks(a + token * a_n + i_hv * a_h, o_k, live, K)
            b_g = ()
            for c in tl.static_range((K + 31) // 32):
                dt = tl.load(
                    dt_bias + i_hv * dt_h + (c * 32 + o_k) * dt_k,
                    mask=c * 32 + o_k < K, other=0.0,
                )  # fmt: skip
                b_g = b_g + (log_decay(b_a[c], dt[None, :], rate, lower_bound, SAFE),)
        else:
            b_a = tl.load(a + token * a_n + i_hv * a_h)
            dt = tl.load(dt_bias + i_hv * dt_h)
            b_g = (log_decay(b_a, dt, rate, lower_bound, SAFE)[:, None],)
        if k_window is not None:
            if t < stored:
                if i_v == 0:
                    if i_hv % (HV // H) == 0:
                        p_kw = k_window + row * kw_s + (i_h * T + t) * K + one
                        _store_chunks(p_kw, o_k, live, b_k, K)
                    o_gate = i_hv * T + t + one
                    tl.store(beta_window + row * bw_s + o_gate, beta)
                    if KDA:
                        _store_chunks(g_window + row * gw_s + o_gate * K, o_k, live, b_g, K)
                    else:
                        tl.store(g_window + row * gw_s + o_gate[:, None], b_g[0])
                tl.store(v_window + row * vw_s + (i_hv * T + t) * V + o_v, b_v, mask=mask_v)
        decay = decays(b_g)
        h = advance(h, normalized(b_k, 1.0, L2NORM), decay, b_v.to(tl.float32), beta)
        b_o = dot_rows(h, normalized(b_q, scale, L2NORM))
        p_o = o + ((start + t).to(tl.int64) * HV + i_hv) * V + o_v
        tl.store(p_o, b_o.to(o.dtype.element_ty), mask=mask_v)
    if k_window is None:
        _store_chunks(p_state, o_k, mask_v, h, K, 4)


@triton.jit(do_not_specialize=["B", "S", "R", "T", "si_s", "ac_s", "wi_s", "ti_s", "ts_s"])
def fold(
    state, k_window, v_window, g_window, beta_window, state_indices, accept_lens,
    window_indices, track_indices, track_steps,
    B, S, R, T,
    state_l, state_s, kw_l, kw_s, vw_l, vw_s, gw_l, gw_s, bw_l, bw_s,
    si_s, ac_s, wi_s, ti_s, ts_s,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KDA: tl.constexpr, L2NORM: tl.constexpr,
    BV: tl.constexpr, TB: tl.constexpr, NW: tl.constexpr,
):  # fmt: skip
    """Replay the accepted rows of one head of one request of one layer into its state."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_v = pid % NV
    i_hv = (pid // NV) % HV
    i_b = (pid // (NV * HV)) % B
    i_l = (pid // (NV * HV) // B).to(tl.int64)
    i_h = i_hv // (HV // H)
    slot = tl.load(state_indices + i_b * si_s).to(tl.int64)
    row = row_of(slot, window_indices, i_b * wi_s)
    n = rows_read(accept_lens + i_b * ac_s, T)
    if outside(slot, S) | outside(row, R) | (n <= 0):
        return
    o_v = i_v * BV + tl.arange(0, BV)
    mask_v = o_v < V
    o_k = tl.arange(0, 32)
    one = tl.arange(0, 1)
    live = one < 1
    p_layer = state + i_l * state_l + (i_hv * V + o_v) * K
    h = _load_state(p_layer + slot * state_s, o_k, mask_v, K)
    if track_indices is not None:
        track = tl.load(track_indices + i_b * ti_s).to(tl.int64)
        track_t = tl.load(track_steps + i_b * ts_s).to(tl.int64)
        track_t = tl.where((track >= 0) & (track < S), track_t, -1)
    p_kw = k_window + i_l * kw_l + row * kw_s + i_h * T * K
    p_vw = v_window + i_l * vw_l + row * vw_s + i_hv * T * V + o_v
    p_gw = g_window + i_l * gw_l + row * gw_s
    p_bw = beta_window + i_l * bw_l + row * bw_s + i_hv * T

    for t in range(0, n):
        b_k = _load_chunks(p_kw + (t + one) * K, o_k, live, K)
        b_v = tl.load(p_vw + t * V, mask=mask_v, other=0.0)
        beta = tl.load(p_bw + t + one)
        o_gate = i_hv * T + t + one
        if KDA:
            b_g = _load_chunks(p_gw + o_gate * K, o_k, live, K)
        else:
            b_g = (tl.load(p_gw + o_gate)[:, None],)
        decay = decays(b_g)
        h = advance(h, normalized(b_k, 1.0, L2NORM), decay, b_v.to(tl.float32), beta)
        if track_indices is not None:
            if t == track_t:
                _store_chunks(p_layer + track * state_s, o_k, mask_v, h, K, 4)
    _store_chunks(p_layer + slot * state_s, o_k, mask_v, h, K, 4)


def recur_tile(
    HV: int, K: int, V: int, batch: int, kda: bool, ragged: bool = False, safe: bool = False
) -> tuple[int, int]:
    """(BV, warps) of verify and decode: one tile for all three kernels, since the
    compiler's layout, and with it the order of sums, depends on it."""
    return 32, 2 if K <= 128 else 8


def fold_tile(HV: int, K: int, V: int, batch: int, kda: bool) -> tuple[int, int]:
    """(BV, warps) of fold."""
    return recur_tile(HV, K, V, batch, kda)
