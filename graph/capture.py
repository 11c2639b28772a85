"""CUDA graphs of a commit or of a whole step, one per bucket."""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.window_rule import fits
from .batch import Bucket, Mode, StaticBatch, smallest
from .commit import Commit, Committed


class Captured:
    """One CUDA graph for each bucket, of a function of a ``StaticBatch``.

    The function is called as ``function(batch)``. It must be capturable: fixed shapes, no
    host sync. What it returns stays at one address. All graphs share one memory pool, so
    the next replay of any bucket may overwrite a result: read it before, or queue its
    reading before. With ``graphs`` False the function runs eagerly at each replay, on any
    device.
    """

    def __init__(
        self,
        function: Callable[[StaticBatch], Any],
        choices: Sequence[Bucket],
        *,
        draft: int,
        device: torch.device | str,
        mode: Mode = "static",
        graphs: bool = True,
    ) -> None:
        """
        Args:
            function: what to capture.
            choices: the buckets, see ``buckets``.
            draft: D.
            device: where the batches live; a CUDA device for graphs.
            mode: see ``buckets``.
            graphs: False runs the function eagerly instead.

        Raises:
            ValueError: no buckets, or graphs on a device that has none.
        """
        if not choices:
            raise ValueError("choices must hold at least one bucket, got none")
        if graphs and torch.device(device).type != "cuda":
            raise ValueError(
                f"device must be a CUDA device to capture on, got {device}: "
                "pass graphs=False to run eagerly"
            )
        self.function, self.eager, self.draft = function, not graphs, draft
        self.device = torch.device(device)
        self.batches = {c: StaticBatch(c, draft, device, mode) for c in sorted(choices)}
        self.graphs: dict[Bucket, torch.cuda.CUDAGraph] = {}
        self.results: dict[Bucket, Any] = {}
        self._warm = False

    def warmup(self) -> None:
        """Run every bucket once on padding, which writes nothing: compiles every kernel."""
        for batch in self.batches.values():
            batch.fill(batch.rows[:0])
            self.function(batch)
        self._warm = True

    def capture(self) -> None:
        """Capture every bucket, the largest first: smaller ones then reuse its memory.

        With ``graphs`` False this does nothing.

        Raises:
            RuntimeError: ``warmup`` was not called, so kernels would compile while capturing.
        """
        if self.eager:
            return
        if not self._warm:
            raise RuntimeError(
                f"call warmup() before capture(): the kernels of {list(self.batches)} are not "
                "compiled, and compiling inside a capture fails or stalls"
            )
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            # torch's own default stream is of whichever device captured first.
            stream = torch.cuda.Stream()
            for choice in sorted(self.batches, reverse=True):
                graph = torch.cuda.CUDAGraph(keep_graph=True)
                with _uncollected(), torch.cuda.graph(graph, pool=pool, stream=stream):
                    self.results[choice] = self.function(self.batches[choice])
                graph.instantiate()
                self.graphs[choice] = graph

    def bucket(self, batch: int, tokens: int | None = None) -> Bucket:
        """The bucket of a live batch, see ``smallest``."""
        return smallest(list(self.batches), batch, tokens)

    def replay(self, choice: Bucket) -> Any:
        """Queue the graph of a bucket whose batch is filled: one launch.

        Returns:
            The tensors that the function returned when it was captured. They hold this
            replay's values once the device has run it.

        Raises:
            RuntimeError: nothing was captured yet.
        """
        if self.eager:
            return self.function(self.batches[choice])
        if choice not in self.graphs:
            raise RuntimeError(f"capture() {choice} before replaying it")
        self.graphs[choice].replay()
        return self.results[choice]


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection: CUDA ends a capture in which another graph is freed."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def window_holds(commit: Commit, choices: Sequence[Bucket], draft: int, owner: str) -> None:
    """Refuse drafts and batches that the commit's pools have no window rows for.

    verify does not store rows past a window: a commit would count them and not fold them.

    Raises:
        ValueError: draft is longer than the window, or a bucket wider than the pools.
    """
    pools = commit.pools
    if not fits(draft, pools.window):
        raise ValueError(
            f"{owner}: draft must be at most {pools.window}, the window of the pools, "
            f"got {draft}"
        )
    widest = max((choice.batch for choice in choices), default=0)
    if widest > pools.requests:
        raise ValueError(
            f"{owner}: choices must hold at most {pools.requests} requests, as many as the "
            f"pools have windows for, got {widest}"
        )


class CapturedCommit(Captured):
    """The commit alone: for engines that capture the target's forward themselves."""

    def __init__(
        self,
        commit: Commit,
        choices: Sequence[Bucket],
        *,
        draft: int,
        mode: Mode = "static",
        graphs: bool = True,
    ) -> None:
        """
        Args:
            commit: the module to capture; its pools' device is captured on.
            choices, draft, mode, graphs: as for ``Captured``.

        Raises:
            ValueError: as ``Captured``, or the pools have too few window rows.
        """
        window_holds(commit, choices, draft, "CapturedCommit")
        device, self.mode = commit.slot_map.device, mode
        # -1 is no token: rows that the live batch does not fill match nothing.
        most = max((c.tokens for c in choices), default=0)
        self._no_tokens = torch.full((most,), -1, device=device, dtype=torch.int64)
        target_tokens = {c: self._no_tokens[: c.tokens].clone() for c in choices}
        self.target_tokens = target_tokens

        # Without self, as a cycle would leave graphs to the garbage collector.
        def function(batch: StaticBatch) -> Committed:
            cu_seqlens, targets = batch.cu_seqlens(), target_tokens[batch.bucket]
            drafts = batch.draft_tokens
            if cu_seqlens is None:
                targets = targets.view(drafts.shape)
            return commit(
                batch.req_indices, batch.seq_lens, drafts, targets, batch.verify_lens,
                cu_seqlens,
            )  # fmt: skip

        super().__init__(
            function, choices, draft=draft, device=device, mode=mode, graphs=graphs
        )

    def __call__(self, rows: Tensor, target_tokens: Tensor) -> Committed:
        """Commit a live batch by one graph launch and two small copies.

        Args:
            rows: [b, 3 + D] int64, see ``live_rows``.
            target_tokens: [b, D] int64; for ``compact`` packed [n], n the sum of the
                rows' verify_lens and at most N.

        Returns:
            What was decided for the b live rows: views of the graph's own memory, which
            the next replay overwrites, see ``Captured``.

        Raises:
            ValueError: no bucket is large enough, or the shapes are not these.
        """
        b, compact = rows.shape[0], self.mode == "compact"
        fits = (
            target_tokens.dim() == 1 if compact else target_tokens.shape == (b, self.draft)
        )
        if not fits:
            want = "packed [n]" if compact else f"[{b}, {self.draft}] as rows has requests"
            raise ValueError(
                f"CapturedCommit: target_tokens must be {want} in mode {self.mode!r}, "
                f"got {list(target_tokens.shape)}"
            )
        flat = target_tokens.reshape(-1)
        choice = self.bucket(b, len(flat) if compact else None)
        self.batches[choice].fill(rows)
        rest = self._no_tokens[len(flat) : choice.tokens]
        torch.cat([flat, rest], out=self.target_tokens[choice])
        return Committed(*(x[:b] for x in self.replay(choice)))
