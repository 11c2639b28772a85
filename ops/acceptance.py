"""accept and commit_indices: from the target's tokens to what a commit needs."""

import torch
from torch import Tensor

from . import checks, debug, reference
from .launch import Plan, ceil_div, stride
from .registration import register


def accept(
    draft_tokens: Tensor,
    target_tokens: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    verify_lens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """How many rows of each draft window the target agrees with, and its next token.

    Row 0, the anchor, is already decided; row t > 0 is accepted when all rows before
    it are and its token is the one the target chose after row t - 1.

    Args:
        draft_tokens: [B, D] int32 or int64, or packed [N] with ``cu_seqlens``; strides
            are free. Column 0 is the anchor.
        target_tokens: [B, D], packed [N] with ``cu_seqlens``, int32 or int64, not
            necessarily draft_tokens' dtype: the target's greedy token after each
            position. Strides are free.
        cu_seqlens: [B + 1] int32 or int64, token offsets of ragged requests, on the
            device. None: every request has D rows. Of draft_tokens [B, D] a request's
            first rows count, as many as it has tokens.
        verify_lens: [B] int32 or int64, the rows that may be accepted, the anchor
            included; 0 or less = a request that takes no part. None: all of them.

    Returns:
        accept_lens [B] int32: 1 + the length of the matching prefix, so the anchor is
        counted and the bonus token is not, capped at verify_lens; 0 for a request
        without rows. bonus [B] in target_tokens' dtype: the target's token after the
        last accepted row, the next step's anchor; -1 where accept_lens is 0.

    Raises:
        ValueError, TypeError: naming the argument, what was wanted and what came.
    """
    return _accept(draft_tokens, target_tokens, cu_seqlens, verify_lens=verify_lens)


def _check_accept(x):
    check = checks.Check("accept", x.draft_tokens, "draft_tokens")
    packed = x.cu_seqlens is not None
    dims, variant = ("N", " with cu_seqlens") if packed else ("B D", " without cu_seqlens")
    rows = packed and x.draft_tokens.dim() == 2
    check.tensor(
        "draft_tokens", x.draft_tokens, "B D" if rows else dims, checks.INDEX,
        variant=variant,
    )  # fmt: skip
    check.tensor("target_tokens", x.target_tokens, dims, checks.INDEX, variant=variant)
    if packed:
        check.index("cu_seqlens", x.cu_seqlens, "B+1")
        check.require(
            x.cu_seqlens.shape[0] >= 1, lambda: "cu_seqlens must be [B + 1], got [0]"
        )
        batch = x.cu_seqlens.shape[0] - 1
        if rows:
            check.require(
                batch == x.draft_tokens.shape[0],
                lambda: (
                    f"cu_seqlens must be [B + 1] with B = {x.draft_tokens.shape[0]} "
                    f"(draft_tokens), got [{batch + 1}]"
                ),
            )
        check.sizes["B"] = batch
        check.sources["B"] = "cu_seqlens"
    check.index("verify_lens", x.verify_lens, "B")
    return check


def _requests(x) -> int:
    """B."""
    # Not len(): that of a tensor makes torch.compile compile every batch size anew.
    return x.draft_tokens.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1


def _rules_accept(x, sizes):
    if x.cu_seqlens is not None:
        yield from debug.offsets(x.cu_seqlens, sizes["N"])


def _plan_accept(kernels, x):
    draft, target = x.draft_tokens, x.target_tokens
    # A packed row's stride is its token's; the tokens of a row follow each other.
    return Plan(
        kernels.accept,
        (_requests(x), 1, 1),
        (
            draft.shape[-1], target.shape[0], draft.stride(0), draft.stride(-1),
            target.stride(0), target.stride(-1), stride(x.cu_seqlens),
            stride(x.verify_lens),
        ),
        {"ROWS": draft.dim() == 2, "BLOCK": 32},
        1,
    )  # fmt: skip


_accept = register(
    "accept(Tensor draft_tokens, Tensor target_tokens, Tensor? cu_seqlens=None, *, "
    "Tensor? verify_lens=None) -> (Tensor accept_lens, Tensor bonus)",
    check=_check_accept,
    cpu=reference.accept,
    plan=_plan_accept,
    outputs=lambda x: (
        ((_requests(x),), torch.int32), ((_requests(x),), x.target_tokens.dtype)
    ),
    rules=_rules_accept,
)  # fmt: skip


def commit_indices(
    accept_lens: Tensor,
    seq_lens: Tensor,
    req_indices: Tensor,
    slot_map: Tensor,
    live: Tensor,
    state_indices: Tensor,
    last_steps: Tensor,
    track_indices: Tensor,
    track_steps: Tensor,
    *,
    track_slot_map: Tensor | None = None,
    track_interval: int = 0,
) -> None:
    """Which slots a commit writes and which step each of them gets, in one launch.

    The four index tensors are written whole: what ``fold`` and ``conv_commit`` take
    as state_indices, track_indices and track_steps, and ``scatter`` as step_indices.
    A row is padding, -1 in all four, at or past ``live``, where its request lies
    outside ``slot_map`` and where its slot is negative.

    A request is tracked when its accepted tokens cross a multiple of
    ``track_interval``; of several it crosses at once, the last counts. The step is
    the one after which the state holds exactly that many tokens.

    Args:
        accept_lens: [B] int32 or int64, as ``accept`` returns them; below 0 is 0.
        seq_lens: [B] int32 or int64, tokens already in the state before the step.
            A negative one is not tracked.
        req_indices: [B] int32 or int64, each row's request: its place in the maps.
        slot_map: [requests] int32 or int64, the slot of every request.
        live: [1] int32 or int64 on the device, the rows that are not padding: for engines
            that pad a captured batch with the rows of a real request, as SGLang does with
            request 0. Any large number where padding's requests are out of the map.
        state_indices: [B] int32 or int64, written: the slot of each row.
        last_steps: [B] int32 or int64, written: accept_lens - 1, which ``scatter`` and
            SGLang's commits take.
        track_indices: [B] int32 or int64, written: the slot of the snapshot; -1 = none.
        track_steps: [B] int32 or int64, written: the step whose state it is, in
            [0, accept_lens); -1 = none.
        track_slot_map: [requests] int32 or int64, the slot for a request's next
            snapshot, negative = none; a request outside it is not tracked. None: no
            request is.
        track_interval: tokens between two snapshots; 0 = none.

    Raises:
        ValueError, TypeError: naming the argument, what was wanted and what came;
            nothing is written.
    """
    _commit_indices(
        accept_lens, seq_lens, req_indices, slot_map, live, state_indices, last_steps,
        track_indices, track_steps, track_slot_map=track_slot_map,
        track_interval=track_interval,
    )  # fmt: skip


def _check_commit_indices(x):
    check = checks.Check("commit_indices", x.accept_lens, "accept_lens")
    check.index("accept_lens", x.accept_lens, "B")
    check.index("seq_lens", x.seq_lens, "B")
    check.index("req_indices", x.req_indices, "B")
    check.index("slot_map", x.slot_map, "requests")
    check.index("live", x.live, "1")
    check.require(
        x.live.shape[0] == 1, lambda: f"live must be [1], got {list(x.live.shape)}"
    )
    for name in _WRITTEN:
        check.tensor(name, getattr(x, name), "B", checks.INDEX, written=True)
    del check.sizes["requests"]  # the two maps may differ in length
    check.index("track_slot_map", x.track_slot_map, "requests")
    if x.track_interval < 0:
        check.fail(f"track_interval must be 0 or more tokens, got {x.track_interval}")
    return check


_WRITTEN = ("state_indices", "last_steps", "track_indices", "track_steps")


def _rules_commit_indices(x, sizes):
    requests, count = x.req_indices.long(), len(x.slot_map)
    place = torch.arange(len(requests), device=requests.device)
    requests = requests.masked_fill(place >= x.live, -1)
    text = f"is outside the slot_map of {count} requests"
    yield debug.Rule("req_indices", requests, requests < count, text)
    text = "is an earlier request of the batch too"
    yield debug.Rule("req_indices", requests, ~debug.repeated(requests), text)
    lens = x.accept_lens.long()
    yield debug.Rule("accept_lens", lens, (requests < 0) | (lens >= 0), "is below 0")


def _plan_commit_indices(kernels, x):
    batch, block = x.accept_lens.shape[0], 128
    tracked = 0 if x.track_slot_map is None else x.track_slot_map.shape[0]
    given = x.accept_lens, x.seq_lens, x.req_indices, x.slot_map
    return Plan(
        kernels.commit_indices,
        (ceil_div(batch, block), 1, 1),
        (
            batch, x.slot_map.shape[0], tracked, x.track_interval, *map(stride, given),
            *(stride(getattr(x, name)) for name in _WRITTEN), stride(x.track_slot_map),
        ),
        {
            "TRACK": x.track_slot_map is not None and x.track_interval > 0,
            "BLOCK": block,
        },
        4,
    )  # fmt: skip


_commit_indices = register(
    "commit_indices(Tensor accept_lens, Tensor seq_lens, Tensor req_indices, "
    "Tensor slot_map, Tensor live, Tensor(a!) state_indices, Tensor(b!) last_steps, "
    "Tensor(c!) track_indices, Tensor(d!) track_steps, *, "
    "Tensor? track_slot_map=None, int track_interval=0) -> ()",
    check=_check_commit_indices,
    cpu=reference.commit_indices,
    plan=_plan_commit_indices,
    rules=_rules_commit_indices,
)
