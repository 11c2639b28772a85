"""How device time is taken: CUDA graphs, cold L2, and rivals replayed in turn."""

import functools
import hashlib
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import torch

Run = Callable[[], object]
Name = TypeVar("Name")
ROUNDS = 20


def event_us(run: Run) -> float:
    """Microseconds of the device work that run queues."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000


def interleaved(
    runs: dict[Name, Run],
    rounds: int,
    chill: Run,
    clock: Callable[[Run], float],
    typical: Callable[[list[float]], float] = statistics.median,
) -> dict[Name, float]:
    """The typical time of each run. All take turns, so that what drifts meets all alike.

    Args:
        runs: what to time, in the order of a round.
        rounds: how often each runs.
        chill: is called before each run, untimed.
        clock: runs what it is given and returns the time that took.
        typical: makes one time of a run's many.
    """
    times: dict[Name, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            chill()
            times[name].append(clock(run))
    return {name: typical(values) for name, values in times.items()}


def _replay(graph: torch.cuda.CUDAGraph, run: Run) -> None:
    graph.replay()


class Timer:
    """Captures runs and times their graphs, with the L2 cache flushed before each replay."""

    def __init__(self, rounds: int = ROUNDS) -> None:
        self.rounds = rounds
        # Writing 1 GiB also takes long enough for the host to queue the graph behind it:
        # a launch of 70 nodes on an idle device would be timed with its host part.
        self._flush = torch.empty(2**30, dtype=torch.int8, device="cuda")
        self._side = torch.cuda.Stream()

    def capture(self, run: Run) -> Run:
        """The replay of a graph of run, which runs once eagerly first: kernels compile.

        The replay keeps run, in whose memory the graph works.
        """
        torch.cuda.synchronize()
        with torch.cuda.stream(self._side):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return functools.partial(_replay, graph, run)

    def medians(self, runs: dict[Name, Run]) -> dict[Name, float]:
        """Microseconds of each run, see ``interleaved``."""
        return interleaved(runs, self.rounds, self._flush.zero_, event_us)


def calls_us(run: Run, calls: int = 20) -> float:
    """Microseconds of the median of a few calls in a row, on the host's clock."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def host_us(runs: dict[Name, Run], rounds: int = 200) -> dict[Name, float]:
    """Microseconds the host spends on one eager call, the device kept from blocking."""
    # Whatever else the host does slows a call, for milliseconds at a time, and nothing makes
    # one faster than its own work: so the fastest round counts, of many over seconds. In it
    # the median leaves out the first calls, which find cold caches, or have to compile.
    return interleaved(runs, rounds, torch.cuda.synchronize, calls_us, min)


def copy_gbs() -> float:
    """GB/s of a large device-to-device copy, bytes read and written both counted."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(50 + ROUNDS):  # the first 50 raise the clocks
        # Not in a graph: a captured copy is a memcpy node, which is slower.
        times.append(event_us(lambda: target.copy_(source)))
    return 2 * source.nbytes / statistics.median(times[50:]) / 1e3


def machine() -> dict[str, str]:
    """What figures are taken on, and of which sources: the head of a file of them."""
    driver = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    here = str(Path(__file__).parent)
    return {
        "card": torch.cuda.get_device_name(), "driver": _first_line(driver),
        "torch": torch.__version__, "triton": metadata.version("triton"),
        "commit": _first_line(["git", "-C", here, "rev-parse", "--short", "HEAD"]),
        "sources": sources(),
    }  # fmt: skip


def sources() -> str:
    """A hash of the package's files: copied ones may have left their commit behind."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    for file in sorted(path for d in ("ops", "graph") for path in (root / d).rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _first_line(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.split("\n")[0]
    except OSError:
        return ""
