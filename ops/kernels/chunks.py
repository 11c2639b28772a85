"""Rows of K numbers as tuples of chunks of 32, for the Gluon kernels.

In registers, in shared memory, and between them and global memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# triton renamed both after 3.6.
_PUBLIC_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def as_tile(rows, shape: gl.constexpr):
    """Rows that are read one at a time, as one [rows, X] buffer."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if _PUBLIC_REINTERPRET:
        tile = rows.reinterpret(gl.float32, shape, layout)
    else:
        tile = rows._reinterpret(gl.float32, shape, layout)
    return tile


@gluon.jit
def put(rows, tile):
    """Store tile [TB, X] into rows that are read one at a time."""
    as_tile(rows, tile.shape).store(tile)


@gluon.jit
def put_chunks(rows, tiles):
    for c in gl.static_range(len(tiles)):
        put(rows[c], tiles[c])


@gluon.jit
def get_chunks(rows, t, layout: gl.constexpr):
    out = ()
    for c in gl.static_range(len(rows)):
        out = out + (rows[c].index(t).load(layout),)
    return out


@gluon.jit
def chunk_buffers(KC: gl.constexpr, TB: gl.constexpr, X: gl.constexpr):
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    out = ()
    for _ in gl.static_range(KC):
        out = out + (gl.allocate_shared_memory(gl.float32, [TB, 1, X], layout),)
    return out


@gluon.jit
def row_buffer(TB: gl.constexpr, X: gl.constexpr):
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.float32, [TB, X], layout)


@gluon.jit
def _chunk_mask(mask_row, o_k, c: gl.constexpr, K: gl.constexpr):
    """[rows, 32] mask of chunk c; the last chunk of an odd K is short."""
    mask = mask_row[:, None]
    if K % 32 != 0:
        mask = mask & (c * 32 + o_k < K)[None, :]
    return mask


@gluon.jit
def load_chunks(p_row, o_k, mask_row, K: gl.constexpr, STREAM: gl.constexpr = False):
    """Rows of K numbers at p_row as chunks of 32. STREAM: they leave the caches first."""
    POLICY: gl.constexpr = "evict_first" if STREAM else ""
    out = ()
    for c in gl.static_range((K + 31) // 32):
        p = p_row[:, None] + (c * 32 + o_k)[None, :]
        mask = _chunk_mask(mask_row, o_k, c, K)
        out = out + (gl.load(p, mask=mask, other=0.0, eviction_policy=POLICY),)
    return out


@gluon.jit
def store_chunks(p_row, o_k, mask_row, tiles, K: gl.constexpr):
    for c in gl.static_range(len(tiles)):
        p = p_row[:, None] + (c * 32 + o_k)[None, :]
        mask = _chunk_mask(mask_row, o_k, c, K)
        gl.store(p, tiles[c].to(p_row.dtype.element_ty), mask=mask)


@gluon.jit
def store_window(
    k_window, v_window, g_window, beta_window, row, n, t0, T, kw_s, vw_s, gw_s, bw_s,
    b_k, b_v, b_g, beta, o_t, o_pk, o_vt, o_pv, i_v, i_hv,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    KDA: gl.constexpr, BV: gl.constexpr,
):  # fmt: skip
    """A block of a request's tokens, from its t0 on and before n, into its window.

    Every program of a head writes its values, the first one the head's gates, and of
    the heads that share a key one the keys.
    """
    mask = t0 + o_t < n
    if i_v == 0:
        i_h = i_hv // (HV // H)
        if i_hv % (HV // H) == 0:
            p_k = k_window + row * kw_s + (i_h * T + t0 + o_t) * K
            store_chunks(p_k, o_pk, mask, b_k, K)
        o_gate = i_hv * T + t0 + o_t
        gl.store(beta_window + row * bw_s + o_gate, beta, mask=mask)
        if KDA:
            store_chunks(g_window + row * gw_s + o_gate * K, o_pk, mask, b_g, K)
        else:
            gl.store(g_window + row * gw_s + o_gate[:, None], b_g[0], mask=mask[:, None])
    mask_v = (t0 + o_vt < n)[:, None]
    if V % BV != 0:
        mask_v = mask_v & (o_pv < V)[None, :]
    p_v = v_window + row * vw_s + (i_hv * T + t0 + o_vt)[:, None] * V + o_pv[None, :]
    gl.store(p_v, b_v, mask=mask_v)


@gluon.jit
def load_state(p_row, o_k, mask_row, K: gl.constexpr, STREAM: gl.constexpr):
    raw = load_chunks(p_row, o_k, mask_row, K, STREAM)
    out = ()
    for c in gl.static_range(len(raw)):
        out = out + (raw[c].to(gl.float32),)
    return out


@gluon.constexpr_function
def state_layout(BV, NW):
    rows = max(BV // (4 * NW), 1)  # a thread's rows are neighbours: wide v and o
    return gl.BlockedLayout([rows, 4], [4, 8], [NW, 1], [1, 0])


@gluon.constexpr_function
def token_layout(NW):
    return gl.BlockedLayout([1, 4], [4, 8], [NW, 1], [1, 0])


@gluon.constexpr_function
def value_layout(BV, NW):
    lanes = min(max(BV // 4, 1), 32)
    return gl.BlockedLayout([1, 4], [32 // lanes, lanes], [NW, 1], [1, 0])


@gluon.jit
def zero_tokens(o, first, last, i_hv, o_v, mask_v, HV: gl.constexpr, V: gl.constexpr):
    zero = gl.zeros_like(o_v).to(o.dtype.element_ty)
    for t in range(first, last):
        gl.store(o + (t.to(gl.int64) * HV + i_hv) * V + o_v, zero, mask=mask_v)
