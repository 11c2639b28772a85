"""REPLAYSSM_DEBUG=1: before every op, the values on the device are checked as well.

Without the flag the ops clamp and skip, as their contracts say, and nothing here runs.
A rule is torch arithmetic that reads nothing on the host, so it is the same on every
device, and a CUDA graph captures it. On the CPU a broken rule is a ValueError; on a GPU a
small kernel in front of the op's own stops the device.

Each op gives its rules where it is registered, and puts them together from those below.
What a padding row holds is never looked at.
"""

import os
from collections.abc import Callable, Iterable, Iterator
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

# A row a lane of one warp, so that the thread that stops names the row.
_BLOCK = 32


class Rule(NamedTuple):
    """One rule over an index argument: values int64 [n], holds bool [n]; what a value
    that breaks it does, in words that complete "name[i] = value"."""

    name: str
    values: Tensor
    holds: Tensor
    text: str


def guarded(
    op: str,
    bind: Callable[..., Any],
    check: Callable[[Any], Any],
    rules: Callable[[Any, dict[str, int]], Iterable[Rule]],
    kernel: Callable,
) -> Callable:
    """``kernel`` behind the checks of its call's metadata and device values."""

    def call(*args, **kwargs):
        x = bind(*args, **kwargs)
        sizes = check(x).sizes
        _apart(op, x)
        for rule in rules(x, sizes):
            _enforce(op, rule)
        return kernel(*args, **kwargs)

    return call


def _apart(op: str, x: Any) -> None:
    """An argument may not be one that the op writes: compilers have dropped the copy that
    made them two. Only where they start is compared, as pages of pools may interleave."""
    starts = {}
    for name, value in x._asdict().items():
        tensors = [y for y in tree_leaves(value) if isinstance(y, Tensor) and y.numel()]
        starts[name] = {y.data_ptr() for y in tensors}
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
        kernels.stop_unless, (launch.ceil_div(n, _BLOCK), 1, 1), (n,),
        {"NAME": name, "TEXT": text, "BLOCK": _BLOCK}, 1,
    )  # fmt: skip


def offsets(cu_seqlens: Tensor | None, tokens: int) -> Iterator[Rule]:
    """Token offsets of ragged requests rise, and stay within the packed tokens."""
    if cu_seqlens is None:
        return
    ends = cu_seqlens.long()
    yield Rule(
        "cu_seqlens", ends, (pad(ends[:-1], (1, 0)) <= ends) & (ends <= tokens),
        "is below 0, below the offset before it or past the packed tokens",
    )  # fmt: skip


def slots(state_indices: Tensor, S: int) -> Iterator[Rule]:
    """Each request's slot lies in the state pool and is no other's."""
    values = state_indices.long()
    text = f"is outside the state pool of {S} slots"
    yield Rule("state_indices", values, values < S, text)
    text = "is the slot of an earlier request of the batch too"
    yield Rule("state_indices", values, ~repeated(values), text)


def rows(name: str, named: Tensor, R: int, pool: str = "window pool") -> Iterator[Rule]:
    """``named``, each request's row (see window_rule.named_rows), lies in its pool."""
    yield Rule(name, named, named < R, f"is outside the {pool} of {R} rows")


def stored_rows(
    name: str, named: Tensor, cu_seqlens: Tensor | None, T: int
) -> Iterator[Rule]:
    """What verify and store write: no row twice, and no more tokens than it holds."""
    text = "is the window row of an earlier request of the batch too"
    yield Rule(name, named, ~repeated(named), text)
    if cu_seqlens is not None:
        ends = cu_seqlens.long()
        fit = (named < 0) | (ends.diff() <= T)
        yield Rule(
            "cu_seqlens", ends, pad(fit, (1, 0), value=True),
            f"gives the request that ends there more than T = {T} rows",
        )  # fmt: skip


def lengths(
    name: str, values: Tensor, slots: Tensor, first: int, last: int
) -> Iterator[Rule]:
    """A live request commits ``first`` to ``last``."""
    values = values.long()
    fit = (slots < 0) | ((first <= values) & (values <= last))
    yield Rule(name, values, fit, f"is not {first} to {last}, as the window has it")


def tracks(x: Any, named: Tensor, accepted: Tensor, S: int) -> Iterator[Rule]:
    """Snapshots of steps that are taken go to slots of their own, which no request has."""
    if x.track_indices is None:
        return
    steps = x.track_steps.long()
    taken = (named >= 0) & (steps >= 0) & (steps < accepted.long())
    values = x.track_indices.long().masked_fill(~taken, -1)
    text = f"is outside the state pool of {S} slots"
    yield Rule("track_indices", values, values < S, text)
    live = (values >= 0) & (values[:, None] == x.state_indices.long()).any(1)
    text = "is the slot of a live request of the batch"
    yield Rule("track_indices", values, ~live, text)
    text = "gets the snapshot of an earlier request of the batch too"
    yield Rule("track_indices", values, ~repeated(values), text)


def repeated(values: Tensor) -> Tensor:
    """Which of the values, negative ones apart, stand earlier in the batch already."""
    same = (values[:, None] == values) & (values >= 0)
    return same.tril(-1).any(1)
