"""Rows of K numbers as tuples of chunks of 32, or of 8, for the Gluon kernels.

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
def _lanes(tile, NL: gl.constexpr):
    """A chunk [BV, 32] as four [BV, 8]: a lane's four neighbours in four chunks."""
    even, odd = gl.split(gl.reshape(tile, [tile.shape[0], 16, 2]))
    x0, x2 = gl.split(gl.reshape(even, [tile.shape[0], 8, 2]))
    x1, x3 = gl.split(gl.reshape(odd, [tile.shape[0], 8, 2]))
    out = ()
    for x in gl.static_range(4):
        out = out + (gl.convert_layout((x0, x1, x2, x3)[x], NL, assert_trivial=True),)
    return out


@gluon.jit
def get_lanes(rows, t, BV: gl.constexpr, L: gl.constexpr, NL: gl.constexpr):
    """Row t, in chunks as the state's and for each of its BV rows; one number as it is."""
    out = ()
    for c in gl.static_range(len(rows)):
        if rows[c].shape[2] == 1:
            out = out + (rows[c].index(t).load(NL),)
        else:
            like = gl.full([BV, 32], 0.0, gl.float32, layout=L)
            row, like = gl.broadcast(rows[c].index(t).load(L), like)
            out = out + _lanes(row, NL)
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
def load_state(
    p_row, o_k, mask_row, NL: gl.constexpr, K: gl.constexpr, STREAM: gl.constexpr
):
    """Rows of the state, fp32, in chunks of 8."""
    raw = load_chunks(p_row, o_k, mask_row, K, STREAM)
    out = ()
    for c in gl.static_range(len(raw)):
        out = out + _lanes(raw[c].to(gl.float32), NL)
    return out


@gluon.jit
def store_state(p_row, o_k, mask_row, h, L: gl.constexpr, K: gl.constexpr):
    """The inverse."""
    tiles = ()
    for c in gl.static_range(len(h) // 4):
        even = gl.join(h[4 * c], h[4 * c + 2])
        odd = gl.join(h[4 * c + 1], h[4 * c + 3])
        tile = gl.reshape(gl.join(even, odd), [h[0].shape[0], 32])
        tiles = tiles + (gl.convert_layout(tile, L, assert_trivial=True),)
    store_chunks(p_row, o_k, mask_row, tiles, K)


@gluon.constexpr_function
def state_layout(BV, NW):
    rows = max(BV // (4 * NW), 1)  # a thread's rows are neighbours: wide v and o
    return gl.BlockedLayout([rows, 4], [4, 8], [NW, 1], [1, 0])


@gluon.constexpr_function
def lane_layout(BV, NW):
    """The same rows, each number on a lane of its own."""
    rows = max(BV // (4 * NW), 1)
    return gl.BlockedLayout([rows, 1], [4, 8], [NW, 1], [1, 0])


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
