"""A speculative state as SGLang lays it out, after one verify, and what fp64 commits of it.

All that nobody may look at is NaN: pages between slots, slots of no request, rows past the
draft, windows of no request.
"""

import dataclasses
from types import SimpleNamespace

import torch
from torch import Tensor

from samples import pool

RINGS = ("replayssm_rawk", "replayssm_rawv", "replayssm_g", "replayssm_beta")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One model and batch. ``source_rows``: what the rows of snapshots are keyed by."""

    kda: bool
    L: int = 2
    H: int = 1
    HV: int = 3
    K: int = 32
    V: int = 16
    W: int = 4
    D: int = 4
    S: int = 11
    accept_lens: tuple[int, ...] = (4, 1, 3, 0, 2)
    slots: tuple[int, ...] = (7, 2, 9, 4, -1)
    source_rows: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.bfloat16

    @property
    def B(self) -> int:
        return len(self.slots)

    @property
    def T(self) -> int:
        """Rows of a ring: SGLang rounds KDA's up to a power of two from 2 D."""
        return 1 << (2 * self.D - 1).bit_length() if self.kda else self.D

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(range(self.B)) if self.source_rows is None else self.source_rows


class Case:
    """The arguments of a commit, on a device, and the same commit in fp64."""

    def __init__(self, shape: Shape, device: str, seed: int = 0) -> None:
        self.shape = m = shape
        draw = torch.Generator().manual_seed(seed)
        self.live = [(i, slot) for i, slot in enumerate(m.slots) if slot >= 0]
        L, R, gate = m.L, max(m.rows) + 2, (m.K,) if m.kda else ()

        def nan(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.full(size, float("nan"), dtype=dtype)

        def some(where: list[int], *size: int, dtype: torch.dtype, rows: int):
            """NaN but for D rows (along ``rows``) of the entries of dimension 1 in where."""
            x = nan(*size, dtype=dtype)
            for entry in where:
                part = x[:, entry].narrow(rows - 1, 0, m.D)
                part.copy_(torch.randn(part.shape, generator=draw))
            return x

        slots = [slot for _, slot in self.live]
        rings = {
            "replayssm_rawk": some(slots, L, m.S, m.H, m.T, m.K, dtype=m.dtype, rows=3),
            "replayssm_rawv": some(slots, L, m.S, m.HV, m.T, m.V, dtype=m.dtype, rows=3),
            "replayssm_g": some(
                slots, L, m.S, m.HV, m.T, *gate, dtype=torch.float32, rows=3
            ).abs().neg(),
            "replayssm_beta": some(
                slots, L, m.S, m.HV, m.T, dtype=torch.float32, rows=3
            ).sigmoid(),
        }  # fmt: skip
        temporal = nan(L, m.S, m.HV, m.V, m.K, dtype=torch.float32)
        temporal[:, slots] = torch.randn(temporal[:, slots].shape, generator=draw)
        C, taps = 2 * m.H * m.K + m.HV * m.V, m.W - 1
        inner = (taps, C) if m.kda else (C, taps)
        conv = nan(L, m.S, *inner, dtype=m.dtype)
        conv[:, slots] = torch.randn(conv[:, slots].shape, generator=draw).to(m.dtype)
        rows = [m.rows[i] for i, _ in self.live]
        if m.kda:
            window = some(rows, L, R, m.D, *inner, dtype=m.dtype, rows=2).to(device)
        else:  # one buffer, seen through a frame that slides over it
            columns = m.D + taps - 1
            buffer = nan(L, R, C, columns, dtype=m.dtype)
            buffer[:, rows] = torch.randn(L, len(rows), C, columns, generator=draw).to(
                m.dtype
            )
            window = buffer.to(device).unfold(-1, taps, 1).movedim(3, 2)
        self.spec_state = SimpleNamespace(
            # Layers and slots of an arena, as in SGLang's envelope layout.
            temporal=pool(temporal.to(device), axis=2), conv=[pool(conv.to(device), axis=2)],
            intermediate_ssm=None, intermediate_conv_window=[window],
            replayssm_d=None, replayssm_k=None,
            **{name: ring.to(device) for name, ring in rings.items()},
        )  # fmt: skip

        def index(x, dtype: torch.dtype) -> Tensor:
            return torch.tensor(x, dtype=dtype, device=device)

        self.state_indices = index(m.slots, torch.int32)
        self.accept_lens = index(m.accept_lens, torch.int64)
        self.last_steps = self.accept_lens - 1
        self.source_rows = None if m.source_rows is None else index(m.rows, torch.int64)
        # The newest request to cross a boundary is tracked in its middle, one at its end.
        free = [slot for slot in range(m.S) if slot not in m.slots]
        targets, steps = [-1] * m.B, [-1] * m.B
        targets[:3], steps[:3] = free[:3], [m.accept_lens[0] // 2, 0, -1]
        self.track_indices, self.track_steps = (
            index(x, torch.int64) for x in (targets, steps)
        )
        self.before = {name: x.clone() for name, x in self.tensors().items()}

    def tensors(self) -> dict[str, Tensor]:
        """Every field's tensors, whole, under names of their own."""
        found = {}
        for name, value in vars(self.spec_state).items():
            for i, x in enumerate(value if isinstance(value, list) else [value]):
                if x is not None:
                    base = x if x._base is None else x._base
                    found[f"{name}[{i}]"] = base
        return found

    @property
    def tracks(self) -> dict[str, Tensor]:
        return {"track_indices": self.track_indices, "track_steps": self.track_steps}

    def trajectories(self) -> dict[int, Tensor]:
        """[L, D, HV, V, K] fp64 of each live request: the state after every row."""
        m, found = self.shape, {}
        state = self.spec_state
        for i, slot in self.live:
            k, v, g, beta = (getattr(state, name)[:, slot].double() for name in RINGS)
            k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
            k = k.repeat_interleave(m.HV // m.H, 1)
            S, after = state.temporal[:, slot].double(), []
            for t in range(m.D):
                S = S * (g[:, :, t, None, :] if m.kda else g[:, :, t, None, None]).exp()
                u = beta[:, :, t, None] * (v[:, :, t] - (S * k[:, :, t, None]).sum(-1))
                S = S + u[..., None] * k[:, :, t, None]
                after.append(S)
            found[i] = torch.stack(after, 1)
        return found

    def add_snapshots(self) -> None:
        """What a verify that keeps a state per draft token leaves instead of rings."""
        m, state = self.shape, self.spec_state
        rows = state.intermediate_conv_window[0].shape[1]
        snapshots = state.temporal.new_full((m.L, rows, m.D, m.HV, m.V, m.K), float("nan"))
        for i, after in self.trajectories().items():
            snapshots[:, m.rows[i]] = after.float()
        state.intermediate_ssm = snapshots
        self.before["intermediate_ssm[0]"] = snapshots.clone()

    def written(self, tracked: bool = True) -> dict[int, tuple[int, int]]:
        """Slot -> the request and the row whose state it must hold after the commit."""
        found, accept_lens = {}, self.shape.accept_lens
        targets, steps = self.track_indices.tolist(), self.track_steps.tolist()
        for i, slot in self.live:
            if accept_lens[i]:
                found[slot] = i, accept_lens[i] - 1
            if tracked and 0 <= steps[i] < accept_lens[i]:
                found[targets[i]] = i, steps[i]
        return found

    def wanted(self, tracked: bool) -> dict[int, tuple[Tensor, Tensor]]:
        """Slot -> the state [L, HV, V, K] in fp64 and the conv state that it must hold."""
        window, after = self.spec_state.intermediate_conv_window[0], self.trajectories()
        return {
            slot: (after[i][:, row].cpu(), window[:, self.shape.rows[i], row])
            for slot, (i, row) in self.written(tracked).items()
        }


# A class's name, or one of its bases', is all that says what a backend is.
class GDNAttnBackend:
    pass


class XpuGDNAttnBackend(GDNAttnBackend):
    pass


class KDAAttnBackend:
    pass


class Mamba2AttnBackend:
    pass
