"""The recurrence as a torch token loop: the specification and the CPU kernel.

Each token of each request is computed on its own, on tensors whose shape and
layout do not depend on the batch, so that torch's vectorised loops treat a value
alike whatever stands beside it: bits do not depend on the batch, nor on whether
verify, fold or decode asks, nor on how many heads are here: a rank's are the model's.
"""

import itertools

import torch
from torch import Tensor

EPS = 1e-6
_MAX = torch.finfo(torch.float32).max


def _fp32(x: Tensor) -> Tensor:
    """A fresh contiguous fp32 copy: one layout, whatever the strides of x."""
    return x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def sigmoid(x: Tensor) -> Tensor:
    """Not torch's: that rounds what its vectors leave over otherwise than the rest."""
    return 1 / (1 + (-x).exp())


def gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None
) -> tuple[Tensor, Tensor]:
    """g and beta of one token: a [HV] or [HV, K], b [HV]."""
    x = _fp32(a) + _fp32(dt_bias)
    rate = _fp32(A_log).exp().clamp(max=_MAX)
    rate = rate if a.dim() == 1 else rate[:, None]
    if lower_bound is not None:
        g = lower_bound * sigmoid(rate * x)
    else:
        g = -rate * torch.where(x > 20, x, x.exp().log1p())
    return g, sigmoid(_fp32(b))


def l2norm(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension."""
    return x * (1 / torch.sqrt((x * x).sum(-1, keepdim=True) + EPS))


def step(S: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """One token: S [HV, V, K], k [HV, K] as used, v [HV, V], g [HV] or [HV, K]."""
    decay = g.exp()[:, None, None] if g.dim() == 1 else g.exp()[:, None, :]
    S = S * decay
    u = beta[:, None] * (v - (S * k[:, None, :]).sum(-1))
    return S + u[:, :, None] * k[:, None, :]


def _heads(x: Tensor, value_heads: int, normalize: bool) -> Tensor:
    """[H, K] of one token -> fp32 [HV, K]: each key head serves HV / H value heads."""
    x = _fp32(x)
    x = l2norm(x) if normalize else x
    return x.repeat_interleave(value_heads // x.shape[0], dim=0)


def _rows(tokens: int, batch: int, cu_seqlens: Tensor | None) -> list[range]:
    """The token range of each request, clamped to the packed batch."""
    if cu_seqlens is None:
        length = tokens // batch if batch else 0
        return [range(i * length, (i + 1) * length) for i in range(batch)]
    ends = [min(max(int(end), 0), tokens) for end in cu_seqlens]
    return [range(*pair) for pair in itertools.pairwise(ends)]


def gate(a, b, A_log, dt_bias, *, lower_bound=None):
    g = torch.empty(a.shape, dtype=torch.float32)
    beta = torch.empty(b.shape, dtype=torch.float32)
    for n in range(a.shape[0]):
        g[n], beta[n] = gates(a[n], b[n], A_log, dt_bias, lower_bound)
    return g, beta


def store(
    k, v, g, beta, k_window, v_window, g_window, beta_window, window_indices,
    cu_seqlens=None,
):  # fmt: skip
    rows, capacity = k_window.shape[0], k_window.shape[2]
    tokens = _rows(k.shape[0], window_indices.shape[0], cu_seqlens)
    pairs = (
        (k, k_window), (v, v_window), (g, g_window), (beta, beta_window)
    )  # fmt: skip
    for row, span in zip(window_indices.tolist(), tokens, strict=True):
        if not 0 <= row < rows:
            continue
        for t, n in enumerate(span[:capacity]):
            for value, window in pairs:
                window[row, :, t] = value[n]


def verify(
    q, k, v, a, b, A_log, dt_bias, state, k_window, v_window, g_window, beta_window,
    state_indices, cu_seqlens=None, window_indices=None, *, scale=None,
    lower_bound=None, use_qk_l2norm=True, exact=True,
):  # fmt: skip
    g, beta = gate(a, b, A_log, dt_bias, lower_bound=lower_bound)
    if window_indices is None:
        window_indices = state_indices
    # A padding row has no window row, whatever window_indices holds for it.
    slots = state_indices.tolist()
    live = (state_indices >= 0) & (state_indices < state.shape[0])
    window_rows = torch.where(live, window_indices.long(), -1)
    store(k, v, g, beta, k_window, v_window, g_window, beta_window, window_rows, cu_seqlens)
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    for slot, span in zip(slots, _rows(q.shape[0], len(slots), cu_seqlens), strict=True):
        if 0 <= slot < state.shape[0]:
            S = _fp32(state[slot])
            for n in span:
                S, out[n] = _token(S, q[n], k[n], v[n], g[n], beta[n], scale, use_qk_l2norm)
    return out


def decode(
    q, k, v, a, b, A_log, dt_bias, state, state_indices, *, scale=None,
    lower_bound=None, use_qk_l2norm=True,
):  # fmt: skip
    g, beta = gate(a, b, A_log, dt_bias, lower_bound=lower_bound)
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    for n, slot in enumerate(state_indices.tolist()):
        if 0 <= slot < state.shape[0]:
            S = _fp32(state[slot])
            S, out[n] = _token(S, q[n], k[n], v[n], g[n], beta[n], scale, use_qk_l2norm)
            state[slot] = S
    return out


def _token(S, q, k, v, g, beta, scale, normalize):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    S = step(S, _heads(k, S.shape[0], normalize), _fp32(v), g, beta)
    qn = _heads(q, S.shape[0], normalize) * scale
    return S, (S * qn[:, None, :]).sum(-1)


def fold(
    state, k_window, v_window, g_window, beta_window, state_indices, accept_lens, *,
    window_indices=None, track_indices=None, track_steps=None, use_qk_l2norm=True,
):  # fmt: skip
    if state.dim() == 5:
        for layer in zip(state, k_window, v_window, g_window, beta_window, strict=True):
            fold(
                *layer, state_indices, accept_lens, window_indices=window_indices,
                track_indices=track_indices, track_steps=track_steps,
                use_qk_l2norm=use_qk_l2norm,
            )  # fmt: skip
        return
    slots = state_indices.tolist()
    window_rows = slots if window_indices is None else window_indices.tolist()
    track_slots = [-1] * len(slots) if track_indices is None else track_indices.tolist()
    steps = [-1] * len(slots) if track_steps is None else track_steps.tolist()
    capacity = k_window.shape[2]
    for slot, row, accept, track, last in zip(
        slots, window_rows, accept_lens.tolist(), track_slots, steps, strict=True
    ):
        accept = min(accept, capacity)
        if not (0 <= slot < state.shape[0] and 0 <= row < k_window.shape[0] and accept > 0):
            continue
        S = _fp32(state[slot])
        for t in range(accept):
            k = _heads(k_window[row, :, t], S.shape[0], use_qk_l2norm)
            v = _fp32(v_window[row, :, t])
            S = step(S, k, v, _fp32(g_window[row, :, t]), _fp32(beta_window[row, :, t]))
            if t == last and 0 <= track < state.shape[0]:
                state[track] = S
        state[slot] = S


def scatter(
    state, intermediate, state_indices, step_indices, *, source_indices=None,
    track_indices=None, track_steps=None,
):  # fmt: skip
    slots, steps = state_indices.tolist(), step_indices.tolist()
    batch = len(slots)
    sources = range(batch) if source_indices is None else source_indices.tolist()
    track_slots = [-1] * batch if track_indices is None else track_indices.tolist()
    track_at = [-1] * batch if track_steps is None else track_steps.tolist()
    for slot, last, source, track, at in zip(
        slots, steps, sources, track_slots, track_at, strict=True
    ):
        if slot < 0 or not 0 <= source < intermediate.shape[1]:
            continue
        if not 0 <= last < intermediate.shape[2] or slot >= state.shape[1]:
            continue
        state[:, slot] = intermediate[:, source, last]
        if 0 <= at <= last and 0 <= track < state.shape[1]:
            state[:, track] = intermediate[:, source, at]
