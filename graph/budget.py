"""How many rows of each draft window to verify, from the drafts' confidences."""

import itertools

import torch
from torch import Tensor

from ..ops import checks

# Expected tokens are summed as integers of this scale: their order cannot matter, and
# 2^13 of them are still exact in fp64.
_SCALE = 2.0**40

# How many rows ahead a causal choice looks. Cost jumps where a larger bucket begins, so
# this must reach over the widest bucket.
_AHEAD = 256


def choose_verify_lens(
    confidences: Tensor,
    *,
    budget: int | Tensor | None = None,
    cost: Tensor | None = None,
    live: Tensor | None = None,
    min_len: int = 1,
    causal: bool = False,
) -> Tensor:
    """Spend a step's verified rows on the drafts that are likeliest to be accepted.

    Draft t survives with probability confidences[:, 0] * ... * confidences[:, t - 1].
    Drafts are admitted in order of survival, those in earlier columns first among equals,
    then those of earlier rows, until n rows are verified in all, anchors included. n is
    the budget, or with a cost table the number up to the budget that promises most
    accepted tokens per time, the smallest of equals. With neither, every row is verified.

    Sampling at temperature > 0 is exact only when whether a draft is admitted does not
    depend on that draft's token. The token shows in the row's confidences after it, which
    come later in the order of survival. So a fixed n is harmless: a draft's place depends
    only on what comes before it, of its own row and of others. The best n is not, as it
    is found by looking past it. With ``causal`` n is settled draft by draft in that order:
    the choice goes on while that looks better, were all later drafts to survive as the
    next one does. Of each row it has then used only the confidences of the drafts it
    admitted and of the first one it cut off, all known before that one was drawn. Where
    cost is linear in n both choices agree. Greedy acceptance needs no ``causal``.

    Args:
        confidences: [B, D - 1] float in (0, 1). Column t - 1 is the probability that
            draft t is accepted when those before it are. For sampling it must have been
            known before draft t was drawn; one that looks at draft t itself belongs one
            column later, with 1 in column 0. NaN counts as 0.
        budget: rows to verify in all: an int, or [] or [1] int32 or int64 on the device.
            Live rows get min_len even where that passes it. None: no limit.
        cost: [max_tokens + 1] float, the time of a step that verifies that many rows,
            above 0. max_tokens limits n as budget does.
        live: [B] bool, False = a row that takes no part and gets 0. None: all.
        min_len: rows every live row gets, its anchor included.
        causal: choose n without looking ahead. For sampling, what else decides a length
            (budget, cost, live, min_len) must not depend on this step's drafts either.

    Returns:
        [B] int32 in 0..D, rows to verify, anchor included.

    Raises:
        ValueError: the shapes or devices are not these, min_len is not in 1..D, or
            budget is an int below 0.
        TypeError: the dtypes are not these.

    Nothing is mutated and nothing is read on the host.
    """
    _check(confidences, budget, cost, live, min_len)
    B, drafts = confidences.shape
    device = confidences.device
    if live is None:
        live = torch.ones(B, dtype=torch.bool, device=device)
    if not B or not drafts or (budget is None and cost is None):
        return live.to(torch.int32) * (drafts + 1)
    # One factor after the other: rounding can then never let survival rise along a row,
    # and the bits do not depend on how a device splits a scan.
    columns = confidences.float().nan_to_num(0).clamp(0, 1).unbind(1)
    survival = torch.stack(list(itertools.accumulate(columns, torch.mul)))
    column = torch.arange(1, drafts + 1, device=device)[:, None]
    must, free = live & (column < min_len), live & (column >= min_len)
    fixed = live.sum() + must.sum()
    # Flattened column after column, so that a stable sort breaks ties as promised.
    scores, order = (
        survival.masked_fill(~free, -1).flatten().sort(stable=True, descending=True)
    )
    extra = free.sum()
    if budget is not None:
        limit = budget.reshape(()) if isinstance(budget, Tensor) else budget
        extra = torch.minimum(extra, limit - fixed)
    if cost is not None:
        extra = torch.minimum(extra, cost.shape[0] - 1 - fixed)
        sure = _whole(live).sum() + _whole(survival).masked_fill(~must, 0).sum()
        gains = sure + torch.nn.functional.pad(_whole(scores).cumsum(0), (1, 0))
        gains, cost = gains / _SCALE, cost.double()
        if causal:
            extra = _first_stop(scores, gains, cost, fixed, extra)
        else:
            extra = _best(gains, cost, fixed, extra)
    rank = torch.arange(len(order), device=device)
    admitted = torch.zeros_like(order, dtype=torch.bool).scatter(0, order, rank < extra)
    return (live + (must | admitted.view_as(must)).sum(0)).to(torch.int32)


def _check(
    confidences: Tensor,
    budget: int | Tensor | None,
    cost: Tensor | None,
    live: Tensor | None,
    min_len: int,
) -> None:
    check = checks.Check("choose_verify_lens", confidences, "confidences")
    floating = (*checks.ACTIVATION, torch.float64)
    check.tensor("confidences", confidences, "B D-1", floating)
    if isinstance(budget, Tensor):
        if budget.dim() > 1 or budget.numel() != 1:
            check.fail(f"budget must be an int, [] or [1], got {list(budget.shape)}")
        # A budget on the host would be baked into a captured graph.
        check.index("budget", budget.reshape(1), "1")
    elif budget is not None and budget < 0:
        check.fail(f"budget must be 0 or more, got {budget}")
    if cost is not None:
        check.tensor("cost", cost, "max_tokens+1", floating)
        if cost.shape[0] < 1:
            check.fail("cost must be [max_tokens + 1], got [0]")
    if live is not None:
        check.tensor("live", live, "B", (torch.bool,))
    D = confidences.shape[1] + 1
    if not 1 <= min_len <= D:
        check.fail(f"min_len must be 1 to D = {D}, got {min_len}")


def _whole(x: Tensor) -> Tensor:
    return (x * _SCALE).long()


def _cost_of(cost: Tensor, rows: Tensor) -> Tensor:
    return cost[rows.clamp(max=cost.shape[0] - 1)]


def _best(gains: Tensor, cost: Tensor, fixed: Tensor, room: Tensor) -> Tensor:
    """How many drafts, at most room [] (none where negative), maximise gain per cost.

    ``gains`` [M + 1] fp64 are the tokens expected of so many, ``fixed`` [] the rows
    verified in any case. The numbers are correctly rounded single operations, so equal
    rates are equal on every device.
    """
    count = torch.arange(len(gains), device=gains.device)
    rates = gains / _cost_of(cost, fixed + count)
    return rates.masked_fill(count > room, -1).argmax()


def _first_stop(
    scores: Tensor, gains: Tensor, cost: Tensor, fixed: Tensor, room: Tensor
) -> Tensor:
    """The first count where going on does not look better; ``scores`` [M] are sorted.

    m more drafts that survive as the next one, s, look better where
    (gain + m s) / cost[n + m] > gain / cost[n], which is
    s cost[n] > gain (cost[n + m] - cost[n]) / m.
    """
    count = torch.arange(len(scores), device=gains.device)
    ahead = torch.arange(1, min(_AHEAD, len(scores)) + 1, device=gains.device)
    now = _cost_of(cost, fixed + count)
    then = count[:, None] + ahead
    slopes = (_cost_of(cost, fixed + then) - now[:, None]) / ahead
    slope = slopes.masked_fill(then > room, torch.inf).amin(1)
    better = scores.double() * now > gains[:-1] * slope
    # At room itself every slope is infinite, and past the last score stands a stop.
    stop = torch.nn.functional.pad(~better, (0, 1), value=True)
    return stop.to(torch.int32).argmax()
