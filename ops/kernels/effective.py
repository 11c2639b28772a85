"""verify with exact=False: the whole draft window in one pass over the state.

Written out, the D steps of the recurrence are linear in the state S they start from:

    o_t = S q~_t + sum_i N[i, t] v_i
    q~_t = e^(G_t) q_t - sum_i N[i, t] e^(G_i) k_i,    G_t = g_1 + ... + g_t
    N = diag(beta) (I + A diag(beta))^-1 M
    A[i, t] = sum_k k_i k_t e^(G_t - G_i) for i < t; M with q_t for k_t, i <= t

All that is D by D, or K by D, is made here from the tokens alone while the state is
on its way into shared memory; then one product on the tensor cores, fp32 as two tf32
halves, gives every output. No exponent is ever positive. A program owns BV value
rows of one head of one request.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from .chunks import (
    as_tile,
    barrier,
    chunk_buffers,
    load_chunks,
    put,
    put_chunks,
    row_buffer,
    store_window,
    token_layout,
    value_layout,
    zero_tokens,
)
from .grams import (
    dot_operands,
    gram_layout,
    grams,
    halves,
    multiply_add,
    put_rows,
    queries,
    solve,
    times,
)
from .step import (
    decay_rate,
    exp,
    fp32_rows,
    inverse_norm,
    log_decay,
    outside,
    row_of,
    rows_stored,
    sigmoid,
)

# triton renamed it after 3.8.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.constexpr_function
def _output_layout(BV, NW):
    lanes = min(BV // 4, 32)
    return gl.BlockedLayout([4, 1], [lanes, 32 // lanes], [1, NW], [0, 1])


@gluon.jit
def _copy_state(p_state, BV: gl.constexpr, K: gl.constexpr):
    """Start the copy of rows of the state into shared memory, in chunks; p_state [BV, 32]."""
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    s_h = ()
    for c in gl.static_range(K // 32):
        chunk = gl.allocate_shared_memory(gl.float32, [BV, 32], SHARED)
        _copy(chunk, p_state + c * 32)
        s_h = s_h + (chunk,)
    async_copy.commit_group()
    return s_h


@gluon.jit
def _outputs(
    b_x, s_n, s_h, s_q, BV: gl.constexpr, TB: gl.constexpr, TX: gl.constexpr,
    M: gl.constexpr,
):  # fmt: skip
    """O [BV, TB] = V N + S Q~."""
    X: gl.constexpr = gl.DotOperandLayout(0, M, 1)
    Y: gl.constexpr = gl.DotOperandLayout(1, M, 1)
    # Three chains of products instead of one three times as long.
    high = gl.zeros([BV, TB], gl.float32, layout=M)
    left, right = high, high
    x_high, x_low = halves(b_x.to(gl.float32))
    y_high, y_low = halves(s_n.slice(TX - TB, TB, dim=0).permute((1, 0)).load(Y))
    high, left, right = multiply_add(x_high, x_low, y_high, y_low, high, left, right)
    for c in gl.static_range(len(s_h)):
        x_high, x_low = halves(s_h[c].load(X))
        y_high, y_low = halves(s_q[c].slice(TX - TB, TB, dim=0).permute((1, 0)).load(Y))
        high, left, right = multiply_add(x_high, x_low, y_high, y_low, high, left, right)
    return high + (left + right)


@gluon.jit(do_not_specialize=["B", "N", "D", "S", "R", "T", "si_s", "cu_s", "wi_s"])
def effective(
    q, k, v, a, b, A_log, dt_bias, state, k_window, v_window, g_window, beta_window,
    state_indices, cu_seqlens, window_indices, o, scale, lower_bound,
    B, N, D, S, R, T,
    q_n, q_h, k_n, k_h, v_n, v_h, a_n, a_h, b_n, b_h, A_s, dt_h, dt_k,
    state_s, kw_s, vw_s, gw_s, bw_s, si_s, cu_s, wi_s,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    KDA: gl.constexpr, SAFE: gl.constexpr, L2NORM: gl.constexpr,
    BV: gl.constexpr, TB: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """recur's arguments but its last two; cu_seqlens is None, D <= TB, 32 divides K and BV divides V."""
    # One row of 32 numbers to 8 or to 16 lanes: all lanes have one.
    P: gl.constexpr = gl.BlockedLayout([1, TB // 4], [TB // 4, 128 // TB], [NW, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, P)
    PV: gl.constexpr = value_layout(BV, NW)
    PS: gl.constexpr = token_layout(NW)
    PO: gl.constexpr = _output_layout(BV, NW)
    M: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NW, 1], [16, 8])
    X: gl.constexpr = gl.DotOperandLayout(0, M, 1)
    # 16-bit keys and queries as they are: the tensor core's products are exact.
    GRAM: gl.constexpr = (not KDA) and q.dtype.element_ty.primitive_bitwidth == 16
    TX: gl.constexpr = 16  # the least depth of a product; TB is 8 or 16
    NV: gl.constexpr = V // BV
    KC: gl.constexpr = K // 32
    pid = gl.program_id(0)
    i_v = pid % NV
    i_hv = (pid // NV) % HV
    i_b = pid // (NV * HV)
    i_h = i_hv // (HV // H)
    start = i_b * D
    slot = gl.load(state_indices + i_b * si_s).to(gl.int64)
    row = row_of(slot, window_indices, i_b * wi_s)

    # The tokens before the state: their arithmetic hides its way here.
    o_pk = gl.arange(0, 32, layout=gl.SliceLayout(0, P))
    o_t = gl.arange(0, TB, layout=ROW)
    mask_t = o_t < D
    token = (start + o_t).to(gl.int64)
    p_k, p_q = k + i_h * k_h, q + i_h * q_h
    b_k = load_chunks(p_k + token * k_n, o_pk, mask_t, K)
    b_q = load_chunks(p_q + token * q_n, o_pk, mask_t, K)
    b_b = gl.load(b + token * b_n + i_hv * b_h, mask=mask_t, other=0.0)
    b_A = gl.load(A_log + i_hv * A_s)
    b_dt = ()
    if KDA:
        b_a = load_chunks(a + token * a_n + i_hv * a_h, o_pk, mask_t, K)
        for c in gl.static_range(KC):
            b_dt = b_dt + (
                gl.load(dt_bias + i_hv * dt_h + (c * 32 + o_pk) * dt_k)[None, :],
            )
    else:
        p_a = a + token * a_n + i_hv * a_h
        b_a = (gl.load(p_a[:, None], mask=mask_t[:, None], other=0.0),)
        b_dt = b_dt + (gl.load(dt_bias + i_hv * dt_h),)
    o_vt = gl.arange(0, TB, layout=gl.SliceLayout(1, PV))
    o_pv = i_v * BV + gl.arange(0, BV, layout=gl.SliceLayout(0, PV))
    p_v = v + ((start + o_vt).to(gl.int64) * v_n + i_hv * v_h)[:, None] + o_pv[None, :]
    b_v = gl.load(p_v, mask=(o_vt < D)[:, None], other=0.0)
    # What the tensor core wants in another order comes from L1.
    o_xv = i_v * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, X))
    o_xt = gl.arange(0, TX, layout=gl.SliceLayout(0, X))
    p_x = v + ((start + o_xt).to(gl.int64) * v_n + i_hv * v_h)[None, :] + o_xv[:, None]
    b_x = gl.load(p_x, mask=(o_xt < D)[None, :], other=0.0)
    if GRAM:
        b_xr, b_yk = dot_operands(p_k, p_q, k_n, q_n, start, D, TB, K, NW)

    if outside(slot, S):
        o_z = i_v * BV + gl.arange(0, BV, layout=ROW)
        zero_tokens(o, start, start + D, i_hv, o_z, o_z < V, HV, V)
        return
    o_sv = i_v * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, PS))
    o_sk = gl.arange(0, 32, layout=gl.SliceLayout(0, PS))
    p_state = (state + slot * state_s + (i_hv * V + o_sv) * K)[:, None] + o_sk[None, :]
    s_h = _copy_state(p_state, BV, K)

    # s_r: keys, later e^(G_i) k_i. A window of 8 tokens leaves rows 8 to 15: KDA's decays
    # lie there, later every variant's queries.
    s_r = chunk_buffers(KC, TX, 32)
    s_beta = row_buffer(TB, 1)
    s_inverse = s_beta
    s_dot = s_beta
    w_k = fp32_rows(b_k)
    w_q = fp32_rows(b_q)
    inverse_k = gl.full([TB], 1.0, gl.float32, layout=ROW)
    inverse_q = inverse_k * scale
    if L2NORM:
        inverse_k = inverse_norm(w_k)
        inverse_q = inverse_norm(w_q) * scale
    w_k = times(w_k, (inverse_k[:, None],))
    w_q = times(w_q, (inverse_q[:, None],))
    if GRAM:
        s_inverse = row_buffer(TB, 1)
        put(s_inverse, inverse_k[:, None])
        s_dot = row_buffer(TB, 2 * TB)
        dots = gl.zeros([2 * TB, TB], gl.float32, layout=gram_layout(NW))
        for c in gl.static_range(KC):
            dots = mma_v2(b_xr[c], b_yk[c], dots)
        as_tile(s_dot, [TB, 2 * TB]).permute((1, 0)).store(dots)
    else:
        put_rows(s_r, w_k, 0, TB, TX)
    beta = sigmoid(b_b.to(gl.float32))
    put(s_beta, beta[:, None])
    rate = decay_rate(b_A)
    b_g = ()
    b_decay = ()
    for c in gl.static_range(len(b_a)):
        g_c = log_decay(b_a[c], b_dt[c], rate, lower_bound, SAFE)
        b_g = b_g + (g_c,)
        b_decay = b_decay + (exp(g_c),)
    first: gl.constexpr = TB if KDA and TB < TX else 0
    if not KDA:
        s_decay = (row_buffer(TB, 1),)
        put(s_decay[0], b_decay[0])
    elif TB < TX:
        s_decay = s_r
        put_rows(s_r, b_decay, TB, TB, TX)
    else:
        s_decay = chunk_buffers(KC, TB, 32)
        put_chunks(s_decay, b_decay)

    gram, m, w_k, w_q = grams(
        w_k, w_q, inverse_k, inverse_q, beta, s_r, s_inverse, s_dot, s_decay, first, o_t,
        TB, TX, KDA, GRAM, P,
    )  # fmt: skip
    s_gram = row_buffer(TB, TX)
    put(s_gram, gram)
    put_rows(s_r, w_k, 0, TB, TX)
    if TB < TX:
        put_rows(s_r, w_q, TB, TB, TX)
    weights = solve(m, s_gram, s_beta, TB, TX, P)
    # Of 8 tokens' window in the last rows, where its queries are; the rest is ignored.
    SINGLE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    s_n = gl.allocate_shared_memory(gl.float32, [TX, TX], SINGLE)
    s_n.slice(TX - TB, TB, dim=0).store(weights)
    s_q = queries(s_n, s_r, w_q, TB, TX, NW)

    stored = rows_stored(row, D, R, T)
    store_window(
        k_window, v_window, g_window, beta_window, row, stored, 0, T,
        kw_s, vw_s, gw_s, bw_s, b_k, b_v, b_g, beta,
        o_t, o_pk, o_vt, o_pv, i_v, i_hv, H, HV, K, V, KDA, BV,
    )  # fmt: skip

    async_copy.wait_group(0)
    barrier()
    acc = gl.convert_layout(_outputs(b_x, s_n, s_h, s_q, BV, TB, TX, M), PO)
    o_ov = i_v * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, PO))
    o_ot = gl.arange(0, TB, layout=gl.SliceLayout(0, PO))
    p_o = o + (((start + o_ot).to(gl.int64) * HV + i_hv) * V)[None, :] + o_ov[:, None]
    gl.store(p_o, acc.to(o.dtype.element_ty), mask=(o_ot < D)[None, :])
