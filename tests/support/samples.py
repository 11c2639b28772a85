"""One decoding problem of any shape, what fp64 says of it, and bitwise comparison.

Everything nobody may look at is NaN: the other half of every pool's pages, slots no
request owns, and windows before verify wrote them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

import torch
from torch import Tensor

from replayssm import ops

VARIANTS = ("gdn", "kda", "kda-safe")
WINDOWS = ("k_window", "v_window", "g_window", "beta_window")
POOLS = ("state", *WINDOWS)
TOKENS = ("q", "k", "v", "a", "b")


def bits(x: Tensor) -> Tensor:
    """The bits of x as integers, so that NaN equals itself and 0 differs from -0."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.detach().contiguous().view(kinds[x.element_size()])


def bits_equal(got: Tensor, want: Tensor, what: str = "values") -> None:
    """Fail with the first element whose bits differ."""
    assert got.shape == want.shape, f"{what}: shape {got.shape} is not {want.shape}"
    assert got.dtype == want.dtype, f"{what}: {got.dtype} is not {want.dtype}"
    differ = bits(got) != bits(want)
    if differ.any():
        first = tuple(differ.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(differ.sum())} of {differ.numel()} elements differ, first at "
            f"{list(first)}: got {got[first].item()!r}, want {want[first].item()!r}"
        )


@contextlib.contextmanager
def unsynced():
    """Nothing inside may wait for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def pool(dense: Tensor, *, axis: int) -> Tensor:
    """The same values as every second page of a larger tensor, the rest NaN."""
    shape = list(dense.shape)
    shape.insert(axis, 2)
    pages = torch.full(shape, float("nan"), dtype=dense.dtype, device=dense.device)
    view = pages.select(axis, 1)
    view.copy_(dense)
    return view


def pages(view: Tensor) -> Tensor:
    """All memory behind a pool."""
    return view if view._base is None else view._base


def copied(view: Tensor) -> Tensor:
    """A pool of the same layout in memory of its own."""
    return pages(view).clone().as_strided(
        view.size(), view.stride(), view.storage_offset()
    )  # fmt: skip


def make_tokens(
    device: str, seed: int, *, N: int, H: int, HV: int, K: int, V: int, kda: bool,
    dtype: torch.dtype,
) -> dict[str, Tensor]:  # fmt: skip
    """q, k, v as slices of one packed tensor, and a and b, drawn on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randn(N, 2 * H * K + HV * V, generator=generator)
    packed = packed.to(dtype).to(device)
    q, k, v = packed.split([H * K, H * K, HV * V], dim=1)
    gates = torch.randn(N, HV * (K + 1 if kda else 2), generator=generator)
    a, b = gates.to(dtype).to(device).split([HV * K if kda else HV, HV], dim=1)
    return {
        "q": q.unflatten(1, (H, K)),
        "k": k.unflatten(1, (H, K)),
        "v": v.unflatten(1, (HV, V)),
        "a": a.unflatten(1, (HV, K)) if kda else a,
        "b": b,
    }


@dataclasses.dataclass
class Problem:
    """The arguments of verify, and calls of the ops on them."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    state: Tensor
    k_window: Tensor
    v_window: Tensor
    g_window: Tensor
    beta_window: Tensor
    state_indices: Tensor
    cu_seqlens: Tensor | None = None
    window_indices: Tensor | None = None
    lower_bound: float | None = None

    @property
    def args(self) -> tuple:
        """verify's positional arguments."""
        names = [field.name for field in dataclasses.fields(self)]
        return tuple(getattr(self, name) for name in names[:-1])

    @property
    def tokens(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in TOKENS)

    @property
    def windows(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in WINDOWS)

    @property
    def batch_and_length(self) -> tuple[int, int]:
        """B and D of a uniform batch."""
        batch = self.state_indices.shape[0]
        return batch, self.q.shape[0] // batch if batch else 1

    def verify(self, **options) -> Tensor:
        return ops.verify(*self.args, lower_bound=self.lower_bound, **options)

    def fold(self, accept_lens: Tensor | list[int], **options) -> None:
        ops.fold(
            self.state, *self.windows, self.state_indices, self.indices(accept_lens),
            window_indices=self.window_indices, **options,
        )  # fmt: skip

    def decode(self, t: int, alive: Tensor | None = None, **options) -> Tensor:
        """Token t of every request that is alive (default all), of uniform requests."""
        slots = self.state_indices
        tokens = (x.unflatten(0, self.batch_and_length)[:, t] for x in self.tokens)
        return ops.decode(
            *tokens, self.A_log, self.dt_bias, self.state,
            slots if alive is None else slots.masked_fill(~alive, -1),
            lower_bound=self.lower_bound, **options,
        )  # fmt: skip

    def indices(self, values: Tensor | list[int]) -> Tensor:
        return torch.as_tensor(values).to(self.state_indices)

    def with_(self, **changes) -> Problem:
        return dataclasses.replace(self, **changes)

    def copy(self) -> Problem:
        """The same problem with pools of its own."""
        return self.with_(**{name: copied(getattr(self, name)) for name in POOLS})

    def next_tokens(self, seed: int, N: int | None = None) -> Problem:
        """The same requests and pools with new tokens, N in all."""
        (tokens, H, K), (HV, V) = self.q.shape, self.v.shape[1:]
        return self.with_(
            **make_tokens(
                self.q.device.type, seed, N=tokens if N is None else N, H=H, HV=HV, K=K,
                V=V, kda=self.a.dim() == 3, dtype=self.q.dtype,
            )
        )  # fmt: skip

    def take(self, rows: list[int]) -> Problem:
        """The uniform requests of these rows, on the same pools; -1 pads with row 0."""
        index = torch.tensor(rows, device=self.q.device, dtype=torch.long)
        shape, live = self.batch_and_length, index.clamp(min=0)
        changes = {
            name: getattr(self, name).unflatten(0, shape)[live].flatten(0, 1)
            for name in TOKENS
        }
        for name in ("state_indices", "window_indices"):
            value = getattr(self, name)
            if value is not None:
                changes[name] = value[live].masked_fill(index < 0, -1)
        return self.with_(**changes)

    def spans(self) -> list[range]:
        """The tokens of each request."""
        if self.cu_seqlens is None:
            batch, D = self.batch_and_length
            return [range(i * D, (i + 1) * D) for i in range(batch)]
        ends = self.cu_seqlens.tolist()
        return [range(start, end) for start, end in itertools.pairwise(ends)]

    def memory(self, *names: str) -> dict[str, Tensor]:
        """A copy of all memory behind the named pools (default all)."""
        return {name: pages(getattr(self, name)).clone() for name in names or POOLS}

    def assert_untouched(self, before: dict[str, Tensor]) -> None:
        for name, value in before.items():
            bits_equal(pages(getattr(self, name)), value, name)


def make(
    device: str, variant: str = "gdn", *, B: int = 3, D: int = 4,
    lengths: list[int] | None = None, tail: int = 0, H: int = 1, HV: int = 2,
    K: int = 32, V: int = 64, T: int | None = None, S: int | None = None,
    R: int | None = None, dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32, index: torch.dtype = torch.int32,
    seed: int = 0,
) -> Problem:  # fmt: skip
    """One layer's problem.

    ``lengths`` makes the batch ragged, with ``tail`` tokens no request covers. The
    window row of a request is its slot, or with ``R`` a shuffled row of its own.
    """
    kda = variant != "gdn"
    B = B if lengths is None else len(lengths)
    N = B * D if lengths is None else sum(lengths) + tail
    S, T = S or B + 3, T or max(lengths or [D]) + 2
    generator = torch.Generator().manual_seed(1000 + seed)

    def uniform(*shape: int, low: float, high: float) -> Tensor:
        return torch.rand(*shape, generator=generator) * (high - low) + low

    slots = torch.randperm(S, generator=generator)[:B]
    rows = None if R is None else torch.randperm(R, generator=generator)[:B]
    # Decays from almost none to a few e-folds a token, as trained models have them.
    A_log = uniform(HV, low=-1, high=2).to(device)
    dt_bias = uniform(*((HV, K) if kda else (HV,)), low=-6, high=-1).to(device)
    dense = torch.full((S, HV, V, K), float("nan"))
    dense[slots] = torch.randn(B, HV, V, K, generator=generator)
    R = R or S
    g_shape = (R, HV, T, K) if kda else (R, HV, T)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        dense = torch.full(shape, float("nan"), dtype=dtype, device=device)
        return pool(dense, axis=1)

    def indices(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(index).to(device)

    ends = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
    return Problem(
        **make_tokens(
            device, seed, N=N, H=H, HV=HV, K=K, V=V, kda=kda, dtype=dtype
        ),
        A_log=A_log,
        dt_bias=dt_bias,
        state=pool(dense.to(state_dtype).to(device), axis=1),
        k_window=empty(R, H, T, K, dtype=dtype),
        v_window=empty(R, HV, T, V, dtype=dtype),
        g_window=empty(*g_shape, dtype=torch.float32),
        beta_window=empty(R, HV, T, dtype=torch.float32),
        state_indices=indices(slots),
        cu_seqlens=indices(ends),
        window_indices=indices(rows),
        lower_bound=-5.0 if variant == "kda-safe" else None,
    )  # fmt: skip


def stack(layers: list[Problem], offset: bool = True) -> tuple[Problem, list[Problem]]:
    """The layers' pools as one pool with a layer axis, and each layer as its view.

    With ``offset`` False the pool starts where its storage does.
    """
    pools = {}
    for name in POOLS:
        memory = torch.stack([pages(getattr(layer, name)) for layer in layers])
        pools[name] = memory[:, :, 1] if offset else memory.flip(2)[:, :, 0]
    views = [
        layer.with_(**{name: pools[name][i] for name in POOLS})
        for i, layer in enumerate(layers)
    ]
    return layers[0].with_(**pools), views
