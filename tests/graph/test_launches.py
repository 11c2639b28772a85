"""What the host asks of a GPU for a step: one copy of the batch and one graph."""

import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine import VOCAB, D, Engine
from replayssm.graph import Bucket, CapturedCommit, StaticBatch, live_rows, nodes

B = 4
# Calls that start work on the device or allocate, and none that waits or asks.
STARTS = re.compile(r"cuda\w*(Launch|Memcpy|Memset|Malloc)|cuLaunch")


def rows_of(b):
    index = torch.arange(b, device="cuda")
    return live_rows(index, index, torch.ones(b, D, device="cuda").long(), None)


class Kernels(TorchDispatchMode):
    """Lists the ops that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("given", [False, True])
def test_rows_are_made_by_one_op_and_one_for_each_cast_and_each_none(dtype, given):
    index, tokens = torch.arange(B, dtype=dtype), torch.ones(B, D, dtype=dtype)
    with Kernels() as seen:
        live_rows(index, index, tokens, index if given else None)
    casts = ["_to_copy"] * (dtype == torch.int32) * (3 + given)
    assert seen.names == [*["full_like"] * (not given), *casts, "cat"]


@pytest.mark.gpu
@pytest.mark.parametrize("b", range(B + 1))
def test_a_batch_is_loaded_by_one_copy(b):
    batch, rows = StaticBatch(Bucket(B, B * D), D, "cuda"), rows_of(b)
    batch.fill(rows)  # loads its kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        batch.fill(rows)
    (node,) = nodes(graph)
    assert node.kind in ("kernel", "memcpy")


def started(work):
    """The calls of work that start something."""
    work()
    torch.cuda.synchronize()
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    return [event.name for event in seen.events() if STARTS.match(event.name)]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["gdn", "kda"])
def test_a_commit_is_one_graph_launch_and_its_inputs_two_copies(variant):
    choice = Bucket(B, B * D)
    commit = CapturedCommit(
        Engine("cuda", variant, B, interval=3).commit, [choice], draft=D
    )
    commit.warmup()
    commit.capture()
    assert started(lambda: commit.replay(choice)) == ["cudaGraphLaunch"]
    rows, targets = rows_of(B - 1), torch.randint(0, VOCAB, (B - 1, D), device="cuda")
    seen = started(lambda: commit(rows, targets))
    assert (len(seen), seen.count("cudaGraphLaunch")) == (3, 1), seen
