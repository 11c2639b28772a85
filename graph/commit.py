"""From the target's tokens to the next verify: one module, eager, compiled or captured."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops import accept, commit_indices, conv_commit, fold
from ..ops.window_rule import fits
from .pools import Pools


class Committed(NamedTuple):
    """What a commit decided, all fresh tensors [B].

    accept_lens int32: rows committed, the anchor included and the bonus not.
    bonus: the target's token after them, the next anchor; -1 where nothing was.
    seq_lens int64: tokens in the state now.
    """

    accept_lens: Tensor
    bonus: Tensor
    seq_lens: Tensor


class Commit(torch.nn.Module):
    """Greedy verify-commit of a draft window.

    Accept the matching prefix, map requests to slots, fold every layer's window into its
    state, move the conv windows, and snapshot what crosses a prefix-cache boundary: on a
    GPU five kernels, no copy, nothing read on the host. Pools are module buffers, which
    is what lets ``torch.compile(mode="reduce-overhead")`` capture their mutation.
    """

    slot_map: Tensor
    track_slot_map: Tensor | None
    window_rows: Tensor
    live: Tensor
    __call__: Callable[..., Committed]  # torch types the call of any module as Any

    def __init__(
        self,
        pools: Pools,
        slot_map: Tensor,
        *,
        track_slot_map: Tensor | None = None,
        track_interval: int = 0,
        use_qk_l2norm: bool = True,
    ) -> None:
        """
        Args:
            pools: the pools verify wrote its windows into.
            slot_map: [requests] int32 or int64, the slot of each request; kept, not
                copied, so the engine may move requests by writing to it.
            track_slot_map: [requests] int, the slot that receives a request's state at a
                boundary; -1 = none. None: no tracking.
            track_interval: tokens between boundaries; 0: no tracking.
            use_qk_l2norm: as given to verify.

        Raises:
            ValueError: a negative interval, or one without slots to track into.
        """
        super().__init__()
        if track_interval < 0:
            raise ValueError(f"track_interval must be 0 or more, got {track_interval}")
        if track_interval and track_slot_map is None:
            raise ValueError(
                f"track_slot_map must be given with track_interval = {track_interval}, "
                "got None"
            )
        self.pools = pools
        self.track_interval, self.use_qk_l2norm = track_interval, use_qk_l2norm
        self.register_buffer("slot_map", slot_map, persistent=False)
        self.register_buffer("track_slot_map", track_slot_map, persistent=False)
        rows = torch.arange(pools.requests, device=slot_map.device)
        self.register_buffer("window_rows", rows.to(torch.int32), persistent=False)
        # Device-side count of live rows: batches mark padding by request -1 instead.
        live = torch.full((1,), 2**31 - 1, device=slot_map.device, dtype=torch.int32)
        self.register_buffer("live", live, persistent=False)

    def forward(
        self,
        req_indices: Tensor,
        seq_lens: Tensor,
        draft_tokens: Tensor,
        target_tokens: Tensor,
        verify_lens: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Committed:
        """Commit one step of B requests, whose windows are rows 0 .. B-1 of the pools.

        Args:
            req_indices: [B] int, entries of the slot map; others are padding.
            seq_lens: [B] int, tokens in each state before the step.
            draft_tokens: [B, D] int, column 0 the anchor; with cu_seqlens also packed [N].
            target_tokens: [B, D], with cu_seqlens packed [N]: the target's greedy token
                after each.
            verify_lens: [B] int, rows verified; caps acceptance; 0 = took no part.
            cu_seqlens: [B + 1] int, offsets of packed rows.

        Returns:
            What was decided, see ``Committed``.

        Raises:
            ValueError, TypeError: from the ops, naming the argument, or a draft longer than
                the pools' windows; nothing is written.

        The state, the conv states and tracked slots are written.
        """
        if draft_tokens.dim() == 2 and not fits(draft_tokens.shape[1], self.pools.window):
            raise ValueError(
                f"draft_tokens must be [B, D] with D <= {self.pools.window}, the window of "
                f"the pools, got {list(draft_tokens.shape)}"
            )
        accept_lens, bonus = accept(
            draft_tokens, target_tokens, cu_seqlens, verify_lens=verify_lens
        )
        return self.commit(req_indices, seq_lens, accept_lens, bonus)

    def commit(
        self, req_indices: Tensor, seq_lens: Tensor, accept_lens: Tensor, bonus: Tensor
    ) -> Committed:
        """The part after acceptance, for callers that accept otherwise (temperature > 0).

        Args:
            req_indices, seq_lens: as for ``forward``.
            accept_lens: [B] int32, rows to commit.
            bonus: [B] int, handed through.

        Returns:
            See ``Committed``.

        Raises:
            ValueError, TypeError: from the ops, naming the argument.
        """
        batch, device = accept_lens.shape[0], accept_lens.device
        if batch > self.pools.requests:
            raise ValueError(
                f"accept_lens must be [B] with B <= {self.pools.requests}, the requests "
                f"that the pools hold windows for, got B = {batch}"
            )
        # Four tensors, not four rows of one: views of one base that an op mutates
        # together come out wrong from Inductor when the batch is dynamic.
        state_indices, last_steps, track_indices, track_steps = (
            torch.empty(batch, device=device, dtype=torch.int32) for _ in range(4)
        )
        commit_indices(
            accept_lens, seq_lens, req_indices, self.slot_map, self.live, state_indices,
            last_steps, track_indices, track_steps, track_slot_map=self.track_slot_map,
            track_interval=self.track_interval,
        )  # fmt: skip
        tracks = {}
        if self.track_interval:
            tracks = {"track_indices": track_indices, "track_steps": track_steps}
        rows = self.window_rows[:batch]
        fold(
            self.pools.state, *self.pools.windows, state_indices, accept_lens,
            window_indices=rows, use_qk_l2norm=self.use_qk_l2norm, **tracks,
        )  # fmt: skip
        if self.pools.conv_states:
            conv_commit(
                self.pools.conv_states, self.pools.conv_windows, state_indices,
                accept_lens, window_indices=rows, channels_last=self.pools.channels_last,
                **tracks,
            )  # fmt: skip
        return Committed(accept_lens, bonus, seq_lens + accept_lens)
