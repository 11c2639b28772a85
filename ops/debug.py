"""REPLAYSSM_DEBUG=1: before every op, what only the device's values show is checked too.

Without it the ops clamp and skip, as their contracts say, and nothing here runs. The
rules are torch arithmetic without a read on the host, the same on every device: a CUDA
graph captures them. On the CPU a broken one is a ValueError; on a GPU a small kernel
in front of the op's own stops the device.
"""

import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves

from . import launch


def _enabled(value: str) -> bool:
    if value not in ("", "0", "1"):
        raise ValueError(f"REPLAYSSM_DEBUG must be 0 or 1, got {value!r}")
    return value == "1"


ENABLED = _enabled(os.environ.get("REPLAYSSM_DEBUG", ""))

# Ops that write window rows, so that no two requests may share one.
_STORING = ("verify", "store")

# A row a lane of one warp, so that the thread that stops names the row.
_BLOCK = 32

Given = dict[str, Any]  # a call's arguments by name


class Rule(NamedTuple):
    """One rule over an index argument: values int64 [n], holds bool [n]; what a value
    that breaks it does, in words that complete "name[i] = value"."""

    name: str
    values: Tensor
    holds: Tensor
    text: str


def guarded(op: str, check: Callable, kernel: Callable) -> Callable:
    """``kernel`` behind the checks of its call's metadata and device values."""
    parameters = inspect.signature(check)

    def call(*args, **kwargs):
        sizes = check(*args, **kwargs).sizes
        given = parameters.bind(*args, **kwargs)
        given.apply_defaults()
        _apart(op, given.arguments)
        for rule in rules(op, given.arguments, sizes):
            _enforce(op, rule)
        return kernel(*args, **kwargs)

    return call


def _apart(op: str, given: Given) -> None:
    """An argument may not be one that the op writes: compilers have dropped the copy that
    made them two. Only where they start is compared, as pages of pools may interleave."""
    starts = {}
    for name, value in given.items():
        tensors = [x for x in tree_leaves(value) if isinstance(x, Tensor) and x.numel()]
        starts[name] = {x.data_ptr() for x in tensors}
    for argument in getattr(torch.ops.replayssm, op).default._schema.arguments:
        if argument.alias_info and argument.alias_info.is_write:
            own = starts.pop(argument.name)
            if same := [name for name in starts if starts[name] & own]:
                raise ValueError(
                    f"replayssm.{op}: {same[0]} is {argument.name}'s own memory, which the "
                    "op writes"
                )


def _enforce(op: str, rule: Rule) -> None:
    if rule.values.is_cuda:
        with torch.cuda.device(rule.values.device):
            dense = rule.values.contiguous(), rule.holds.contiguous()
            stop(op, rule).compile_and_launch(dense, ())
    elif not rule.holds.all():
        i = int(rule.holds.logical_not().nonzero()[0])
        at = f"{rule.name}[{i}] = {int(rule.values[i])}"
        raise ValueError(f"replayssm.{op}: {at} {rule.text}")


def stop(op: str, rule: Rule) -> launch.Plan:
    """The launch that stops the device where a row breaks the rule."""
    from .kernels import debug as kernels  # triton, which a CPU may lack

    n = rule.values.shape[0]
    name = f"replayssm.{op}: {rule.name}"
    text = f"{name}[{_BLOCK} * block + thread] {rule.text}"
    return launch.Plan(
        kernels.stop_unless, (-(-n // _BLOCK), 1, 1), (n,),
        {"NAME": name, "TEXT": text, "BLOCK": _BLOCK}, 1,
    )  # fmt: skip


def rules(op: str, given: Given, sizes: dict[str, int]) -> Iterator[Rule]:
    """The rules of one call. What a padding row holds is never looked at."""
    if op == "commit_indices":
        yield from _requests(given)
        return
    slots, ends = given.get("state_indices"), given.get("cu_seqlens")
    if ends is not None:
        ends = ends.long()
        yield Rule(
            "cu_seqlens", ends, (pad(ends[:-1], (1, 0)) <= ends) & (ends <= sizes["N"]),
            "is below 0, below the offset before it or past the packed tokens",
        )  # fmt: skip
    if slots is not None:
        slots, S = slots.long(), sizes["S"]
        text = f"is outside the state pool of {S} slots"
        yield Rule("state_indices", slots, slots < S, text)
        text = "is the slot of an earlier request of the batch too"
        yield Rule("state_indices", slots, ~_repeated(slots), text)
    if "R" not in sizes:
        return
    name, rows = _rows(given, slots)
    rows = rows if slots is None else rows.masked_fill(slots < 0, -1)
    pool = "snapshots" if op == "scatter" else "window pool"
    text = f"is outside the {pool} of {sizes['R']} rows"
    yield Rule(name, rows, rows < sizes["R"], text)
    if op in _STORING:
        text = "is the window row of an earlier request of the batch too"
        yield Rule(name, rows, ~_repeated(rows), text)
        if ends is not None:
            fits = (rows < 0) | (ends.diff() <= sizes["T"])
            yield Rule(
                "cu_seqlens", ends, pad(fits, (1, 0), value=True),
                f"gives the request that ends there more than T = {sizes['T']} rows",
            )  # fmt: skip
    elif slots is not None:
        yield from _commit(op, given, sizes, slots, rows)


def _rows(given: Given, slots: Any) -> tuple[str, Tensor]:
    """Each request's row of the windows or snapshots, and the argument it is from.

    slots is None for store alone, whose rows are given.
    """
    for name in ("window_indices", "source_indices"):
        if given.get(name) is not None:
            return name, given[name].long()
    if "source_indices" in given:
        return "source_indices", torch.arange(len(slots), device=slots.device)
    return "state_indices", slots


def _commit(
    op: str, given: Given, sizes: dict[str, int], slots: Tensor, rows: Tensor
) -> Iterator[Rule]:
    """What fold, scatter and conv_commit take, and where their snapshots go."""
    if op == "scatter":
        name, first, last = "step_indices", -1, sizes["D"] - 1
    else:
        name, first = "accept_lens", 0
        if "D+W-2" in sizes:  # conv_commit's sliding window
            last = sizes["D+W-2"] - sizes["W-1"] + 1
        else:
            last = sizes["T"] if "T" in sizes else sizes["D"]
    lens = given[name].long()
    fits = (slots < 0) | ((first <= lens) & (lens <= last))
    yield Rule(name, lens, fits, f"is not {first} to {last}, as the window has it")
    if given["track_indices"] is None:
        return
    accepted = lens + 1 if op == "scatter" else lens
    steps = given["track_steps"].long()
    taken = (rows >= 0) & (steps >= 0) & (steps < accepted)
    tracks = given["track_indices"].long().masked_fill(~taken, -1)
    text = f"is outside the state pool of {sizes['S']} slots"
    yield Rule("track_indices", tracks, tracks < sizes["S"], text)
    live = (tracks >= 0) & (tracks[:, None] == slots).any(1)
    text = "is the slot of a live request of the batch"
    yield Rule("track_indices", tracks, ~live, text)
    text = "gets the snapshot of an earlier request of the batch too"
    yield Rule("track_indices", tracks, ~_repeated(tracks), text)


def _requests(given: Given) -> Iterator[Rule]:
    """What commit_indices reads: its other index tensors are outputs."""
    requests, count = given["req_indices"].long(), len(given["slot_map"])
    place = torch.arange(len(requests), device=requests.device)
    requests = requests.masked_fill(place >= given["live"], -1)
    text = f"is outside the slot_map of {count} requests"
    yield Rule("req_indices", requests, requests < count, text)
    text = "is an earlier request of the batch too"
    yield Rule("req_indices", requests, ~_repeated(requests), text)
    lens = given["accept_lens"].long()
    yield Rule("accept_lens", lens, (requests < 0) | (lens >= 0), "is below 0")


def _repeated(values: Tensor) -> Tensor:
    """Which of the values, negative ones apart, stand earlier in the batch already."""
    same = (values[:, None] == values) & (values >= 0)
    return same.tril(-1).any(1)
