"""Pools for prompts of two small models, and how a prompt's state gets in."""

import dataclasses

import pytest
import torch

from replayssm.graph import LinearAttention, Pools, put_prefill

# K = V, the case that a transposed state would slip through.
SQUARE = LinearAttention(2, 1, 2, 32, 32, "gdn", activation_dtype=torch.float32)
KDA = dataclasses.replace(SQUARE, variant="kda", V=64)
MODELS = pytest.mark.parametrize("model", (SQUARE, KDA), ids=("gdn-square", "kda"))
SLOTS, D = [4, -1, 2], 4
LIVE, ROWS = [4, 2], [0, 2]  # live slots, and the batch rows they come from


def pools_of(model, device, **options):
    """Pools whose every slot and window holds NaN."""
    pools = Pools(model, slots=6, requests=3, window=D, device=device, **options)
    for buffer in pools.buffers():
        buffer.fill_(float("nan"))
    return pools


def random(*shape, device, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def put(pools, slots, *args, layout="vk", **options):
    slots = torch.tensor(slots, device=pools.state.device, dtype=torch.int32)
    put_prefill(pools, slots, *args, layout=layout, **options)
