"""Time whole steps on a GPU, mode against mode: python tools/bench_step.py [--out FILE].

A step is one CUDA graph: every layer's verify, then the commit (accept, commit_indices,
fold, conv_commit). cap-accept verifies all B * D rows and caps what it accepts; compact
verifies only the N rows that the budget admits, packed. Both get the same lengths, drafts
and targets, and must decide and commit the same, bit for bit, before they are timed. The
rest of the target's forward is not here: compact saves the same share of it.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

from bench import DEVICE, MODELS, REPLAYS, Model, event_us
from replayssm import ops
from replayssm.graph import (
    Bucket,
    Captured,
    Commit,
    LinearAttention,
    Pools,
    StaticBatch,
    live_rows,
)


class Step:
    """A model's verify and commit for B requests, as a function of a StaticBatch."""

    def __init__(self, model: Model, B: int, mode: str, share: float) -> None:
        self.model, self.mode, D = model, mode, model.D
        layers = LinearAttention(
            model.layers, model.H, model.HV, model.K, model.V,
            "kda" if model.kda else "gdn", lower_bound=model.lower_bound,
        )  # fmt: skip
        self.pools = Pools(layers, slots=B, requests=B, window=D, device=DEVICE)
        draw = torch.Generator(DEVICE).manual_seed(0)
        for pool in (self.pools.state, *self.pools.conv_states, *self.pools.conv_windows):
            pool.normal_(generator=draw)
        self.commit = Commit(
            self.pools, torch.randperm(B, generator=draw, device=DEVICE).int()
        )

        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(*shape, generator=draw, device=DEVICE, dtype=dtype)

        gate = (model.HV, model.K) if model.kda else (model.HV,)
        L, N = model.layers, B * D
        self.A_log = normal(L, model.HV, dtype=torch.float32)
        self.dt_bias = normal(L, *gate, dtype=torch.float32)
        tokens = (
            normal(L, N, model.H, model.K), normal(L, N, model.H, model.K),
            normal(L, N, model.HV, model.V), normal(L, N, *gate), normal(L, N, model.HV),
        )  # fmt: skip
        lens = torch.full((B,), max(round(D * share), 1), device=DEVICE)
        # Unequal lengths of the same sum, as confidences give them.
        spread = torch.arange(B, device=DEVICE) % 2 * 2 - 1
        lens = (
            (lens + spread * min(2, int(lens[0]) - 1)).clamp(max=D) if B % 2 == 0 else lens
        )
        drafts, targets = torch.randint(0, 2, (2, B, D), generator=draw, device=DEVICE)
        index = torch.arange(B, device=DEVICE)
        self.rows = live_rows(index, index, drafts, lens)
        self.bucket = Bucket(B, N if mode == "cap-accept" else int(lens.sum()))
        self.tokens, self.targets = tokens, targets
        if mode == "compact":
            batch = StaticBatch(self.bucket, D, DEVICE, mode)
            batch.fill(self.rows)
            row, column, _ = batch.places(batch.cu_seqlens())
            self.tokens = tuple(x[:, row * D + column] for x in tokens)
            self.targets = targets[row, column]

    def __call__(self, batch: StaticBatch):
        slots, cu_seqlens = batch.slots(self.commit.slot_map), batch.cu_seqlens()
        outputs = [
            ops.verify(
                *(x[layer] for x in self.tokens), self.A_log[layer], self.dt_bias[layer],
                self.pools.state[layer], *(window[layer] for window in self.pools.windows),
                slots, cu_seqlens, batch.window_indices, lower_bound=self.model.lower_bound,
            )
            for layer in range(self.model.layers)
        ]  # fmt: skip
        decided = self.commit(
            batch.req_indices, batch.seq_lens, batch.drafts(cu_seqlens), self.targets, batch.verify_lens,
            cu_seqlens,
        )  # fmt: skip
        return decided, outputs

    def captured(self) -> Captured:
        graphs = Captured(
            self, [self.bucket], draft=self.model.D, device=DEVICE, mode=self.mode
        )  # fmt: skip
        graphs.warmup()
        graphs.capture()
        graphs.batches[self.bucket].fill(self.rows)
        return graphs


def compare(name: str, B: int, share: float, flush: torch.Tensor) -> dict:
    """Median us of a step in both modes, replays interleaved."""
    steps = {mode: Step(MODELS[name], B, mode, share) for mode in ("cap-accept", "compact")}
    graphs = {mode: step.captured() for mode, step in steps.items()}
    decided = {mode: graphs[mode].replay(steps[mode].bucket)[0] for mode in steps}
    for one, other in zip(*decided.values(), strict=True):
        if not torch.equal(one, other):
            sys.exit(f"{name}, B = {B}: the modes decide differently: no figures")
    if not torch.equal(*(step.pools.state for step in steps.values())):
        sys.exit(f"{name}, B = {B}: the modes commit differently: no figures")
    times: dict[str, list[float]] = {mode: [] for mode in steps}
    for _ in range(REPLAYS):
        for mode, step in steps.items():
            flush.zero_()
            times[mode].append(event_us(lambda m=mode, s=step: graphs[m].replay(s.bucket)))
    median = {mode: round(statistics.median(x), 1) for mode, x in times.items()}
    tokens = {mode: step.bucket.tokens for mode, step in steps.items()}
    return {"model": name, "op": "step", "B": B, "D": MODELS[name].D, "us": median,
            "tokens": tokens, "share": share}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["qwen3.5-27b"])
    parser.add_argument("--batch", nargs="+", type=int, default=[8, 12, 16])
    parser.add_argument("--budget", type=float, default=0.5, help="share of B * D rows")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_step: needs a CUDA device")
    flush = torch.empty(2**28, dtype=torch.int8, device=DEVICE)
    rows = []
    print(f"{torch.cuda.get_device_name()}: us of a step (verify of all layers + commit)")
    for name in options.model:
        for B in options.batch:
            row = compare(name, B, options.budget, flush)
            rows.append(row)
            cap, compact = row["us"]["cap-accept"], row["us"]["compact"]
            print(
                f"{name:16} B {B:3}  cap-accept {cap:8.1f}  compact {compact:8.1f}  {cap / compact:.2f}x",
                flush=True,
            )
    if options.out:
        options.out.write_text(
            json.dumps({"card": torch.cuda.get_device_name(), "rows": rows}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
