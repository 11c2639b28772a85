"""From prefill to decoding: a prompt's final state and conv inputs, put into slots."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ..ops import checks, scatter
from .pools import Pools


def put_prefill(
    pools: Pools,
    slots: Tensor,
    state: Tensor,
    conv_states: Sequence[Tensor] | None,
    *,
    layout: Literal["vk", "kv"],
    channels_last: bool = False,
) -> None:
    """Overwrite whole slots, for all layers, with the state a prefill ended in.

    Copies by ``scatter``, one launch for the state and one per convolution: padding
    rows are never written and nothing is read on the host, so it can be captured.
    Values are rounded once, to the pools' dtypes. Window rows need no hand-off.

    Args:
        pools: written: state, and conv states where given.
        slots: [B] int32 or int64 on the pools' device, the slot of each prompt; live
            ones distinct, negative or at or past S = skipped.
        state: [L, B, HV, V, K], or with layout "kv" [L, B, HV, K, V], fp32, bf16 or
            fp16: the state after the prompt's last token, any strides.
        conv_states: for each convolution the last W-1 inputs of the prompt, oldest
            first, zeros before its start: [L, B, C, W-1] of state's dtypes, any strides.
            None leaves the slots' conv states as they are.
        layout: which of the two ``state`` has. Never guessed: with K = V the shapes are
            the same. Pools keep "vk"; chunked prefill kernels often return "kv".
        channels_last: conv_states come as [L, B, W-1, C], whatever the pools' own form.

    Raises:
        ValueError, TypeError: naming the argument, what was wanted and what came;
            nothing is written.
    """
    if layout not in ("vk", "kv"):
        raise ValueError(f"put_prefill: layout must be 'vk' or 'kv', got {layout!r}")
    check = checks.Check("put_prefill", pools.state, "pools")
    letters = ("L", "S", "HV", "V", "K")
    for letter, size in zip(letters, pools.state.shape, strict=True):
        check.sizes[letter], check.sources[letter] = size, "pools"
    check.index("slots", slots, "B")
    dims = "L B HV V K" if layout == "vk" else "L B HV K V"
    check.tensor("state", state, dims, checks.ACTIVATION, variant=f" (layout '{layout}')")
    pairs = [(pools.state, state if layout == "vk" else state.transpose(-2, -1))]
    if conv_states is not None:
        pairs += _conv_pairs(check, pools, conv_states, channels_last)
    # Snapshot 0 of row i goes to slot i.
    step = torch.zeros_like(slots)
    for pool, values in pairs:
        # A cast makes it contiguous in the same pass; without one .to returns it as it is.
        dense = values.to(pool.dtype, memory_format=torch.contiguous_format).contiguous()
        scatter(pool, dense.unsqueeze(2), slots, step)


def _conv_pairs(
    check: checks.Check, pools: Pools, conv_states: Sequence[Tensor], channels_last: bool
) -> list[tuple[Tensor, Tensor]]:
    """Each conv state with the values for it, in the pools' form."""
    if len(conv_states) != len(pools.conv_states):
        check.fail(
            f"conv_states must be {len(pools.conv_states)} tensors for these pools, "
            f"got {len(conv_states)}"
        )
    pairs = []
    for i, (pool, values) in enumerate(zip(pools.conv_states, conv_states, strict=True)):
        channels, taps = f"C{i}", "W-1"
        inner = (taps, channels) if pools.channels_last else (channels, taps)
        for letter, size in zip(inner, pool.shape[2:], strict=True):
            check.sizes[letter], check.sources[letter] = size, "pools"
        wanted = (taps, channels) if channels_last else (channels, taps)
        check.tensor(
            f"conv_states[{i}]", values, f"L B {' '.join(wanted)}", checks.ACTIVATION
        )
        if channels_last != pools.channels_last:
            values = values.transpose(-2, -1)
        pairs.append((pool, values))
    return pairs
