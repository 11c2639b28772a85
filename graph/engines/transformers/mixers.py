"""The linear-attention layers that transformers ships, and where their inputs come out."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

# The recurrence of whole sequences and of single tokens, in a modeling file's namespace.
RULES = {
    "gdn": ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    "kda": ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
}


class Mixer(NamedTuple):
    """A linear-attention layer of a model: sizes, parameters, where a and b come out.

    split(*outputs of projections) gives a [B, D, HV] (KDA: [B, D, HV, K]) and b [B, D, HV].
    """

    module: nn.Module
    sizes: dict[str, Any]
    A_log: Tensor
    dt_bias: Tensor
    projections: tuple[nn.Module, ...]
    split: Callable[..., tuple[Tensor, Tensor]]


def _gdn(m: nn.Module, projections: tuple[nn.Module, ...], split: Callable) -> Mixer:
    sizes = {"H": m.num_k_heads, "HV": m.num_v_heads, "K": m.head_k_dim, "V": m.head_v_dim}
    return Mixer(m, {**sizes, "variant": "gdn"}, m.A_log, m.dt_bias, projections, split)


def _qwen3_next(m: nn.Module) -> Mixer:
    def split(ba: Tensor) -> tuple[Tensor, Tensor]:
        # Ordered by key head: b of its value heads, then a of them.
        b, a = ba.unflatten(-1, (m.num_k_heads, 2, -1)).unbind(-2)
        return a.flatten(-2), b.flatten(-2)

    return _gdn(m, (m.in_proj_ba,), split)


def _qwen3_5(m: nn.Module) -> Mixer:
    return _gdn(m, (m.in_proj_a, m.in_proj_b), lambda a, b: (a, b))


def _kimi_linear(m: nn.Module) -> Mixer:
    heads, gate = (m.num_heads, m.head_dim), m.forget_gate
    sizes = {"H": heads[0], "HV": heads[0], "K": heads[1], "V": heads[1], "variant": "kda"}
    parameters = gate.A_log.flatten(), gate.dt_bias.unflatten(0, heads)
    return Mixer(
        m, sizes, *parameters, (gate.f_b_proj, m.b_proj),
        lambda a, b: (a.unflatten(-1, heads), b),
    )  # fmt: skip


MIXERS = {
    "Qwen3NextGatedDeltaNet": _qwen3_next,
    "Qwen3_5GatedDeltaNet": _qwen3_5,
    "Qwen3_5MoeGatedDeltaNet": _qwen3_5,
    "KimiLinearDeltaAttention": _kimi_linear,
}
