"""Calls whose mistake only the device's values show, and calls that only look wrong."""

from typing import NamedTuple


class Case(NamedTuple):
    """A call with a mistake, its error, and the right call that it is clamped to when
    nobody checks; None where the ops promise nothing."""

    label: str
    change: dict[str, list[int]]
    error: str
    means: dict[str, list[int]] | None = None


FOLD, VERIFY, RAGGED = "fold-kda-layers-track", "verify-gdn", "verify-ragged"
CONV, SLIDING = "conv_commit-dense-track", "conv_commit-sliding-last-track"
SLOTS = {"state_indices": [0, 1, 2], "window_indices": [0, 1, 2]}
TRACKS = {**SLOTS, "accept_lens": [3, 1, 2], "track_steps": [1, 0, -1]}

CASES = {
    "a slot past the pool": Case(
        FOLD, {"state_indices": [5, 17, 2], "track_steps": [-1, -1, -1]},
        "replayssm.fold: state_indices[1] = 17 is outside the state pool of 8 slots",
        {"state_indices": [5, -1, 2], "track_steps": [-1, -1, -1]},
    ),
    "a slot twice": Case(
        FOLD, {"state_indices": [5, -1, 5], "track_steps": [-1, -1, -1]},
        "replayssm.fold: state_indices[2] = 5 is the slot of an earlier request of the "
        "batch too",
    ),
    "a window row past the pool": Case(
        FOLD, {**TRACKS, "window_indices": [0, 1, 5], "track_indices": [3, 4, 5]},
        "replayssm.fold: window_indices[2] = 5 is outside the window pool of 5 rows",
        {**TRACKS, "window_indices": [0, 1, -1], "track_indices": [3, 4, 5]},
    ),
    "more accepted than the window has": Case(
        FOLD, {**TRACKS, "accept_lens": [3, 7, 2], "track_indices": [3, 4, 5]},
        "replayssm.fold: accept_lens[1] = 7 is not 0 to 6, as the window has it",
        {**TRACKS, "accept_lens": [3, 6, 2], "track_indices": [3, 4, 5]},
    ),
    "less accepted than nothing": Case(
        FOLD, {**TRACKS, "accept_lens": [3, -1, 2], "track_indices": [3, 4, 5]},
        "replayssm.fold: accept_lens[1] = -1 is not 0 to 6, as the window has it",
        {**TRACKS, "accept_lens": [3, 0, 2], "track_indices": [3, 4, 5]},
    ),
    "a snapshot past the pool": Case(
        FOLD, {**TRACKS, "track_indices": [3, 8, 4]},
        "replayssm.fold: track_indices[1] = 8 is outside the state pool of 8 slots",
        {**TRACKS, "track_indices": [3, -1, 4]},
    ),
    "a snapshot over a live slot": Case(
        FOLD, {**TRACKS, "track_indices": [2, 4, 5]},
        "replayssm.fold: track_indices[0] = 2 is the slot of a live request of the batch",
    ),
    "two snapshots in a slot": Case(
        FOLD, {**TRACKS, "track_indices": [3, 3, 4]},
        "replayssm.fold: track_indices[1] = 3 gets the snapshot of an earlier request of "
        "the batch too",
    ),
    "verify's slot past the pool": Case(
        VERIFY, {"state_indices": [6, 0, 1]},
        "replayssm.verify: state_indices[0] = 6 is outside the state pool of 6 slots",
        {"state_indices": [-1, 0, 1]},
    ),
    "verify's slot twice": Case(
        VERIFY, {"state_indices": [2, 2, 1]},
        "replayssm.verify: state_indices[1] = 2 is the slot of an earlier request of the "
        "batch too",
    ),
    "verify's window row past the pool": Case(
        RAGGED, {**SLOTS, "window_indices": [4, 9, 0]},
        "replayssm.verify: window_indices[1] = 9 is outside the window pool of 5 rows",
        {**SLOTS, "window_indices": [4, -1, 0]},
    ),
    "verify's window row twice": Case(
        RAGGED, {**SLOTS, "window_indices": [4, 2, 4]},
        "replayssm.verify: window_indices[2] = 4 is the window row of an earlier request "
        "of the batch too",
    ),
    "offsets that fall": Case(
        RAGGED, {**SLOTS, "cu_seqlens": [0, 4, 3, 7]},
        "replayssm.verify: cu_seqlens[2] = 3 is below 0, below the offset before it or "
        "past the packed tokens",
    ),
    "an offset below 0": Case(
        RAGGED, {**SLOTS, "cu_seqlens": [-1, 3, 3, 7]},
        "replayssm.verify: cu_seqlens[0] = -1 is below 0, below the offset before it or "
        "past the packed tokens",
        {**SLOTS, "cu_seqlens": [0, 3, 3, 7]},
    ),
    "an offset past the tokens": Case(
        RAGGED, {**SLOTS, "cu_seqlens": [0, 3, 5, 10]},
        "replayssm.verify: cu_seqlens[3] = 10 is below 0, below the offset before it or "
        "past the packed tokens",
        {**SLOTS, "cu_seqlens": [0, 3, 5, 9]},
    ),
    "more rows than a window has": Case(
        RAGGED, {**SLOTS, "cu_seqlens": [0, 7, 7, 9]},
        "replayssm.verify: cu_seqlens[1] = 7 gives the request that ends there more than "
        "T = 6 rows",
    ),
    "decode's slot past the pool": Case(
        "decode-kda", {"state_indices": [3, 2**31 - 1, 1]},
        "replayssm.decode: state_indices[1] = 2147483647 is outside the state pool of 6 "
        "slots",
        {"state_indices": [3, -1, 1]},
    ),
    "decode's slot twice": Case(
        "decode-gdn", {"state_indices": [0, 1, 0]},
        "replayssm.decode: state_indices[2] = 0 is the slot of an earlier request of the "
        "batch too",
    ),
    "a slot past the pool in a large batch": Case(
        "decode-many", {"state_indices": [*range(37), 43, 38, 39]},
        "replayssm.decode: state_indices[37] = 43 is outside the state pool of 43 slots",
        {"state_indices": [*range(37), -1, 38, 39]},
    ),
    "store's window row past the pool": Case(
        "store-gdn", {"window_indices": [3, 6, 1]},
        "replayssm.store: window_indices[1] = 6 is outside the window pool of 6 rows",
        {"window_indices": [3, -1, 1]},
    ),
    "store's window row twice": Case(
        "store-ragged", {"window_indices": [3, 3, 1]},
        "replayssm.store: window_indices[1] = 3 is the window row of an earlier request "
        "of the batch too",
    ),
    "scatter's step past the window": Case(
        "scatter-conv-track", {"step_indices": [3, 0, 0], "track_steps": [-1, -1, -1]},
        "replayssm.scatter: step_indices[0] = 3 is not -1 to 2, as the window has it",
        {"step_indices": [-1, 0, 0], "track_steps": [-1, -1, -1]},
    ),
    "scatter's source past the snapshots": Case(
        "scatter-conv-track", {"source_indices": [3, 4, 1]},
        "replayssm.scatter: source_indices[1] = 4 is outside the snapshots of 4 rows",
        {"source_indices": [3, -1, 1]},
    ),
    "scatter's snapshot over a live slot": Case(
        "scatter-conv-track", {"track_indices": [0, -1, 2]},
        "replayssm.scatter: track_indices[0] = 0 is the slot of a live request of the batch",
    ),
    "conv_commit's slot past the pool": Case(
        CONV, {"state_indices": [3, 5, -1]},
        "replayssm.conv_commit: state_indices[1] = 5 is outside the state pool of 5 slots",
        {"state_indices": [3, -1, -1]},
    ),
    "more accepted than a dense conv window has": Case(
        CONV, {"accept_lens": [3, 4, 2]},
        "replayssm.conv_commit: accept_lens[1] = 4 is not 0 to 3, as the window has it",
        {"accept_lens": [3, 3, 2]},
    ),
    "more accepted than a sliding conv window has": Case(
        SLIDING, {"accept_lens": [3, 4, 2]},
        "replayssm.conv_commit: accept_lens[1] = 4 is not 0 to 3, as the window has it",
        {"accept_lens": [3, 3, 2]},
    ),
    "accept's offsets that fall": Case(
        "accept-ragged", {"cu_seqlens": [0, 4, 8, 7, 12]},
        "replayssm.accept: cu_seqlens[3] = 7 is below 0, below the offset before it or "
        "past the packed tokens",
    ),
    "a request past the slot map": Case(
        "commit_indices-track", {"req_indices": [2, 0, 4, 3, 0]},
        "replayssm.commit_indices: req_indices[2] = 4 is outside the slot_map of 4 requests",
        {"req_indices": [2, 0, -1, 3, 0]},
    ),
    "a request twice": Case(
        "commit_indices-track", {"req_indices": [2, 0, 1, 0, 0]},
        "replayssm.commit_indices: req_indices[3] = 0 is an earlier request of the batch "
        "too",
    ),
    "a request that accepts less than nothing": Case(
        "commit_indices-track", {"accept_lens": [4, -2, 0, 3, 7]},
        "replayssm.commit_indices: accept_lens[1] = -2 is below 0",
        {"accept_lens": [4, 0, 0, 3, 7]},
    ),
}  # fmt: skip

# Rows that take no part may hold anything.
HARMLESS = {
    "padding, whatever stands beside it": (
        FOLD,
        {
            "state_indices": [0, -1, -1], "window_indices": [1, 99, 1],
            "accept_lens": [4, 99, -9], "track_indices": [3, 0, 99],
            "track_steps": [1, 0, 0],
        },
    ),
    "snapshots of no step": (
        FOLD,
        {**TRACKS, "track_indices": [0, 99, 1], "track_steps": [-1, 1, 3]},
    ),
    "padding that shares a window row": (
        RAGGED, {"state_indices": [0, -1, -1], "window_indices": [1, 1, 99]},
    ),
    "live requests without a window row": (
        RAGGED, {"state_indices": [0, 1, 2], "window_indices": [-1, 1, -1]},
    ),
    "tokens of no request before and behind": (RAGGED, {**SLOTS, "cu_seqlens": [2, 5, 5, 8]}),
    "more padding than windows": (
        "scatter-state", {"state_indices": [0, -1, -1], "step_indices": [0, 9, 9]},
    ),
    "requests past the live ones": (
        "commit_indices", {"req_indices": [2, 0, 1, 3, 99]},
    ),
}  # fmt: skip

# What is clamped or skipped all at once: the first values that are too large, and negative
# ones, padding among them; mostly beside a live request.
OUTSIDE = {
    "verify": ("verify-gdn", {"state_indices": [6, -1, 1]}),
    "verify-past": (
        RAGGED,
        {
            "state_indices": [6, 1, 2], "window_indices": [0, 1, 5],
            "cu_seqlens": [0, 3, 5, 10],
        },
    ),
    "verify-below": (
        RAGGED,
        {
            "state_indices": [-9, 1, 2], "window_indices": [5, -1, 0],
            "cu_seqlens": [-1, 3, 5, 9],
        },
    ),
    "decode": ("decode-kda", {"state_indices": [6, -9, 1]}),
    "store-past": ("store-gdn", {"window_indices": [6, -9, 1]}),
    "store-below": (
        "store-ragged", {"window_indices": [5, -1, 0], "cu_seqlens": [-1, 3, 5, 10]},
    ),
    "fold-past": (
        FOLD,
        {
            "state_indices": [8, 1, 2], "window_indices": [0, 5, 1],
            "accept_lens": [4, 4, 7], "track_indices": [3, 4, 8], "track_steps": [1, 1, 1],
        },
    ),
    "fold-below": (
        FOLD,
        {
            "state_indices": [-1, 1, 2], "window_indices": [5, -1, 0],
            "accept_lens": [7, 4, 4], "track_indices": [3, 4, -9], "track_steps": [7, 1, 0],
        },
    ),
    "fold-nothing": (
        FOLD,
        {
            "state_indices": [0, 1, 2], "window_indices": [0, 1, 2],
            "accept_lens": [0, -1, 4], "track_indices": [3, 4, 5], "track_steps": [0, 0, -9],
        },
    ),
    "fold-tracks": (FOLD, {"track_indices": [8, -9, 3], "track_steps": [1, 0, 1]}),
    "scatter-tracks": (
        "scatter-conv-track", {"step_indices": [2, 1, 0], "track_steps": [2, 1, 1]},
    ),
    "scatter-past": (
        "scatter-conv-track",
        {
            "state_indices": [6, 0, 3], "step_indices": [0, 3, 1],
            "source_indices": [0, 1, 2], "track_indices": [1, 4, 6],
        },
    ),
    "scatter-below": (
        "scatter-conv-track",
        {
            "state_indices": [1, 0, 3], "step_indices": [-1, 1, 1],
            "source_indices": [0, -1, 2], "track_indices": [2, 4, -9],
        },
    ),
    "scatter-sources": (
        "scatter-conv-track",
        {
            "state_indices": [-1, 0, 3], "step_indices": [9, 2, 2],
            "source_indices": [9, 4, 0], "track_indices": [1, 2, 4],
            "track_steps": [0, 0, 3],
        },
    ),
    **{
        f"{label}-{name}": (label, change)
        for label in (CONV, SLIDING)
        for name, change in {
            "past": {
                "state_indices": [5, 1, 2], "window_indices": [0, 3, 1],
                "accept_lens": [3, 3, 4], "track_indices": [0, 3, 5],
                "track_steps": [0, 0, 2],
            },
            "below": {
                "state_indices": [0, 1, 2], "window_indices": [0, -1, 2],
                "accept_lens": [-1, 3, 2], "track_indices": [3, 4, -9],
                "track_steps": [0, 0, 0],
            },
        }.items()
    },
    "commit_indices": (
        "commit_indices-track",
        {
            "accept_lens": [9, -2, 1, 1, 9], "seq_lens": [-6, 8, 7, 7, 1],
            "req_indices": [4, 0, -1, 3, 99], "track_slot_map": [-9, 7, 6, 99],
        },
    ),
}  # fmt: skip
