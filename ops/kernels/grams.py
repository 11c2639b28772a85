"""The D by D algebra of a draft window, for verify with exact=False: see ``effective``.

grams, solve and queries, in the letters and the layouts of that file.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .chunks import as_tile, get_chunks
from .step import dot_rows, less


@gluon.constexpr_function
def gram_layout(NW):
    return gl.NVMMADistributedLayout([2, 0], [2, NW // 2], [16, 8])


@gluon.jit
def halves(x):
    """fp32 x as a sum of two tf32 numbers, the second cut by the tensor core."""
    high = (x.to(gl.int32, bitcast=True) & -8192).to(gl.float32, bitcast=True)
    return high, x - high


@gluon.jit
def multiply_add(x_high, x_low, y_high, y_low, high, left, right):
    high = mma_v2(x_high, y_high, high, input_precision="tf32")
    left = mma_v2(x_low, y_high, left, input_precision="tf32")
    right = mma_v2(x_high, y_low, right, input_precision="tf32")
    return high, left, right


@gluon.jit
def put_rows(rows, tiles, first: gl.constexpr, TB: gl.constexpr, TX: gl.constexpr):
    """Store chunks [TB, 32] into rows ``first`` .. of TX."""
    for c in gl.static_range(len(tiles)):
        as_tile(rows[c], [TX, 32]).slice(first, TB, dim=0).store(tiles[c])


@gluon.jit
def times(w, factor):
    """Chunks of w times a factor, one chunk or as many."""
    out = ()
    for c in gl.static_range(len(w)):
        out = out + (w[c] * factor[c % len(factor)],)
    return out


@gluon.jit
def fade(w, decay, mask):
    """Chunks of w times as many of decay, where mask [rows, 1] holds."""
    out = ()
    for c in gl.static_range(len(w)):
        out = out + (w[c] * gl.where(mask, decay[c], 1.0),)
    return out


@gluon.jit
def dot_operands(
    p_k, p_q, k_n, q_n, start, D, TB: gl.constexpr, K: gl.constexpr, NW: gl.constexpr
):
    """Chunks of the tokens' keys above their queries, and of the keys across."""
    XG: gl.constexpr = gl.DotOperandLayout(0, gram_layout(NW), 4)
    YG: gl.constexpr = gl.DotOperandLayout(1, gram_layout(NW), 4)
    o_xr = gl.arange(0, 2 * TB, layout=gl.SliceLayout(1, XG))
    o_xk = gl.arange(0, 32, layout=gl.SliceLayout(0, XG))
    o_yt = gl.arange(0, TB, layout=gl.SliceLayout(0, YG))
    o_yk = gl.arange(0, 32, layout=gl.SliceLayout(1, YG))
    xr = (start + o_xr % TB).to(gl.int64)
    p_xr = gl.where(o_xr < TB, p_k + xr * k_n, p_q + xr * q_n)[:, None] + o_xk[None, :]
    p_yk = (p_k + (start + o_yt).to(gl.int64) * k_n)[None, :] + o_yk[:, None]
    b_xr = ()
    b_yk = ()
    for c in gl.static_range(K // 32):
        x_c = gl.load(p_xr + c * 32, mask=(o_xr % TB < D)[:, None], other=0.0)
        y_c = gl.load(p_yk + c * 32, mask=(o_yt < D)[None, :], other=0.0)
        b_xr = b_xr + (x_c,)
        b_yk = b_yk + (y_c,)
    return b_xr, b_yk


@gluon.jit
def grams(
    w_k, w_q, inverse_k, inverse_q, beta, s_r, s_inverse, s_dot, s_decay, first: gl.constexpr,
    o_t, TB: gl.constexpr, TX: gl.constexpr, KDA: gl.constexpr, GRAM: gl.constexpr,
    P: gl.constexpr,
):  # fmt: skip
    """gram[t, i] = beta_t A[i, t]; m[TB - 1 - i] = row i of M; keys and queries, faded to
    the window's start."""
    ROW: gl.constexpr = gl.SliceLayout(1, P)
    o_pc = gl.arange(0, TX, layout=gl.SliceLayout(0, P))
    gram = gl.zeros([TB, TX], gl.float32, layout=P)
    faded = gl.full([TB], 1.0, gl.float32, layout=ROW)
    m = ()
    for i in gl.static_range(TB - 1, -1, -1):
        if i < TB - 1:  # row t, or its factor, loses the decays of i + 1 .. t
            if KDA:
                decay = get_chunks(s_decay, first + i + 1, P)
                w_k = fade(w_k, decay, (o_t > i)[:, None])
                w_q = fade(w_q, decay, (o_t > i)[:, None])
            else:
                decay = s_decay[0].index(i + 1).load(ROW)
                faded = faded * gl.where(o_t > i, decay, 1.0)
        if GRAM:
            norm = s_inverse.index(i).load(ROW) * faded
            dot_k = s_dot.index(i).slice(0, TB).load(ROW) * (norm * inverse_k)
            dot_q = s_dot.index(i).slice(TB, TB).load(ROW) * (norm * inverse_q)
        else:
            k_i = get_chunks(s_r, i, P)
            dot_k = dot_rows(w_k, k_i) * faded
            dot_q = dot_rows(w_q, k_i) * faded  # of KDA all ones: w has faded
        dot_k = gl.where(o_t > i, dot_k * beta, 0.0)
        gram = gl.where((o_pc == i)[None, :], dot_k[:, None], gram)
        m = m + (gl.where(o_t >= i, dot_q, 0.0),)
    if KDA:
        decay = get_chunks(s_decay, first, P)
    else:
        decay = ((faded * s_decay[0].index(0).load(ROW))[:, None],)
    return gram, m, times(w_k, decay), times(w_q, decay)


@gluon.jit
def solve(m, s_gram, s_beta, TB: gl.constexpr, TX: gl.constexpr, P: gl.constexpr):
    """N^T [TB, TX]: (I + A diag(beta)) x = M from the last row up, times beta."""
    ROW: gl.constexpr = gl.SliceLayout(1, P)
    o_pc = gl.arange(0, TX, layout=gl.SliceLayout(0, P))
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
    return weights


@gluon.jit
def queries(s_n, s_r, w_q, TB: gl.constexpr, TX: gl.constexpr, NW: gl.constexpr):
    """The effective queries q~, in shared memory."""
    MQ: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, NW], [16, 8])
    XQ: gl.constexpr = gl.DotOperandLayout(0, MQ, 1)
    YQ: gl.constexpr = gl.DotOperandLayout(1, MQ, 1)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    x_high, x_low = halves(s_n.load(XQ))
    s_q = ()
    for c in gl.static_range(len(s_r)):
        rows = as_tile(s_r[c], [TX, 32])
        y_high, y_low = halves(rows.load(YQ))
        b_c = gl.zeros([TX, 32], gl.float32, layout=MQ)
        b_c, left, right = multiply_add(x_high, x_low, y_high, y_low, b_c, b_c, b_c)
        if TB < TX:
            q_c = rows.load(MQ)
        else:
            q_c = gl.convert_layout(w_q[c], MQ)
        q_c = q_c - (b_c + (left + right))
        s_q = s_q + (gl.allocate_shared_memory(gl.float32, [TX, 32], SHARED, q_c),)
    return s_q
