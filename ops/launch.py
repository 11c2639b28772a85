"""From tensors to kernel arguments, the same for both GPU lowerings.

A lowering is a module with the kernels ``recur`` (verify and decode), ``fold`` and
``gate``, and the tables ``recur_tile`` and ``fold_tile``.
"""

from types import ModuleType

from torch import Tensor

# Contraction off: a fused multiply-add happens where the kernels say fma, nowhere
# else, whatever triton's default (it changes between releases).
_PINNED = {"enable_fp_fusion": False}

# Tokens staged together; more costs shared memory and gains nothing.
_MAX_BLOCK = 8


def _block(tokens: int) -> int:
    return min(_MAX_BLOCK, 1 << max(tokens - 1, 0).bit_length())


def _programs(V: int, BV: int, HV: int) -> int:
    return -(-V // BV) * HV


def gate(
    lowering: ModuleType, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    g: Tensor, beta: Tensor, lower_bound: float | None,
) -> None:  # fmt: skip
    kda = a.dim() == 3
    elements = a.numel()
    if elements == 0:
        return
    block = 256
    lowering.gate[(-(-elements // block),)](
        a, b, A_log, dt_bias, g, beta,
        0.0 if lower_bound is None else lower_bound, elements,
        a.stride(0), a.stride(1), b.stride(0), b.stride(1), A_log.stride(0),
        dt_bias.stride(0), dt_bias.stride(1) if kda else 0,
        HV=a.shape[1], K=a.shape[2] if kda else 1, KDA=kda,
        SAFE=lower_bound is not None, BLOCK=block, num_warps=4, **_PINNED,
    )  # fmt: skip


def verify(
    lowering: ModuleType, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    A_log: Tensor, dt_bias: Tensor, state: Tensor, out: Tensor, k_window: Tensor,
    v_window: Tensor, g_window: Tensor, beta_window: Tensor, state_indices: Tensor,
    window_indices: Tensor, cu_seqlens: Tensor | None, scale: float | None,
    lower_bound: float | None, use_qk_l2norm: bool,
) -> None:  # fmt: skip
    _recur(
        lowering, q, k, v, a, b, A_log, dt_bias, state, out, state_indices,
        (k_window, v_window, g_window, beta_window), window_indices, cu_seqlens,
        scale, lower_bound, use_qk_l2norm,
    )  # fmt: skip


def decode(
    lowering: ModuleType, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    A_log: Tensor, dt_bias: Tensor, state: Tensor, out: Tensor, state_indices: Tensor,
    scale: float | None, lower_bound: float | None, use_qk_l2norm: bool,
) -> None:  # fmt: skip
    _recur(
        lowering, q, k, v, a, b, A_log, dt_bias, state, out, state_indices, None,
        state_indices, None, scale, lower_bound, use_qk_l2norm,
    )  # fmt: skip


def _recur(
    lowering, q, k, v, a, b, A_log, dt_bias, state, out, state_indices, windows,
    window_indices, cu_seqlens, scale, lower_bound, use_qk_l2norm,
):  # fmt: skip
    tokens, H, K = q.shape
    HV, V = v.shape[1:]
    batch = state_indices.shape[0]
    ragged = cu_seqlens is not None
    if tokens == 0 or (batch == 0 and not ragged):
        return
    kda = a.dim() == 3
    rows = 0 if ragged else tokens // batch
    BV, warps = lowering.recur_tile(K, V, batch)
    if windows is None:  # decode: arguments the kernel compiled for it never touches
        windows, strides, capacity, pool = (state,) * 4, (0,) * 4, 0, 0
    else:
        strides = tuple(window.stride(0) for window in windows)
        pool, _, capacity, _ = windows[0].shape
    lowering.recur[(_programs(V, BV, HV) * (batch + ragged),)](
        q, k, v, a, b, A_log, dt_bias, state, out, *windows,
        state_indices, window_indices, cu_seqlens if ragged else state_indices,
        K**-0.5 if scale is None else scale,
        0.0 if lower_bound is None else lower_bound,
        batch, tokens, rows, state.shape[0], pool, capacity,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        a.stride(0), a.stride(1), b.stride(0), b.stride(1), A_log.stride(0),
        dt_bias.stride(0), dt_bias.stride(1) if kda else 0,
        state.stride(0), *strides, state_indices.stride(0), window_indices.stride(0),
        cu_seqlens.stride(0) if ragged else 0,
        H=H, HV=HV, K=K, V=V, KDA=kda, SAFE=lower_bound is not None,
        L2NORM=use_qk_l2norm, RAGGED=ragged, COMMIT=windows[0] is state,
        BV=BV, TB=_MAX_BLOCK if ragged else _block(rows), NW=warps,
        num_warps=warps, **_PINNED,
    )  # fmt: skip


def fold(
    lowering: ModuleType, state: Tensor, k_window: Tensor, v_window: Tensor,
    g_window: Tensor, beta_window: Tensor, state_indices: Tensor, accept_lens: Tensor,
    window_indices: Tensor, track_indices: Tensor | None, track_steps: Tensor | None,
    use_qk_l2norm: bool,
) -> None:  # fmt: skip
    """Pools carry the layer axis here."""
    layers, slots, HV, V, K = state.shape
    _, rows, H, capacity, _ = k_window.shape
    batch = state_indices.shape[0]
    if batch == 0 or layers == 0 or capacity == 0:
        return
    track = track_indices is not None
    if not track:
        track_indices = track_steps = accept_lens
    BV, warps = lowering.fold_tile(K, V, batch)
    pools = (state, k_window, v_window, g_window, beta_window)
    lowering.fold[(_programs(V, BV, HV) * batch * layers,)](
        *pools, state_indices, accept_lens, window_indices, track_indices, track_steps,
        batch, slots, rows, capacity,
        *(pool.stride(dim) for pool in pools for dim in (0, 1)),
        state_indices.stride(0), accept_lens.stride(0), window_indices.stride(0),
        track_indices.stride(0), track_steps.stride(0),
        H=H, HV=HV, K=K, V=V, KDA=g_window.dim() == 5, L2NORM=use_qk_l2norm,
        TRACK=track, BV=BV, TB=_block(capacity), NW=warps, num_warps=warps, **_PINNED,
    )  # fmt: skip
