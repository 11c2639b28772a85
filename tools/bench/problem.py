"""What the benchmarks run: a model's linear-attention layers with random inputs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm import ops
from replayssm.graph import Commit, LinearAttention, Pools, memory

OPS = ("verify", "decode", "fold", "step", "commit")
FASTER = ("verify", "step")  # what exact=False changes


@dataclass(frozen=True)
class Workload(LinearAttention):
    """One GPU's share of a model's linear-attention layers, and the draft length D to time."""

    D: int = 8

    @property
    def kda(self) -> bool:
        return self.variant == "kda"


def _heads(
    layers: int, H: int, HV: int, variant: str = "gdn", K: int = 128, V: int = 128, **rest
) -> Workload:
    return Workload(layers, H, HV, K, V, variant, **rest)


MODELS = {
    "qwen3-next-80b": _heads(36, 16, 32, D=4),
    "qwen3.5-35b": _heads(30, 16, 32),
    "qwen3.5-27b": _heads(48, 16, 48),
    "qwen3.5-397b-tp4": _heads(45, 4, 16, D=4),
    "kimi-linear-48b": _heads(20, 32, 32, "kda"),
    "kimi-k3-tp8": _heads(69, 12, 12, "kda", lower_bound=-5.0),
    "ling-3.0-flash": _heads(35, 32, 32, "kda", D=9, lower_bound=-5.0),
}
# qwen3.5-35b's states cut into other heads, to compare shares of the floor.
HEAD_DIMS = {
    "head-dim-64": _heads(30, 64, 128, K=64, V=64),
    "head-dim-256": _heads(30, 4, 8, K=256, V=256),
}


class Problem:
    """B requests of a workload: pools, and fresh random activations for every layer.

    tokens: q, k [L, N, H, K], v [L, N, HV, V], a [L, N, HV] (KDA [L, N, HV, K]) and
    b [L, N, HV], in the model's activation dtype, N = B * D. A_log [L, HV] and dt_bias, fp32. state and windows as
    ``Pools`` has them, B slots and rows, the windows filled by a verify. slots [B] int32,
    each request's slot and window row. accept_lens [B] int32, see ``accept``.
    """

    def __init__(
        self, model: Workload, B: int, device: torch.device | str = "cuda", seed: int = 0
    ) -> None:
        L, N, gates = model.layers, B * model.D, (model.HV, model.K)[: 1 + model.kda]
        self.model, self.B = model, B
        self._draw = draw = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, dtype: torch.dtype = model.activation_dtype) -> Tensor:
            return torch.randn(*shape, generator=draw, device=device, dtype=dtype)

        self.pools = Pools(model, slots=B, requests=B, window=model.D, device=device)
        for pool in (self.pools.state, *self.pools.conv_states, *self.pools.conv_windows):
            pool.normal_(generator=draw)
        self.tokens = (
            normal(L, N, model.H, model.K), normal(L, N, model.H, model.K),
            normal(L, N, model.HV, model.V), normal(L, N, *gates), normal(L, N, model.HV),
        )  # fmt: skip
        self.A_log = normal(L, model.HV, dtype=torch.float32)
        self.dt_bias = normal(L, *gates, dtype=torch.float32)
        self.slots = torch.randperm(B, generator=draw, device=device).int()
        self.accept_lens = torch.full_like(self.slots, model.D)
        self.commit = Commit(self.pools, self.slots)
        self.requests = torch.arange(B, device=device)
        self.state, self.windows = self.pools.state, self.pools.windows
        self.every_layer(self.verify)  # random windows would hold decays above 1

    def arguments(self, layer: int, t: int | None = None) -> tuple[Tensor, ...]:
        """verify's tensors of one layer, or decode's of its token t."""
        tokens = [x[layer] for x in self.tokens]
        if t is not None:
            tokens = [x.unflatten(0, (self.B, self.model.D))[:, t] for x in tokens]
        windows = [] if t is not None else [window[layer] for window in self.windows]
        gates = self.A_log[layer], self.dt_bias[layer]
        return *tokens, *gates, self.state[layer], *windows, self.slots

    def verify(self, layer: int, exact: bool = True) -> Tensor:
        lower_bound = self.model.lower_bound
        return ops.verify(*self.arguments(layer), lower_bound=lower_bound, exact=exact)

    def decode(self, layer: int, t: int = 0) -> Tensor:
        return ops.decode(*self.arguments(layer, t), lower_bound=self.model.lower_bound)

    def fold(self) -> None:
        ops.fold(self.state, *self.windows, self.slots, self.accept_lens)

    def step(self, exact: bool = True) -> None:
        """What an engine queues: the verify of each layer in turn, one fold of all."""
        self.every_layer(lambda layer: self.verify(layer, exact))
        self.fold()

    def commit_step(self) -> None:
        """commit_indices, fold and conv_commit, as ``replayssm.graph`` runs them."""
        lens = self.accept_lens
        self.commit.commit(self.requests, self.requests, lens, bonus=lens)

    def every_layer(self, op: Callable[[int], object]) -> None:
        for layer in range(self.model.layers):
            op(layer)

    def run(self, op: str, exact: bool = True) -> Callable[[], None]:
        """A call of one of ``OPS`` for all layers."""
        return {
            "verify": lambda: self.every_layer(lambda layer: self.verify(layer, exact)),
            "decode": lambda: self.every_layer(self.decode),
            "fold": self.fold,
            "step": lambda: self.step(exact),
            "commit": self.commit_step,
        }[op]

    def accept(self, lengths: int | str) -> None:
        """Set accept_lens: to a number, to "all" of D, or each "uniform" in 1 .. D."""
        if lengths == "uniform":
            self.accept_lens.random_(1, self.model.D + 1, generator=self._draw)
        else:
            self.accept_lens.fill_(self.model.D if lengths == "all" else lengths)


def needed_bytes(model: Workload, B: int) -> int:
    """What a ``Problem`` allocates, and the outputs of one layer's verify."""
    pools = memory(model, slots=B, requests=B, window=model.D).total
    gates = model.HV * (model.K if model.kda else 1)
    inputs = 2 * model.H * model.K + model.HV * model.V + gates + model.HV
    tokens = B * model.D * 2 * (model.layers * inputs + model.HV * model.V)
    return pools + tokens
