"""What a type checker sees of the package: tests/repo/test_distribution.py runs mypy on this."""

from typing import assert_type

import torch
from torch import Tensor

import replayssm
from replayssm import graph, ops


def layers(x: Tensor, pools: graph.Pools, slots: Tensor, lens: Tensor) -> None:
    windows = pools.windows
    projections = x, x, x, x, x, x, x
    assert_type(ops.verify(*projections, pools.state, *windows, slots, exact=False), Tensor)
    assert_type(ops.decode(*projections, pools.state, slots, scale=1.0), Tensor)
    assert_type(ops.gate(x, x, x, x, lower_bound=-5.0), tuple[Tensor, Tensor])
    assert_type(ops.accept(lens, lens, verify_lens=None), tuple[Tensor, Tensor])
    assert_type(windows.k, Tensor)
    assert_type(pools.conv_windows, list[Tensor])
    assert_type(ops.lowering("cpu"), ops.Lowering)
    assert_type(replayssm.__version__, str)
    ops.fold(pools.state, *windows, slots, lens, track_steps=None)
    ops.fold(pools.state, *windows, slots, 3)  # type: ignore[arg-type]
    ops.fold(pools.state, *windows, slots, lens, window=lens)  # type: ignore[call-arg]
    nothing = ops.fold(pools.state, *windows, slots, lens)  # type: ignore[func-returns-value]
    assert_type(nothing, None)


def engine(pools: graph.Pools, slot_map: Tensor, rows: Tensor, targets: Tensor) -> None:
    commit = graph.Commit(pools, slot_map)
    assert_type(commit(rows, rows, targets, targets), graph.Committed)
    captured = graph.CapturedCommit(commit, graph.buckets([1], 8, "static"), draft=8)
    assert_type(captured(rows, targets), graph.Committed)
    assert_type(captured(rows, targets).accept_lens, Tensor)
    assert_type(captured.bucket(1), graph.Bucket)
    batch = captured.batches[captured.bucket(1)]
    assert_type(batch.seq_lens, Tensor)
    assert_type(batch.cu_seqlens(), Tensor | None)
    assert_type(graph.choose_verify_lens(torch.ones(1, 7), budget=8), Tensor)
    graph.buckets([1], 8, "packed")  # type: ignore[arg-type]


def sizes(model: graph.LinearAttention) -> None:
    taken = graph.memory(model, slots=1, requests=1, window=8)
    assert_type(taken, graph.Memory)
    assert_type(taken.snapshot_total, int)
    assert_type(graph.decide("gdn", replay=True, window=8, draft=8), graph.Route)
