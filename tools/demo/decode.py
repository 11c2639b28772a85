"""Speculative greedy decoding of text by a small hybrid language model, through the ops.

    python tools/demo/decode.py [--prompt TEXT | --file PATH] [--model gdn] [--algo dspark]
        [--mode static|cap-accept|compact] [--graphs | --no-graphs] [--compile]

All prompts are decoded as one batch, by `replayssm.graph.DecodeLoop`. The result is compared,
byte by byte, with plain token-by-token decoding through `ops.decode`; exit code 1 if they
differ, 2 for bad input.
"""

import argparse
import codecs
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm import tqdm

from drafters import STYLES, DFlash, DrafterConfig
from generate import Options, Run, plain, speculate
from model import TARGETS, Config, HybridLM
from replayssm import ops

HERE = Path(__file__).parent
# DFlash gives no confidences, so it has but one mode.
MODES = {"dflash": ("static",), "dspark": ("cap-accept", "static", "compact")}
# What a missing, damaged or foreign file can raise.
FILE_ERRORS = (OSError, SafetensorError, RuntimeError, ValueError, TypeError)
FILE_ERRORS += (ArithmeticError, AttributeError, LookupError)


class WeightsError(ValueError):
    """A weights file is missing, malformed or does not fit."""


def load_weights(path: Path, build: Callable[[dict[str, Any]], nn.Module]) -> nn.Module:
    """Builds what the file's header describes; upcasts once, to fp32. Nothing in the file is
    run, and no header can ask for more memory than the file itself."""
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name, tensor in tensors.items():
            if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32):
                raise TypeError(f"{name} must be 16 or 32 bit floats, got {tensor.dtype}")
            if not tensor.isfinite().all():
                raise ValueError(f"{name} holds inf or nan")
        fields = json.loads(header.get("config", "{}"))
        if fields.get("layers", 0) > len(tensors):
            raise ValueError(
                f"config asks for {fields['layers']} layers of {len(tensors)} tensors"
            )
        with torch.device("meta"):
            model = build(fields)
        loaded = {name: tensor.float() for name, tensor in tensors.items()}
        model.load_state_dict(loaded, assign=True)
    except FILE_ERRORS as e:
        raise WeightsError(f"{path}: {' '.join(str(e).split())[:200]}") from e
    return model.eval().requires_grad_(False)


def load_drafter(path: Path, style: str, target: Config) -> DFlash:
    drafter = load_weights(path, lambda fields: STYLES[style](DrafterConfig(**fields)))
    c = drafter.config
    got = (c.style, c.target, c.target_dim, c.features)
    want = (style, target.kind, target.dim, len(target.taps) * target.dim)
    if got != want:
        raise WeightsError(f"{path}: made for {got}, want {want}")
    return drafter


class Stream:
    """Shows the first request's text as it comes. Where a bar shares the terminal, whole
    lines go above it and the line being written is the bar's label."""

    def __init__(self, bar: tqdm) -> None:
        self.bar, self.line = bar, ""
        self.shared = not bar.disable and sys.stdout.isatty()
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def hear(self, i: int, new: bytes) -> None:
        self.bar.update(len(new))
        if i == 0:
            self.write(new)

    def write(self, new: bytes, final: bool = False) -> None:
        text = self.decoder.decode(new, final) + ("\n" if final else "")
        if not self.shared:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        *whole, self.line = (self.line + text).split("\n")
        for line in whole:
            self.bar.write(line, file=sys.stdout)
        self.bar.set_description_str(self.line[-48:])


def report(name: str, run: Run, base: Run, rows: int, options: Options) -> bool:
    """Prints the figures of one (model, algo). Returns whether both outputs are equal."""
    same = run.texts == base.texts
    batch, steps = len(base.texts), sum(run.accepted.values())
    tokens, passes = sum(map(len, run.texts)), base.passes * batch
    mean = sum(n * times for n, times in run.accepted.items()) / max(steps, 1)
    print(f"\n== {name}: {batch} prompts, {tokens} tokens, {steps} steps")
    how = ["CUDA graphs" if options.graphs else "no graphs"]
    how += ["compiled"] if options.compile else []
    print(f"mode           {options.mode}, {', '.join(how)}")
    print(f"accepted length per step, anchor included: mean {mean:.2f}")
    most = max(run.accepted.values(), default=1)
    for n in range(1, rows + 1):
        bar = "#" * round(40 * run.accepted[n] / most)
        print(f"  {n:2} {run.accepted[n]:5} {bar}".rstrip())
    saved = f"{passes - steps} saved ({(passes - steps) / max(passes, 1):.0%})"
    print(f"target passes  {steps} instead of {passes}: {saved}")
    print(f"as one batch   {run.passes} instead of {base.passes}")
    print(f"rows verified  {run.verified} of {steps * rows}, padded to {run.computed}")
    verdict = "byte-identical to" if same else "DIFFERS from"
    print(f"output         {verdict} plain decoding")
    ratio = f"{run.snapshot_bytes / run.window_bytes:.1f} times as many"
    print(f"window         {run.window_bytes:,} bytes a request and layer")
    print(f"snapshots      {run.snapshot_bytes:,} bytes, {ratio}")
    setup = f" after {run.setup:.1f} s of setting up" if run.setup >= 0.1 else ""
    print(f"time           {run.seconds:.2f} s{setup}, plain decoding {base.seconds:.2f} s")
    return same


def read_prompts(args: argparse.Namespace) -> list[str]:
    lines = args.prompt or args.file.read_text(encoding="utf-8").splitlines()
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ValueError("no prompt: want at least one line that is not blank")
    return prompts


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add, text = parser.add_argument, parser.add_mutually_exclusive_group()
    text.add_argument("--prompt", action="append", help="may be given several times")
    text.add_argument("--file", type=Path, default=HERE / "prompts.txt", help="one a line")
    add("--model", choices=(*TARGETS, "both"), default="both")
    add("--algo", "--drafter", choices=(*STYLES, "both"), default="both")
    mode = "of DSpark, default cap-accept; DFlash has no confidences and is always static"
    add("--mode", choices=sorted(MODES["dspark"], reverse=True), help=mode)
    graphs = "a CUDA graph of the whole step (default: on CUDA)"
    add("--graphs", action=argparse.BooleanOptionalAction, help=graphs)
    add("--compile", action="store_true", help="the whole step under torch.compile")
    add("--tokens", type=int, default=160, help="new tokens (bytes) a prompt")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--weights", type=Path, default=HERE / "weights", help="folder")
    cut = "cap-accept takes drafts while the probability that all are right is above this"
    add("--cut", type=float, default=0.3, help=cut)
    budget = "rows that a step of compact verifies, as a share of all"
    add("--budget", type=float, default=0.6, help=budget)
    args = parser.parse_args()
    if args.tokens < 1:
        parser.error(f"--tokens: want at least 1, got {args.tokens}")
    for name in ("cut", "budget"):
        if not 0 <= (share := getattr(args, name)) <= 1:
            parser.error(f"--{name}: want 0 to 1, got {share}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda is not available here")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.graphs and args.device == "cpu":
        parser.error("--graphs: want a CUDA device, got --device cpu")
    if args.graphs is None:
        args.graphs = args.device == "cuda"
    if args.mode and args.algo != "both" and args.mode not in MODES[args.algo]:
        parser.error(
            f"--mode: want static, as {args.algo} has no confidences, got {args.mode}"
        )
    try:
        args.prompt = read_prompts(args)
    except (OSError, ValueError) as e:
        parser.error(f"--prompt/--file: {e}")
    args.model = list(TARGETS) if args.model == "both" else [args.model]
    args.algo = list(STYLES) if args.algo == "both" else [args.algo]
    return args


def read_options(style: str, args: argparse.Namespace) -> Options:
    mode = args.mode if args.mode in MODES[style] else MODES[style][0]
    return Options(mode, args.graphs, args.compile, args.cut, args.budget)


def run_model(kind: str, args: argparse.Namespace) -> bool:
    def file(name: str) -> Path:
        return args.weights / f"{name}.safetensors"

    def new_bar(label: str) -> tqdm:
        total, hidden = len(prompts) * args.tokens, not sys.stderr.isatty()
        return tqdm(total=total, desc=label, unit="token", leave=False, disable=hidden)

    target = load_weights(file(kind), lambda fields: HybridLM(Config(**fields)))
    fits = target.config
    drafters = {s: load_drafter(file(f"{kind}-{s}"), s, fits) for s in args.algo}
    target = target.to(args.device)
    codes = [list(prompt.encode(errors="surrogateescape")) for prompt in args.prompt]
    prompts = [torch.tensor(code, device=args.device) for code in codes]
    given, runs, shown = (target, prompts, args.tokens), {}, set()
    options = {style: read_options(style, args) for style in drafters}
    for style, drafter in drafters.items():
        print(f"\n== {kind} + {style}\n{args.prompt[0]}", flush=True)
        with new_bar(f"{kind} + {style}") as bar:
            stream = Stream(bar)
            drafter = drafter.to(args.device)
            run = speculate(*given, drafter, ops, stream.hear, options[style])
            stream.write(b"", final=True)
        runs[style] = run
        for pair in zip(args.prompt[1:], run.texts[1:], strict=True):
            if pair not in shown:  # the second drafter's text is the same
                print(f"\n{pair[0]}\n{pair[1].decode(errors='replace')}")
            shown.add(pair)
    rows = {style: drafter.config.block for style, drafter in drafters.items()}
    with new_bar(f"{kind} plain") as bar:
        base = plain(*given, max(rows.values()), ops, bar.update)
    reports = [
        report(f"{kind} + {style}", run, base, rows[style], options[style])
        for style, run in runs.items()
    ]
    return all(reports)


@torch.inference_mode()
def main() -> int:
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this quietly
    sys.stdout.reconfigure(errors="replace")
    args = parse_arguments()
    # Tensors this small gain nothing from threads, and stall where another process has a core.
    torch.set_num_threads(1)
    try:
        return 0 if all([run_model(kind, args) for kind in args.model]) else 1
    except WeightsError as e:
        print(f"error: weights: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
