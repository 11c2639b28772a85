"""Static ragged batches: fixed shapes per bucket, what varies in device tensors."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Mode = Literal["static", "cap-accept", "compact"]
MODES = get_args(Mode)

# Columns of a row before its D tokens.
_REQUEST, _LENGTH, _VERIFY, _TOKENS = 0, 1, 2, 3


def _known(mode: str) -> None:
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")


class Bucket(NamedTuple):
    """Shapes of one captured step: B requests, N tokens that are verified."""

    batch: int
    tokens: int


def buckets(
    batches: Sequence[int], draft: int, mode: Mode, budgets: Sequence[int] | None = None
) -> list[Bucket]:
    """The buckets of a deployment, smallest first.

    Args:
        batches: batch sizes B to provide for.
        draft: D, rows of a draft window, the anchor included.
        mode: ``static`` and ``cap-accept`` verify B * D tokens; ``compact`` verifies N
            packed tokens.
        budgets: for ``compact``, the N to provide for, each for every B <= N <= B * D.

    Returns:
        Every (B, N), sorted.

    Raises:
        ValueError: an unknown mode, sizes below 1, or budgets missing or not wanted.
    """
    _known(mode)
    if draft < 1 or not batches or min(batches) < 1:
        raise ValueError(
            f"batches and draft must be at least 1, got {list(batches)} and {draft}"
        )
    if (mode == "compact") != (budgets is not None):
        raise ValueError(
            "budgets must be given for mode 'compact' and for no other, "
            f"got {budgets} for {mode!r}"
        )
    if budgets is None:
        return sorted({Bucket(batch, batch * draft) for batch in batches})
    fits = {Bucket(b, n) for b in batches for n in budgets if b <= n <= b * draft}
    if not fits:
        raise ValueError(
            f"budgets must hold an N with B <= N <= B * D, got {list(budgets)} for "
            f"B in {list(batches)} and D = {draft}"
        )
    return sorted(fits)


def smallest(choices: Sequence[Bucket], batch: int, tokens: int | None = None) -> Bucket:
    """The smallest bucket that holds a live batch.

    Args:
        choices: the buckets that exist.
        batch: live requests.
        tokens: verified tokens, for ``compact``: the budget of this step.

    Raises:
        ValueError: none is large enough.
    """
    fits = [
        c for c in choices if c.batch >= batch and (tokens is None or c.tokens >= tokens)
    ]
    if not fits:
        raise ValueError(
            f"no bucket holds {batch} requests and {tokens} tokens, have {list(choices)}"
        )
    return min(fits)


def live_rows(
    req_indices: Tensor, seq_lens: Tensor, draft_tokens: Tensor, verify_lens: Tensor | None
) -> Tensor:
    """Rows [b, 3 + D] int64 of a live batch, on the device, as ``StaticBatch.fill`` takes them.

    One kernel where all is int64; one more for each int32 tensor, and for a None.

    Args:
        req_indices: [b] int, each request's entry of the slot map.
        seq_lens: [b] int, tokens already in the state.
        draft_tokens: [b, D] int, column 0 the anchor.
        verify_lens: [b] int, rows to verify, anchor included; None: all D.

    Raises:
        ValueError: the shapes are not these.
    """
    if draft_tokens.dim() != 2:
        raise ValueError(f"draft_tokens must be [b, D], got {list(draft_tokens.shape)}")
    b, draft = draft_tokens.shape
    given = {"req_indices": req_indices, "seq_lens": seq_lens, "verify_lens": verify_lens}
    for name, value in given.items():
        if value is not None and list(value.shape) != [b]:
            raise ValueError(
                f"{name} must be [b] beside draft_tokens [b, D], got {list(value.shape)} "
                f"and {list(draft_tokens.shape)}"
            )
    if verify_lens is None:
        verify_lens = torch.full_like(req_indices, draft, dtype=torch.int64)
    heads = [x.to(torch.int64)[:, None] for x in (req_indices, seq_lens, verify_lens)]
    return torch.cat([*heads, draft_tokens.to(torch.int64)], dim=1)


class StaticBatch:
    """The device buffers of one bucket, at fixed addresses.

    ``rows`` [B, 3 + D] int64 holds per request its entry of the slot map, the tokens in
    its state, the rows to verify and its D tokens, column 0 the anchor; the properties
    are views of it. A padded row's entry is -1, which no slot map has, so whatever a
    kernel makes of the row, its slot is -1 and it reads and writes nothing.
    """

    def __init__(
        self, bucket: Bucket, draft: int, device: torch.device | str, mode: Mode = "static"
    ) -> None:
        """
        Args:
            bucket: B and N.
            draft: D.
            device: where the buffers live.
            mode: see ``buckets``.

        Raises:
            ValueError: an unknown mode.
        """
        _known(mode)
        self.bucket, self.draft, self.mode = bucket, draft, mode
        row = torch.tensor([-1, 0, 0] + [0] * draft, device=device)
        self._padding = row.repeat(bucket.batch, 1)
        self.rows = self._padding.clone()
        # A window lives from verify to fold of one step: any distinct rows will do.
        self.window_indices = torch.arange(bucket.batch, device=device, dtype=torch.int32)

    @property
    def req_indices(self) -> Tensor:
        return self.rows[:, _REQUEST]

    @property
    def seq_lens(self) -> Tensor:
        return self.rows[:, _LENGTH]

    @property
    def verify_lens(self) -> Tensor:
        return self.rows[:, _VERIFY]

    @property
    def draft_tokens(self) -> Tensor:
        return self.rows[:, _TOKENS:]

    def fill(self, rows: Tensor) -> None:
        """Load a live batch: one small device copy, padding the tail.

        Args:
            rows: [b, 3 + D] int64 with b <= B, see ``live_rows``.

        Raises:
            ValueError: b is larger than the bucket, or the row is of another width.
        """
        b = rows.shape[0]
        if b > self.bucket.batch or rows.shape[1:] != self.rows.shape[1:]:
            raise ValueError(
                f"rows must be [b <= {self.bucket.batch}, {self.rows.shape[1]}], "
                f"got {list(rows.shape)}"
            )
        torch.cat([rows, self._padding[b:]], out=self.rows)

    def slots(self, slot_map: Tensor) -> Tensor:
        """[B] the slot of each row, -1 for padding: verify's state_indices.

        Args:
            slot_map: [requests] int, the slot of each request.
        """
        request = self.req_indices
        inside = (request >= 0) & (request < slot_map.shape[0])
        slot = slot_map[request.clamp(0, slot_map.shape[0] - 1)]
        return slot.masked_fill(~inside, -1)

    def cu_seqlens(self) -> Tensor | None:
        """[B + 1] int32 offsets of the packed rows; None for dense modes.

        Rows past the bucket's N are cut: a budget that promises less cannot be exceeded.
        """
        if self.mode != "compact":
            return None
        ends = self.verify_lens.clamp(0, self.draft).cumsum(0).clamp(max=self.bucket.tokens)
        return torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)

    def pack(self, cu_seqlens: Tensor | None) -> Tensor:
        """[N] the tokens to verify, packed; dense modes: all B * D.

        Args:
            cu_seqlens: what ``cu_seqlens()`` gave. Tokens no row covers are 0.
        """
        if cu_seqlens is None:
            return self.draft_tokens.reshape(-1)
        row, column, covered = self.places(cu_seqlens)
        return torch.where(covered, self.draft_tokens[row, column], 0)

    def places(self, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """([N] row, [N] column, [N] bool covered) of each packed token in [B, D].

        Args:
            cu_seqlens: what ``cu_seqlens()`` gave.
        """
        n = torch.arange(self.bucket.tokens, device=self.rows.device, dtype=torch.int32)
        # The whole of it: Inductor (torch 2.11) cannot search a slice on a GPU.
        row = torch.searchsorted(cu_seqlens, n, right=True) - 1
        covered = row < self.bucket.batch
        row = row.clamp(max=self.bucket.batch - 1)
        column = (n - cu_seqlens[row]).clamp(0, self.draft - 1)
        return row, column, covered
