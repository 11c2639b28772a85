"""Pure copies, the same kernels on every GPU: store, scatter and conv_commit."""

import triton
import triton.language as tl

from .step import clamped, outside, row_of


@triton.jit(do_not_specialize=["span", "N", "D", "R", "T", "wi_s", "cu_s"])
def store(
    k, v, g, beta, k_window, v_window, g_window, beta_window, window_indices,
    cu_seqlens, span, N, D, R, T,
    k_n, k_h, v_n, v_h, g_n, g_h, b_n, b_h, kw_s, vw_s, gw_s, bw_s, wi_s, cu_s,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KDA: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program for each of span window rows of one value head of one request."""
    pid = tl.program_id(0)
    t = pid % span
    i_hv = (pid // span) % HV
    i_b = pid // (span * HV)
    if cu_seqlens is not None:
        start = clamped(cu_seqlens + i_b * cu_s, N)
        n = clamped(cu_seqlens + (i_b + 1) * cu_s, N) - start
    else:
        start = i_b * D
        n = D
    row = tl.load(window_indices + i_b * wi_s).to(tl.int64)
    if outside(row, R) | (t >= n):
        return
    token = (start + t).to(tl.int64)
    o_k = tl.arange(0, BK)
    o_v = tl.arange(0, BV)
    i_h = i_hv // (HV // H)
    if i_hv % (HV // H) == 0:
        b_k = tl.load(k + token * k_n + i_h * k_h + o_k, mask=o_k < K)
        tl.store(k_window + row * kw_s + (i_h * T + t) * K + o_k, b_k, mask=o_k < K)
    b_v = tl.load(v + token * v_n + i_hv * v_h + o_v, mask=o_v < V)
    tl.store(v_window + row * vw_s + (i_hv * T + t) * V + o_v, b_v, mask=o_v < V)
    o_gate = i_hv * T + t
    tl.store(beta_window + row * bw_s + o_gate, tl.load(beta + token * b_n + i_hv * b_h))
    if KDA:
        b_g = tl.load(g + token * g_n + i_hv * g_h + o_k, mask=o_k < K)
        tl.store(g_window + row * gw_s + o_gate * K + o_k, b_g, mask=o_k < K)
    else:
        tl.store(g_window + row * gw_s + o_gate, tl.load(g + token * g_n + i_hv * g_h))


@triton.jit
def _copy(p_to, p_from, size, BLOCK: tl.constexpr):
    o = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = o < size
    tl.store(p_to + o, tl.load(p_from + o, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["B", "S", "R", "D", "si_s", "st_s", "so_s", "ti_s", "ts_s"])
def scatter(
    state, intermediate, state_indices, step_indices, source_indices, track_indices,
    track_steps, size, B, S, R, D,
    state_l, state_s, from_l, from_r, from_d, si_s, st_s, so_s, ti_s, ts_s,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per block of one layer of one request."""
    i_b = tl.program_id(0) % B
    i_l = (tl.program_id(0) // B).to(tl.int64)
    slot = tl.load(state_indices + i_b * si_s).to(tl.int64)
    step = tl.load(step_indices + i_b * st_s).to(tl.int64)
    source = tl.zeros([], tl.int64) + i_b
    if source_indices is not None:
        source = tl.load(source_indices + i_b * so_s).to(tl.int64)
    inside = (slot >= 0) & (slot < S) & (step >= 0) & (step < D)
    if inside & (source >= 0) & (source < R):
        p_from = intermediate + i_l * from_l + source * from_r
        p_to = state + i_l * state_l
        _copy(p_to + slot * state_s, p_from + step * from_d, size, BLOCK)
        if track_indices is not None:
            track = tl.load(track_indices + i_b * ti_s).to(tl.int64)
            at = tl.load(track_steps + i_b * ts_s).to(tl.int64)
            if (track >= 0) & (track < S) & (at >= 0) & (at <= step):
                _copy(p_to + track * state_s, p_from + at * from_d, size, BLOCK)


@triton.jit
def _conv_group(
    state, window, size, state_l, state_s, from_l, from_r, from_t,
    i_l, slot, row, n, track_slot, track_n, D,
    TAPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one group: its conv state after n tokens, and after track_n."""
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = o < size
    o_from = o
    if ROWS:  # sliding windows hold D + TAPS - 1 columns a channel, the state TAPS
        o_from = o // TAPS * (D + TAPS - 1) + o % TAPS
    p_from = window + i_l * from_l + row * from_r
    p_to = state + i_l * state_l
    b_state = tl.load(p_from + (n - 1) * from_t + o_from, mask=mask)
    tl.store(p_to + slot * state_s + o, b_state, mask=mask)
    if track_n > 0:
        b_state = tl.load(p_from + (track_n - 1) * from_t + o_from, mask=mask)
        tl.store(p_to + track_slot * state_s + o, b_state, mask=mask)


@triton.jit(do_not_specialize=["B", "S", "R", "D", "si_s", "al_s", "wi_s", "ti_s", "ts_s"])
def conv_commit(
    state0, state1, state2, state3, window0, window1, window2, window3,
    state_indices, accept_lens, window_indices, track_indices, track_steps,
    B, S, R, D, size0, size1, size2, size3,
    s0_l, s0_s, w0_l, w0_r, w0_t, s1_l, s1_s, w1_l, w1_r, w1_t,
    s2_l, s2_s, w2_l, w2_r, w2_t, s3_l, s3_s, w3_l, w3_r, w3_t,
    si_s, al_s, wi_s, ti_s, ts_s,
    TAPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per block of one group of one layer of one request."""
    i_b = tl.program_id(0) % B
    i_l = (tl.program_id(0) // B).to(tl.int64)
    i_group = tl.program_id(2)
    slot = tl.load(state_indices + i_b * si_s).to(tl.int64)
    n = tl.minimum(tl.load(accept_lens + i_b * al_s).to(tl.int64), D)
    row = row_of(slot, window_indices, i_b * wi_s)
    if outside(slot, S) | (row < 0) | (row >= R) | (n <= 0):
        return
    track_slot = tl.full([], -1, tl.int64)
    track_n = tl.full([], 0, tl.int64)
    if track_indices is not None:
        track_slot = tl.load(track_indices + i_b * ti_s).to(tl.int64)
        step = tl.load(track_steps + i_b * ts_s).to(tl.int64)
        inside = (track_slot >= 0) & (track_slot < S) & (step >= 0) & (step < n)
        track_n = tl.where(inside, step + 1, 0)
    if i_group == 0:
        _conv_group(
            state0, window0, size0, s0_l, s0_s, w0_l, w0_r, w0_t,
            i_l, slot, row, n, track_slot, track_n, D, TAPS, ROWS, BLOCK,
        )  # fmt: skip
    if state1 is not None:
        if i_group == 1:
            _conv_group(
                state1, window1, size1, s1_l, s1_s, w1_l, w1_r, w1_t,
                i_l, slot, row, n, track_slot, track_n, D, TAPS, ROWS, BLOCK,
            )  # fmt: skip
    if state2 is not None:
        if i_group == 2:
            _conv_group(
                state2, window2, size2, s2_l, s2_s, w2_l, w2_r, w2_t,
                i_l, slot, row, n, track_slot, track_n, D, TAPS, ROWS, BLOCK,
            )  # fmt: skip
    if state3 is not None:
        if i_group == 3:
            _conv_group(
                state3, window3, size3, s3_l, s3_s, w3_l, w3_r, w3_t,
                i_l, slot, row, n, track_slot, track_n, D, TAPS, ROWS, BLOCK,
            )  # fmt: skip
