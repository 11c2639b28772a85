"""The benchmark command: its options, rounds, rows and peers, on the CPU without a clock."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import bench as command
import problem
import timing
from problem import Problem, Workload

TINY = Workload(layers=2, H=1, HV=2, K=32, V=32, variant="gdn", D=4)
TINY_KDA = replace(TINY, H=2, D=3, variant="kda", lower_bound=-5.0)
KEYS = {
    "model", "variant", "op", "B", "D", "accept", "exact", "us", "floor_us", "io_us", "peers"
}  # fmt: skip
models = pytest.mark.parametrize("model", [TINY, TINY_KDA], ids=["gdn", "kda"])


class Peer(NamedTuple):
    name: str
    prepare: Callable


class Turns:
    """A timer that captures nothing: 1 us for the first run of a round, 2 for the next."""

    def capture(self, run):
        run()
        return run

    def medians(self, runs):
        return {name: i + 1.0 for i, name in enumerate(runs)}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The command with a model "tiny" and, for its peers, none: bench.peers is ours."""
    peers = SimpleNamespace(Peer=Peer, find=lambda *_: ([], {}), agrees=lambda *_: None)
    monkeypatch.setattr(command, "peers", peers)
    monkeypatch.setitem(problem.MODELS, "tiny", TINY)
    monkeypatch.setitem(problem.MODELS, "tiny-kda", TINY_KDA)
    return command


def measure(bench: ModuleType, *arguments: str, device: str = "cpu", timer=None) -> dict:
    options = bench.parse(["--model", "tiny", "--batch", "2", *arguments])
    running = bench.Bench(options, timer or Turns(), gbs=1.0, device=device)
    return bench.run(running, {"card": "none"})


def test_the_default_run_is_every_op_of_the_targets_with_their_own_drafts(bench):
    options = bench.parse([])
    assert [(name, model.D) for name, model in bench.shapes(options)] == [
        ("qwen3.5-35b", 8), ("qwen3.5-27b", 8), ("qwen3.5-397b-tp4", 4),
        ("kimi-linear-48b", 8), ("kimi-k3-tp8", 8),
    ]  # fmt: skip
    assert options.batch == [1, 8, 32, 128]
    assert options.op == list(problem.OPS)


def test_full_fills_in_only_what_is_not_asked_for(bench):
    options = bench.parse(["--full", "--batch", "3", "--model", "tiny"])
    assert options.batch == [3]
    assert [model.D for _, model in bench.shapes(options)] == [4, 8, 16]
    assert options.accept == ["half", "uniform", "all"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--batch 8 257", "--batch: must be 1 to 256, got [8, 257]"),
        ("--batch 0", "--batch: must be 1 to 256, got [0]"),
        ("--draft 0", "--draft: must be at least 1, got [0]"),
        ("--rounds 19", "--rounds: must be 20 or more, got 19"),
        ("--accept most", "--accept: must be a number, half, uniform or all, got most"),
        ("--model tiny --accept 4 5", "--accept: must be at most D = 4 of tiny, got 5"),
        ("--model gpt", "--model: invalid choice: 'gpt'"),
        ("--append", "--append: needs --out FILE"),
        ("--op scatter", "--op: invalid choice: 'scatter'"),
    ],
)
def test_options_that_make_no_sense_are_refused_with_the_reason(
    bench, capsys, arguments, reason
):
    with pytest.raises(SystemExit):
        bench.parse(arguments.split())
    assert reason in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_run_says_so_and_stops(bench, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench"])
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        bench.main()


def test_runs_take_turns_each_after_a_flush_and_the_median_counts():
    log, times = [], iter([5.0, 50.0, 1.0, 90.0, 2.0, 60.0])

    def clock(run):
        run()
        return next(times)

    runs = {name: lambda name=name: log.append(name) for name in ("ours", "peer")}
    got = timing.interleaved(runs, 3, lambda: log.append("flush"), clock)
    assert log == ["flush", "ours", "flush", "peer"] * 3
    assert got == {"ours": 2.0, "peer": 60.0}


def test_the_hosts_time_is_the_lowest_rounds_median_call(monkeypatch):
    """Of two runs in turn: bursts that last a round, and calls that stand out, do not count."""
    calls, now, log = iter([30, 2, 9, 4, 5, 3, 8, 7, 6, 90, 1, 80]), [0.0], []

    def run() -> None:
        now[0] += next(calls) * 1e-6

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append(now[0]))
    monkeypatch.setattr(timing.calls_us, "__defaults__", (3,))
    got = timing.host_us({"verify": run, "fold": run}, rounds=2)
    # verify's rounds are 30, 2, 9 and 8, 7, 6; fold's 4, 5, 3 and 90, 1, 80.
    assert got == pytest.approx({"verify": 7.0, "fold": 4.0})
    assert log == pytest.approx([0, 41e-6, 53e-6, 74e-6])


OF_A_STEP = {"verify", "decode", "fold", "gate", "store", "scatter"}


@models
def test_the_host_is_timed_for_each_op_of_a_step_called_as_it_is(bench, monkeypatch, model):
    called = []

    def calls(name):
        op = getattr(bench.ops, name)
        return lambda *args, **options: called.append(name) or op(*args, **options)

    p = Problem(model, 2, "cpu")
    for name in OF_A_STEP:
        monkeypatch.setattr(bench.ops, name, calls(name))

    def host_us(runs):
        called.clear()
        for name, run in runs.items():
            run()
            assert called.pop() == name and not called
        return dict.fromkeys(runs, 1.26)

    monkeypatch.setattr(bench, "host_us", host_us)
    assert bench.host_figures(p) == dict.fromkeys(OF_A_STEP, 1.3)


@pytest.mark.gpu
def test_the_host_is_timed_on_a_gpu(bench):
    figures = bench.host_figures(Problem(TINY, 1))
    assert figures.keys() == OF_A_STEP and min(figures.values()) > 0


@pytest.mark.parametrize("name", ["tiny", "tiny-kda"])
def test_every_figure_is_a_row_with_every_key(bench, name, tmp_path):
    out = tmp_path / "figures.json"
    results = measure(bench, "--model", name, "--accept", "1", "uniform", "--out", str(out))
    assert json.loads(out.read_text()) == results
    assert set(results) == {"card", "copy_gbs", "missing", "left_out", "rows"}
    for row in results["rows"]:
        assert set(row) - {"fused_floor_us"} == KEYS
        assert ("fused_floor_us" in row) == (row["op"] == "step")
        assert row["variant"] == ("kda" if name == "tiny-kda" else "gdn")
    both = [(accept, exact) for accept in (1, "uniform") for exact in (True, False)]
    assert [(row["op"], row["accept"], row["exact"]) for row in results["rows"]] == [
        ("verify", 0, True), ("verify", 0, False), ("decode", 1, True),
        ("fold", 1, True), ("fold", "uniform", True), *(("step", *x) for x in both),
        ("commit", 1, True), ("commit", "uniform", True),
    ]  # fmt: skip


def test_a_wrong_op_ends_the_run_before_any_figure(bench, monkeypatch):
    monkeypatch.setattr("replayssm.ops.fold", lambda *_, **__: None)
    with pytest.raises(SystemExit, match=r"tiny, D = 4: .*no figures"):
        measure(bench)


def test_missing_peers_are_named(bench, capsys):
    bench.peers.find = lambda folder, loaders: ([], {"rival": f"no folder {folder.name}"})
    results = measure(bench, "--op", "fold", "--peers", "/nowhere")
    assert results["missing"] == {"rival": "no folder nowhere"}
    assert "missing: rival: no folder nowhere\n" in capsys.readouterr().out


def fold_only(op: str, problem: Problem) -> Callable[[], None] | None:
    return problem.fold if op == "fold" else None


def test_a_peer_is_timed_after_ours_for_the_ops_it_has(bench, capsys):
    bench.peers.find = lambda *_: ([Peer("rival", fold_only), Peer("last", fold_only)], {})
    rows = measure(bench, "--op", "decode", "fold", "--accept", "all")["rows"]
    assert [row["us"] for row in rows] == [1, 1]
    assert [row["peers"] for row in rows] == [{}, {"rival": 2.0, "last": 3.0}]
    assert "rival 2.00x" in capsys.readouterr().out


def test_a_peer_that_fails_or_disagrees_is_named_and_the_rest_goes_on(bench, capsys):
    def out_of_memory(op, problem):
        raise torch.OutOfMemoryError("for a peer\nand more")

    def agrees(peer, problem):
        if peer.name == "broken":
            raise RuntimeError("no kernel")
        return "the state differs" if peer.name == "other" else None

    names = {"large": out_of_memory, "broken": fold_only, "other": fold_only}
    present = [Peer(*pair) for pair in names.items()] + [Peer("good", fold_only)]
    bench.peers.find, bench.peers.agrees = lambda *_: (present, {}), agrees
    results = measure(bench, "--op", "fold", "--accept", "all")
    assert results["left_out"] == [
        "broken, tiny, D = 4: RuntimeError: no kernel",
        "other, tiny, D = 4: the state differs",
        "large, fold of tiny, B = 2, D = 4: OutOfMemoryError: for a peer",
    ]
    assert [row["peers"] for row in results["rows"]] == [{"good": 2.0}]
    printed = capsys.readouterr().out
    assert all(f"left out: {text}\n" in printed for text in results["left_out"])


def test_a_batch_that_does_not_fit_is_skipped_by_name(bench, monkeypatch):
    free = problem.needed_bytes(TINY, 3) - 1
    monkeypatch.setattr(bench, "free_bytes", lambda device: free)
    results = measure(bench, "--batch", "2", "3", "--op", "fold", "--accept", "all")
    assert [row["B"] for row in results["rows"]] == [2]
    assert results["left_out"] == ["tiny, B = 3, D = 4: needs 0.0 GiB, 0.0 are free"]


def test_what_was_measured_before_a_failure_is_written(bench, tmp_path):
    class Failing(Turns):
        def medians(self, runs):
            self.left = getattr(self, "left", 3) - 1
            if not self.left:
                raise RuntimeError("illegal memory access")
            return super().medians(runs)

    out = tmp_path / "figures.json"
    with pytest.raises(RuntimeError):
        measure(bench, "--op", "fold", "decode", "--out", str(out), timer=Failing())
    assert len(json.loads(out.read_text())["rows"]) == 2


@pytest.mark.parametrize(
    "content", ["", '{"rows": [', "[]", '{"copy_gbs": 1, "rows": []}', '{"copy_gbs": "1"}']
)
def test_a_run_is_appended_to_no_malformed_file(bench, capsys, tmp_path, content):
    """One line and status 2 before anything is measured; the file stays."""
    out = tmp_path / "figures.json"
    out.write_text(content)
    with pytest.raises(SystemExit) as stop:
        measure(bench, "--append", "--out", str(out))
    printed, error = capsys.readouterr()
    assert stop.value.code == 2
    assert f": {out}: " in error and error.count("\n") == 1
    assert out.read_text() == content and not printed


@pytest.mark.gpu
@models
def test_a_run_on_a_gpu_times_every_figure(bench, monkeypatch, model):
    bench.peers.find = lambda *_: ([Peer("rival", fold_only)], {})
    monkeypatch.setitem(problem.MODELS, "tiny", model)
    results = measure(bench, "--batch", "1", device="cuda", timer=timing.Timer())
    assert len(results["rows"]) == 11
    assert all(row["us"] > 0 for row in results["rows"])
    assert all(
        ("rival" in row["peers"]) == (row["op"] == "fold") for row in results["rows"]
    )
    assert results["left_out"] == []
