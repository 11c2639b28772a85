"""Which commit a linear-attention backend gets, decided before its pools exist."""

import dataclasses
from typing import Literal, NoReturn

import torch

from ..ops.window_rule import fits

# What torch calls a ROCm device: "cuda", or "hip" in some builds' own names.
_DEVICES = ("cuda", "hip", "cpu")


@dataclasses.dataclass(frozen=True)
class Route:
    """How a backend commits: "scatter" from snapshots, the others by replaying windows.

    window: the T that was checked against the draft. None for a commit by scatter and for a
    draft worker, of which no window is asked.
    """

    commit: Literal["scatter", "gdn_fold", "kda_fold"]
    reason: str
    window: int | None = None


def decide(
    target: str,
    *,
    replay: bool,
    window: int,
    draft: int,
    pool_kda: bool | None = None,
    device: str | torch.device = "cuda",
    unified_memory: bool = False,
    topk: int = 1,
    draft_worker: bool = False,
) -> Route:
    """The commit of one backend. Pure: no device is touched, nothing is remembered.

    ====================  ==========  =========
    target                replay off  replay on
    ====================  ==========  =========
    "gdn"                 scatter     gdn_fold
    "kda"                 scatter     kda_fold
    anything else         scatter     refused
    ====================  ==========  =========

    With replay on, what a fold cannot do is refused here, before any pool is allocated.
    Nothing is refused with replay off. A draft worker's pool is never refused either: it
    follows the table, and a backend that is neither GDN nor KDA gets scatter. Chains of
    MTP and EAGLE drafts (topk = 1) are folded like all others.

    Args:
        target: the kind of the backend that really runs: "gdn", "kda", or another's name.
        replay: whether speculative commits are to replay the inputs of accepted tokens.
        window: T, rows of a replay window.
        draft: D, rows of one verify, the anchor included.
        pool_kda: whether the pool is marked as KDA's; None: it carries no mark.
        device: "cuda" (ROCm too) or "cpu" (the reference), with or without an index.
        unified_memory: the pool's slots are virtual, in one arena with the KV cache.
        topk: branches per draft step; 1 is a chain, more is a tree.
        draft_worker: the pool belongs to the draft model, which verifies nothing.

    Raises:
        ValueError: this backend cannot fold; the text has the reason and what to change.
    """
    if not replay:
        return Route("scatter", "replay is off")
    if target not in ("gdn", "kda"):
        if draft_worker:
            return Route("scatter", f"a draft worker's backend {target!r} has no fold")
        _refuse(
            f"target must be 'gdn' or 'kda' with replay on, got {target!r}",
            "no other backend's inputs can be replayed into its state",
            "set replay=False to commit by scatter",
        )
    if not draft_worker:
        _check_fold(target, window, draft, pool_kda, device, unified_memory, topk)
    commit: Literal["gdn_fold", "kda_fold"] = "gdn_fold" if target == "gdn" else "kda_fold"
    reason = f"replay is on and the backend is {target.upper()}"
    return Route(commit, reason, None if draft_worker else window)


def _check_fold(
    target: str,
    window: int,
    draft: int,
    pool_kda: bool | None,
    device: str | torch.device,
    unified_memory: bool,
    topk: int,
) -> None:
    if pool_kda is not None and pool_kda != (target == "kda"):
        _refuse(
            f"pool_kda must be {not pool_kda} for target {target!r}, got {pool_kda}",
            "a KDA pool has one gate per head and key dimension, a GDN pool one per head",
            f"set pool_kda={not pool_kda}, or the target to the backend that runs",
        )
    if str(device).partition(":")[0] not in _DEVICES:
        _refuse(
            f"device must be 'cuda' (ROCm too) or 'cpu' (the reference), got '{device}'",
            "the fold has no kernel for others",
            "set device, or replay=False",
        )
    if unified_memory:
        _refuse(
            "unified_memory must be False with replay on, got True",
            "its slots are virtual, in one arena with the KV cache, and the fold takes "
            "slots of a pool of its own",
            "set unified_memory=False, or replay=False",
        )
    if topk != 1:
        _refuse(
            f"topk must be 1 with replay on, got {topk}",
            "a window is one chain of tokens, and a tree's accepted path need not be a "
            "prefix of it",
            "set topk=1, or replay=False",
        )
    if draft < 1:
        _refuse(
            f"draft must be at least 1, got {draft}",
            "the anchor is row 0 of every verify",
            "set draft to the drafts of a step plus 1",
        )
    if not fits(draft, window):
        _refuse(
            f"window must be at least draft = {draft}, got {window}",
            "rows past the window are verified but not stored, and could not be folded",
            f"set window={draft}, or draft={window}",
        )


def _refuse(what: str, reason: str, change: str) -> NoReturn:
    raise ValueError(f"decide: {what}: {reason}; {change}")
