"""The specification, as torch loops that read like the mathematics; also the CPU kernels.

In the order of a step: gate, the recurrence's one step, store, verify, decode; accept,
commit_indices, fold, conv_commit, scatter. Each op takes its arguments as x, named as in
its schema.

Every token of every request is computed by itself, on tensors whose shape and layout do
not depend on the batch. torch's vectorised loops then treat a number the same, whatever
stands beside it. So bits depend neither on the batch, nor on which of verify, fold and
decode asks, nor on how many heads there are: one rank's are the whole model's.
"""

import itertools

import torch
from torch import Tensor

from .window_rule import Windows, rows_of, rows_read

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


def gate(x) -> tuple[Tensor, Tensor]:
    g = torch.empty(x.a.shape, dtype=torch.float32)
    beta = torch.empty(x.b.shape, dtype=torch.float32)
    for n in range(len(x.a)):
        g[n], beta[n] = gates(x.a[n], x.b[n], x.A_log, x.dt_bias, x.lower_bound)
    return g, beta


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


def _token(S: Tensor, x, n: int, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The state after token n of verify's or decode's x, and its output [HV, V]."""
    scale = x.q.shape[-1] ** -0.5 if x.scale is None else x.scale
    k, q = (_heads(y[n], len(S), x.use_qk_l2norm) for y in (x.k, x.q))
    S = step(S, k, _fp32(x.v[n]), g[n], beta[n])
    return S, (S * (q * scale)[:, None, :]).sum(-1)


def spans(tokens: int, batch: int, cu_seqlens: Tensor | None) -> list[range]:
    """The token range of each request, clamped to the packed batch."""
    if cu_seqlens is None:
        length = tokens // batch if batch else 0
        return [range(i * length, (i + 1) * length) for i in range(batch)]
    ends = [min(max(int(end), 0), tokens) for end in cu_seqlens]
    return [range(*pair) for pair in itertools.pairwise(ends)]


def _store(x, g: Tensor, beta: Tensor, rows: list[int]) -> None:
    """The tokens of each request into its window row, -1 = none."""
    windows = Windows.of(x)
    pairs = list(zip((x.k, x.v, g, beta), windows, strict=True))
    tokens = spans(len(x.k), len(rows), x.cu_seqlens)
    for row, span in zip(rows, tokens, strict=True):
        for t, n in enumerate(span[: windows.capacity] if row >= 0 else ()):
            for value, window in pairs:
                window[row, :, t] = value[n]


def store(x) -> None:
    rows, R = x.window_indices.tolist(), Windows.of(x).rows
    _store(x, x.g, x.beta, [row if row < R else -1 for row in rows])


def verify(x) -> Tensor:
    g, beta = gate(x)
    S = len(x.state)
    rows = rows_of(x.state_indices, x.window_indices, S, Windows.of(x).rows)
    _store(x, g, beta, rows.tolist())
    out = torch.zeros_like(x.v, memory_format=torch.contiguous_format)
    slots = x.state_indices.tolist()
    for slot, span in zip(slots, spans(len(x.q), len(slots), x.cu_seqlens), strict=True):
        if 0 <= slot < S:
            h = _fp32(x.state[slot])
            for n in span:
                h, out[n] = _token(h, x, n, g, beta)
    return out


def decode(x) -> Tensor:
    g, beta = gate(x)
    out = torch.zeros_like(x.v, memory_format=torch.contiguous_format)
    for n, slot in enumerate(x.state_indices.tolist()):
        if 0 <= slot < len(x.state):
            x.state[slot], out[n] = _token(_fp32(x.state[slot]), x, n, g, beta)
    return out


def accept(x) -> tuple[Tensor, Tensor]:
    draft, target = x.draft_tokens.tolist(), x.target_tokens.tolist()
    if x.cu_seqlens is None:
        rows = list(zip(draft, target, strict=True))
    else:
        packed = spans(len(target), len(x.cu_seqlens) - 1, x.cu_seqlens)
        if x.draft_tokens.dim() == 1:
            draft = [draft[span.start : span.stop] for span in packed]
        rows = [
            (row[: len(span)], target[span.start : span.stop])
            for row, span in zip(draft, packed, strict=True)
        ]
    caps = [len(draft) for draft, _ in rows]
    if x.verify_lens is not None:
        caps = [min(pair) for pair in zip(caps, x.verify_lens.tolist(), strict=True)]
    accept_lens, bonus = [], []
    for (draft, target), cap in zip(rows, caps, strict=True):
        n = 0
        while n < cap and (n == 0 or draft[n] == target[n - 1]):
            n += 1
        accept_lens.append(n)
        bonus.append(target[n - 1] if n else -1)
    return (
        torch.tensor(accept_lens, dtype=torch.int32),
        torch.tensor(bonus, dtype=x.target_tokens.dtype),
    )


def commit_indices(x) -> None:
    slots = x.slot_map.tolist()
    track_slots = [] if x.track_slot_map is None else x.track_slot_map.tolist()
    columns = x.accept_lens.tolist(), x.seq_lens.tolist(), x.req_indices.tolist()
    for i, (n, before, request) in enumerate(zip(*columns, strict=True)):
        slot = last = track = at = -1
        if i < x.live.item() and 0 <= request < len(slots) and slots[request] >= 0:
            slot, n = slots[request], max(n, 0)
            last = n - 1
            if x.track_interval and 0 <= request < len(track_slots) and before >= 0:
                # The last multiple of the interval that is not past the new length.
                boundary = (before + n) // x.track_interval * x.track_interval
                if boundary > before and track_slots[request] >= 0:
                    track, at = track_slots[request], boundary - before - 1
        x.state_indices[i], x.last_steps[i] = slot, last
        x.track_indices[i], x.track_steps[i] = track, at


def _tracks(x) -> list[tuple[int, int]]:
    """The slot and the step of each request's snapshot, -1 = none."""
    if x.track_indices is None:
        return [(-1, -1)] * len(x.state_indices)
    return list(zip(x.track_indices.tolist(), x.track_steps.tolist(), strict=True))


_POOLS = ("state", "k_window", "v_window", "g_window", "beta_window")


def fold(x) -> None:
    if x.state.dim() == 5:
        for layer in zip(x.state, *Windows.of(x), strict=True):
            fold(x._replace(**dict(zip(_POOLS, layer, strict=True))))
        return
    S, windows = len(x.state), Windows.of(x)
    rows = rows_of(x.state_indices, x.window_indices, S, windows.rows).tolist()
    slots, lens = x.state_indices.tolist(), x.accept_lens.tolist()
    for slot, row, n, (track, at) in zip(slots, rows, lens, _tracks(x), strict=True):
        n = rows_read(n, windows.capacity)
        if row < 0 or n == 0:
            continue
        h = _fp32(x.state[slot])
        for t in range(n):
            k = _heads(windows.k[row, :, t], len(h), x.use_qk_l2norm)
            v, g, beta = (_fp32(window[row, :, t]) for window in windows[1:])
            h = step(h, k, v, g, beta)
            if t == at and 0 <= track < S:
                x.state[track] = h
        x.state[slot] = h


def conv_commit(x) -> None:
    S, R = x.conv_states[0].shape[1], x.conv_windows[0].shape[1]
    rows = rows_of(x.state_indices, x.window_indices, S, R).tolist()
    slots, lens = x.state_indices.tolist(), x.accept_lens.tolist()
    for state, window in zip(x.conv_states, x.conv_windows, strict=True):
        taps = state.shape[2 if x.channels_last else 3]
        for slot, row, n, (track, at) in zip(slots, rows, lens, _tracks(x), strict=True):
            if row < 0:
                continue
            after = _conv_states(window[:, row], taps, x.channels_last)
            n = rows_read(n, len(after))
            if n > 0:
                state[:, slot] = after[n - 1]
            if 0 <= at < n and 0 <= track < S:
                state[:, track] = after[at]


def _conv_states(window: Tensor, taps: int, channels_last: bool) -> tuple[Tensor, ...]:
    """The conv states of all layers after each token of one window row."""
    if window.dim() == 4:
        return window.unbind(1)
    columns = 1 if channels_last else 2
    tokens = window.shape[columns] - taps + 1
    return tuple(window.narrow(columns, t, taps) for t in range(tokens))


def sources(x) -> Tensor:
    """[B]: each request's row of scatter's snapshots, by default its place in the batch."""
    if x.source_indices is not None:
        return x.source_indices
    return torch.arange(len(x.state_indices), device=x.state_indices.device)


def scatter(x) -> None:
    S, (R, D) = x.state.shape[1], x.intermediate.shape[1:3]
    rows = rows_of(x.state_indices, sources(x), S, R).tolist()
    slots, steps = x.state_indices.tolist(), x.step_indices.tolist()
    for slot, row, last, (track, at) in zip(slots, rows, steps, _tracks(x), strict=True):
        if row < 0 or not 0 <= last < D:
            continue
        x.state[:, slot] = x.intermediate[:, row, last]
        if 0 <= at <= last and 0 <= track < S:
            x.state[:, track] = x.intermediate[:, row, at]
