"""What peers read of a benchmark's problem, with random numbers on the CPU."""

from dataclasses import dataclass

import torch

from replayssm import ops
from replayssm.graph import LinearAttention, Pools


@dataclass(frozen=True)
class Model:
    layers: int
    H: int
    HV: int
    D: int
    kda: bool = False
    lower_bound: float | None = None
    K: int = 32
    V: int = 16


class Problem:
    """Requests of a model with these accept lengths."""

    def __init__(self, model: Model, accept_lens: list[int], dtype=torch.bfloat16) -> None:
        L, H, HV, K, V = model.layers, model.H, model.HV, model.K, model.V
        self.model, self.B = model, len(accept_lens)
        N, gate = self.B * model.D, (HV, K)[: 1 + model.kda]
        self.tokens = tuple(
            torch.randn(L, N, *shape, dtype=dtype)
            for shape in ((H, K), (H, K), (HV, V), gate, (HV,))
        )
        self.A_log, self.dt_bias = torch.randn(L, HV), torch.randn(L, *gate)
        attention = LinearAttention(
            L, H, HV, K, V, "kda" if model.kda else "gdn", lower_bound=model.lower_bound,
            activation_dtype=dtype,
        )  # fmt: skip
        self.pools = Pools(
            attention, slots=self.B, requests=self.B, window=model.D, device="cpu"
        )
        for pool in (self.pools.state, *self.pools.conv_states, *self.pools.conv_windows):
            pool.normal_()
        self.state, self.windows = self.pools.state, self.pools.windows
        self.slots = torch.randperm(self.B).int()
        self.accept_lens = torch.tensor(accept_lens, dtype=torch.int32)

    def verify(self, layer: int) -> torch.Tensor:
        windows = (window[layer] for window in self.windows)
        return self._run(ops.verify, layer, self.tokens, *windows)

    def decode(self, layer: int) -> torch.Tensor:
        tokens = (x.unflatten(1, (self.B, self.model.D))[:, :, 0] for x in self.tokens)
        return self._run(ops.decode, layer, tokens)

    def _run(self, op, layer: int, tokens, *windows: torch.Tensor) -> torch.Tensor:
        return op(
            *(x[layer] for x in tokens), self.A_log[layer], self.dt_bias[layer],
            self.state[layer], *windows, self.slots, lower_bound=self.model.lower_bound,
        )  # fmt: skip
