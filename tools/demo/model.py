"""A small byte-level hybrid language model: three linear-attention layers, then a full one.

Two ways through the same weights: `HybridLM.forward` runs whole sequences in plain,
differentiable torch, with the recurrence it is given (training); `session.Session` serves
requests through the ops (inference).

Letters: B requests, T tokens of a sequence (or rows of a window), N packed tokens, H key
heads, HV value heads, K key dim, V value dim.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONV_WIDTH = 4


@dataclass(frozen=True)
class Config:
    """Shape of a target. `taps` are the layers whose output a drafter sees."""

    kind: str
    key_heads: int
    value_heads: int
    mlp: int
    dim: int = 128
    key_dim: int = 32
    value_dim: int = 32
    gate_rank: int = 16
    attention_heads: int = 4
    layers: int = 4
    taps: tuple[int, ...] = (0, 2, 3)

    def __post_init__(self) -> None:
        heads_fit = (
            self.value_heads % self.key_heads == self.dim % self.attention_heads == 0
        )
        if (
            self.kind not in ("gdn", "kda")
            or not heads_fit
            or max(self.taps) >= self.layers
        ):
            raise ValueError(f"config does not fit together: {self}")


TARGETS = {
    "gdn": Config("gdn", key_heads=2, value_heads=4, mlp=192),
    "kda": Config("kda", key_heads=4, value_heads=4, mlp=160),
}


def rope(x: Tensor, position: Tensor) -> Tensor:
    """Rotary embedding of x [..., heads, channels] at position [...]."""
    half = x.shape[-1] // 2
    octave = torch.arange(half, device=x.device, dtype=torch.float64) / half
    angle = position[..., None, None] * 10000.0**-octave
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class LinearLayer(nn.Module):
    """Gated DeltaNet (one decay per value head) or KDA (one per head and key channel)."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config, self.kda = c, c.kind == "kda"
        keys, values = c.key_heads * c.key_dim, c.value_heads * c.value_dim
        self.parts = (keys, keys, values)
        self.widths = (sum(self.parts), values, c.gate_rank if self.kda else c.value_heads)
        self.project_in = nn.Linear(c.dim, sum(self.widths) + c.value_heads, bias=False)
        if self.kda:
            self.gate_up = nn.Linear(c.gate_rank, c.value_heads * c.key_dim, bias=False)
        self.conv = nn.Parameter(
            torch.empty(CONV_WIDTH, sum(self.parts)).uniform_(-0.5, 0.5)
        )
        # softplus(dt_bias) is log-uniform in [1e-3, 0.1] and A uniform in [1, 16], as in Mamba2.
        heads = (c.value_heads, c.key_dim) if self.kda else (c.value_heads,)
        step = torch.empty(heads).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.A_log = nn.Parameter(torch.empty(c.value_heads).uniform_(1, 16).log())
        self.norm = nn.Parameter(torch.ones(c.value_dim))
        self.project_out = nn.Linear(values, c.dim, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [..., dim] -> packed q, k, v before the conv, output gate z, a, b."""
        widths = (*self.widths, self.config.value_heads)
        packed, z, a, b = self.project_in(x).split(widths, -1)
        if self.kda:
            a = self.gate_up(a).unflatten(-1, self.dt_bias.shape)
        return packed, z, a, b

    def heads(self, packed: Tensor) -> list[Tensor]:
        """packed [..., channels] after the conv -> q, k [..., H, K], v [..., HV, V]: views."""
        dims = (self.config.key_dim, self.config.key_dim, self.config.value_dim)
        parts = zip(packed.split(self.parts, -1), dims, strict=True)
        return [part.unflatten(-1, (-1, dim)) for part, dim in parts]

    def output(self, o: Tensor, z: Tensor) -> Tensor:
        """o [..., HV, V] and its gate z [..., HV * V] -> [..., dim]."""
        o = F.rms_norm(o, self.norm.shape, self.norm, 1e-6).flatten(-2)
        return self.project_out(o * F.silu(z.to(o.dtype)))

    def forward(self, x: Tensor, recurrence: Callable[..., Tensor]) -> Tensor:
        packed, z, a, b = self.project(x)
        # Decays and the recurrence stay in fp32.
        with torch.autocast(x.device.type, enabled=False):
            packed, a, b = (y.to(x.dtype) for y in (packed, a, b))
            padded, length = F.pad(packed, (0, 0, CONV_WIDTH - 1, 0)), packed.shape[1]
            taps = (padded[:, j : j + length] * self.conv[j] for j in range(CONV_WIDTH))
            q, k, v = self.heads(F.silu(sum(taps)))
            q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
            repeats = self.config.value_heads // self.config.key_heads
            q = q.repeat_interleave(repeats, 2) * self.config.key_dim**-0.5
            k = k.repeat_interleave(repeats, 2)
            rate = self.A_log.exp().unsqueeze(-1) if self.kda else self.A_log.exp()
            o = recurrence(q, k, v, -rate * F.softplus(a + self.dt_bias), b.sigmoid())
        return self.output(o, z)


class FullAttention(nn.Module):
    """Softmax attention with rotary positions."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads = c.attention_heads
        self.project_in = nn.Linear(c.dim, 3 * c.dim, bias=False)
        self.project_out = nn.Linear(c.dim, c.dim, bias=False)

    def project(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., dim] at position [...] -> q, k (rotated), v [..., heads, channels]."""
        packed = self.project_in(x).to(x.dtype)
        q, k, v = packed.unflatten(-1, (3, self.heads, -1)).unbind(-3)
        return rope(q, position), rope(k, position), v

    def forward(self, x: Tensor, _recurrence: Callable[..., Tensor]) -> Tensor:
        qkv = self.project(x, torch.arange(x.shape[1], device=x.device))
        q, k, v = (y.transpose(1, 2) for y in qkv)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project_out(o.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, c: Config, linear: bool) -> None:
        super().__init__()
        self.mixer_norm, self.mlp_norm = nn.RMSNorm(c.dim, 1e-6), nn.RMSNorm(c.dim, 1e-6)
        self.mixer = LinearLayer(c) if linear else FullAttention(c)
        self.mlp = SwiGLU(c.dim, c.mlp)


class HybridLM(nn.Module):
    """Every fourth layer is full attention; the embedding is tied to the head."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.embed = nn.Embedding(256, c.dim)
        self.blocks = nn.ModuleList(Block(c, linear=i % 4 != 3) for i in range(c.layers))
        self.norm = nn.RMSNorm(c.dim, 1e-6)
        nn.init.normal_(self.embed.weight, std=c.dim**-0.5)
        for name, p in self.named_parameters():
            if name.endswith(("project_out.weight", "down.weight")):
                nn.init.normal_(p, std=0.5 * (p.shape[1] * 2 * c.layers) ** -0.5)

    def head(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.embed.weight)

    def forward(self, tokens: Tensor, recurrence: Callable[..., Tensor]) -> Tensor:
        """tokens [B, T] -> logits [B, T, 256].

        `recurrence(q, k, v, g, beta)` gives o, all [B, T, HV, ...], from a zero state; q and k
        come normalised, q scaled."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block.mixer(block.mixer_norm(x), recurrence)
            x = x + block.mlp(block.mlp_norm(x))
        return self.head(x)
