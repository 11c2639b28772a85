"""State, window and convolution pools of a model's linear-attention layers."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops import checks, scatter
from ..ops.window_rule import Windows
from .model import LinearAttention, positive
from .routing import Route


class Memory(NamedTuple):
    """Bytes on one rank. The snapshot path needs the last two in place of the windows."""

    state: int
    windows: int
    conv_states: int
    conv_windows: int
    snapshots: int
    conv_snapshots: int

    @property
    def total(self) -> int:
        """What Pools allocates: all but the snapshots."""
        return self.state + self.windows + self.conv_states + self.conv_windows

    @property
    def snapshot_total(self) -> int:
        """What the pools of the snapshot path (``scatter``) would take."""
        return self.state + self.conv_states + self.snapshots + self.conv_snapshots

    def __str__(self) -> str:
        names = (*self._fields, "total", "snapshot_total")
        sizes = (getattr(self, name) / 2**20 for name in names)
        return "\n".join(
            f"{name:<14} {size:12,.2f} MiB" for name, size in zip(names, sizes, strict=True)
        )


def memory(
    model: LinearAttention,
    *,
    slots: int,
    requests: int,
    window: int,
    tensor_parallel: int = 1,
    draft: int | None = None,
) -> Memory:
    """What :class:`Pools` of these arguments takes on one rank; nothing is allocated.

    Args:
        model: the layers, before tensor parallelism.
        slots: S. Args like :class:`Pools`.
        requests: R.
        window: T.
        tensor_parallel: ranks.
        draft: D of the snapshot path that is compared, which keeps D states and D conv
            states a request and layer; default ``window``.

    Raises:
        ValueError, TypeError: as :class:`Pools`.
    """
    if draft is not None:
        positive("memory", "draft", draft)
    rank = model.rank(tensor_parallel)
    sizes = dict.fromkeys(Memory._fields, 0)
    for kind, _, shape, dtype in _layout(rank, slots, requests, window, False):
        sizes[kind] += math.prod(shape) * dtype.itemsize
    copies = (window if draft is None else draft) * requests
    sizes["snapshots"] = sizes["state"] // slots * copies
    sizes["conv_snapshots"] = sizes["conv_states"] // slots * copies
    return Memory(**sizes)


class Pools(torch.nn.Module):
    """All memory of one rank's linear-attention layers, as zeroed module buffers.

    Buffers, each dense and alone in its storage, none of them in a state_dict:
    state [L, S, HV, V, K] in state_dtype; k_window [L, R, H, T, K] and v_window
    [L, R, HV, T, V] in activation_dtype; g_window [L, R, HV, T] (GDN) or
    [L, R, HV, T, K] (KDA) and beta_window [L, R, HV, T] fp32. For convolution i,
    conv_state_i [L, S, C, W-1] and conv_window_i [L, R, C, T+W-2], both in
    activation_dtype; a conv window holds the W-2 inputs before a step and its T new ones.

    They are buffers because torch.compile's reduce-overhead makes no graph of a function
    that mutates anything else. ``.to(device)`` moves them, so it must come before any
    capture. A cast or another memory format is refused: it would round the fp32 gates.

    Args:
        model: the layers, before tensor parallelism. ``pools.model`` is one rank's share.
        slots: S, states kept: running requests and cached prefixes.
        requests: R, requests that can be verified at once; window rows.
        window: T, rows of a window, at least D.
        tensor_parallel: ranks that share the heads evenly.
        device: where. CUDA devices are asked for their free memory first.
        channels_last: conv buffers as [.., W-1, C] and [.., T+W-2, C].
        route: what ``decide`` said of the backend that will use them; None: it was not
            asked. It must be a fold of the model's variant, decided for this window.

    Raises:
        ValueError, TypeError: naming the argument, what was wanted and what came;
            nothing has been allocated then.
    """

    state: Tensor
    k_window: Tensor
    v_window: Tensor
    g_window: Tensor
    beta_window: Tensor

    def __init__(
        self,
        model: LinearAttention,
        *,
        slots: int,
        requests: int,
        window: int,
        tensor_parallel: int = 1,
        device: torch.device | str,
        channels_last: bool = False,
        route: Route | None = None,
    ) -> None:
        super().__init__()
        if route is not None and route.commit != f"{model.variant}_fold":
            raise ValueError(
                f"Pools: route must be {model.variant}_fold for a {model.variant!r} model, "
                f"got {route.commit}: {route.reason}"
            )
        if route is not None and route.window not in (None, window):
            raise ValueError(
                f"Pools: window must be {route.window}, which route was decided for, got "
                f"{window}: decide with the window that the pools will have"
            )
        self.memory = memory(
            model, slots=slots, requests=requests, window=window,
            tensor_parallel=tensor_parallel,
        )  # fmt: skip
        self.model, self.channels_last = model.rank(tensor_parallel), channels_last
        self.slots, self.requests, self.window = slots, requests, window
        device = torch.device(device)
        free = _free_bytes(device)
        if free is not None and self.memory.total > free:
            raise ValueError(
                f"Pools: {self.memory.total} bytes wanted on {device}, {free} are free: "
                f"lower slots = {slots} ({self.memory.state + self.memory.conv_states} "
                f"bytes) or requests = {requests} "
                f"({self.memory.windows + self.memory.conv_windows} bytes)"
            )
        # Tensors made under inference mode could never be written outside it.
        with torch.inference_mode(False):
            for _, name, shape, dtype in _layout(
                self.model, slots, requests, window, channels_last
            ):
                zeros = torch.zeros(shape, dtype=dtype, device=device)
                self.register_buffer(name, zeros, persistent=False)

    @property
    def windows(self) -> Windows:
        """k_window, v_window, g_window, beta_window: ``fold``'s arguments after state."""
        return Windows(self.k_window, self.v_window, self.g_window, self.beta_window)

    @property
    def conv_states(self) -> list[Tensor]:
        """The conv state of each convolution; [] without one."""
        return self._numbered("conv_state")

    @property
    def conv_windows(self) -> list[Tensor]:
        """The conv window of each convolution; [] without one."""
        return self._numbered("conv_window")

    def _numbered(self, name: str) -> list[Tensor]:
        return [getattr(self, f"{name}_{i}") for i in range(len(self.model.conv_groups))]

    def reset(self, slots: Tensor) -> None:
        """Zero the state and conv states of slots, for all layers, before a new request.

        A slot that changes hands must be reset or filled by ``put_prefill``. Window rows
        need neither: nothing counts what they hold, and verify writes before fold reads.

        Args:
            slots: [B] int32 or int64 on the pools' device; live ones distinct, negative
                or at or past S = ignored. Never read on the host, so this can be captured.

        Raises:
            ValueError, TypeError: naming the argument, what was wanted and what came.
        """
        checks.Check("reset", self.state, "pools").index("slots", slots, "B")
        source = torch.zeros_like(slots)
        for pool in (self.state, *self.conv_states):
            # One slot of one layer, read again for every other.
            zero = pool.new_zeros((1, 1, 1, *pool.shape[2:]))
            zeros = zero.expand(pool.shape[0], *zero.shape[1:])
            scatter(pool, zeros, slots, source, source_indices=source)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Pools":
        # Module.to, .half() and the rest all come through here.
        for name, buffer in self.named_buffers():
            probe = torch.empty(
                (2,) * buffer.dim(), dtype=buffer.dtype, device=buffer.device
            )
            moved = fn(probe)
            if moved.dtype != buffer.dtype or not moved.is_contiguous():
                raise TypeError(
                    f"Pools: {name} must stay {buffer.dtype} and contiguous, got "
                    f"{moved.dtype} with strides {list(moved.stride())}: set the dtypes in "
                    "LinearAttention, and cast the model before it holds the pools"
                )
        super()._apply(fn, recurse)
        return self


def _layout(
    rank: LinearAttention, slots: int, requests: int, window: int, channels_last: bool
) -> Iterator[tuple[str, str, tuple[int, ...], torch.dtype]]:
    """Every buffer: which of Memory's fields counts it, its name, shape and dtype."""
    for name, value in (("slots", slots), ("requests", requests), ("window", window)):
        positive("Pools", name, value)
    L, H, HV, K, V, W = (
        rank.layers, rank.H, rank.HV, rank.K, rank.V, rank.conv_width
    )  # fmt: skip
    gates = (L, requests, HV, window)
    yield "state", "state", (L, slots, HV, V, K), rank.state_dtype
    yield "windows", "k_window", (L, requests, H, window, K), rank.activation_dtype
    yield "windows", "v_window", (L, requests, HV, window, V), rank.activation_dtype
    g_shape = gates if rank.variant == "gdn" else (*gates, K)
    yield "windows", "g_window", g_shape, torch.float32
    yield "windows", "beta_window", gates, torch.float32
    for i, C in enumerate(rank.conv_groups):
        for name, rows, taps in (
            ("conv_state", slots, W - 1), ("conv_window", requests, window + W - 2)
        ):  # fmt: skip
            inner = (taps, C) if channels_last else (C, taps)
            yield f"{name}s", f"{name}_{i}", (L, rows, *inner), rank.activation_dtype


def _free_bytes(device: torch.device) -> int | None:
    """What can still be allocated; None where nobody can say (the CPU)."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    # Cached blocks that are not in use: the allocator gives them back before it fails.
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + cached
