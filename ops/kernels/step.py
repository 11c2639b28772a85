"""The one recurrence step, its gates and the window rule, shared by all kernels.

Plain Triton, so that both lowerings trace the very same operations: Gluon kernels
call these functions too. Everything that decides bits is here and is explicit:
multiply-adds are written as fma where they are meant to be fused, and the kernels
compile with contraction off, so nothing else is. exp, log1p, sqrt and division use
fp32 arithmetic only, no approximate instruction: a systematic error of an
approximate exp would add up over the hundreds of tokens a slow decay remembers.

A row of K numbers is a tuple of chunks, of 32 numbers or of 8: one dot product is then
a chain of fma across chunks and one short reduction, 8 lanes wide, where a reduction
over the whole row would spend an addition on every element. With 8 numbers to a chunk,
one a lane, the reduction is three shuffles and no more.
"""

import triton
import triton.language as tl


@triton.jit
def clamped(p, N):
    """The token offset at p, within 0 .. N: before it is narrowed, or int64 would wrap."""
    return tl.minimum(tl.maximum(tl.load(p), 0), N).to(tl.int32)


@triton.jit
def outside(index, size):
    """Whether a slot or a row is none of a pool's."""
    return (index < 0) | (index >= size)


@triton.jit
def row_of(slot, window_indices, o_b):
    """The window row of a request: the one at offset o_b, or its slot."""
    row = slot
    if window_indices is not None:
        row = tl.load(window_indices + o_b).to(tl.int64)
    return row


@triton.jit
def rows_stored(row, n, R, T):
    """How many of a request's n tokens its window row takes."""
    return tl.where((row >= 0) & (row < R), tl.minimum(n, T), 0)


@triton.jit
def rows_read(p_len, T):
    """How many tokens of its row a commit of the length at p_len reads."""
    return tl.maximum(tl.minimum(tl.load(p_len), T), 0).to(tl.int32)


@triton.jit
def exp(x):
    """e^x for x <= 89 to about 1 ulp; 0 below -87.3, so of -inf too."""
    n = tl.floor(tl.fma(x, 1.4426950408889634, 0.5))
    r = tl.fma(n, -0.693359375, x)
    r = tl.fma(n, 2.12194440e-4, r)
    p = tl.fma(r, 1.9875691500e-4, 1.3981999507e-3)
    p = tl.fma(p, r, 8.3334519073e-3)
    p = tl.fma(p, r, 4.1665795894e-2)
    p = tl.fma(p, r, 1.6666665459e-1)
    p = tl.fma(p, r, 5.0000001201e-1)
    p = tl.fma(p, r * r, r) + 1.0
    i = n.to(tl.int32)
    half = i >> 1  # two factors: 2^128 alone is not a float
    p = p * ((half + 127) << 23).to(tl.float32, bitcast=True)
    p = p * ((i - half + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -87.3, 0.0, p)


@triton.jit
def _softplus(x):
    """max(x, 0) + log1p(e^-|x|), by log1p(y) = 2 atanh(y / (2 + y)) for 0 < y <= 1."""
    y = exp(0.0 - tl.abs(x))
    s = tl.div_rn(y, y + 2.0)
    z = s * s
    p = tl.fma(z, 0.0666666667, 0.0769230769)
    p = tl.fma(p, z, 0.0909090909)
    p = tl.fma(p, z, 0.1111111111)
    p = tl.fma(p, z, 0.1428571429)
    p = tl.fma(p, z, 0.2)
    p = tl.fma(p, z, 0.3333333333)
    p = tl.fma(p, z, 1.0)
    return tl.where(x > 20.0, x, tl.fma(s + s, p, tl.maximum(x, 0.0)))


@triton.jit
def sigmoid(x):
    e = exp(0.0 - tl.abs(x))
    return tl.div_rn(tl.where(x < 0.0, e, 1.0), e + 1.0)


@triton.jit
def decay_rate(A_log):
    """exp(A_log), at most the largest fp32, so that rate * 0 is 0."""
    A_log = A_log.to(tl.float32)
    rate = exp(tl.where(A_log > 89.0, 89.0, A_log))
    return tl.where(rate > 3.4028234663852886e38, 3.4028234663852886e38, rate)


@triton.jit
def log_decay(a, dt_bias, rate, lower_bound, SAFE: tl.constexpr):
    """g of the gate's raw input."""
    x = a.to(tl.float32) + dt_bias.to(tl.float32)
    if SAFE:
        return lower_bound * sigmoid(rate * x)
    else:
        return (0.0 - rate) * _softplus(x)


@triton.jit
def log_decays(a, dt_bias, rate, lower_bound, SAFE: tl.constexpr):
    """g of each chunk of the gate's raw inputs."""
    out = ()
    for c in tl.static_range(len(a)):
        out = out + (log_decay(a[c], dt_bias[c], rate, lower_bound, SAFE),)
    return out


@triton.jit
def decays(g):
    """exp of each chunk of g."""
    out = ()
    for c in tl.static_range(len(g)):
        out = out + (exp(g[c]),)
    return out


@triton.jit
def dot_rows(h, x):
    """Rows of h [V, K] times x [1, K] (or rows of its own) -> [V]."""
    p = h[0] * x[0]
    for c in tl.static_range(1, len(h)):
        x_c, h_c = tl.broadcast(x[c], h[c])
        p = tl.fma(h_c, x_c, p)
    return tl.sum(p, axis=1)


@triton.jit
def less(z, x, y):
    """z - x y of vectors, x [1]; rounded once."""
    x, _ = tl.broadcast(x, z)
    return tl.fma(0.0 - x, y, z)


@triton.jit
def fp32_rows(x):
    rows = ()
    for c in tl.static_range(len(x)):
        rows = rows + (x[c].to(tl.float32),)
    return rows


@triton.jit
def inverse_norm(rows):
    return tl.div_rn(1.0, tl.sqrt_rn(dot_rows(rows, rows) + 1e-6))


@triton.jit
def normalized(x, scale, L2NORM: tl.constexpr):
    """fp32 rows of x, each over sqrt(its sum of squares + 1e-6), times scale."""
    rows = fp32_rows(x)
    if L2NORM:
        inverse = inverse_norm(rows)[:, None]
    out = ()
    for c in tl.static_range(len(x)):
        if L2NORM:
            out = out + (rows[c] * inverse * scale,)
        else:
            out = out + (rows[c] * scale,)
    return out


@triton.jit
def add_outer(h, u, k):
    """h [V, K] + u [V] times k [1, K]."""
    out = ()
    for c in tl.static_range(len(h)):
        k_c, h_c = tl.broadcast(k[c], h[c])
        u_c, h_c = tl.broadcast(u[:, None], h[c])
        out = out + (tl.fma(u_c, k_c, h_c),)
    return out


@triton.jit
def advance(h, k, decay, v, beta):
    """One token: h [V, K] decays, then gains beta * (v - h k) along k.

    k: [1, K] as used; decay = exp(g): one chunk (GDN) or as many as k (KDA);
    v [V] fp32; beta [1].
    """
    faded = ()
    for c in tl.static_range(len(h)):
        faded = faded + (h[c] * decay[c % len(decay)],)
    return add_outer(faded, (v - dot_rows(faded, k)) * beta, k)
