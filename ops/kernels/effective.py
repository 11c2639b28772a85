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
    get_chunks,
    load_chunks,
    put,
    put_chunks,
    row_buffer,
    store_window,
    token_layout,
    value_layout,
    zero_tokens,
)
from .step import (
    decay_rate,
    dot_rows,
    exp,
    fp32_rows,
    inverse_norm,
    less,
    log_decay,
    sigmoid,
)

# triton renamed it after 3.8.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.constexpr_function
def _output_layout(BV, NW):
    lanes = min(BV // 4, 32)
    return gl.BlockedLayout([4, 1], [lanes, 32 // lanes], [1, NW], [0, 1])


@gluon.jit
def _halves(x):
    """fp32 x as a sum of two tf32 numbers, the second cut by the tensor core."""
    high = (x.to(gl.int32, bitcast=True) & -8192).to(gl.float32, bitcast=True)
    return high, x - high


@gluon.jit
def _multiply_add(x_high, x_low, y_high, y_low, high, left, right):
    high = mma_v2(x_high, y_high, high, input_precision="tf32")
    left = mma_v2(x_low, y_high, left, input_precision="tf32")
    right = mma_v2(x_high, y_low, right, input_precision="tf32")
    return high, left, right


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
    PO: gl.constexpr = _output_layout(BV, NW)
    M: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NW, 1], [16, 8])
    X: gl.constexpr = gl.DotOperandLayout(0, M, 1)
    Y: gl.constexpr = gl.DotOperandLayout(1, M, 1)
    MQ: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, NW], [16, 8])
    XQ: gl.constexpr = gl.DotOperandLayout(0, MQ, 1)
    YQ: gl.constexpr = gl.DotOperandLayout(1, MQ, 1)
    MG: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, NW // 2], [16, 8])
    XG: gl.constexpr = gl.DotOperandLayout(0, MG, 4)
    YG: gl.constexpr = gl.DotOperandLayout(1, MG, 4)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    SINGLE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
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
    row = slot
    if window_indices is not None:
        row = gl.load(window_indices + i_b * wi_s).to(gl.int64)

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
        o_xr = gl.arange(0, 2 * TB, layout=gl.SliceLayout(1, XG))
        o_xk = gl.arange(0, 32, layout=gl.SliceLayout(0, XG))
        o_yt = gl.arange(0, TB, layout=gl.SliceLayout(0, YG))
        o_yk = gl.arange(0, 32, layout=gl.SliceLayout(1, YG))
        xr = (start + o_xr % TB).to(gl.int64)
        p_xr = gl.where(o_xr < TB, p_k + xr * k_n, p_q + xr * q_n)[:, None] + o_xk[None, :]
        p_yk = (p_k + (start + o_yt).to(gl.int64) * k_n)[None, :] + o_yk[:, None]
        b_xr = ()
        b_yk = ()
        for c in gl.static_range(KC):
            x_c = gl.load(p_xr + c * 32, mask=(o_xr % TB < D)[:, None], other=0.0)
            y_c = gl.load(p_yk + c * 32, mask=(o_yt < D)[None, :], other=0.0)
            b_xr = b_xr + (x_c,)
            b_yk = b_yk + (y_c,)

    if (slot < 0) | (slot >= S):
        o_z = i_v * BV + gl.arange(0, BV, layout=ROW)
        zero_tokens(o, start, start + D, i_hv, o_z, o_z < V, HV, V)
        return
    o_sv = i_v * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, token_layout(NW)))
    o_sk = gl.arange(0, 32, layout=gl.SliceLayout(0, token_layout(NW)))
    p_state = (state + slot * state_s + (i_hv * V + o_sv) * K)[:, None] + o_sk[None, :]
    s_h = ()
    for c in gl.static_range(KC):
        chunk = gl.allocate_shared_memory(gl.float32, [BV, 32], SHARED)
        _copy(chunk, p_state + c * 32)
        s_h = s_h + (chunk,)
    async_copy.commit_group()

    # s_r: keys, later e^(G_i) k_i. A window of 8 tokens leaves rows 8 to 15: KDA's decays
    # lie there, later every variant's queries.
    s_r = chunk_buffers(KC, TX, 32)
    s_beta = row_buffer(TB, 1)
    w_k = fp32_rows(b_k)
    w_q = fp32_rows(b_q)
    inverse_k = gl.full([TB], 1.0, gl.float32, layout=ROW)
    inverse_q = inverse_k * scale
    if L2NORM:
        inverse_k = inverse_norm(w_k)
        inverse_q = inverse_norm(w_q) * scale
    w_k = _times(w_k, (inverse_k[:, None],))
    w_q = _times(w_q, (inverse_q[:, None],))
    if GRAM:
        s_inverse = row_buffer(TB, 1)
        put(s_inverse, inverse_k[:, None])
        s_dot = row_buffer(TB, 2 * TB)
        dots = gl.zeros([2 * TB, TB], gl.float32, layout=MG)
        for c in gl.static_range(KC):
            dots = mma_v2(b_xr[c], b_yk[c], dots)
        as_tile(s_dot, [TB, 2 * TB]).permute((1, 0)).store(dots)
    else:
        _put_rows(s_r, w_k, 0, TB, TX)
    beta = sigmoid(b_b.to(gl.float32))
    put(s_beta, beta[:, None])
    rate = decay_rate(b_A)
    b_g = ()
    decays = ()
    for c in gl.static_range(len(b_a)):
        g_c = log_decay(b_a[c], b_dt[c], rate, lower_bound, SAFE)
        b_g = b_g + (g_c,)
        decays = decays + (exp(g_c),)
    if not KDA:
        first: gl.constexpr = 0
        s_decay = (row_buffer(TB, 1),)
        put(s_decay[0], decays[0])
    elif TB < TX:
        first: gl.constexpr = TB
        s_decay = s_r
        _put_rows(s_r, decays, TB, TB, TX)
    else:
        first: gl.constexpr = 0
        s_decay = chunk_buffers(KC, TB, 32)
        put_chunks(s_decay, decays)

    # gram[t, i] is beta_t A[i, t], m[TB - 1 - i] the row i of M.
    o_pc = gl.arange(0, TX, layout=gl.SliceLayout(0, P))
    gram = gl.zeros([TB, TX], gl.float32, layout=P)
    fade = gl.full([TB], 1.0, gl.float32, layout=ROW)
    m = ()
    for i in gl.static_range(TB - 1, -1, -1):
        if i < TB - 1:  # row t, or its factor, loses the decays of i + 1 .. t
            if KDA:
                decay = get_chunks(s_decay, first + i + 1, P)
                w_k = _fade(w_k, decay, (o_t > i)[:, None])
                w_q = _fade(w_q, decay, (o_t > i)[:, None])
            else:
                decay = s_decay[0].index(i + 1).load(ROW)
                fade = fade * gl.where(o_t > i, decay, 1.0)
        if GRAM:
            norm = s_inverse.index(i).load(ROW) * fade
            dot_k = s_dot.index(i).slice(0, TB).load(ROW) * (norm * inverse_k)
            dot_q = s_dot.index(i).slice(TB, TB).load(ROW) * (norm * inverse_q)
        else:
            k_i = get_chunks(s_r, i, P)
            dot_k = dot_rows(w_k, k_i) * fade
            dot_q = dot_rows(w_q, k_i) * fade  # of KDA all ones: w has faded
        dot_k = gl.where(o_t > i, dot_k * beta, 0.0)
        gram = gl.where((o_pc == i)[None, :], dot_k[:, None], gram)
        m = m + (gl.where(o_t >= i, dot_q, 0.0),)
    if KDA:
        decay = get_chunks(s_decay, first, P)
    else:
        decay = ((fade * s_decay[0].index(0).load(ROW))[:, None],)
    w_k = _times(w_k, decay)
    w_q = _times(w_q, decay)
    s_gram = row_buffer(TB, TX)
    put(s_gram, gram)
    _put_rows(s_r, w_k, 0, TB, TX)
    if TB < TX:
        _put_rows(s_r, w_q, TB, TB, TX)

    # (I + A diag(beta)) x = M from the last row up.
    x = ()
    for i in gl.static_range(TB - 1, -1, -1):
        x_i = m[TB - 1 - i]
        for j in gl.static_range(TB - 1, i, -1):
            x_i = less(x_i, s_gram.index(j).slice(i, 1).load(ROW), x[TB - 1 - j])
        x = x + (x_i,)
    weights = gl.zeros([TB, TX], gl.float32, layout=P)
    for i in gl.static_range(TB):
        n_i = x[TB - 1 - i] * s_beta.index(i).load(ROW)
        weights = gl.where((o_pc == i)[None, :], n_i[:, None], weights)
    # Of 8 tokens' window in the last rows, where its queries are; the rest is ignored.
    s_n = gl.allocate_shared_memory(gl.float32, [TX, TX], SINGLE)
    s_n.slice(TX - TB, TB, dim=0).store(weights)
    x_high, x_low = _halves(s_n.load(XQ))
    s_q = ()
    for c in gl.static_range(KC):
        rows = as_tile(s_r[c], [TX, 32])
        y_high, y_low = _halves(rows.load(YQ))
        b_c = gl.zeros([TX, 32], gl.float32, layout=MQ)
        b_c, left, right = _multiply_add(x_high, x_low, y_high, y_low, b_c, b_c, b_c)
        if TB < TX:
            q_c = rows.load(MQ)
        else:
            q_c = gl.convert_layout(w_q[c], MQ)
        q_c = q_c - (b_c + (left + right))
        s_q = s_q + (gl.allocate_shared_memory(gl.float32, [TX, 32], SHARED, q_c),)

    stored = gl.where((row >= 0) & (row < R), gl.minimum(D, T), 0)
    store_window(
        k_window, v_window, g_window, beta_window, row, stored, 0, T,
        kw_s, vw_s, gw_s, bw_s, b_k, b_v, b_g, beta,
        o_t, o_pk, o_vt, o_pv, i_v, i_hv, H, HV, K, V, KDA, BV,
    )  # fmt: skip

    async_copy.wait_group(0)
    barrier()
    # Three chains of products instead of one three times as long.
    high = gl.zeros([BV, TB], gl.float32, layout=M)
    left, right = high, high
    x_high, x_low = _halves(b_x.to(gl.float32))
    y_high, y_low = _halves(s_n.slice(TX - TB, TB, dim=0).permute((1, 0)).load(Y))
    high, left, right = _multiply_add(x_high, x_low, y_high, y_low, high, left, right)
    for c in gl.static_range(KC):
        x_high, x_low = _halves(s_h[c].load(X))
        y_high, y_low = _halves(s_q[c].slice(TX - TB, TB, dim=0).permute((1, 0)).load(Y))
        high, left, right = _multiply_add(x_high, x_low, y_high, y_low, high, left, right)
    acc = gl.convert_layout(high + (left + right), PO)
    o_ov = i_v * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, PO))
    o_ot = gl.arange(0, TB, layout=gl.SliceLayout(0, PO))
    p_o = o + (((start + o_ot).to(gl.int64) * HV + i_hv) * V)[None, :] + o_ov[:, None]
    gl.store(p_o, acc.to(o.dtype.element_ty), mask=(o_ot < D)[None, :])


@gluon.jit
def _put_rows(rows, tiles, first: gl.constexpr, TB: gl.constexpr, TX: gl.constexpr):
    """Store chunks [TB, 32] into rows ``first`` .. of TX."""
    for c in gl.static_range(len(tiles)):
        as_tile(rows[c], [TX, 32]).slice(first, TB, dim=0).store(tiles[c])


@gluon.jit
def _times(w, factor):
    """Chunks of w times a factor, one chunk or as many."""
    out = ()
    for c in gl.static_range(len(w)):
        out = out + (w[c] * factor[c % len(factor)],)
    return out


@gluon.jit
def _fade(w, decay, mask):
    """Chunks of w times as many of decay, where mask [rows, 1] holds."""
    out = ()
    for c in gl.static_range(len(w)):
        out = out + (w[c] * gl.where(mask, decay[c], 1.0),)
    return out
