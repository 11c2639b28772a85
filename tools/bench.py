"""Time the ops on a GPU: python tools/bench.py [--model NAME ...] [--out FILE].

Each figure is the median over replays of one CUDA graph that runs an op for every
layer of a model, on random data, with the L2 cache flushed before each replay. A
model's figures count only after its outputs and states were checked, bit for bit,
against token-by-token decoding in the same run. floor = the state's bytes over the
copy bandwidth measured in the same run: one read for verify, a read and a write for
fold and decode. Host figures are microseconds of one eager call, launch included.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from replayssm import ops

DEVICE = "cuda"
REPLAYS = 20


@dataclass(frozen=True)
class Model:
    """Linear-attention layers of one model on one GPU."""

    layers: int
    H: int
    HV: int
    D: int = 8
    kda: bool = False
    lower_bound: float | None = None
    K: int = 128
    V: int = 128


MODELS = {
    "qwen3-next-80b": Model(36, 16, 32, D=4),
    "qwen3.5-35b": Model(30, 16, 32),
    "qwen3.5-27b": Model(48, 16, 48),
    "qwen3.5-397b-tp4": Model(45, 4, 16, D=4),
    "kimi-linear-48b": Model(20, 32, 32, kda=True),
    "kimi-k3-tp8": Model(69, 12, 12, kda=True, lower_bound=-5.0),
    "ling-3.0-flash": Model(35, 32, 32, D=9, kda=True, lower_bound=-5.0),
}


class Problem:
    """Random activations and pools of all layers of a model, B requests."""

    def __init__(self, model: Model, B: int) -> None:
        L, H, HV, D, K, V = (
            model.layers, model.H, model.HV, model.D, model.K, model.V
        )  # fmt: skip
        self.model, self.B, N = model, B, B * D

        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(*shape, device=DEVICE, dtype=dtype)

        gate, fp32 = ((HV, K) if model.kda else (HV,)), torch.float32
        self.tokens = (
            normal(L, N, H, K), normal(L, N, H, K), normal(L, N, HV, V),
            normal(L, N, *gate), normal(L, N, HV),
        )  # fmt: skip
        self.A_log, self.dt_bias = normal(L, HV, dtype=fp32), normal(L, *gate, dtype=fp32)
        self.state = normal(L, B, HV, V, K, dtype=fp32)
        g = (L, B, HV, D, K) if model.kda else (L, B, HV, D)
        self.windows = (
            normal(L, B, H, D, K), normal(L, B, HV, D, V), normal(*g, dtype=fp32),
            normal(L, B, HV, D, dtype=fp32),
        )  # fmt: skip
        self.slots = torch.randperm(B, device=DEVICE).int()

    def arguments(self, layer: int, t: int | None = None) -> tuple[torch.Tensor, ...]:
        """verify's tensors of one layer, or decode's of its token t."""
        tokens = [x[layer] for x in self.tokens]
        if t is not None:
            tokens = [x.unflatten(0, (self.B, self.model.D))[:, t] for x in tokens]
        windows = [] if t is not None else [window[layer] for window in self.windows]
        gates = self.A_log[layer], self.dt_bias[layer]
        return *tokens, *gates, self.state[layer], *windows, self.slots

    def verify(self, layer: int) -> torch.Tensor:
        return ops.verify(*self.arguments(layer), lower_bound=self.model.lower_bound)

    def decode(self, layer: int, t: int = 0) -> torch.Tensor:
        return ops.decode(*self.arguments(layer, t), lower_bound=self.model.lower_bound)

    def fold(self, accept_lens: torch.Tensor) -> None:
        ops.fold(self.state, *self.windows, self.slots, accept_lens)

    def accept(self, rows: int) -> torch.Tensor:
        return torch.full((self.B,), rows, device=DEVICE, dtype=torch.int32)

    def every_layer(self, op) -> None:
        for layer in range(self.model.layers):
            op(layer)


def gate(model: Model) -> None:
    """verify + fold of all D rows must equal D decodes, bit for bit."""
    p = Problem(model, 3)
    start, D = p.state.clone(), model.D
    outputs = [p.verify(layer) for layer in range(model.layers)]
    p.fold(p.accept(D))
    folded = p.state.clone()
    p.state.copy_(start)
    for t in range(D):
        for layer in range(model.layers):
            out = p.decode(layer, t)
            if not torch.equal(out, outputs[layer].unflatten(0, (3, D))[:, t]):
                sys.exit(
                    f"outputs of layer {layer}, token {t} are not decode's: no figures"
                )
    if not torch.equal(p.state, folded):
        sys.exit("the folded state is not decode's: no figures")


def event_us(run) -> float:
    """Microseconds of the device work that run queues."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000


def device_us(run, flush: torch.Tensor) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(REPLAYS):
        flush.zero_()
        times.append(event_us(graph.replay))
    return statistics.median(times)


def host_us(run, calls: int = 300) -> float:
    """Microseconds the host spends on one eager call, the device kept from blocking."""
    for _ in range(50):
        run()
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls // 5):
            run()
        times.append((time.perf_counter() - start) / (calls // 5) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def copy_bandwidth() -> float:
    """GB/s of a large device-to-device copy, bytes read and written both counted."""
    source = torch.randn(2**29, device=DEVICE)
    target = torch.empty_like(source)
    times = []
    for _ in range(50 + REPLAYS):  # the first 50 raise the clocks
        # Not in a graph: a captured copy is a memcpy node, which is slower.
        times.append(event_us(lambda: target.copy_(source)))
    return 2 * source.nbytes / statistics.median(times[50:]) / 1e3


def figures(name: str, batches: list[int], copy_gbs: float, flush: torch.Tensor):
    model = MODELS[name]
    gate(model)
    for B in batches:
        p = Problem(model, B)
        read = p.state.nbytes / copy_gbs / 1e3
        runs = [
            ("verify", 0, lambda p=p: p.every_layer(p.verify), read),
            ("decode", 1, lambda p=p: p.every_layer(p.decode), 2 * read),
        ]
        for rows in sorted({(model.D + 1) // 2, model.D}):
            accept_lens = p.accept(rows)
            runs.append(("fold", rows, lambda p=p, a=accept_lens: p.fold(a), 2 * read))
        for op, accept, run, floor in runs:
            yield {
                "model": name, "variant": "kda" if model.kda else "gdn", "op": op, "B": B,
                "D": model.D, "accept": accept, "exact": True,
                "us": round(device_us(run, flush), 1), "floor_us": round(floor, 1),
                "peers": {},
            }  # fmt: skip


def host_figures() -> dict[str, float]:
    p = Problem(MODELS["qwen3.5-35b"], 1)
    windowed, single, accept_lens = p.arguments(0), p.arguments(0, 0), p.accept(4)
    return {
        "verify": round(host_us(lambda: ops.verify(*windowed)), 1),
        "decode": round(host_us(lambda: ops.decode(*single)), 1),
        "fold": round(host_us(lambda: p.fold(accept_lens)), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench: needs a CUDA device")
    torch.manual_seed(0)
    flush = torch.empty(2**28, dtype=torch.int8, device=DEVICE)
    copy_gbs = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {copy_gbs:.0f} GB/s; us for all layers")
    print(
        f"{'model':18} {'op':7} {'B':>4} {'D':>3} {'accept':>6} {'us':>9} {'floor':>8} share"
    )
    rows = []
    for name in options.model:
        for row in figures(name, options.batch, copy_gbs, flush):
            rows.append(row)
            print(
                f"{row['model']:18} {row['op']:7} {row['B']:4} {row['D']:3} {row['accept']:6} "
                f"{row['us']:9.1f} {row['floor_us']:8.1f} {row['floor_us'] / row['us']:5.0%}",
                flush=True,
            )
    host = host_figures()
    print("host us a call:", ", ".join(f"{op} {us}" for op, us in host.items()))
    if options.out:
        header = {
            "card": torch.cuda.get_device_name(), "driver": driver(),
            "torch": torch.__version__, "triton": metadata.version("triton"),
            "commit": revision(), "copy_gbs": round(copy_gbs), "host_us": host,
        }  # fmt: skip
        options.out.write_text(json.dumps({**header, "rows": rows}, indent=1) + "\n")


def driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return _first_line(query)


def revision() -> str:
    return _first_line(["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"])


def _first_line(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.split("\n")[0]
    except OSError:
        return ""


if __name__ == "__main__":
    main()
