"""accept, commit_indices and conv_commit as loops: the specification and the CPU kernels."""

import itertools

import torch
from torch import Tensor


def accept(draft_tokens, target_tokens, cu_seqlens=None, *, verify_lens=None):
    if cu_seqlens is None:
        rows = list(zip(draft_tokens.tolist(), target_tokens.tolist(), strict=True))
    else:
        draft, target = draft_tokens.tolist(), target_tokens.tolist()
        spans = list(itertools.pairwise(cu_seqlens.clamp(0, len(target)).tolist()))
        if draft_tokens.dim() == 1:
            draft = [draft[i:j] for i, j in spans]
        rows = [
            (row[: max(j - i, 0)], target[i:j])
            for row, (i, j) in zip(draft, spans, strict=True)
        ]
    caps = [len(draft) for draft, _ in rows]
    if verify_lens is not None:
        caps = [min(pair) for pair in zip(caps, verify_lens.tolist(), strict=True)]
    accept_lens, bonus = [], []
    for (draft, target), cap in zip(rows, caps, strict=True):
        n = 0
        while n < cap and (n == 0 or draft[n] == target[n - 1]):
            n += 1
        accept_lens.append(n)
        bonus.append(target[n - 1] if n else -1)
    return (
        torch.tensor(accept_lens, dtype=torch.int32),
        torch.tensor(bonus, dtype=target_tokens.dtype),
    )


def commit_indices(
    accept_lens, seq_lens, req_indices, slot_map, live, state_indices, last_steps,
    track_indices, track_steps, *, track_slot_map=None, track_interval=0,
):  # fmt: skip
    slots = slot_map.tolist()
    track_slots = [] if track_slot_map is None else track_slot_map.tolist()
    rows = zip(accept_lens.tolist(), seq_lens.tolist(), req_indices.tolist(), strict=True)
    for i, (n, before, request) in enumerate(rows):
        slot = last = track = step = -1
        if i < live.item() and 0 <= request < len(slots) and slots[request] >= 0:
            slot, n = slots[request], max(n, 0)
            last = n - 1
            if track_interval and 0 <= request < len(track_slots) and before >= 0:
                # The last multiple of the interval that is not past the new length.
                boundary = (before + n) // track_interval * track_interval
                if boundary > before and track_slots[request] >= 0:
                    track, step = track_slots[request], boundary - before - 1
        state_indices[i], last_steps[i] = slot, last
        track_indices[i], track_steps[i] = track, step


def conv_commit(
    conv_states, conv_windows, state_indices, accept_lens, *, window_indices=None,
    track_indices=None, track_steps=None, channels_last=False,
):  # fmt: skip
    slots = state_indices.tolist()
    rows = slots if window_indices is None else window_indices.tolist()
    track_slots = [-1] * len(slots) if track_indices is None else track_indices.tolist()
    steps = [-1] * len(slots) if track_steps is None else track_steps.tolist()
    for state, window in zip(conv_states, conv_windows, strict=True):
        taps = state.shape[2 if channels_last else 3]
        for slot, row, n, track, step in zip(
            slots, rows, accept_lens.tolist(), track_slots, steps, strict=True
        ):
            if not (0 <= slot < state.shape[1] and 0 <= row < window.shape[1]):
                continue
            after = _conv_states(window[:, row], taps, channels_last)
            n = min(n, len(after))
            if n > 0:
                state[:, slot] = after[n - 1]
            if 0 <= step < n and 0 <= track < state.shape[1]:
                state[:, track] = after[step]


def _conv_states(window: Tensor, taps: int, channels_last: bool) -> tuple[Tensor, ...]:
    """The conv states of all layers after each token of one window row."""
    if window.dim() == 4:
        return window.unbind(1)
    columns = 1 if channels_last else 2
    tokens = window.shape[columns] - taps + 1
    return tuple(window.narrow(columns, t, taps) for t in range(tokens))
