"""A captured commit is a handful of kernels and nothing else."""

import pytest
import torch

from replayssm.graph import (
    Bucket,
    CapturedCommit,
    Commit,
    LinearAttention,
    Pools,
    nodes,
)

pytestmark = pytest.mark.gpu

D, B = 8, 4


OURS = ["accept", "commit_indices", "fold", "conv_commit"]


def listing(
    layers: int, variant: str, interval: int = 0, mode: str = "cap-accept"
) -> list[str]:
    """Kind and name of every node of a captured greedy commit."""
    model = LinearAttention(layers, H=1, HV=3, K=32, V=32, variant=variant)
    pools = Pools(model, slots=8, requests=B, window=D, device="cuda")
    slots = torch.arange(4, device="cuda", dtype=torch.int32)
    commit = Commit(pools, slots, track_slot_map=slots + 4, track_interval=interval)
    captured = CapturedCommit(commit, [Bucket(B, B * D)], draft=D, mode=mode)
    captured.warmup()
    captured.capture()
    return [f"{n.kind} {n.name}" for n in nodes(captured.graphs[B, B * D])]


@pytest.mark.parametrize("variant, interval", [("gdn", 0), ("gdn", 4), ("kda", 4)])
def test_a_48_layer_commit_is_five_kernels(variant, interval):
    """accept, commit_indices, fold, conv_commit, and the addition of seq_lens."""
    seen = listing(48, variant, interval)
    assert all(node.startswith("kernel ") for node in seen)
    assert [node.split()[1] for node in seen[:4]] == OURS
    assert len(seen) == 5


@pytest.mark.parametrize("variant", ["gdn", "kda"])
def test_compact_rows_cost_a_few_kernels_more_for_their_offsets(variant):
    """clamp, cumsum, clamp, pad and a cast; the commit after them is the same five."""
    seen = listing(48, variant, interval=4, mode="compact")
    assert [node.split()[1] for node in seen[-5:-1]] == OURS
    assert not any(node.startswith(("alloc ", "free ", "host ")) for node in seen)
    assert len(seen) <= 12


def test_the_nodes_do_not_grow_with_the_layers():
    assert listing(2, "gdn") == listing(48, "gdn")
