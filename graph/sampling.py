"""Speculative sampling at temperature > 0: what comes out follows the target.

Speculative sampling is Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023
(arXiv 2302.01318). Every number below is a correctly rounded single operation or an
integer, so a request's draws have the same bits in any row of any batch, eager, compiled
or captured, on every device.
"""

import torch
from torch import Tensor

from ..ops import checks

# splitmix64 (Steele, Lea and Flood 2014), its constants as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64

# A probability becomes the integer floor(p * 2^52). Integer sums do not depend on their
# order, the scaling is exact, and a sum of 2,048 ones fits in 63 bits.
_SCALE = 2.0**52

# The vocabulary is searched in two steps: a sum per block, then one block. One running
# sum over 250,000 numbers a row would be serial.
_BLOCK = 512


def rejection_accept(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    *,
    seed: Tensor,
    counters: Tensor,
    verify_lens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Accept drafts so that what a request emits follows the target's distribution.

    Draft t (column t >= 1) is accepted with probability min(1, p / q), where p is
    target_probs[:, t - 1] and q is draft_probs[:, t - 1], both at the draft. After the
    first rejection the bonus is drawn from max(p - q, 0), normalised. Where every
    verified draft was accepted, which includes rows that verify_lens cut short, the bonus
    is drawn from the target itself.

    Args:
        draft_tokens: [B, D] int32 or int64. Column 0 is the anchor, which is already
            decided. A draft outside the vocabulary is rejected.
        draft_probs: [B, D - 1, vocab] fp32, bf16 or fp16, the distributions that the
            drafts were drawn from. None: each draft was picked outright, so its q is 1.
        target_probs: [B, D, vocab] fp32, bf16 or fp16, the target's distribution after
            each position. Its rows and draft_probs' must sum to 1 within rounding: an
            acceptance compares them as they are.
        seed: [] or [1] int64, on the tensors' device.
        counters: [B] int64. A request's random numbers come from (seed, counter,
            position) alone, so no two calls may see the same counter of one seed: start
            requests far apart, say at request << 32, and add accept_lens after each call.
            The drafts must be drawn from other random numbers than these.
        verify_lens: [B] int32 or int64, rows that were verified, anchor included;
            0 = a row that takes no part. None: all D. A row's length may not depend on
            a draft that it includes or cuts off: see :func:`choose_verify_lens`, ``causal``.

    Returns:
        accept_lens [B] int32: 1 + the accepted drafts, so the anchor is counted and the
        bonus is not. bonus [B] int64: the next step's anchor; -1 where accept_lens is 0.
        No token is emitted whose target probability is 0; below 2^-52 it counts as 0.

    Raises:
        ValueError: the shapes or devices are not these, or D or vocab is 0.
        TypeError: the dtypes are not these.

    Nothing is mutated and nothing is read on the host. What it allocates grows with
    B * vocab, not with D.
    """
    _check(draft_tokens, draft_probs, target_probs, seed, counters, verify_lens)
    B, D, vocab = target_probs.shape
    drafts = draft_tokens[:, 1:].long()
    tokens = drafts.clamp(0, vocab - 1)  # in range to gather, whatever padding holds
    known = tokens == drafts
    p = target_probs[:, :-1].gather(2, tokens[:, :, None])[:, :, 0].double()
    position = torch.arange(1, D, device=drafts.device)
    # Even numbers of a request's stream decide acceptance, odd ones draw the bonus.
    u = _uniform(seed, counters[:, None], 2 * position)
    if draft_probs is not None:
        u = u * draft_probs.gather(2, tokens[:, :, None])[:, :, 0].double()
    accepted = known & (u < p)
    accept_lens = 1 + accepted.to(torch.int32).cumprod(1, dtype=torch.int32).sum(
        1, dtype=torch.int32
    )
    verified = torch.full_like(accept_lens, D)
    if verify_lens is not None:
        verified = verify_lens.clamp(0, D).to(torch.int32)
        accept_lens = torch.minimum(accept_lens, verified)

    rows = torch.arange(B, device=drafts.device)
    last = (accept_lens.long() - 1).clamp(min=0)
    weights = target_probs[rows, last].float()
    if D > 1:
        refused = last.clamp(max=D - 2)  # the refused draft is in column refused + 1
        if draft_probs is None:
            token = tokens[rows, refused, None]
            kept = weights.gather(1, token).masked_fill(known[rows, refused, None], 0)
            residual = weights.scatter(1, token, kept)
        else:
            residual = weights - draft_probs[rows, refused].float()
            residual = residual.clamp(min=0)
        # Rows that do not quite sum to 1 can refuse a draft and leave nothing to draw.
        use = (accept_lens < verified) & (residual.amax(1) * _SCALE >= 1)
        weights = torch.where(use[:, None], residual, weights)
    bonus = _draw(weights, _uniform(seed, counters, 2 * last + 1))
    return accept_lens, torch.where(accept_lens > 0, bonus, -1)


def _check(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    seed: Tensor,
    counters: Tensor,
    verify_lens: Tensor | None,
) -> None:
    check = checks.Check("rejection_accept", draft_tokens, "draft_tokens")
    check.index("draft_tokens", draft_tokens, "B D")
    check.tensor("target_probs", target_probs, "B D vocab", checks.ACTIVATION)
    for letter, size in zip(("D", "vocab"), target_probs.shape[1:], strict=True):
        if size < 1:
            check.fail(f"target_probs must have {letter} >= 1, got {size}")
    if draft_probs is not None:
        check.sizes["D-1"] = target_probs.shape[1] - 1
        check.sources["D-1"] = "target_probs"
        check.tensor("draft_probs", draft_probs, "B D-1 vocab", checks.ACTIVATION)
    if seed.dim() > 1 or seed.numel() != 1:
        check.fail(f"seed must be [] or [1], got {list(seed.shape)}")
    # A seed on the host would be baked into a captured graph.
    check.tensor("seed", seed.reshape(1), "1", (torch.int64,))
    check.tensor("counters", counters, "B", (torch.int64,))
    check.index("verify_lens", verify_lens, "B")


def _shifted(x: Tensor, count: int) -> Tensor:
    """A logical shift to the right; that of int64 is arithmetic."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _mix(x: Tensor) -> Tensor:
    """One step of splitmix64 from the state x; products wrap at 64 bits."""
    x = x + _GOLDEN
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _uniform(seed: Tensor, counters: Tensor, keys: Tensor) -> Tensor:
    """fp64 numbers k * 2^-53 in [0, 1), one for each (seed, counter, key)."""
    x = _mix(_mix(_mix(seed.reshape(1)) ^ counters) ^ keys)
    return _shifted(x, 11).double() * 2.0**-53


def _draw(weights: Tensor, u: Tensor) -> Tensor:
    """The token where the running sum of weights [B, vocab] passes u [B] of the total."""
    B, vocab = weights.shape
    width = min(_BLOCK, vocab)
    counts = (weights * _SCALE).long()
    if vocab % width:
        counts = torch.nn.functional.pad(counts, (0, -vocab % width))
    counts = counts.unflatten(1, (-1, width))
    sums = counts.sum(2)
    ends = sums.cumsum(1)
    # Below 2^53 a total is exact in fp64, and u * total then rounds below total.
    wanted = (u * ends[:, -1].double()).long()
    # Only a row without any weight finds no end above wanted.
    block = (ends <= wanted[:, None]).sum(1).clamp(max=sums.shape[1] - 1)
    rows = torch.arange(B, device=weights.device)
    wanted = wanted - (ends[rows, block] - sums[rows, block])
    inside = counts[rows, block].cumsum(1)
    token: Tensor = block * width + (inside <= wanted[:, None]).sum(1)
    return token.clamp(max=vocab - 1)
