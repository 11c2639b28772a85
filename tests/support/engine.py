"""A small engine around replayssm.graph: random steps of a model that is only its pools."""

import copy

import torch
from torch import Tensor

from replayssm import ops
from replayssm.graph import Commit, LinearAttention, Pools, StaticBatch, live_rows

L, D, REQUESTS, SLOTS = 2, 4, 6, 13
VOCAB = 3
# How often a draft is what the target says: all of a window, and every shorter prefix,
# are then accepted often.
AGREE = 0.8


class Engine:
    """Pools, maps and the inputs of one step, at fixed addresses.

    Slots 0 .. REQUESTS-1 serve, later ones hold snapshots; SLOTS-1 belongs to nobody.
    """

    def __init__(self, device: str, variant: str, B: int, interval: int = 0) -> None:
        variant, safe = variant.removesuffix("-safe"), variant == "kda-safe"
        model = LinearAttention(
            L, H=1, HV=2, K=32, V=32, variant=variant,
            lower_bound=-5.0 if safe else None,
        )  # fmt: skip
        self.device, self.model, self.B = device, model, B
        self.pools = Pools(model, slots=SLOTS, requests=B, window=D, device=device)
        draw = torch.Generator().manual_seed(0)
        for pool in (self.pools.state, *self.pools.conv_states):
            pool.copy_(torch.randn(pool.shape, generator=draw))
        slots = torch.arange(REQUESTS, device=device, dtype=torch.int32)
        self.commit = Commit(
            self.pools, slots.clone(), track_slot_map=slots + REQUESTS,
            track_interval=interval,
        )  # fmt: skip
        gate = (model.K,) if variant == "kda" else ()
        shapes = {
            "q": (1, 32), "k": (1, 32), "v": (2, 32), "a": (2, *gate), "b": (2,)
        }  # fmt: skip
        self.inputs = {
            name: torch.zeros(L, B * D, *shape, device=device, dtype=torch.bfloat16)
            for name, shape in shapes.items()
        }
        self.A_log = torch.zeros(L, 2, device=device)
        self.dt_bias = torch.full((L, 2, *gate), -2.0, device=device)
        self.conv = [torch.zeros_like(window) for window in self.pools.conv_windows]
        self.targets = torch.zeros(B * D, device=device, dtype=torch.int64)

    def twin(self) -> "Engine":
        """The same in memory of its own."""
        return copy.deepcopy(self)

    def memory(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.pools.named_buffers()}

    def load(self, seed: int) -> Tensor:
        """New inputs and maps; returns the live rows [b, 3 + D], 0 <= b <= B."""
        draw = torch.Generator().manual_seed(seed)
        for value in (*self.inputs.values(), *self.conv):
            value.copy_(torch.randn(value.shape, generator=draw))
        b = int(torch.randint(0, self.B + 1, (), generator=draw))
        drafts = torch.randint(0, VOCAB, (self.B, D), generator=draw)
        misses = torch.rand(drafts.shape, generator=draw) >= AGREE
        self.targets.copy_(((drafts.roll(-1, 1) + misses) % VOCAB).flatten())
        serving = torch.randperm(REQUESTS, generator=draw).int()
        self.commit.slot_map.copy_(serving)
        return live_rows(
            torch.randperm(REQUESTS, generator=draw)[:b],
            torch.randint(0, 40, (b,), generator=draw),
            drafts[:b],
            torch.randint(0, D + 1, (b,), generator=draw),
        ).to(self.device)

    def pack(self, batch: StaticBatch) -> None:
        """Moves the inputs of dense rows to where a filled compact batch has them."""
        row, column, covered = batch.places(batch.cu_seqlens())
        for value in (*self.inputs.values(), self.targets[None]):
            packed = value[:, row * D + column]
            covers = covered.view(1, -1, *(1,) * (value.dim() - 2))
            value[:, : len(row)] = torch.where(covers, packed, 0)

    def verify(self, batch: StaticBatch, cu_seqlens: Tensor | None) -> Tensor:
        """Every layer's verify, and the conv windows a forward would leave.

        Returns the last layer's outputs.
        """
        slots, tokens = batch.slots(self.commit.slot_map), batch.bucket.tokens
        for layer in range(L):
            windows = (window[layer] for window in self.pools.windows)
            outputs = ops.verify(
                *(x[layer, :tokens] for x in self.inputs.values()), self.A_log[layer],
                self.dt_bias[layer], self.pools.state[layer], *windows, slots, cu_seqlens,
                batch.window_indices, lower_bound=self.model.lower_bound,
            )  # fmt: skip
        for window, values in zip(self.pools.conv_windows, self.conv, strict=True):
            window.copy_(values)
        return outputs

    def step(self, batch: StaticBatch):
        """verify and commit."""
        cu_seqlens = batch.cu_seqlens()
        self.verify(batch, cu_seqlens)
        targets = self.targets[: batch.bucket.tokens]
        if cu_seqlens is None:
            targets = targets.view(batch.draft_tokens.shape)
        return self.commit(
            batch.req_indices, batch.seq_lens, batch.draft_tokens, targets,
            batch.verify_lens, cu_seqlens,
        )  # fmt: skip
