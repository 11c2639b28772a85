"""Serving requests with `model.HybridLM` through the ops.

Letters: B requests, T rows of a window, N packed tokens, P positions.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model import CONV_WIDTH, HybridLM, LinearAttention


class Session:
    """B requests being decoded: states, windows, conv states, KV cache, drafters' features.

    `verify` computes all rows of a ragged batch and leaves the committed state alone; `commit`
    then keeps a prefix of each request's rows. `decode` is the plain path, one token each.

    The ops give the same bits for one row as for eight; a matrix product in fp32 does not
    (another row count, another summation order). So everything else accumulates in fp64 and
    rounds to fp32 once: that is what makes both paths agree byte for byte.
    """

    def __init__(
        self, model: HybridLM, batch: int, capacity: int, window: int, ops: Any
    ) -> None:
        """capacity: the longest sequence, unaccepted rows included. window: T.
        ops: `replayssm.ops`, or what stands in for it."""
        self.model, self.ops = copy.deepcopy(model).double().requires_grad_(False), ops
        c, device = model.config, model.embed.weight.device
        mixers = [block.mixer for block in self.model.blocks]
        linear = [mixer for mixer in mixers if isinstance(mixer, LinearAttention)]
        self.gates = [(mixer.A_log.float(), mixer.dt_bias.float()) for mixer in linear]

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, device=device)

        # Slots and window rows deliberately differ from batch positions, as in a server.
        order = torch.Generator().manual_seed(batch)
        self.slots = torch.randperm(batch + 3, generator=order)[:batch].int().to(device)
        self.rows = torch.randperm(batch, generator=order).int().to(device)
        pool, gate = (len(linear), batch), (c.key_dim,) if c.kind == "kda" else ()
        self.state = zeros(len(linear), batch + 3, c.value_heads, c.value_dim, c.key_dim)
        self.windows = (
            zeros(*pool, c.key_heads, window, c.key_dim),
            zeros(*pool, c.value_heads, window, c.value_dim),
            zeros(*pool, c.value_heads, window, *gate),
            zeros(*pool, c.value_heads, window),
        )
        self.conv = list(zeros(*pool, CONV_WIDTH - 1, sum(linear[0].parts)))
        heads = (c.attention_heads, c.dim // c.attention_heads)
        self.cache = zeros(c.layers - len(linear), 2, batch, capacity, *heads)
        self.features = zeros(batch, capacity, len(c.taps) * c.dim)
        self.length = torch.zeros(batch, dtype=torch.int64, device=device)

    def verify(self, tokens: Tensor, lens: list[int]) -> Tensor:
        """tokens [N], lens[i] of them for request i -> logits [N, 256]; commits nothing."""
        cu_seqlens = None
        if len(set(lens)) > 1:
            cu_seqlens = torch.tensor([0, *lens], device=tokens.device).cumsum(0).int()
        indices = (self.slots, cu_seqlens, self.rows)

        def recurrence(i: int, *inputs: Tensor) -> Tensor:
            windows = (window[i] for window in self.windows)
            return self.ops.verify(*inputs, self.state[i], *windows, *indices)

        return self._run(tokens, lens, recurrence)

    def commit(self, accept_lens: Tensor) -> None:
        """Keeps the first accept_lens[i] rows of request i's last verify."""
        pools = (self.state, *self.windows)
        self.ops.fold(*pools, self.slots, accept_lens, window_indices=self.rows)
        self._advance(accept_lens.long())

    def decode(self, tokens: Tensor) -> Tensor:
        """tokens [B] -> logits [B, 256]; commits the token."""

        def recurrence(i: int, *inputs: Tensor) -> Tensor:
            return self.ops.decode(*inputs, self.state[i], self.slots)

        logits = self._run(tokens, [1] * len(tokens), recurrence)
        self._advance(torch.ones_like(self.length))
        return logits

    def finish(self, done: Tensor) -> None:
        """Makes the requests of done [B] bool padding rows: the ops skip them from now on."""
        self.slots = self.slots.masked_fill(done, -1)

    def _past(self, request: Tensor, end: Tensor, count: int) -> Tensor:
        """Where the `count` inputs before a request's row `end` are in cat(conv, packed)."""
        row = end[:, None] + torch.arange(-count, 0, device=end.device)
        old = row + (request * (CONV_WIDTH - 1) + CONV_WIDTH - 1)[:, None]
        new = row + (self.starts[request] + len(self.length) * (CONV_WIDTH - 1))[:, None]
        return torch.where(row < 0, old, new)

    def _advance(self, accept_lens: Tensor) -> None:
        requests = torch.arange(len(accept_lens), device=accept_lens.device)
        past = self._past(requests, accept_lens, CONV_WIDTH - 1)
        self.conv = [source[past] for source in self.sources]
        self.length += accept_lens

    def _run(
        self, tokens: Tensor, lens: list[int], recurrence: Callable[..., Tensor]
    ) -> Tensor:
        length = torch.tensor(lens, device=tokens.device)
        self.starts = length.cumsum(0) - length
        request = torch.repeat_interleave(length)
        row = torch.arange(len(tokens), device=tokens.device) - self.starts[request]
        place = (request, self.length[request] + row)
        taps = self._past(request, row + 1, CONV_WIDTH)
        self.sources, features, full = [], [], 0
        x = self.model.embed(tokens).float()
        for i, block in enumerate(self.model.blocks):
            mixer, y = block.mixer, block.mixer_norm(x.double())
            if isinstance(mixer, LinearAttention):
                linear = len(self.sources)
                packed, z, *gates = (p.float() for p in mixer.project(y))
                self.sources.append(torch.cat((self.conv[linear].flatten(0, 1), packed)))
                packed = (self.sources[-1][taps].double() * mixer.conv).sum(1)
                qkv = mixer.heads(F.silu(packed).float())
                o = recurrence(linear, *qkv, *gates, *self.gates[linear])
                y = mixer.output(o.double(), z)
            else:
                o = self._attend(self.cache[full], place, row, mixer.project(y, place[1]))
                y, full = mixer.project_out(o.double()), full + 1
            x = x + y.float()
            x = x + block.mlp(block.mlp_norm(x.double())).float()
            if i in self.model.config.taps:
                features.append(x)
        self.features[place] = torch.cat(features, -1)
        return self.model.head(x.double()).float()

    def _attend(
        self,
        cache: Tensor,
        place: tuple[Tensor, Tensor],
        row: Tensor,
        qkv: tuple[Tensor, ...],
    ) -> Tensor:
        """Over the cache [2, B, P, heads, channels], for q, k, v [N, heads, channels] that go to
        its (request, position) = `place` and are each request's `row`. Returns [N, dim]."""
        q, k, v = (y.float() for y in qkv)
        cache[0][place], cache[1][place] = k, v
        rows, positions = int(row.max()) + 1, int(place[1].max()) + 1
        query = q.new_zeros(cache.shape[1], rows, *q.shape[1:])
        query[place[0], row] = q
        last = self.length[:, None] + torch.arange(rows, device=q.device)
        hidden = torch.arange(positions, device=q.device) > last[..., None]  # [B, rows, P]
        heads = (y.double().transpose(1, 2) for y in (query, *cache[:, :, :positions]))
        query, keys, values = heads
        score = query @ keys.mT * q.shape[-1] ** -0.5
        weight = score.masked_fill(hidden[:, None], -math.inf).softmax(-1)
        return (weight @ values).transpose(1, 2)[place[0], row].flatten(1).float()
