"""Serving requests with `model.HybridLM` through the ops, in fixed shapes.

Letters: B requests, D rows of a window, N packed tokens, P positions, C channels, W taps.
"""

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model import CONV_WIDTH, HybridLM, LinearLayer
from replayssm import graph
from replayssm.graph import Bucket, Commit, Pools, StaticBatch, live_rows


class Layout(NamedTuple):
    """Where N packed tokens stand in B windows of D rows, and where their requests live.

    row, column [N]: a token's place. token [B, D]: the way back, anything where no token is.
    length [B]: tokens before the window. slot [B]: -1 for padding. request [B] and
    (place, position) [N]: where a request's, and a token's, cache and features are.
    """

    row: Tensor
    column: Tensor
    token: Tensor
    length: Tensor
    slot: Tensor
    request: Tensor
    place: Tensor
    position: Tensor


class Session:
    """B requests being decoded: pools, KV cache, features for the drafters, lengths.

    `logits` runs a `StaticBatch` and leaves the committed state alone; `commit` then keeps a
    prefix of each request's rows. `decode` is the plain path, one token each. Nothing is read
    on the host, and the caches have one request more than there are: padding writes there.

    The ops give the same bits for one row as for eight; a matrix product in fp32 does not
    (another row count, another summation order). So everything else accumulates in fp64 and
    rounds to fp32 once: that is what makes both paths agree byte for byte.
    """

    def __init__(
        self, model: HybridLM, batch: int, capacity: int, window: int, ops: Any
    ) -> None:
        """capacity: P, the longest sequence, unaccepted rows included. window: D.
        ops: `replayssm.ops`, or what stands in for it."""
        self.model, self.ops = copy.deepcopy(model).double().requires_grad_(False), ops
        c, device = model.config, model.embed.weight.device
        mixers = [block.mixer for block in self.model.blocks]
        linear = [mixer for mixer in mixers if isinstance(mixer, LinearLayer)]
        self.gates = [(mixer.A_log.float(), mixer.dt_bias.float()) for mixer in linear]
        layers = graph.LinearAttention(
            len(linear), c.key_heads, c.value_heads, c.key_dim, c.value_dim, c.kind,
            CONV_WIDTH, activation_dtype=torch.float32,
        )  # fmt: skip
        self.pools = Pools(
            layers, slots=batch + 3, requests=batch, window=window, device=device,
            channels_last=True,
        )  # fmt: skip
        # Rows, requests and slots deliberately have different numbers, as in a server.
        order = torch.Generator().manual_seed(batch)
        slots = torch.randperm(batch + 3, generator=order)[:batch]
        self.commit = Commit(self.pools, slots.int().to(device))
        self.requests = torch.randperm(batch, generator=order).to(device)
        self.length = torch.zeros_like(self.requests)
        heads = (c.attention_heads, c.dim // c.attention_heads)
        full, past = c.layers - len(linear), (batch + 1, capacity)
        self.cache = torch.zeros(full, 2, *past, *heads, device=device)
        self.features = torch.zeros(*past, len(c.taps) * c.dim, device=device)

    @property
    def slots(self) -> Tensor:
        return self.commit.slot_map[self.requests]

    def logits(self, batch: StaticBatch, cu_seqlens: Tensor | None) -> Tensor:
        """[N, 256] for the batch's tokens, as `batch.pack` orders them; commits nothing."""
        slot = batch.slots(self.commit.slot_map)
        if cu_seqlens is None:
            n = torch.arange(batch.bucket.tokens, device=slot.device)
            token, row, column = n.view(-1, batch.draft), n // batch.draft, n % batch.draft
            covered = torch.ones_like(n, dtype=torch.bool)
        else:
            row, column, covered = batch.places(cu_seqlens)
            token = cu_seqlens[:-1, None] + torch.arange(batch.draft, device=slot.device)
            token = token.clamp(max=batch.bucket.tokens - 1)
        spare = len(self.requests)
        request = torch.where(slot < 0, spare, batch.req_indices)
        place = torch.where(covered, request[row], spare)
        position = batch.seq_lens[row] + column
        layout = Layout(row, column, token, batch.seq_lens, slot, request, place, position)

        def recurrence(i: int, *inputs: Tensor) -> Tensor:
            windows = (window[i] for window in self.pools.windows)
            indices = (slot, cu_seqlens, batch.window_indices)
            return self.ops.verify(*inputs, self.pools.state[i], *windows, *indices)

        return self._run(batch.pack(cu_seqlens), layout, recurrence, self._keep_window)

    def verify(self, batch: StaticBatch, cu_seqlens: Tensor | None) -> Tensor:
        """The greedy tokens after the batch's, [B, D] or packed [N]: a `DecodeLoop`'s verify."""
        said = self.logits(batch, cu_seqlens).argmax(-1)
        return said.view_as(batch.draft_tokens) if cu_seqlens is None else said

    def prefill(self, prompts: list[Tensor]) -> Tensor:
        """Feeds prompts in windows of up to D rows, all of them accepted. Returns the first
        new token of each request [B]."""
        count, width = len(prompts), self.pools.window
        bucket, device = Bucket(count, count * width), self.length.device
        batch, new = StaticBatch(bucket, width, device, "compact"), self.length
        for start in range(0, max(map(len, prompts)), width):
            parts = [prompt[start : start + width] for prompt in prompts]
            lens = torch.tensor([len(part) for part in parts], device=device)
            rows = torch.stack([F.pad(part, (0, width - len(part))) for part in parts])
            batch.fill(live_rows(self.requests, self.length, rows, lens))
            ends = batch.cu_seqlens()
            said = self.verify(batch, ends)[ends[1:].long() - 1]
            done = self.commit.commit(self.requests, self.length, lens.int(), said)
            self.length, new = done.seq_lens, torch.where(lens > 0, said, new)
        return new

    def decode(self, tokens: Tensor) -> Tensor:
        """tokens [B] -> logits [B, 256]; commits the token."""
        row, slot = torch.arange(len(tokens), device=tokens.device), self.slots
        layout = Layout(
            row, torch.zeros_like(row), row[:, None], self.length, slot, self.requests,
            self.requests, self.length,
        )  # fmt: skip

        def recurrence(i: int, *inputs: Tensor) -> Tensor:
            return self.ops.decode(*inputs, self.pools.state[i], slot)

        logits = self._run(tokens, layout, recurrence, self._keep_state)
        self.length = self.length + 1
        return logits

    def _keep_window(self, i: int, inputs: list[Tensor], slot: Tensor) -> None:
        """The conv's inputs [B, W-1 + D, C] of each group: all but the oldest."""
        for window, new in zip(self.pools.conv_windows, inputs, strict=True):
            window[i, : len(slot), : new.shape[1] - 1] = new[:, 1:]

    def _keep_state(self, i: int, inputs: list[Tensor], slot: Tensor) -> None:
        for state, new in zip(self.pools.conv_states, inputs, strict=True):
            state[i, slot] = new[:, 1:]

    def _run(
        self,
        tokens: Tensor,
        layout: Layout,
        recurrence: Callable[..., Tensor],
        keep: Callable[[int, list[Tensor], Tensor], None],
    ) -> Tensor:
        features, linear, full = [], 0, 0
        x = self.model.embed(tokens).float()
        for i, block in enumerate(self.model.blocks):
            mixer, y = block.mixer, block.mixer_norm(x.double())
            if isinstance(mixer, LinearLayer):
                packed, z, *gates = (p.float() for p in mixer.project(y))
                inputs = self._conv_inputs(linear, packed, layout)
                keep(linear, inputs, layout.slot)
                packed = self._convolve(torch.cat(inputs, -1), mixer.conv)
                qkv = mixer.heads(packed[layout.row, layout.column])
                o = recurrence(linear, *qkv, *gates, *self.gates[linear])
                y, linear = mixer.output(o.double(), z), linear + 1
            else:
                qkv = (p.float() for p in mixer.project(y, layout.position))
                o = self._attend(self.cache[full], layout, *qkv)
                y, full = mixer.project_out(o.double()), full + 1
            x = x + y.float()
            x = x + block.mlp(block.mlp_norm(x.double())).float()
            if i in self.model.config.taps:
                features.append(x)
        self.features[layout.place, layout.position] = torch.cat(features, -1)
        return self.model.head(x.double()).float()

    def _conv_inputs(self, i: int, packed: Tensor, layout: Layout) -> list[Tensor]:
        """[B, W-1 + D, C] of each conv group: what came before the windows, and the windows."""
        slot = layout.slot.clamp(min=0)
        new = packed[layout.token].split(self.pools.model.conv_groups, -1)
        old = (state[i, slot] for state in self.pools.conv_states)
        return [torch.cat(pair, 1) for pair in zip(old, new, strict=True)]

    def _convolve(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """[B, W-1 + D, C] -> [B, D, C]."""
        rows = inputs.shape[1] - CONV_WIDTH + 1
        taps = (inputs[:, j : j + rows].double() * weight[j] for j in range(CONV_WIDTH))
        return F.silu(sum(taps)).float()

    def _attend(
        self, cache: Tensor, layout: Layout, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Over the cache [2, requests + 1, P, heads, channels], for q, k, v
        [N, heads, channels]. Returns [N, dim]."""
        cache[0][layout.place, layout.position] = k
        cache[1][layout.place, layout.position] = v
        rows = torch.arange(layout.token.shape[1], device=q.device)
        last = layout.length[:, None] + rows
        hidden = (
            torch.arange(cache.shape[2], device=q.device) > last[..., None]
        )  # [B, D, P]
        heads = (q[layout.token], cache[0][layout.request], cache[1][layout.request])
        query, keys, values = (y.double().transpose(1, 2) for y in heads)
        score = query @ keys.mT * q.shape[-1] ** -0.5
        weight = score.masked_fill(hidden[:, None], -math.inf).softmax(-1)
        o = (weight @ values).transpose(1, 2)[layout.row, layout.column]
        return o.flatten(1).float()
