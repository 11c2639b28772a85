"""Verify, commit and plain decoding of a server's requests, each against plain decoding."""

from typing import NamedTuple, get_args

import torch
from torch import Tensor

import oracle
from plain import VOCAB
from replayssm import ops
from replayssm.graph import (
    Bucket,
    CapturedCommit,
    Committed,
    Mode,
    StaticBatch,
    buckets,
    live_rows,
)
from samples import WINDOWS, bits_equal
from serving import Request, Server, Setup

MODES: tuple[Mode, ...] = get_args(Mode)
BATCHES = (1, 2, 4)
# How to commit. Greedy acceptance takes at least the anchor of a row that was verified.
GREEDY = ("captured", "eager")
WAYS = (*GREEDY, "decided", "ops")


class Step(NamedTuple):
    """A verified batch, with what each of its rows may become by plain decoding."""

    mode: Mode
    batch: StaticBatch
    rows: Tensor
    window_rows: Tensor
    requests: list[Request]
    drafts: list[list[int]]
    caps: list[int]
    plain: list[list[Tensor]]
    exact: list[list[Tensor]]
    convs: list[list[Tensor]]


class SpeculativeServer(Server):
    """A server that verifies drafts in static batches and commits what is accepted."""

    def __init__(self, device: str, setup: Setup) -> None:
        super().__init__(device, setup)
        self.captured: dict[Mode, CapturedCommit] = {}
        self.batches: dict[tuple[Mode, Bucket], StaticBatch] = {}
        for mode in MODES:
            budgets = [3, 7, 4 * setup.D] if mode == "compact" else None
            choices = buckets(BATCHES, setup.D, mode, budgets)
            captured = CapturedCommit(
                self.commit, choices, draft=setup.D, mode=mode, graphs=device == "cuda"
            )
            captured.warmup()
            captured.capture()
            self.captured[mode] = captured
            for choice in choices:
                self.batches[mode, choice] = StaticBatch(choice, setup.D, device, mode)

    def clear(self) -> None:
        super().clear()
        self.step: Step | None = None
        graphs = (batch for x in self.captured.values() for batch in x.batches.values())
        for batch in (*graphs, *self.batches.values()):
            batch.rows.zero_()
            batch.req_indices.fill_(-1)

    def drop(self) -> None:
        """Forget what was verified."""
        self.step, self.verified = None, []

    def convs_after(self, request: Request, tokens: list[int]) -> list[list[Tensor]]:
        """Of each convolution its state [L, C, W-1] before and after each token."""
        states = []
        for i, table in enumerate(self.layers.conv):
            old = self.taps(self.want[f"conv_state_{i}"][:, request.slot])
            inputs = torch.cat([old, table[:, tokens].transpose(1, 2)], dim=2)
            states.append(list(inputs.unfold(2, old.shape[2], 1).unbind(2)))
        return states

    def values(self, state: Tensor, convs: list[Tensor]) -> dict[str, Tensor]:
        """What a slot holds with this state and these conv states."""
        named = {f"conv_state_{i}": self.taps(x) for i, x in enumerate(convs)}
        return {"state": state, **named}

    def advance(
        self, request: Request, plain: Tensor, exact: Tensor, convs: list[Tensor], n: int
    ) -> None:
        """A request has taken n tokens."""
        self.put(request.slot, self.values(plain, convs))
        request.length, request.exact = request.length + n, exact
        error = oracle.state_error(self.pools.state[:, request.slot].flatten(0, 1), exact)
        assert error <= 1e-6, (
            f"slot {request.slot} after {n} tokens is {error:.1e} off fp64"
        )

    def verify(
        self, mode: Mode, requests: list[Request], drafts: list[list[int]],
        caps: list[int], window_rows: list[int] | None = None,
    ) -> None:  # fmt: skip
        """Run a batch through every layer; ``caps`` are its verify_lens."""
        rows = live_rows(
            self.tensor([r.entry for r in requests]),
            self.tensor([r.length for r in requests]),
            self.tensor(drafts).reshape(-1, self.setup.D), self.tensor(caps),
        )  # fmt: skip
        budget = sum(caps) if mode == "compact" else None
        choice = self.captured[mode].bucket(len(requests), budget)
        batch = self.batches[mode, choice]
        batch.fill(rows)
        places = (
            batch.window_indices if window_rows is None
            else self.tensor(window_rows[: choice.batch])
        )  # fmt: skip
        shown = [row[:n] for row, n in zip(drafts, caps, strict=True)]
        shown = shown if mode == "compact" else drafts
        out = self.forward(batch, places, requests, shown)
        slots = self.tensor([r.slot for r in requests])
        outputs, plain = self.layers.decode(self.want["state"][:, slots], shown)
        exact_outputs, exact = self.layers.exact([r.exact for r in requests], shown)
        want, start = torch.zeros_like(out), 0
        for i, row in enumerate(shown):
            for t, value in enumerate(outputs[i]):
                want[:, start + t] = value
            mine = out[:, start : start + len(row)].transpose(0, 1).flatten(1, 2)
            oracle.assert_outputs(mine, exact_outputs[i])
            start += len(row)
            self.store(int(places[i]), row)
        bits_equal(out, want, "outputs")
        convs = [self.convs_after(*pair) for pair in zip(requests, shown, strict=True)]
        self.step = Step(
            mode, batch, rows, places, requests, drafts, caps, plain, exact, convs
        )
        self.verified = requests

    def forward(
        self, batch: StaticBatch, places: Tensor, requests: list[Request],
        shown: list[list[int]],
    ) -> Tensor:  # fmt: skip
        """A target's forward pass over its linear-attention layers: outputs [L, N, HV, V]."""
        for i, table in enumerate(self.layers.conv):
            for row, r, tokens in zip(places.tolist(), requests, shown, strict=False):
                old = self.taps(self.pools.conv_states[i][:, r.slot])[:, :, 1:]
                inputs = torch.cat([old, table[:, tokens].transpose(1, 2)], dim=2)
                for pool in (self.pools.conv_windows[i], self.want[f"conv_window_{i}"]):
                    self.taps(pool[:, row])[:, :, : inputs.shape[2]] = inputs
        cu_seqlens = batch.cu_seqlens()
        tokens, slots = batch.pack(cu_seqlens), batch.slots(self.commit.slot_map)
        return torch.stack([
            ops.verify(
                *self.layers.arguments(layer, tokens), self.pools.state[layer],
                *(window[layer] for window in self.pools.windows), slots, cu_seqlens,
                places, lower_bound=self.setup.model.lower_bound,
            )
            for layer in range(self.setup.model.layers)
        ])  # fmt: skip

    def store(self, row: int, tokens: list[int]) -> None:
        """A window row holds these tokens' inputs; what lies behind them stays."""
        for name in WINDOWS:
            values = self.layers.table[name.removesuffix("_window")][:, tokens]
            self.want[name][:, row, :, : len(tokens)] = values.transpose(1, 2)

    def commit_step(self, way: str, accept_lens: list[int], bonus: list[int]) -> None:
        """Commit what was verified: the fold, the convolutions and the snapshots."""
        step, b = self.step, len(accept_lens)
        self.drop()
        decided = getattr(self, f"commit_{way}")(step, accept_lens, bonus)
        if decided is not None:
            lengths = step.rows[:, 1].tolist()
            after = [sum(pair) for pair in zip(lengths, accept_lens, strict=True)]
            got = [x[:b].tolist() for x in decided]
            want = [accept_lens, bonus, after]
            assert got == want, f"decided {got}, not {want}: {decided._fields}"
        for i, (r, n) in enumerate(zip(step.requests, accept_lens, strict=True)):
            if n and r in self.running():
                convs = [[states[t] for states in step.convs[i]] for t in range(n + 1)]
                self.snapshot(r, step.plain[i], step.exact[i], convs)
                self.advance(r, step.plain[i][n], step.exact[i][n], convs[n], n)
                r.anchor = bonus[i]
        self.map()

    def snapshot(
        self, request: Request, plain: list[Tensor], exact: list[Tensor],
        convs: list[list[Tensor]],
    ) -> None:  # fmt: skip
        """The last boundary that len(convs) - 1 tokens cross is in the snapshot slot."""
        length = request.length + len(convs) - 1
        boundary = length // self.setup.interval * self.setup.interval
        if request.track < 0 or boundary <= request.length:
            return
        at = boundary - request.length
        self.put(request.track, self.values(plain[at], convs[at]))
        self.snapshots[request.track] = boundary, exact[at]
        request.track = next(iter(self.free_slots()), -1)

    def targets(self, step: Step, accept_lens: list[int], bonus: list[int]) -> Tensor:
        """Greedy tokens that agree with every draft but the first that is not accepted."""
        rows = []
        for drafts, n, cap, token in zip(
            step.drafts, accept_lens, step.caps, bonus, strict=True
        ):
            row = [*drafts[1:], 0]
            if n:
                row[n - 1] = token
            rows.append(row[:cap] if step.mode == "compact" else row)
        if step.mode == "compact":
            return self.tensor([token for row in rows for token in row])
        return self.tensor(rows).reshape(-1, self.setup.D)

    def commit_captured(
        self, step: Step, accept_lens: list[int], bonus: list[int]
    ) -> Committed:
        """A replay of the smallest bucket's graph; on the CPU the same, eagerly."""
        return self.captured[step.mode](step.rows, self.targets(step, accept_lens, bonus))

    def commit_eager(
        self, step: Step, accept_lens: list[int], bonus: list[int]
    ) -> Committed:
        batch, cu_seqlens = step.batch, step.batch.cu_seqlens()
        given = self.targets(step, accept_lens, bonus).flatten()
        targets = torch.zeros(batch.bucket.tokens, device=self.device, dtype=torch.int64)
        targets[: len(given)] = given
        if cu_seqlens is None:
            targets = targets.view(batch.draft_tokens.shape)
        return self.commit(
            batch.req_indices, batch.seq_lens, batch.draft_tokens, targets,
            batch.verify_lens, cu_seqlens,
        )  # fmt: skip

    def commit_decided(
        self, step: Step, accept_lens: list[int], bonus: list[int]
    ) -> Committed:
        """After another acceptance, whose padding rows hold anything."""
        tail = step.batch.bucket.batch - len(accept_lens)
        return self.commit.commit(
            step.batch.req_indices, step.batch.seq_lens,
            self.tensor(accept_lens + [self.setup.D] * tail).int(),
            self.tensor(bonus + [VOCAB] * tail),
        )  # fmt: skip

    def commit_ops(self, step: Step, accept_lens: list[int], bonus: list[int]) -> None:
        """As an engine calls the ops: padding rows are old rows of requests that are live."""
        b, B, device = len(accept_lens), step.batch.bucket.batch, self.device
        names = [r.entry for r in self.running()] or [0]
        entries = step.batch.req_indices.clone()
        entries[b:] = self.tensor((names * B)[: B - b])
        taken = self.tensor(accept_lens + [self.setup.D] * (B - b))
        slots, last, tracks, at = (
            torch.full((B,), 99, device=device, dtype=torch.int32) for _ in range(4)
        )
        ops.commit_indices(
            taken, step.batch.seq_lens, entries, self.commit.slot_map, self.tensor([b]),
            slots, last, tracks, at, track_slot_map=self.commit.track_slot_map,
            track_interval=self.setup.interval,
        )  # fmt: skip
        options = {
            "window_indices": step.window_rows, "track_indices": tracks, "track_steps": at
        }  # fmt: skip
        ops.fold(self.pools.state, *self.pools.windows, slots, taken, **options)
        ops.conv_commit(
            self.pools.conv_states, self.pools.conv_windows, slots, taken,
            channels_last=self.setup.channels_last, **options,
        )  # fmt: skip

    def decode(self, rows: list[Request | None], following: list[int]) -> None:
        """One token of each row without drafts; None is padding. ``following``: next anchors."""
        self.drop()  # what was verified started from the state before
        requests = [r for r in rows if r]
        tokens = [[r.anchor] for r in requests]
        index = self.tensor([r.slot if r else -1 for r in rows])
        given = self.tensor([r.anchor if r else 0 for r in rows])
        slots = self.tensor([r.slot for r in requests])
        outputs, plain = self.layers.decode(self.want["state"][:, slots], tokens)
        exact_outputs, exact = self.layers.exact([r.exact for r in requests], tokens)
        out = torch.stack([
            ops.decode(
                *self.layers.arguments(layer, given), self.pools.state[layer], index,
                lower_bound=self.setup.model.lower_bound,
            )
            for layer in range(self.setup.model.layers)
        ])  # fmt: skip
        want, live = torch.zeros_like(out), [i for i, r in enumerate(rows) if r]
        for i, r in enumerate(requests):
            want[:, live[i]] = outputs[i][0]
            oracle.assert_outputs(out[:, live[i]].flatten(0, 1)[None], exact_outputs[i])
            convs = [states[1] for states in self.convs_after(r, tokens[i])]
            for pool, value in zip(self.pools.conv_states, convs, strict=True):
                pool[:, r.slot] = self.taps(value)
            self.advance(r, plain[i][1], exact[i][1], convs, 1)
            r.anchor = following[i]
        bits_equal(out, want, "outputs")
