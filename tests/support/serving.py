"""A serving engine on replayssm.graph, and what its memory must hold, bit for bit.

Every operation is done twice: to the pools as an engine does it, and to ``want``, where
accepted tokens were decoded plainly. Slots that no one holds are NaN in both.
"""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from plain import Layers
from replayssm.graph import Commit, LinearAttention, Pools, put_prefill
from samples import bits_equal

# Batches have at most 4 rows, so that some window row is always nobody's.
ENTRIES, SLOTS, ROWS = 6, 10, 5


class Setup(NamedTuple):
    """A model, draft window D in windows of T rows, and tokens between two snapshots."""

    model: LinearAttention
    D: int
    T: int
    interval: int
    channels_last: bool


# No dimension of one equals another of its own; and one model that is square.
SETUPS = {
    "gdn": Setup(LinearAttention(2, 1, 3, 5, 4, "gdn"), 4, 4, 3, False),
    "kda": Setup(
        LinearAttention(2, 2, 4, 3, 3, "kda", 2, activation_dtype=torch.float16), 3, 5, 2, True
    ),
    "kda-safe": Setup(LinearAttention(2, 1, 2, 3, 5, "kda", 3, -5.0), 4, 6, 5, False),
}  # fmt: skip


@dataclasses.dataclass(eq=False)
class Request:
    """Its place in the maps, its slot (-1: preempted), the slot of its next snapshot
    (-1: none), tokens in the state, next anchor, and the state in fp64."""

    entry: int
    slot: int
    track: int
    length: int
    anchor: int
    exact: Tensor | None = dataclasses.field(repr=False)
    saved: dict[str, Tensor] = dataclasses.field(default_factory=dict, repr=False)


class Server:
    """One model being served on one device."""

    def __init__(self, device: str, setup: Setup) -> None:
        self.device, self.setup, self.layers = device, setup, Layers(setup.model, device)
        self.pools = Pools(
            setup.model, slots=SLOTS, requests=ROWS, window=setup.T, device=device,
            channels_last=setup.channels_last,
        )  # fmt: skip
        self.commit = Commit(
            self.pools, self.tensor([-1] * ENTRIES),
            track_slot_map=self.tensor([-1] * ENTRIES), track_interval=setup.interval,
        )  # fmt: skip
        self.slotted = [name for name, _ in self.pools.named_buffers() if "state" in name]

    def clear(self) -> None:
        """Nobody is served, and all memory is NaN."""
        for buffer in self.pools.buffers():
            buffer.fill_(float("nan"))
        self.want = {name: buffer.clone() for name, buffer in self.pools.named_buffers()}
        self.requests: list[Request] = []
        self.prompts = 0
        self.snapshots: dict[int, tuple[int, Tensor]] = {}  # slot -> tokens, fp64 state
        self.verified: list[Request] = []  # in rows that are still to be committed
        self.map()

    def tensor(self, values: list) -> Tensor:
        return torch.tensor(values, device=self.device, dtype=torch.int64)

    def taps(self, x: Tensor) -> Tensor:
        """A conv buffer as [.., C, columns], whatever its form."""
        return x.transpose(-2, -1) if self.setup.channels_last else x

    def running(self) -> list[Request]:
        return [r for r in self.requests if r.slot >= 0]

    def free_slots(self) -> list[int]:
        held = {x for r in self.requests for x in (r.slot, r.track)} | set(self.snapshots)
        return sorted(set(range(SLOTS)) - held)

    def free_entries(self) -> list[int]:
        named = {r.entry for r in (*self.requests, *self.verified)}
        return sorted(set(range(ENTRIES)) - named)

    def map(self) -> None:
        """Tell the commit who is where."""
        slots, tracks = [-1] * ENTRIES, [-1] * ENTRIES
        for r in self.requests:
            slots[r.entry], tracks[r.entry] = r.slot, r.track
        self.commit.slot_map.copy_(self.tensor(slots))
        self.commit.track_slot_map.copy_(self.tensor(tracks))

    def put(self, slot: int, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self.want[name][:, slot] = value

    def poison(self, slot: int) -> None:
        """Nobody holds a slot any more."""
        for name in self.slotted:
            self.pools.get_buffer(name)[:, slot] = float("nan")
            self.want[name][:, slot] = float("nan")

    def check(self) -> None:
        for name, buffer in self.pools.named_buffers():
            bits_equal(buffer, self.want[name], name)

    def prefill(self, requests: list[Request], layout: str, channels_last: bool) -> None:
        """Prompts whose states are handed over, after one row of padding."""
        L, _, HV, V, K = self.pools.state.shape
        rows = 1 + len(requests)
        self.prompts += 1
        draw = torch.Generator().manual_seed(self.prompts)
        state = torch.randn(L, rows, HV, V, K, generator=draw).to(self.device)
        convs = []
        for i in range(len(self.layers.conv)):
            pool = self.taps(self.pools.conv_states[i])
            conv = torch.randn(L, rows, *pool.shape[2:], generator=draw).to(self.device)
            for row, r in enumerate(requests, 1):  # zeros before a prompt's start
                conv[:, row, :, : max(pool.shape[-1] - r.length, 0)] = 0
            convs.append(conv)
        put_prefill(
            self.pools, self.tensor([-1] + [r.slot for r in requests]),
            state if layout == "vk" else state.transpose(-2, -1).contiguous(),
            [x.transpose(-2, -1) for x in convs] if channels_last else convs,
            layout=layout, channels_last=channels_last,
        )  # fmt: skip
        for row, r in enumerate(requests, 1):
            r.exact = state[:, row].flatten(0, 1).cpu().double()
            values = {f"conv_state_{i}": self.taps(x[:, row]) for i, x in enumerate(convs)}
            self.put(r.slot, {"state": state[:, row], **values})
        self.map()

    def reset(self, request: Request) -> None:
        """A request without a prompt."""
        self.pools.reset(self.tensor([-1, request.slot]))
        L, _, *inner = self.pools.state.shape
        request.exact = torch.zeros(L * inner[0], *inner[1:], dtype=torch.float64)
        zero = torch.zeros((), device=self.device)
        self.put(request.slot, dict.fromkeys(self.slotted, zero))
        self.map()

    def share(self, source: int, request: Request) -> None:
        """A request that starts from a copy of another slot."""
        for name in self.slotted:
            pool = self.pools.get_buffer(name)
            pool[:, request.slot] = pool[:, source]
        self.put(request.slot, {name: self.want[name][:, source] for name in self.slotted})
        self.map()

    def preempt(self, request: Request) -> None:
        request.saved = {
            name: self.pools.get_buffer(name)[:, request.slot].to("cpu", copy=True)
            for name in self.slotted
        }
        self.poison(request.slot)
        request.slot = -1
        self.map()

    def resume(self, request: Request, slot: int) -> None:
        state, *convs = (x.unsqueeze(1).to(self.device) for x in request.saved.values())
        put_prefill(
            self.pools, self.tensor([slot]), state, convs,
            layout="vk", channels_last=self.setup.channels_last,
        )  # fmt: skip
        self.put(slot, request.saved)
        request.slot = slot
        self.map()

    def finish(self, request: Request) -> None:
        if request.slot >= 0:
            self.poison(request.slot)
        self.requests.remove(request)
        self.map()

    def evict(self, slot: int) -> None:
        del self.snapshots[slot]
        self.poison(slot)
