"""Time whole steps on a GPU, mode against mode: python tools/bench/steps.py [--out FILE].

A step is one CUDA graph: every layer's verify, then the commit (accept, commit_indices,
fold, conv_commit). cap-accept verifies all B * D rows and caps what it accepts, and may do
so with exact=False; compact verifies only the N rows that the budget admits, packed. All
get the same lengths, drafts and targets, and must decide and commit the same, bit for bit,
before they are timed. The rest of the target's forward is not here: compact saves the same
share of it.
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

# Label -> mode, exact.
STEPS = {
    "cap-accept": ("cap-accept", True),
    "compact": ("compact", True),
    "cap-accept, exact=False": ("cap-accept", False),
}


class Step:
    """A problem's verify and commit, as a function of a StaticBatch."""

    def __init__(self, problem: Problem, mode: str, exact: bool, share: float) -> None:
        self.problem, self.mode, self.exact = problem, mode, exact
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
                exact=self.exact,
            )
            for layer in range(p.model.layers)
        ]  # fmt: skip
        decided = p.commit(
            batch.req_indices, batch.seq_lens, batch.draft_tokens, self.targets,
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
    """Median us of each step, replays interleaved."""
    model = MODELS[name]
    steps = {label: Step(Problem(model, B), *kind, share) for label, kind in STEPS.items()}
    graphs = {label: step.captured() for label, step in steps.items()}
    decided = [graphs[label].replay(step.bucket)[0] for label, step in steps.items()]
    states = [step.problem.state for step in steps.values()]
    for other, state in zip(decided[1:], states[1:], strict=True):
        if not all(map(torch.equal, decided[0], other)):
            sys.exit(f"{name}, B = {B}: the modes decide differently: no figures")
        if not torch.equal(states[0], state):
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
        sys.exit("steps: needs a CUDA device")
    timer, head, rows = Timer(), machine(), []
    print(f"{head['card']}: us of a step (verify of all layers + commit)")
    for name in options.model:
        for B in options.batch:
            row = compare(name, B, options.budget, timer)
            rows.append(row)
            cap, compact = row["us"]["cap-accept"], row["us"]["compact"]
            inexact = row["us"]["cap-accept, exact=False"]
            print(
                f"{name:16} B {B:3}  cap-accept {cap:8.1f}  compact {compact:8.1f}  "
                f"{cap / compact:.2f}x  cap-accept, exact=False {inexact:8.1f}",
                flush=True,
            )
    if options.out:
        options.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
