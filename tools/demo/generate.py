"""Greedy text from `model.HybridLM`: plain, and speculative through `DecodeLoop`.

Letters: B prompts, D rows of a window.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drafters import DFlash, gather_context
from model import HybridLM
from replayssm.graph import (
    Bucket,
    Committed,
    DecodeLoop,
    Mode,
    StaticBatch,
    choose_verify_lens,
    live_rows,
)
from session import Session

Heard = Callable[[int, bytes], None]
# Steps that are queued before their text is read, where a step is a graph.
QUEUED = 8


class Options(NamedTuple):
    """How to speculate. cut: DSpark in mode cap-accept accepts drafts while the probability
    that all are right is above it. budget: rows a step of mode compact verifies, as a share."""

    mode: Mode = "static"
    graphs: bool = False
    compile: bool = False
    cut: float = 0.3
    budget: float = 0.6


@dataclass
class Run:
    """What one way of decoding gave. `passes` are target passes over the whole batch,
    `setup` the seconds that compiling and capturing took beforehand."""

    texts: list[bytes]
    seconds: float
    passes: int
    accepted: Counter[int] = field(default_factory=Counter)
    setup: float = 0.0
    verified: int = 0
    computed: int = 0
    window_bytes: int = 0
    snapshot_bytes: int = 0


class Speculator:
    """A session, a drafter and the loop over both."""

    def __init__(
        self, session: Session, drafter: DFlash, embed: Tensor, count: int, options: Options
    ) -> None:
        """embed: the target's embedding. count: tokens a request, the first one apart."""
        self.session, self.drafter, self.embed = session, drafter, embed
        self.options, batch = options, len(session.requests)
        rows = batch * drafter.config.block
        if options.mode == "compact":
            rows = max(batch, round(options.budget * rows))
        self.bucket = Bucket(batch, rows)
        self.verified = torch.zeros((), dtype=torch.int64, device=embed.device)
        self.loop = DecodeLoop(
            session.commit, self._verify, self._propose, [self.bucket],
            draft=drafter.config.block, max_tokens=count, mode=options.mode,
            graphs=options.graphs,
        )  # fmt: skip
        if options.compile:
            # torch 2.11 takes fp64 -> fp32 -> fp64 for pointless, but a session rounds there
            # on purpose; only with all of its patterns can that one be turned off.
            self.loop.function = torch.compile(
                self.loop.function, fullgraph=True, dynamic=False,
                options={"pattern_matcher": False},
            )  # fmt: skip
        self.loop.warmup()
        self.loop.capture()

    def start(self, anchor: Tensor, count: int) -> None:
        """Drafts after the first new tokens [B], and starts the loop."""
        requests, length = self.session.requests, self.session.length
        drafts, lens = self.draft(requests, length, anchor)
        block = torch.cat((anchor[:, None], drafts), 1)
        rows = live_rows(requests, length, block, lens)
        self.loop.start(rows, torch.full_like(anchor, count), self.bucket.tokens)
        self.verified.zero_()

    def draft(
        self, requests: Tensor, length: Tensor, anchor: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Drafts [B, D - 1] and how many rows to verify [B], or None for all; a request of
        -1 is padding and gets 0."""
        live, features = requests >= 0, self.session.features
        request = torch.where(live, requests, len(features) - 1)
        width, options = self.drafter.config.context, self.options
        context, known = gather_context(features, request, length, width)
        drafts, trust = self.drafter.draft(context, known, anchor, self.embed)
        lens = None
        if options.mode == "cap-accept":
            lens = (1 + (trust.cumprod(1) >= options.cut).sum(1)) * live
        elif options.mode == "compact":
            lens = choose_verify_lens(trust, budget=self.bucket.tokens, live=live)
        return drafts, lens

    def _verify(self, batch: StaticBatch, cu_seqlens: Tensor | None) -> Tensor:
        self.verified.add_(batch.verify_lens.sum())
        return self.session.verify(batch, cu_seqlens)

    def _propose(
        self, batch: StaticBatch, committed: Committed
    ) -> tuple[Tensor, Tensor | None]:
        return self.draft(batch.req_indices, batch.seq_lens, batch.draft_tokens[:, 0])


def _prefill(
    target: HybridLM, prompts: list[Tensor], count: int, rows: int, ops: Any
) -> tuple[Session, Tensor]:
    """The session, with room for `count` more tokens, and each request's first new one."""
    # A request may overshoot by a window, and still has one to pad when it is finished.
    capacity = max(map(len, prompts)) + count + 2 * rows
    session = Session(target, len(prompts), capacity, rows, ops)
    return session, session.prefill(prompts)


def plain(
    target: HybridLM,
    prompts: list[Tensor],
    count: int,
    rows: int,
    ops: Any,
    told: Callable[[int], object],
) -> Run:
    """One token per request and pass; `told` hears how many are new."""
    session, first = _prefill(target, prompts, count, rows, ops)
    tokens = [first]
    start = time.perf_counter()
    for _ in range(count - 1):
        tokens.append(session.decode(tokens[-1]).argmax(-1))
        told(len(prompts))
    texts = [bytes(row) for row in torch.stack(tokens, 1).tolist()]
    return Run(texts, time.perf_counter() - start, count - 1)


def speculate(
    target: HybridLM,
    prompts: list[Tensor],
    count: int,
    drafter: DFlash,
    ops: Any,
    heard: Heard,
    options: Options,
) -> Run:
    """Up to D tokens per request and pass. `heard(i, new)` is told request i's new bytes."""
    session, anchor = _prefill(target, prompts, count, drafter.config.block, ops)
    texts = [bytearray([token]) for token in anchor.tolist()]
    for i, text in enumerate(texts):
        heard(i, bytes(text))
    run, begun = Run([], 0.0, 0), time.perf_counter()
    if count > 1:
        speculator = Speculator(session, drafter, target.embed.weight, count - 1, options)
        run.setup = time.perf_counter() - begun
        begun, loop = time.perf_counter(), speculator.loop
        speculator.start(anchor, count - 1)
        out = loop.read()
        while not out.done.all():
            loop.run(QUEUED if options.graphs else 1)
            for i, (tokens, text) in enumerate(zip(_read(out), texts, strict=True)):
                if new := bytes(tokens[len(text) - 1 :]):
                    heard(i, new)
                    text += new
        steps = out.steps
        run.accepted = Counter(dict(enumerate(steps.sum(0).tolist())))
        run.passes = int(steps.sum(1).max())
        run.verified = int(speculator.verified)
        run.computed = run.passes * speculator.bucket.tokens
    run.texts, run.seconds = [bytes(text) for text in texts], time.perf_counter() - begun
    size = session.pools.memory
    copies = len(session.requests) * session.pools.model.layers
    run.window_bytes, run.snapshot_bytes = size.windows // copies, size.snapshots // copies
    return run


def _read(out: Any) -> list[list[int]]:
    """Each request's tokens so far."""
    lens = out.lens.tolist()
    return [row[:n] for row, n in zip(out.tokens.tolist(), lens, strict=True)]
