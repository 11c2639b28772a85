"""What a model's linear-attention layers are."""

import dataclasses
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..ops import checks


class Shard(NamedTuple):
    """What one tensor-parallel rank holds of the whole model's tensors.

    key_heads, of H: q and k. value_heads, of HV: v, a, b, A_log, dt_bias, the state, and
    the rows of the output projection. channels, a [C / ranks] int64 CPU tensor for each
    convolution: of its weight, bias and conv states. GDN's one convolution has q, k and v
    one after another, so a rank's channels are three runs of it.
    """

    key_heads: slice
    value_heads: slice
    channels: tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True)
class LinearAttention:
    """A model's linear-attention layers, before tensor parallelism.

    Args:
        layers: L, linear-attention layers only.
        H: key heads. HV, value heads, is a multiple of it.
        HV: value heads.
        K: key dimension, at most 256. V, value dimension.
        V: value dimension.
        variant: "gdn", one decay per head, or "kda", one per head and key dimension.
        conv_width: W, taps of the causal convolution before q, k and v; 1 = none.
        lower_bound: KDA's safe gate, a finite number below 0; None: softplus.
        activation_dtype: of the k and v windows and the convolution, bf16, fp16 or fp32.
        state_dtype: of the state, fp32, bf16 or fp16.

    Raises:
        ValueError, TypeError: naming the field, what was wanted and what came.
    """

    layers: int
    H: int
    HV: int
    K: int
    V: int
    variant: Literal["gdn", "kda"]
    conv_width: int = 4
    lower_bound: float | None = None
    activation_dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        owner = type(self).__name__
        for name in ("layers", "H", "HV", "K", "V", "conv_width"):
            positive(owner, name, getattr(self, name))
        if self.HV % self.H:
            raise ValueError(
                f"{owner}: HV must be a multiple of H, got HV = {self.HV} and H = {self.H}"
            )
        if self.K > checks.MAX_K:
            raise ValueError(f"{owner}: K must be 1 to {checks.MAX_K}, got {self.K}")
        if self.variant not in ("gdn", "kda"):
            raise ValueError(
                f"{owner}: variant must be 'gdn' or 'kda', got {self.variant!r}"
            )
        if self.lower_bound is not None:
            if self.variant == "gdn":
                raise ValueError(
                    f"{owner}: lower_bound is KDA's safe gate and must be None for 'gdn', "
                    f"got {self.lower_bound}"
                )
            if not float("-inf") < self.lower_bound < 0:
                raise ValueError(
                    f"{owner}: lower_bound must be a finite number below 0, "
                    f"got {self.lower_bound}"
                )
        for name in ("activation_dtype", "state_dtype"):
            if getattr(self, name) not in checks.ACTIVATION:
                raise TypeError(
                    f"{owner}: {name} must be bfloat16 or float16 or float32, "
                    f"got {getattr(self, name)}"
                )

    @property
    def conv_groups(self) -> tuple[int, ...]:
        """Channels C of each convolution: GDN's one over q, k and v, KDA's three; () without."""
        q, v = self.H * self.K, self.HV * self.V
        if self.conv_width == 1:
            return ()
        return (2 * q + v,) if self.variant == "gdn" else (q, q, v)

    def rank(self, tensor_parallel: int) -> "LinearAttention":
        """The share of one of ``tensor_parallel`` ranks: heads are split evenly.

        Args:
            tensor_parallel: number of ranks; divides H, and so HV.

        Raises:
            ValueError, TypeError: it does not divide the heads, or is no positive int.
        """
        positive("LinearAttention.rank", "tensor_parallel", tensor_parallel)
        if self.H % tensor_parallel:
            raise ValueError(
                "LinearAttention.rank: tensor_parallel must divide the heads, got "
                f"{tensor_parallel} for H = {self.H} and HV = {self.HV}"
            )
        return dataclasses.replace(
            self, H=self.H // tensor_parallel, HV=self.HV // tensor_parallel
        )

    def shard(self, rank: int, tensor_parallel: int) -> Shard:
        """Which heads and channels rank ``rank`` holds: runs of heads, in rank order.

        Every value head stays with its key head, so each rank has the model's HV / H.

        Args:
            rank: from 0.
            tensor_parallel: number of ranks; divides H, and so HV.

        Raises:
            ValueError, TypeError: as ``rank``, or there is no such rank.
        """
        share = self.rank(tensor_parallel)
        if not isinstance(rank, int) or isinstance(rank, bool):
            raise TypeError(f"LinearAttention.shard: rank must be an int, got {rank!r}")
        if not 0 <= rank < tensor_parallel:
            raise ValueError(
                f"LinearAttention.shard: rank must be 0 to {tensor_parallel - 1} with "
                f"tensor_parallel = {tensor_parallel}, got {rank}"
            )
        keys = slice(rank * share.H, (rank + 1) * share.H)
        values = slice(rank * share.HV, (rank + 1) * share.HV)
        q, v = (
            torch.arange(heads.start * size, heads.stop * size, device="cpu")
            for heads, size in ((keys, self.K), (values, self.V))
        )
        size = self.H * self.K
        channels: tuple[Tensor, ...] = (torch.cat([q, q + size, v + 2 * size]),)
        if self.variant == "kda":
            channels = q, q, v
        return Shard(keys, values, channels if self.conv_width > 1 else ())


def positive(owner: str, name: str, value: int) -> None:
    """Raise where an argument of ``owner`` is no int of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{owner}: {name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{owner}: {name} must be at least 1, got {value}")
