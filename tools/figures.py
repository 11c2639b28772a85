"""One model after the other: the gate, the peers that agree, and a row per figure."""

import sys
from argparse import Namespace
from collections.abc import Iterator

import torch

import peers
from correct import mistake, mixed_lengths
from floors import traffic
from problem import FASTER, Model, Problem, needed_bytes
from timing import Run, Timer


class Bench:
    """Yields the rows of a run, and keeps what has none and why.

    missing: peers that are not installed, with the reason. left_out: what was skipped,
    failed or disagreed with ours, a sentence each, also printed when it happens.
    """

    def __init__(self, options: Namespace, timer: Timer, gbs: float, device="cuda") -> None:
        self.options, self.timer, self.gbs, self.device = options, timer, gbs, device
        self.peers, self.missing = peers.find(options.peers)
        self.left_out: list[str] = []

    def figures(self, name: str, model: Model) -> Iterator[dict]:
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

    def _agreeing(self, name: str, model: Model) -> list[peers.Peer]:
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
