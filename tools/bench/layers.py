"""Time verify and decode among other kernels: python tools/bench/layers.py [--out FILE].

tools/bench/bench.py runs an op's layers one right after another. In an engine each stands between
others, which fill the caches and the gaps between launches. Here one CUDA graph has, for
every layer, the product of the tokens with a 2048 x 12288 matrix, an addition as large as
their 8192 conv inputs, the op, and the addition again; the time of the same graph without
the op is taken off. Launch parameters are chosen by such figures where the two differ.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from correct import mistake
from problem import MODELS, Problem
from timing import Timer, machine

OPS = {
    "verify": Problem.verify,
    "verify, exact=False": lambda problem, layer: problem.verify(layer, exact=False),
    "decode": Problem.decode,
}


class Layers:
    """A problem's layers, each op of them alone or between other kernels."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        N, device = problem.B * problem.model.D, problem.slots.device
        half = {"device": device, "dtype": torch.bfloat16}
        self.hidden = torch.randn(N, 2048, **half)
        self.weight = torch.randn(2048, 12288, **half)
        self.conv = torch.randn(N, 8192, **half)
        self.product, self.sum = torch.empty(N, 12288, **half), torch.empty_like(self.conv)

    def alone(self, op: Callable) -> None:
        self.problem.every_layer(lambda layer: op(self.problem, layer))

    def between(self, op: Callable | None = None) -> None:
        def layer_of_an_engine(layer: int) -> None:
            torch.mm(self.hidden, self.weight, out=self.product)
            torch.add(self.conv, 1.0, out=self.sum)
            if op is not None:
                op(self.problem, layer)
            torch.add(self.conv, 1.0, out=self.sum)

        self.problem.every_layer(layer_of_an_engine)


def figures(name: str, B: int, timer: Timer, device: str = "cuda") -> dict:
    """Median us of each op over all layers, replays interleaved: {op: {place: us}}."""
    layers = Layers(Problem(MODELS[name], B, device))
    runs = {("", "others"): timer.capture(layers.between)}
    for label, op in OPS.items():
        runs[label, "alone"] = timer.capture(lambda op=op: layers.alone(op))
        runs[label, "between"] = timer.capture(lambda op=op: layers.between(op))
    us = timer.medians(runs)
    others = us["", "others"]
    times = {
        label: {
            "alone": round(us[label, "alone"], 1),
            "between": round(us[label, "between"] - others, 1),
        }
        for label in OPS
    }
    return {
        "model": name, "B": B, "D": layers.problem.model.D, "others_us": round(others, 1),
        "us": times,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", nargs="+", choices=MODELS, default=["qwen3.5-35b", "kimi-linear-48b"]
    )
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 8, 16, 32])
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("layers: needs a CUDA device")
    timer, head, rows = Timer(), machine(), []
    print(f"{head['card']}: us for all layers, alone (among other kernels)")
    for name in options.model:
        if found := mistake(MODELS[name]):
            sys.exit(f"{name}: {found}: no figures")
        for B in options.batch:
            row = figures(name, B, timer)
            rows.append(row)
            shown = "  ".join(
                f"{label} {us['alone']:.1f} ({us['between']:.1f})"
                for label, us in row["us"].items()
            )
            print(f"{name:16} B {B:3}  {shown}", flush=True)
    if options.out:
        options.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
