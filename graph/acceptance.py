"""How many rows of a draft window the target agrees with."""

import torch
from torch import Tensor


def greedy_accept(
    draft_tokens: Tensor, target_tokens: Tensor, verify_lens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compare drafts with the target's greedy tokens.

    Args:
        draft_tokens: [B, D] int. Column 0 is the anchor, which is already decided.
        target_tokens: [B, D] int. The target's greedy token after each position.
        verify_lens: [B] int, rows that were verified, anchor included; 0 = a row
            that took no part. None: all D.

    Returns:
        accept_lens [B] int32: 1 + the length of the matching prefix, so the anchor
        is counted and the bonus token is not, capped at verify_lens.
        bonus [B], target_tokens' dtype: the target's token after the last accepted
        row, the next step's anchor; -1 where accept_lens is 0.

    Raises:
        ValueError: the shapes are not these.

    Nothing is mutated and nothing is read on the host.
    """
    if draft_tokens.dim() != 2 or draft_tokens.shape != target_tokens.shape:
        raise ValueError(
            "draft_tokens and target_tokens must both be [B, D], got "
            f"{list(draft_tokens.shape)} and {list(target_tokens.shape)}"
        )
    matches = draft_tokens[:, 1:] == target_tokens[:, :-1]
    accept_lens = 1 + matches.to(torch.int32).cumprod(1, dtype=torch.int32).sum(
        1, dtype=torch.int32
    )
    if verify_lens is not None:
        if verify_lens.shape != draft_tokens.shape[:1]:
            raise ValueError(
                f"verify_lens must be [B] = [{draft_tokens.shape[0]}], got "
                f"{list(verify_lens.shape)}"
            )
        accept_lens = torch.minimum(accept_lens, verify_lens.to(torch.int32)).clamp(min=0)
    last = (accept_lens - 1).clamp(min=0).long()[:, None]
    bonus = target_tokens.gather(1, last)[:, 0]
    return accept_lens, torch.where(accept_lens > 0, bonus, -1)
