"""Integer work on one step's batch, the same kernels on every GPU."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["D", "N"])
def accept(
    draft_tokens, target_tokens, cu_seqlens, verify_lens, accept_lens, bonus,
    D, N, draft_b, draft_t, target_b, target_t, cu_s, verify_s,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per request. ROWS: of draft_tokens each request has a row of D; else
    they are packed like target_tokens, by cu_seqlens."""
    i_b = tl.program_id(0).to(tl.int64)
    start = i_b
    length = tl.zeros([], tl.int64) + D
    if cu_seqlens is not None:
        start = tl.load(cu_seqlens + i_b * cu_s).to(tl.int64)
        start = tl.minimum(tl.maximum(start, 0), N)
        end = tl.load(cu_seqlens + (i_b + 1) * cu_s).to(tl.int64)
        length = tl.minimum(tl.minimum(end, N) - start, length)
    if verify_lens is not None:
        length = tl.minimum(length, tl.load(verify_lens + i_b * verify_s).to(tl.int64))
    p_draft = draft_tokens + (i_b if ROWS else start) * draft_b
    p_target = target_tokens + start * target_b
    n = tl.maximum(length, 0)
    for first in range(0, length, BLOCK):
        o_t = first + tl.arange(0, BLOCK).to(tl.int64)
        mask = (o_t > 0) & (o_t < length)
        b_draft = tl.load(p_draft + o_t * draft_t, mask=mask, other=0)
        b_target = tl.load(p_target + (o_t - 1) * target_t, mask=mask, other=0)
        differs = mask & (b_draft.to(tl.int64) != b_target.to(tl.int64))
        n = tl.minimum(n, tl.min(tl.where(differs, o_t, length), axis=0))
    last = tl.load(p_target + (n - 1) * target_t, mask=n > 0, other=-1)
    tl.store(accept_lens + i_b, n.to(tl.int32))
    tl.store(bonus + i_b, last)


@triton.jit(do_not_specialize=["B", "requests", "tracked"])
def commit_indices(
    accept_lens, seq_lens, req_indices, slot_map, live, state_indices, last_steps,
    track_indices, track_steps, track_slot_map, B, requests, tracked, track_interval,
    al_s, sl_s, ri_s, sm_s, si_s, ls_s, ti_s, ts_s, tm_s,
    TRACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per block of rows."""
    o_b = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = o_b < B
    alive = mask & (o_b < tl.load(live))
    request = tl.load(req_indices + o_b * ri_s, mask=alive, other=-1).to(tl.int64)
    alive = alive & (request >= 0) & (request < requests)
    slot = tl.load(slot_map + request * sm_s, mask=alive, other=-1).to(tl.int64)
    alive = alive & (slot >= 0)
    n = tl.load(accept_lens + o_b * al_s, mask=alive, other=0).to(tl.int64)
    n = tl.maximum(n, 0)
    track = tl.full([BLOCK], -1, tl.int64)
    step = tl.full([BLOCK], -1, tl.int64)
    if TRACK:
        before = tl.load(seq_lens + o_b * sl_s, mask=alive, other=-1).to(tl.int64)
        boundary = (before + n) // track_interval * track_interval
        crossed = alive & (before >= 0) & (boundary > before) & (request < tracked)
        track = tl.load(track_slot_map + request * tm_s, mask=crossed, other=-1)
        track = tl.maximum(track.to(tl.int64), -1)
        step = tl.where(track >= 0, boundary - before - 1, -1)
    tl.store(state_indices + o_b * si_s, tl.where(alive, slot, -1), mask=mask)
    tl.store(last_steps + o_b * ls_s, n - 1, mask=mask)
    tl.store(track_indices + o_b * ti_s, track, mask=mask)
    tl.store(track_steps + o_b * ts_s, step, mask=mask)
