"""Many decode steps queued as graph replays, with nothing read until the end."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .batch import Bucket, Mode, StaticBatch
from .capture import Captured, window_holds
from .commit import Commit, Committed

# Anchor's successors: what the target says after each verified token.
Verify = Callable[[StaticBatch, Tensor | None], Tensor]
# The next drafts [B, D-1], and how many rows of each window to verify or None for all.
Draft = Callable[[StaticBatch, Committed], tuple[Tensor, Tensor | None]]


class Outputs(NamedTuple):
    """What a bucket's requests have produced, on the device.

    tokens [B, max_tokens + 1] int64, the last column is scratch; lens [B] int64, how many
    of them; limits [B] int64, how many are wanted; done [B] bool; steps [B, D + 1] int64,
    how often each accept length occurred.
    """

    tokens: Tensor
    lens: Tensor
    limits: Tensor
    done: Tensor
    steps: Tensor


class _Step:
    """One step of a loop: verify, commit, stop or go on, draft.

    A class of its own, so that graphs hold no reference to the loop that holds them. In a
    cycle they would be left to the garbage collector, and CUDA ends a capture in which it
    frees one.
    """

    def __init__(
        self,
        commit: Commit,
        verify: Verify,
        propose: Draft,
        outputs: dict[Bucket, Outputs],
        draft: int,
        end_token: int | None,
    ) -> None:
        self.commit, self.verify, self.propose = commit, verify, propose
        self.outputs, self.draft, self.end_token = outputs, draft, end_token

    def run(self, batch: StaticBatch) -> Committed:
        out = self.outputs[batch.bucket]
        cu_seqlens = batch.cu_seqlens()
        drafts = batch.draft_tokens
        targets = self.verify(batch, cu_seqlens)
        decided = self.commit(
            batch.req_indices, batch.seq_lens, drafts, targets, batch.verify_lens,
            cu_seqlens,
        )  # fmt: skip
        count = self._emit(out, drafts, decided)
        out.done.logical_or_(out.lens >= out.limits)
        live = ~out.done
        width = decided.accept_lens.long()[:, None]
        out.steps.scatter_add_(1, width, (count > 0).long()[:, None])
        # The row of the next step, in place: its padding is what ends a request.
        batch.seq_lens.copy_(decided.seq_lens)
        batch.req_indices.copy_(torch.where(live, batch.req_indices, -1))
        # A live row that took no part this time keeps its anchor.
        anchor = torch.where(decided.accept_lens > 0, decided.bonus, drafts[:, 0])
        drafts[:, 0].copy_(torch.where(live, anchor, 0))
        tokens, verify_lens = self.propose(batch, decided)
        drafts[:, 1:].copy_(tokens)
        lens = self.draft if verify_lens is None else verify_lens
        batch.verify_lens.copy_(torch.where(live, lens, 0))
        return decided

    def _emit(self, out: Outputs, drafts: Tensor, decided: Committed) -> Tensor:
        """Append the accepted drafts and the bonus, up to an end token or the limit."""
        accept = decided.accept_lens.long()
        column = torch.arange(self.draft, device=drafts.device)
        following = torch.cat([drafts[:, 1:], drafts[:, :1]], dim=1)
        last = (accept - 1)[:, None]
        emitted = torch.where(column < last, following, decided.bonus[:, None])
        count = accept
        if self.end_token is not None:
            ends = (emitted == self.end_token) & (column <= last)
            first = torch.where(ends, column, self.draft).amin(1)
            count = torch.minimum(count, first + 1)
            out.done.logical_or_(first < accept)
        count = torch.minimum(count, out.limits - out.lens).clamp(min=0)
        place = out.lens[:, None] + column
        place = torch.where(column < count[:, None], place, out.tokens.shape[1] - 1)
        out.tokens.scatter_(1, place, emitted)
        out.lens.add_(count)
        return count


class DecodeLoop(Captured):
    """Speculative greedy decoding: verify, commit, stop or go on, draft; N times.

    One graph holds a whole step, so N steps are N launches and no host sync. A request
    that reaches its end token or its length becomes padding in its bucket: from then on
    it reads and writes nothing.
    """

    def __init__(
        self,
        commit: Commit,
        verify: Verify,
        propose: Draft,
        choices: Sequence[Bucket],
        *,
        draft: int,
        max_tokens: int,
        end_token: int | None = None,
        mode: Mode = "static",
        graphs: bool = True,
    ) -> None:
        """
        Args:
            commit: the commit, with the pools verify writes.
            verify: verify(batch, cu_seqlens) runs the target over ``batch.pack(cu_seqlens)``
                and gives its greedy tokens, [B, D] or packed [N]. Capturable.
            propose: propose(batch, committed) drafts after each row's new anchor,
                ``batch.draft_tokens[:, 0]``. Capturable.
            choices: the buckets, see ``buckets``.
            draft: D.
            max_tokens: most tokens of one request.
            end_token: ends a request, and is its last token; None: only length does.
            mode, graphs: as for ``Captured``.

        Raises:
            ValueError: as ``Captured``, max_tokens below 1, or the pools have too few
                window rows.
        """
        window_holds(commit, choices, draft, "DecodeLoop")
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        self.commit, self.max_tokens = commit, max_tokens
        device = commit.slot_map.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, device=device, dtype=dtype)

        self.outputs = {
            c: Outputs(
                zeros(c.batch, max_tokens + 1), zeros(c.batch), zeros(c.batch),
                zeros(c.batch, dtype=torch.bool), zeros(c.batch, draft + 1),
            )
            for c in choices
        }  # fmt: skip
        self.step = _Step(commit, verify, propose, self.outputs, draft, end_token)
        super().__init__(
            self.step.run, choices, draft=draft, device=device, mode=mode, graphs=graphs
        )
        self._current: tuple[Bucket, int] | None = None

    def start(self, rows: Tensor, limits: Tensor, budget: int | None = None) -> Bucket:
        """Load a batch of requests whose first windows are drafted.

        Args:
            rows: [b, 3 + D] int64, see ``live_rows``.
            limits: [b] int, tokens wanted of each, at most max_tokens.
            budget: tokens verified a step, for ``compact``.

        Returns:
            The bucket that holds it.

        Raises:
            ValueError: no bucket does.
        """
        b = rows.shape[0]
        choice = self.bucket(b, budget)
        self.batches[choice].fill(rows)
        outputs = self.outputs[choice]
        outputs.lens.zero_()
        outputs.steps.zero_()
        outputs.limits.zero_()
        outputs.limits[:b].copy_(limits.clamp(max=self.max_tokens))
        torch.lt(self.batches[choice].req_indices, 0, out=outputs.done)
        self._current = choice, b
        return choice

    def run(self, steps: int) -> None:
        """Queue so many steps of the batch that was started; nothing waits.

        Raises:
            RuntimeError: nothing was started.
        """
        choice, _ = self._started()
        for _ in range(steps):
            self.replay(choice)

    def read(self) -> Outputs:
        """The live rows' outputs so far, as views on the device. Only reading them waits.

        Raises:
            RuntimeError: nothing was started.
        """
        choice, b = self._started()
        tokens, *rest = (x[:b] for x in self.outputs[choice])
        return Outputs(tokens[:, :-1], *rest)

    def _started(self) -> tuple[Bucket, int]:
        if self._current is None:
            raise RuntimeError("start() a batch before running or reading it")
        return self._current
