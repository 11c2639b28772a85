"""The tuned lowering: NVIDIA sm_80 and newer, in Gluon.

A program owns BV value rows of one head of one request and walks its tokens. The
state lives in registers with K on 8 lanes of a warp (three shuffles end a dot
product) and rows on the rest, in chunks of one number a lane, which costs nothing: a
lane's four neighbours are only named apart. The layout decides the order of every sum,
so any (BV, warps) gives the same bits. Up to TB tokens at a time are staged in shared
memory: keys and queries normalised, gates computed, once per program and not once
per thread, and the windows are written on the way.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .chunks import (
    barrier,
    chunk_buffers,
    get_lanes,
    lane_layout,
    load_chunks,
    load_state,
    put,
    put_chunks,
    row_buffer,
    state_layout,
    store_state,
    store_window,
    token_layout,
    value_layout,
    zero_tokens,
)
from .step import (
    advance,
    clamped,
    decay_rate,
    decays,
    dot_rows,
    log_decays,
    normalized,
    outside,
    row_of,
    rows_read,
    rows_stored,
    sigmoid,
)


@gluon.jit
def _load_tokens(
    p_k, p_q, p_v, p_a, p_b, p_dt, k_n, q_n, v_n, a_n, b_n, dt_k, start, n,
    o_t, o_pk, o_vt, o_pv,
    K: gl.constexpr, V: gl.constexpr, KDA: gl.constexpr,
):  # fmt: skip
    """k, q, v, a, b and dt_bias of TB tokens from start, as they lie in memory; zero from
    n on."""
    mask = o_t < n
    token = (start + o_t).to(gl.int64)
    b_k = load_chunks(p_k + token * k_n, o_pk, mask, K)
    b_q = load_chunks(p_q + token * q_n, o_pk, mask, K)
    if KDA:
        b_a = load_chunks(p_a + token * a_n, o_pk, mask, K)
        b_dt = ()
        for c in gl.static_range(len(b_a)):
            o_k = c * 32 + o_pk
            dt = gl.load(p_dt + o_k * dt_k, mask=o_k < K, other=0.0)
            b_dt = b_dt + (dt[None, :],)
    else:
        b_a = (gl.load((p_a + token * a_n)[:, None], mask=mask[:, None], other=0.0),)
        b_dt = (gl.load(p_dt),)
    b_b = gl.load(p_b + token * b_n, mask=mask, other=0.0)
    p_v = p_v + ((start + o_vt).to(gl.int64) * v_n)[:, None] + o_pv[None, :]
    b_v = gl.load(p_v, mask=(o_vt < n)[:, None] & (o_pv < V)[None, :], other=0.0)
    return b_k, b_q, b_v, b_a, b_b, b_dt


@gluon.jit
def _step(
    h, t, s_k, s_decay, s_v, s_beta,
    BV: gl.constexpr, L: gl.constexpr, NL: gl.constexpr,
):  # fmt: skip
    """The state after staged token t."""
    return advance(
        h, get_lanes(s_k, t, BV, L, NL), get_lanes(s_decay, t, BV, L, NL),
        s_v.index(t).load(gl.SliceLayout(1, NL)), s_beta.index(t).load(gl.SliceLayout(1, NL)),
    )  # fmt: skip


@gluon.jit
def _output(
    h, t, s_q, dtype: gl.constexpr,
    BV: gl.constexpr, L: gl.constexpr, NL: gl.constexpr,
):  # fmt: skip
    """What staged token t reads from the state after it."""
    b_o = dot_rows(h, get_lanes(s_q, t, BV, L, NL)).to(dtype)
    return gl.convert_layout(b_o, gl.SliceLayout(1, L), assert_trivial=True)


@gluon.jit(do_not_specialize=["B", "N", "D", "S", "R", "T", "si_s", "cu_s", "wi_s"])
def recur(
    q, k, v, a, b, A_log, dt_bias, state, k_window, v_window, g_window, beta_window,
    state_indices, cu_seqlens, window_indices, o, scale, lower_bound,
    B, N, D, S, R, T,
    q_n, q_h, k_n, k_h, v_n, v_h, a_n, a_h, b_n, b_h, A_s, dt_h, dt_k,
    state_s, kw_s, vw_s, gw_s, bw_s, si_s, cu_s, wi_s,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    KDA: gl.constexpr, SAFE: gl.constexpr, L2NORM: gl.constexpr,
    BV: gl.constexpr, TB: gl.constexpr, NW: gl.constexpr, ONE: gl.constexpr,
    STREAM: gl.constexpr,
):  # fmt: skip
    """verify writes windows; decode, whose windows are None, writes the state.

    ONE: every request has at most TB tokens.
    """
    L: gl.constexpr = state_layout(BV, NW)
    P: gl.constexpr = token_layout(NW)
    PV: gl.constexpr = value_layout(BV, NW)
    NL: gl.constexpr = lane_layout(BV, NW)
    LV: gl.constexpr = gl.SliceLayout(1, L)
    NV: gl.constexpr = (V + BV - 1) // BV
    KC: gl.constexpr = (K + 31) // 32
    pid = gl.program_id(0)
    i_v = pid % NV
    i_hv = (pid // NV) % HV
    i_b = pid // (NV * HV)
    i_h = i_hv // (HV // H)
    o_v = i_v * BV + gl.arange(0, BV, layout=LV)
    mask_v = o_v < V
    if cu_seqlens is not None:
        if i_b == B:  # one program more than rows: the tokens no row covers
            first = clamped(cu_seqlens, N)
            last = clamped(cu_seqlens + B * cu_s, N)
            zero_tokens(o, 0, first, i_hv, o_v, mask_v, HV, V)
            zero_tokens(o, gl.maximum(first, last), N, i_hv, o_v, mask_v, HV, V)
            return
        start = clamped(cu_seqlens + i_b * cu_s, N)
        n = gl.maximum(clamped(cu_seqlens + (i_b + 1) * cu_s, N) - start, 0)
    else:
        start = i_b * D
        n = D
    slot = gl.load(state_indices + i_b * si_s).to(gl.int64)
    row = row_of(slot, window_indices, i_b * wi_s)
    b_A = gl.load(A_log + i_hv * A_s)
    o_k = gl.arange(0, 32, layout=gl.SliceLayout(0, L))
    o_t = gl.arange(0, TB, layout=gl.SliceLayout(1, P))
    o_pk = gl.arange(0, 32, layout=gl.SliceLayout(0, P))
    o_vt = gl.arange(0, TB, layout=gl.SliceLayout(1, PV))
    o_pv = i_v * BV + gl.arange(0, BV, layout=gl.SliceLayout(0, PV))
    p_k, p_q, p_v = k + i_h * k_h, q + i_h * q_h, v + i_hv * v_h
    p_a, p_b, p_dt = a + i_hv * a_h, b + i_hv * b_h, dt_bias + i_hv * dt_h
    # The first TB tokens before the state, whose way here their arithmetic then hides.
    ahead = _load_tokens(
        p_k, p_q, p_v, p_a, p_b, p_dt, k_n, q_n, v_n, a_n, b_n, dt_k,
        start, n, o_t, o_pk, o_vt, o_pv, K, V, KDA,
    )  # fmt: skip
    if outside(slot, S):
        zero_tokens(o, start, start + n, i_hv, o_v, mask_v, HV, V)
        return
    p_state = state + slot * state_s + (i_hv * V + o_v) * K
    h = load_state(p_state, o_k, mask_v, NL, K, STREAM)

    s_k = chunk_buffers(KC, TB, 32)
    s_q = chunk_buffers(KC, TB, 32)
    s_decay = chunk_buffers(KC if KDA else 1, TB, 32 if KDA else 1)
    s_v = row_buffer(TB, BV)
    s_beta = row_buffer(TB, 1)
    rate = decay_rate(b_A)
    stored = rows_stored(row, n, R, T)
    # A token's output beside the next one's step: their sums hide each other's way. Twice
    # the code, for two blocks, of 128 numbers a thread would spill.
    ROTATE: gl.constexpr = ONE or BV * K <= 64 * 32 * NW

    # The first TB tokens by themselves, then any others in a loop.
    for later in gl.static_range(1 if ONE else 2):
        for t0 in range(TB if later else 0, n if later else TB, TB):
            if later:
                tokens = _load_tokens(
                    p_k, p_q, p_v, p_a, p_b, p_dt, k_n, q_n, v_n, a_n, b_n, dt_k,
                    start + t0, n - t0, o_t, o_pk, o_vt, o_pv, K, V, KDA,
                )  # fmt: skip
            else:
                tokens = ahead
            b_k, b_q, b_v, b_a, b_b, b_dt = tokens
            beta = sigmoid(b_b.to(gl.float32))
            b_g = log_decays(b_a, b_dt, rate, lower_bound, SAFE)
            if k_window is not None:
                store_window(
                    k_window, v_window, g_window, beta_window, row, stored, t0, T,
                    kw_s, vw_s, gw_s, bw_s, b_k, b_v, b_g, beta,
                    o_t, o_pk, o_vt, o_pv, i_v, i_hv, H, HV, K, V, KDA, BV,
                )  # fmt: skip
            decay = decays(b_g)
            put_chunks(s_decay, decay)
            put_chunks(s_k, normalized(b_k, 1.0, L2NORM))
            put_chunks(s_q, normalized(b_q, scale, L2NORM))
            put(s_v, b_v.to(gl.float32))
            put(s_beta, beta[:, None])
            barrier()  # here, or triton puts one before the first read: inside the loop
            m = gl.minimum(n - t0, TB)
            p_o = o + ((start + t0).to(gl.int64) * HV + i_hv) * V + o_v
            if not ROTATE:
                for t in range(m):
                    h = _step(h, t, s_k, s_decay, s_v, s_beta, BV, L, NL)
                    b_o = _output(h, t, s_q, o.dtype.element_ty, BV, L, NL)
                    gl.store(p_o, b_o, mask=mask_v)
                    p_o += HV * V
            elif m > 0:
                h = _step(h, 0, s_k, s_decay, s_v, s_beta, BV, L, NL)
                for t in range(1, m):
                    b_o = _output(h, t - 1, s_q, o.dtype.element_ty, BV, L, NL)
                    h = _step(h, t, s_k, s_decay, s_v, s_beta, BV, L, NL)
                    gl.store(p_o, b_o, mask=mask_v)
                    p_o += HV * V
                b_o = _output(h, m - 1, s_q, o.dtype.element_ty, BV, L, NL)
                gl.store(p_o, b_o, mask=mask_v)
    if k_window is None:
        store_state(p_state, o_k, mask_v, h, L, K)


@gluon.jit(do_not_specialize=["B", "S", "R", "T", "si_s", "ac_s", "wi_s", "ti_s", "ts_s"])
def fold(
    state, k_window, v_window, g_window, beta_window, state_indices, accept_lens,
    window_indices, track_indices, track_steps,
    B, S, R, T,
    state_l, state_s, kw_l, kw_s, vw_l, vw_s, gw_l, gw_s, bw_l, bw_s,
    si_s, ac_s, wi_s, ti_s, ts_s,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    KDA: gl.constexpr, L2NORM: gl.constexpr,
    BV: gl.constexpr, TB: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """Replay the accepted rows of one head of one request of one layer into its state.

    A program owns BV rows of the state, and walks the window's rows by the step that
    verify and decode take, TB of them staged at a time.
    """
    L: gl.constexpr = state_layout(BV, NW)
    P: gl.constexpr = token_layout(NW)
    PV: gl.constexpr = value_layout(BV, NW)
    NL: gl.constexpr = lane_layout(BV, NW)
    LV: gl.constexpr = gl.SliceLayout(1, L)
    NV: gl.constexpr = (V + BV - 1) // BV
    KC: gl.constexpr = (K + 31) // 32
    pid = gl.program_id(0)
    i_v = pid % NV
    i_hv = (pid // NV) % HV
    i_b = (pid // (NV * HV)) % B
    i_l = (pid // (NV * HV) // B).to(gl.int64)
    i_h = i_hv // (HV // H)
    slot = gl.load(state_indices + i_b * si_s).to(gl.int64)
    row = row_of(slot, window_indices, i_b * wi_s)
    n = rows_read(accept_lens + i_b * ac_s, T)
    if outside(slot, S) | outside(row, R) | (n <= 0):
        return
    o_v = i_v * BV + gl.arange(0, BV, layout=LV)
    mask_v = o_v < V
    o_k = gl.arange(0, 32, layout=gl.SliceLayout(0, L))
    p_layer = state + i_l * state_l + (i_hv * V + o_v) * K
    h = load_state(p_layer + slot * state_s, o_k, mask_v, NL, K, False)
    if track_indices is not None:
        track = gl.load(track_indices + i_b * ti_s).to(gl.int64)
        track_t = gl.load(track_steps + i_b * ts_s).to(gl.int64)
        track_t = gl.where((track >= 0) & (track < S), track_t, -1)

    s_k = chunk_buffers(KC, TB, 32)
    s_decay = chunk_buffers(KC if KDA else 1, TB, 32 if KDA else 1)
    s_v = row_buffer(TB, BV)
    s_beta = row_buffer(TB, 1)
    o_t = gl.arange(0, TB, layout=gl.SliceLayout(1, P))
    o_pk = gl.arange(0, 32, layout=gl.SliceLayout(0, P))
    o_vt = gl.arange(0, TB, layout=gl.SliceLayout(1, PV))
    o_pv = i_v * BV + gl.arange(0, BV, layout=gl.SliceLayout(0, PV))
    p_kw = k_window + i_l * kw_l + row * kw_s
    p_vw = v_window + i_l * vw_l + row * vw_s
    p_gw = g_window + i_l * gw_l + row * gw_s
    p_bw = beta_window + i_l * bw_l + row * bw_s

    for t0 in range(0, n, TB):
        mask_t = t0 + o_t < n
        b_k = load_chunks(p_kw + (i_h * T + t0 + o_t) * K, o_pk, mask_t, K)
        mask_tv = (t0 + o_vt < n)[:, None] & (o_pv < V)[None, :]
        b_v = gl.load(
            p_vw + (i_hv * T + t0 + o_vt)[:, None] * V + o_pv[None, :],
            mask=mask_tv, other=0.0,
        )  # fmt: skip
        o_gate = i_hv * T + t0 + o_t
        beta = gl.load(p_bw + o_gate, mask=mask_t, other=0.0)
        if KDA:
            b_g = load_chunks(p_gw + o_gate * K, o_pk, mask_t, K)
        else:
            b_g = (gl.load(p_gw + o_gate, mask=mask_t, other=0.0)[:, None],)
        decay = decays(b_g)
        put_chunks(s_k, normalized(b_k, 1.0, L2NORM))
        put_chunks(s_decay, decay)
        put(s_v, b_v.to(gl.float32))
        put(s_beta, beta[:, None])
        barrier()  # here, or triton puts one before the first read: inside the loop
        for t in range(gl.minimum(n - t0, TB)):
            h = _step(h, t, s_k, s_decay, s_v, s_beta, BV, L, NL)
            if track_indices is not None:
                if t0 + t == track_t:
                    store_state(p_layer + track * state_s, o_k, mask_v, h, L, K)
    store_state(p_layer + slot * state_s, o_k, mask_v, h, L, K)
