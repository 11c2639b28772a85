"""Time whole steps on a GPU, mode against mode: python tools/bench_step.py [--out FILE].

A step is one CUDA graph: every layer's verify, then the commit (accept, commit_indices,
fold, conv_commit). cap-accept verifies all B * D rows and caps what it accepts; compact
verifies only the N rows that the budget admits, packed. Both get the same lengths, drafts
and targets, and must decide and commit the same, bit for bit, before they are timed. The
rest of the target's forward is not here: compact saves the same share of it.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from problem import MODELS, Problem
from replayssm import ops
from replayssm.graph import Bucket, Captured, StaticBatch, live_rows
from timing import Timer, machine


class Step:
    """A problem's verify and commit, as a function of a StaticBatch."""

    def __init__(self, problem: Problem, mode: str, share: float) -> None:
        self.problem, self.mode = problem, mode
        B, D, index = problem.B, problem.model.D, problem.requests
        draw = torch.Generator(index.device).manual_seed(1)
        lens = torch.full_like(index, max(round(D * share), 1))
        if B % 2 == 0:
            # Unequal lengths of the same sum, as confidences give them.
            spread = (index % 2 * 2 - 1) * min(2, int(lens[0]) - 1)
            lens = (lens + spread).clamp(max=D)
        drafts, self.targets = torch.randint(
            0, 2, (2, B, D), generator=draw, device=index.device
        )
        self.rows = live_rows(index, index, drafts, lens)
        self.bucket = Bucket(B, B * D if mode == "cap-accept" else int(lens.sum()))
        self.tokens = problem.tokens
        if mode == "compact":
            batch = StaticBatch(self.bucket, D, index.device, mode)
            batch.fill(self.rows)
            row, column, _ = batch.places(batch.cu_seqlens())
            self.tokens = tuple(x[:, row * D + column] for x in problem.tokens)
            self.targets = self.targets[row, column]

    def __call__(self, batch: StaticBatch):
        p, cu_seqlens = self.problem, batch.cu_seqlens()
        slots = batch.slots(p.slots)
        outputs = [
            ops.verify(
                *(x[layer] for x in self.tokens), p.A_log[layer], p.dt_bias[layer],
                p.state[layer], *(window[layer] for window in p.windows), slots,
                cu_seqlens, batch.window_indices, lower_bound=p.model.lower_bound,
            )
            for layer in range(p.model.layers)
        ]  # fmt: skip
        decided = p.commit(
            batch.req_indices, batch.seq_lens, batch.drafts(cu_seqlens), self.targets,
            batch.verify_lens, cu_seqlens,
        )  # fmt: skip
        return decided, outputs

    def captured(self) -> Captured:
        graphs = Captured(
            self, [self.bucket], draft=self.problem.model.D, mode=self.mode,
            device=self.problem.slots.device,
        )  # fmt: skip
        graphs.warmup()
        graphs.capture()
        graphs.batches[self.bucket].fill(self.rows)
        return graphs


def compare(name: str, B: int, share: float, timer: Timer) -> dict:
    """Median us of a step in both modes, replays interleaved."""
    model = MODELS[name]
    steps = {
        mode: Step(Problem(model, B), mode, share) for mode in ("cap-accept", "compact")
    }
    graphs = {mode: step.captured() for mode, step in steps.items()}
    decided = {mode: graphs[mode].replay(steps[mode].bucket)[0] for mode in steps}
    for one, other in zip(*decided.values(), strict=True):
        if not torch.equal(one, other):
            sys.exit(f"{name}, B = {B}: the modes decide differently: no figures")
    if not torch.equal(*(step.problem.state for step in steps.values())):
        sys.exit(f"{name}, B = {B}: the modes commit differently: no figures")
    us = timer.medians(
        {
            mode: lambda m=mode, s=step: graphs[m].replay(s.bucket)
            for mode, step in steps.items()
        }
    )
    return {
        "model": name, "op": "step", "B": B, "D": model.D,
        "us": {mode: round(x, 1) for mode, x in us.items()},
        "tokens": {mode: step.bucket.tokens for mode, step in steps.items()},
        "share": share,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["qwen3.5-27b"])
    parser.add_argument("--batch", nargs="+", type=int, default=[8, 12, 16])
    parser.add_argument("--budget", type=float, default=0.5, help="share of B * D rows")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_step: needs a CUDA device")
    timer, head, rows = Timer(), machine(), []
    print(f"{head['card']}: us of a step (verify of all layers + commit)")
    for name in options.model:
        for B in options.batch:
            row = compare(name, B, options.budget, timer)
            rows.append(row)
            cap, compact = row["us"]["cap-accept"], row["us"]["compact"]
            print(
                f"{name:16} B {B:3}  cap-accept {cap:8.1f}  compact {compact:8.1f}  "
                f"{cap / compact:.2f}x",
                flush=True,
            )
    if options.out:
        options.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
