"""Speculative greedy decoding of text by a small hybrid language model, through the ops.

    python tools/decode.py [--prompt TEXT | --file PATH] [--model gdn] [--drafter dspark]

All prompts are decoded as one batch. The result is compared, byte by byte, with plain
token-by-token decoding through `ops.decode`; exit code 1 if they differ, 2 for bad input.
"""

import argparse
import codecs
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from drafters import STYLES, DFlash, DrafterConfig, gather_context
from model import TARGETS, Config, HybridLM
from replayssm import ops
from replayssm.graph import greedy_accept
from session import Session

HERE = Path(__file__).parent
Heard = Callable[[int, bytes], None]
# What a missing, damaged or foreign file can raise.
FILE_ERRORS = (OSError, SafetensorError, RuntimeError, ValueError, TypeError)
FILE_ERRORS += (ArithmeticError, AttributeError, LookupError)


class WeightsError(ValueError):
    """A weights file is missing, malformed or does not fit."""


def load_weights(path: Path, build: Callable[[dict[str, Any]], nn.Module]) -> nn.Module:
    """Builds what the file's header describes; upcasts once, to fp32."""
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        model = build(json.loads(header.get("config", "{}")))
        model.load_state_dict(tensors)
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            raise ValueError("a tensor holds inf or nan")
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


@dataclass
class Run:
    """What one way of decoding gave. `passes` are target passes over the whole batch."""

    texts: list[bytes]
    seconds: float
    passes: int
    accepted: Counter[int] = field(default_factory=Counter)
    verified: int = 0
    window_bytes: int = 0
    snapshot_bytes: int = 0


def prefill(
    target: HybridLM, prompts: list[Tensor], count: int, rows: int
) -> tuple[Session, Tensor]:
    """Feeds the prompts in windows of up to `rows`, all accepted. Returns the session, with
    room for `count` more tokens, and each request's first new one [B]."""
    # A request may overshoot by a window, and still has one to pad when it is finished.
    capacity = max(map(len, prompts)) + count + 2 * rows
    session = Session(target, len(prompts), capacity, rows, ops)
    anchors = torch.zeros_like(session.length)
    for start in range(0, max(map(len, prompts)), rows):
        parts = [prompt[start : start + rows] for prompt in prompts]
        lens = [len(part) for part in parts]
        said = session.verify(torch.cat(parts), lens).argmax(-1).split(lens)
        session.commit(torch.tensor(lens, device=anchors.device))
        for i, part in enumerate(said):
            anchors[i] = part[-1] if lens[i] else anchors[i]
    return session, anchors


def plain(target: HybridLM, prompts: list[Tensor], count: int, rows: int, bar: tqdm) -> Run:
    """One token per request and pass."""
    session, first = prefill(target, prompts, count, rows)
    tokens = [first]
    start = time.perf_counter()
    for _ in range(count - 1):
        tokens.append(session.decode(tokens[-1]).argmax(-1))
        bar.update(len(prompts))
    texts = [bytes(row) for row in torch.stack(tokens, 1).tolist()]
    return Run(texts, time.perf_counter() - start, count - 1)


def speculate(
    target: HybridLM,
    drafter: DFlash,
    prompts: list[Tensor],
    count: int,
    cut: float,
    heard: Heard,
) -> Run:
    """Up to D tokens per request and pass. `heard(i, new)` is told request i's new bytes.

    A drafter with confidences has its window cut where their product falls below `cut`."""
    rows, width = drafter.config.block, drafter.config.context
    session, anchor = prefill(target, prompts, count, rows)
    texts = [bytearray([token]) for token in anchor.tolist()]
    for i, text in enumerate(texts):
        heard(i, bytes(text))
    embed, requests = target.embed.weight, torch.arange(len(prompts), device=anchor.device)
    run, start = Run([], 0.0, 0), time.perf_counter()
    while not all(done := [len(text) >= count for text in texts]):
        live = ~torch.tensor(done, device=anchor.device)
        session.finish(~live)
        context, known = gather_context(session.features, requests, session.length, width)
        drafts, confidence = drafter.draft(context, known, anchor, embed)
        block = torch.cat((anchor[:, None], drafts), 1)
        verify_lens = torch.full_like(anchor, rows)
        if confidence is not None:  # a finished request packs no rows at all
            verify_lens = (1 + (confidence.cumprod(1) >= cut).sum(1)) * live
        packed = torch.arange(rows, device=anchor.device) < verify_lens[:, None]
        said = torch.full_like(block, -1)
        said[packed] = session.verify(block[packed], verify_lens.tolist()).argmax(-1)
        accept_lens, bonus = greedy_accept(block, said, verify_lens * live)
        session.commit(accept_lens)
        anchor = torch.where(live, bonus, anchor)
        run.passes += 1
        run.verified += int((verify_lens * live).sum())
        for i, (n, new) in enumerate(zip(accept_lens.tolist(), said.tolist(), strict=True)):
            if n:
                run.accepted[n] += 1
                new = bytes(new[:n])[: count - len(texts[i])]
                texts[i] += new
                heard(i, new)
    run.texts, run.seconds = [bytes(text) for text in texts], time.perf_counter() - start
    layers, batch = session.windows[0].shape[:2]
    run.window_bytes = sum(window.nbytes for window in session.windows) // (layers * batch)
    run.snapshot_bytes = rows * session.state[0, 0].nbytes
    return run


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


def report(name: str, run: Run, base: Run, rows: int) -> bool:
    """Prints the figures of one (model, drafter). Returns whether both outputs are equal."""
    same = run.texts == base.texts
    batch, steps = len(base.texts), sum(run.accepted.values())
    tokens, passes = sum(map(len, run.texts)), base.passes * batch
    mean = sum(n * times for n, times in run.accepted.items()) / max(steps, 1)
    print(f"\n== {name}: {batch} prompts, {tokens} tokens, {steps} steps")
    print(f"accepted length per step, anchor included: mean {mean:.2f}")
    most = max(run.accepted.values(), default=1)
    for n in range(1, rows + 1):
        bar = "#" * round(40 * run.accepted[n] / most)
        print(f"  {n:2} {run.accepted[n]:5} {bar}".rstrip())
    saved = f"{passes - steps} saved ({(passes - steps) / max(passes, 1):.0%})"
    print(f"target passes  {steps} instead of {passes}: {saved}")
    print(f"as one batch   {run.passes} instead of {base.passes}")
    print(f"rows verified  {run.verified} of {steps * rows}")
    verdict = "byte-identical to" if same else "DIFFERS from"
    print(f"output         {verdict} plain decoding")
    ratio = f"{run.snapshot_bytes / run.window_bytes:.1f} times as many"
    print(f"window         {run.window_bytes:,} bytes a request and layer")
    print(f"snapshots      {run.snapshot_bytes:,} bytes, {ratio}")
    print(f"time           {run.seconds:.2f} s, plain decoding {base.seconds:.2f} s")
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
    add("--drafter", choices=(*STYLES, "both"), default="both")
    add("--tokens", type=int, default=160, help="new tokens (bytes) a prompt")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--weights", type=Path, default=HERE / "weights", help="folder")
    cut = "DSpark verifies drafts while the probability that all are accepted is above this"
    add("--cut", type=float, default=0.3, help=cut)
    args = parser.parse_args()
    if args.tokens < 1:
        parser.error(f"--tokens: want at least 1, got {args.tokens}")
    if not 0 <= args.cut <= 1:
        parser.error(f"--cut: want a probability, got {args.cut}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda is not available here")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        args.prompt = read_prompts(args)
    except (OSError, ValueError) as e:
        parser.error(f"--prompt/--file: {e}")
    args.model = list(TARGETS) if args.model == "both" else [args.model]
    args.drafter = list(STYLES) if args.drafter == "both" else [args.drafter]
    return args


def run_model(kind: str, args: argparse.Namespace) -> bool:
    def file(name: str) -> Path:
        return args.weights / f"{name}.safetensors"

    def new_bar(label: str) -> tqdm:
        total, hidden = len(prompts) * args.tokens, not sys.stderr.isatty()
        return tqdm(total=total, desc=label, unit="token", leave=False, disable=hidden)

    target = load_weights(file(kind), lambda fields: HybridLM(Config(**fields)))
    fits = target.config
    drafters = {s: load_drafter(file(f"{kind}-{s}"), s, fits) for s in args.drafter}
    target = target.to(args.device)
    codes = [list(prompt.encode(errors="surrogateescape")) for prompt in args.prompt]
    prompts = [torch.tensor(code, device=args.device) for code in codes]
    runs, shown = {}, set()
    for style, drafter in drafters.items():
        print(f"\n== {kind} + {style}\n{args.prompt[0]}", flush=True)
        with new_bar(f"{kind} + {style}") as bar:
            stream = Stream(bar)
            drafter = drafter.to(args.device)
            run = speculate(target, drafter, prompts, args.tokens, args.cut, stream.hear)
            stream.write(b"", final=True)
        runs[style] = run
        for pair in zip(args.prompt[1:], run.texts[1:], strict=True):
            if pair not in shown:  # the second drafter's text is the same
                print(f"\n{pair[0]}\n{pair[1].decode(errors='replace')}")
            shown.add(pair)
    rows = {style: drafter.config.block for style, drafter in drafters.items()}
    with new_bar(f"{kind} plain") as bar:
        base = plain(target, prompts, args.tokens, max(rows.values()), bar)
    return all([report(f"{kind} + {s}", run, base, rows[s]) for s, run in runs.items()])


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
