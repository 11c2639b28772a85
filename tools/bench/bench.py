"""Time the ops on a GPU: python tools/bench/bench.py [--model NAME ...] [--out FILE].

Each figure is the median over replays of one CUDA graph that runs an op for every layer
of a model, on fresh random inputs, the L2 cache flushed before each replay. Ours and its
peers take turns, replay by replay. A model's figures count only after its outputs and
states were checked in the same run, a peer's only where its results agree with ours.

floor = the bytes of state that an op must move, over the copy bandwidth measured in the
same run: one read for verify, a read and a write for decode, and for fold and commit a
read and a write of the rows that accept anything; a step adds verify's and fold's, and
fused would save one read. GB/s and share count these bytes alone; what q, k, v, o and
windows would add to the floor stands under "+ io". A peer's ratio is its time over ours.
"""

import argparse
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

import peers
from correct import mistake, mixed_lengths
from floors import traffic
from peer_sglang import NO_JIT, PEERS
from problem import FASTER, HEAD_DIMS, MODELS, OPS, Problem, Workload, needed_bytes
from replayssm import ops
from table import NUMBER, read
from timing import ROUNDS, Run, Timer, copy_gbs, host_us, machine

TARGETS = [
    "qwen3.5-35b", "qwen3.5-27b", "qwen3.5-397b-tp4", "kimi-linear-48b", "kimi-k3-tp8"
]  # fmt: skip
COLUMNS = (
    f"{'model':17} {'op':6} {'B':>3} {'D':>2} {'accept':>7} exact {'us':>8} {'GB/s':>5} "
    f"{'floor':>7} {'+ io':>6} share  peers"
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options with their defaults; exits with the reason where they make no sense."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--model",
        nargs="+",
        choices=[*MODELS, *HEAD_DIMS],
        help=f"default: {' '.join(TARGETS)}",
    )
    add("--batch", nargs="+", type=int, help="B, 1 to 256; default: 1 8 32 128")
    add("--draft", nargs="+", type=int, help="D; default: the model's own")
    add(
        "--accept", nargs="+", type=_accept,
        help='rows to commit: a number or "half" of D for every request, "all", or '
        '"uniform" in 1 .. D; default: the numbers D / 2 and D',
    )  # fmt: skip
    add("--op", nargs="+", choices=OPS, default=list(OPS), help="default: every one")
    add(
        "--exact", action=argparse.BooleanOptionalAction,
        help="verify and step with exact=True, or False, alone; default: both",
    )  # fmt: skip
    add(
        "--full", action="store_true",
        help="every model, B = 1, 2, 4 .. 256, D = 4, 8, 16, accept half, uniform and all, "
        "where nothing else is asked for",
    )  # fmt: skip
    add("--rounds", type=int, default=ROUNDS, help=f"replays of each, {ROUNDS} or more")
    add(
        "--peers", type=Path, default=Path(__file__).parents[2] / ".peers",
        metavar="FOLDER", help="where peers are installed; default: %(default)s",
    )  # fmt: skip
    add("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    add(
        "--append", action="store_true",
        help="keep the rows of FILE that this run does not measure; they must be of the "
        "same card, versions and commit, and of a copy bandwidth within 2 %%",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.full:
        options.model = options.model or list(MODELS)
        options.batch = options.batch or [2**i for i in range(9)]
        options.draft = options.draft or [4, 8, 16]
        options.accept = options.accept or ["half", "uniform", "all"]
    options.model = options.model or TARGETS
    options.batch = options.batch or [1, 8, 32, 128]
    if options.append and not options.out:
        parser.error("argument --append: needs --out FILE")
    if not all(1 <= B <= 256 for B in options.batch):
        parser.error(f"argument --batch: must be 1 to 256, got {options.batch}")
    if options.draft and min(options.draft) < 1:
        parser.error(f"argument --draft: must be at least 1, got {options.draft}")
    if options.rounds < ROUNDS:
        parser.error(f"argument --rounds: must be {ROUNDS} or more, got {options.rounds}")
    for name, model in shapes(options):
        for accept in options.accept or []:
            if isinstance(accept, int) and accept > model.D:
                parser.error(
                    f"argument --accept: must be at most D = {model.D} of {name}, "
                    f"got {accept}"
                )
    return options


def _accept(text: str) -> int | str:
    if text.isdecimal():
        return int(text)
    if text in ("half", "uniform", "all"):
        return text
    raise argparse.ArgumentTypeError(f"must be a number, half, uniform or all, got {text}")


def shapes(options: argparse.Namespace) -> list[tuple[str, Workload]]:
    """Each model that is asked for, with each D."""
    return [
        (name, replace(model, D=D))
        for name, model in ((name, (MODELS | HEAD_DIMS)[name]) for name in options.model)
        for D in options.draft or [model.D]
    ]


class Bench:
    """Yields the rows of a run, and keeps what has none and why.

    missing: peers that are not installed, with the reason. left_out: what was skipped,
    failed or disagreed with ours, a sentence each, also printed when it happens.
    """

    def __init__(self, options: Namespace, timer: Timer, gbs: float, device="cuda") -> None:
        self.options, self.timer, self.gbs, self.device = options, timer, gbs, device
        self.peers, self.missing = peers.find(options.peers, PEERS)
        if any(peer.name == "sglang" for peer in self.peers):
            self.missing["sglang: KDA decode, 8 requests or more"] = NO_JIT
        self.left_out: list[str] = []

    def figures(self, name: str, model: Workload) -> Iterator[dict]:
        """Every row of a model. Exits where our own results are wrong."""
        if found := mistake(model, self.device):
            sys.exit(f"{name}, D = {model.D}: {found}: no figures")
        present = self._agreeing(name, model)
        for B in self.options.batch:
            torch.cuda.empty_cache()  # graphs of the last batch size keep their memory
            needed, free = needed_bytes(model, B), free_bytes(self.device)
            if needed > free:
                self._leave_out(
                    f"{name}, B = {B}, D = {model.D}: needs {needed / 2**30:.1f} GiB, "
                    f"{free / 2**30:.1f} are free"
                )
            else:
                yield from self._rows(name, Problem(model, B, self.device), present)

    def _rows(
        self, name: str, problem: Problem, present: list[peers.Peer]
    ) -> Iterator[dict]:
        model = problem.model
        for op in self.options.op:
            for accept in accepts(op, model.D, self.options.accept):
                problem.accept(accept)
                ours, theirs = self._times(name, op, problem, present)
                moved = traffic(model, op, problem.accept_lens.tolist())
                floors = {"floor_us": self._us(moved.state), "io_us": self._us(moved.io)}
                if moved.fused is not None:
                    floors["fused_floor_us"] = self._us(moved.fused)
                for exact, us in ours.items():
                    yield {
                        "model": name, "variant": model.variant, "op": op,
                        "B": problem.B, "D": model.D, "accept": accept, "exact": exact,
                        "us": us, **floors, "peers": theirs,
                    }  # fmt: skip

    def _times(
        self, name: str, op: str, problem: Problem, present: list[peers.Peer]
    ) -> tuple[dict[bool, float], dict[str, float]]:
        """Microseconds by exact, and by peer: of one series of rounds."""
        ours = {
            exact: self.timer.capture(problem.run(op, exact))
            for exact in exacts(op, self.options.exact)
        }
        theirs = self._theirs(name, op, problem, present)
        us = {run: round(x, 1) for run, x in self.timer.medians(ours | theirs).items()}
        return {run: us[run] for run in ours}, {run: us[run] for run in theirs}

    def _agreeing(self, name: str, model: Workload) -> list[peers.Peer]:
        """The peers whose results for three requests of this model are ours."""
        agreeing = []
        for peer in self.peers:
            problem = Problem(model, 3, self.device)
            mixed_lengths(problem)
            try:
                disagreement = peers.agrees(peer, problem)
            except Exception as error:  # a peer's failure must not end the run
                disagreement = _text(error)
            if disagreement is None:
                agreeing.append(peer)
            else:
                self._leave_out(f"{peer.name}, {name}, D = {model.D}: {disagreement}")
        return agreeing

    def _theirs(
        self, name: str, op: str, problem: Problem, present: list[peers.Peer]
    ) -> dict[str, Run]:
        """The graph of each peer that has this op."""
        graphs = {}
        for peer in present:
            try:
                run = peer.prepare(op, problem)
                if run is not None:
                    graphs[peer.name] = self.timer.capture(run)
            except Exception as error:  # a peer's failure must not end the run
                where = f"{op} of {name}, B = {problem.B}, D = {problem.model.D}"
                self._leave_out(f"{peer.name}, {where}: {_text(error)}")
        return graphs

    def _leave_out(self, text: str) -> None:
        print(f"left out: {text}", flush=True)
        self.left_out.append(text)

    def _us(self, size: int) -> float:
        """How long a copy takes to move so many bytes."""
        return round(size / self.gbs / 1e3, 1)


def accepts(op: str, D: int, wanted: list[int | str] | None) -> list[int | str]:
    """A row's accept for each figure: verify accepts none yet, decode has one token."""
    if op == "verify":
        return [0]
    if op == "decode":
        return [1]
    half = (D + 1) // 2
    lengths = [half if accept == "half" else accept for accept in wanted or [half, D]]
    return list(dict.fromkeys(lengths))


def exacts(op: str, wanted: bool | None) -> list[bool]:
    """Both kinds of outputs, or the one that is wanted, where an op has two."""
    if op not in FASTER:
        return [True]
    return [True, False] if wanted is None else [wanted]


def free_bytes(device: torch.device | str) -> float:
    """What a device can still allocate; a CPU's memory is not looked at."""
    if torch.device(device).type != "cuda":
        return float("inf")
    return torch.cuda.mem_get_info(device)[0]


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def line(row: dict, gbs: float) -> str:
    """A row of the table on screen, under ``COLUMNS``."""
    share = row["floor_us"] / row["us"]
    notes = [f"{peer} {us / row['us']:.2f}x" for peer, us in row["peers"].items()]
    if "fused_floor_us" in row:
        notes.insert(0, f"(fused floor {row['fused_floor_us']:.1f})")
    return (
        f"{row['model']:17} {row['op']:6} {row['B']:3} {row['D']:2} {row['accept']!s:>7} "
        f"{'yes' if row['exact'] else 'no':5} {row['us']:8.1f} {share * gbs:5.0f} "
        f"{row['floor_us']:7.1f} {row['io_us']:6.1f} {share:5.0%}  {'  '.join(notes)}"
    ).rstrip()


def host_figures(p: Problem) -> dict[str, float]:
    """Microseconds of the host for one eager call: of one layer, or of all in a commit."""
    windowed, single = p.arguments(0), p.arguments(0, 0)
    _, k, v, a, b, A_log, dt_bias, _, *windows, slots = windowed
    g, beta = ops.gate(a, b, A_log, dt_bias)
    snapshots, steps = torch.zeros_like(p.state).unsqueeze(2), torch.zeros_like(slots)
    runs = {
        "verify": lambda: ops.verify(*windowed),
        "decode": lambda: ops.decode(*single),
        "fold": p.fold,
        "gate": lambda: ops.gate(a, b, A_log, dt_bias),
        "store": lambda: ops.store(k, v, g, beta, *windows, slots),
        "scatter": lambda: ops.scatter(p.state, snapshots, slots, steps),
    }
    return {op: round(us, 1) for op, us in host_us(runs).items()}


def identity(row: dict) -> tuple:
    """What tells one figure from another."""
    return tuple(row[name] for name in ("model", "op", "B", "D", "accept", "exact"))


def earlier(file: Path, head: dict) -> dict:
    """What an earlier run wrote; exits where that was not the same card and code."""
    found = read(file, copy_gbs=NUMBER, left_out=list)
    for name in ("card", "driver", "torch", "triton", "commit", "sources"):
        if found.get(name) != head.get(name):
            sys.exit(
                f"--append: {file} has {name} {found.get(name)}, this run {head.get(name)}"
            )
    return found


def run(bench: Bench, head: dict) -> dict:
    """Print every figure as it comes; returns, and writes, them all below the head."""
    options, kept = bench.options, []
    if options.append and options.out.exists():
        found = earlier(options.out, head)
        if not abs(found["copy_gbs"] / bench.gbs - 1) <= 0.02:  # nor is NaN near
            sys.exit(
                f"--append: {options.out} has copy_gbs {found['copy_gbs']}, "
                f"this run {bench.gbs:.0f}"
            )
        head, kept = found, found["rows"]
        bench.left_out += found["left_out"]
    for name, reason in bench.missing.items():
        print(f"missing: {name}: {reason}")
    print(COLUMNS)
    results = {"copy_gbs": round(bench.gbs), "missing": {}, **head,
               "left_out": bench.left_out, "rows": []}  # fmt: skip
    results["missing"] |= bench.missing
    new = []
    try:
        for name, model in shapes(options):
            for row in bench.figures(name, model):
                new.append(row)
                print(line(row, bench.gbs), flush=True)
    finally:  # what was measured before a failure is kept
        measured = {identity(row) for row in new}
        results["rows"] = [row for row in kept if identity(row) not in measured] + new
        if options.out:
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    return results


def main() -> None:
    options = parse()
    if not torch.cuda.is_available():
        sys.exit("bench: needs a CUDA device")
    timer, gbs = Timer(options.rounds), copy_gbs()
    host = host_figures(Problem(MODELS["qwen3.5-35b"], 1))
    head = {**machine(), "host_us": host}
    print(f"{head['card']}: copy {gbs:.0f} GB/s; us for all layers")
    print("host us a call:", ", ".join(f"{op} {us}" for op, us in host.items()))
    run(Bench(options, timer, gbs), head)


if __name__ == "__main__":
    main()
