"""Pools whose layers, slots and rows lie further apart than 32 bits can tell, and the ops
on them against the same pools in one place. Most of their room is never touched."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from samples import POOLS, VARIANTS, WINDOWS, Problem, bits_equal, make, stack

# Elements from page to page. Page 3 starts past 2^31, and APART itself fits 32 bits, so
# that a kernel which multiplies it by an index in 32 bits goes to another place.
APART = 720_000_000
BETWEEN = 2**22  # of the axis that is not far
ROOM = 9 * 10**9  # bytes: three steps of fp32, and what stands there

# The interpreter, and the reference, take their time: no tile more than there must be.
SMALL = {"cpu": {"V": 16}}

Call = Callable[..., tuple[Tensor, ...]]  # an op by name, and its outputs


def room(device: str, folder: Path) -> Tensor:
    """Bytes for far pools: on the CPU a file with holes, since malloc may refuse so much,
    and as much before them, where an offset that became negative is no crash."""
    if device != "cpu":
        return torch.empty(ROOM, dtype=torch.int8, device=device)
    file = str(folder / "room")
    return torch.from_file(file, shared=True, size=2 * ROOM, dtype=torch.int8)[ROOM:]


def spread(x: Tensor, strides: tuple[int, ...], room: Tensor, start: int = 0) -> Tensor:
    """A copy of x in ``room`` (bytes) from byte ``start`` on, its first axes so strided."""
    inner = x[(0,) * len(strides)].contiguous().stride()
    memory = room[start:].view(x.dtype)
    return memory.as_strided(x.shape, (*strides, *inner)).copy_(x)


def moved(p: Problem, room: Tensor, *strides: int) -> Problem:
    """p with its pools in ``room``: side by side, as one page of each is small."""
    pools = {
        name: spread(getattr(p, name), strides, room, i * 2**20)
        for i, name in enumerate(POOLS)
    }
    return p.with_(**pools)


def equal(far: Problem, near: Problem, *names: str) -> None:
    for name in names:
        bits_equal(getattr(far, name), getattr(near, name), name)


def one_layer(call: Call, device: str, room: Tensor, variant: str) -> None:
    """verify, fold with a far track slot, decode and store."""
    near = make(device, variant, B=4, S=4, R=4, D=2, **SMALL.get(device, {}))
    far = moved(near, room, APART)
    bound = {"lower_bound": near.lower_bound}
    for exact in (False, True):
        outputs = [call("verify", *p.args, **bound, exact=exact)[0] for p in (far, near)]
        bits_equal(*outputs, f"outputs, exact={exact}")
        equal(far, near, *WINDOWS)

    live = [i for i, slot in enumerate(near.state_indices.tolist()) if slot != 3]
    for rows, track in (live, 3), (range(4), -1):
        few, n = near.take([*rows]), len(rows)
        for p in (far, near):
            call(
                "fold", p.state, *p.windows, few.state_indices, few.indices([2, 1, 2, 1][:n]),
                window_indices=few.window_indices,
                track_indices=few.indices([track, -1, -1, -1][:n]),
                track_steps=few.indices([0] * n),
            )  # fmt: skip
        equal(far, near, "state")

    outputs = []
    for p in (far, near):
        tokens = (x.unflatten(0, (4, 2))[:, 0] for x in p.tokens)
        outputs += call(
            "decode", *tokens, p.A_log, p.dt_bias, p.state, p.state_indices, **bound
        )
    bits_equal(*outputs, "outputs of decode")
    equal(far, near, "state")

    new = near.next_tokens(1)
    gates = call("gate", new.a, new.b, new.A_log, new.dt_bias, **bound)
    for p in (far, near):
        call("store", new.k, new.v, *gates, *p.windows, p.window_indices)
    equal(far, near, *WINDOWS)


def all_layers(call: Call, device: str, room: Tensor, variant: str) -> None:
    """fold of every layer, and its track slot."""
    shape = {"B": 2, "S": 3, "D": 2, **SMALL.get(device, {})}
    near, views = stack([make(device, variant, **shape, seed=i) for i in range(4)])
    for view in views:
        call("verify", *view.args, lower_bound=view.lower_bound)
    far = moved(near, room, APART, BETWEEN)
    (free,) = {0, 1, 2} - set(near.state_indices.tolist())
    tracks = {"track_indices": near.indices([free, -1]),
              "track_steps": near.indices([0, 0])}  # fmt: skip
    for p in (far, near):
        call("fold", p.state, *p.windows, p.state_indices, p.indices([2, 1]), **tracks)
    equal(far, near, "state")


def grown(x: Tensor, pages: int) -> Tensor:
    """x as the last pages of so many, of which nobody wrote the others."""
    big = x.new_empty((x.shape[0], pages, *x.shape[2:]))
    big[:, -x.shape[1] :] = x
    return big


def dense(device: str, slots: int, rows: int) -> None:
    """verify, fold with a track slot and decode, at the end of pools that are all there."""
    shape = {"B": 2, "S": 3, "R": 2, "T": 8, "H": 1, "HV": 32, "K": 128, "V": 128}
    near, views = stack([make(device, "gdn", **shape).next_tokens(i) for i in range(2)])
    near.state[0].neg_()  # or both layers would have one state
    sizes = {name: slots if name == "state" else rows for name in POOLS}
    pools = {name: grown(getattr(near, name), size) for name, size in sizes.items()}
    indices = {"state_indices": near.state_indices + slots - 3,
               "window_indices": near.window_indices + rows - 2}  # fmt: skip
    far = near.with_(**pools, **indices)
    far_views = [
        view.with_(**{name: pool[i] for name, pool in pools.items()}, **indices)
        for i, view in enumerate(views)
    ]

    def ends_equal(*names: str) -> None:
        for name in names:
            want = getattr(near, name)
            bits_equal(getattr(far, name)[:, -want.shape[1] :], want, name)

    for exact in (False, True):
        for pair in zip(far_views, views, strict=True):
            bits_equal(*(p.verify(exact=exact) for p in pair), "outputs")
    ends_equal(*WINDOWS)
    (free,) = {0, 1, 2} - set(near.state_indices.tolist())
    for p, first in (far, slots - 3), (near, 0):
        tracks = p.indices([first + free, -1]), p.indices([1, 0])
        p.fold([4, 3], track_indices=tracks[0], track_steps=tracks[1])
    ends_equal("state")
    bits_equal(far_views[-1].decode(0), views[-1].decode(0), "outputs of decode")
    ends_equal("state")


def scatter(call: Call, device: str, room: Tensor, strides: tuple[int, int]) -> None:
    """Far slots, source rows and track slots, or far layers."""
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(4, 4, 3, 7, generator=draw).to(device)
    snapshots = torch.randn(4, 4, 2, 3, 7, generator=draw).to(device)
    far = spread(states, strides, room), spread(snapshots, strides, room, 2**20)
    index = [
        torch.tensor(x, device=device) for x in ([2, 0], [1, 0], [3, 2], [3, 1], [0, 0])
    ]
    slots, steps, sources, tracks, at = index
    for state, intermediate in (far, (states, snapshots)):
        call(
            "scatter", state, intermediate, slots, steps, source_indices=sources,
            track_indices=tracks, track_steps=at,
        )  # fmt: skip
    bits_equal(far[0], states, "state")


CHECKS = {
    **{f"one layer {x}": (one_layer, x) for x in VARIANTS[:2]},
    **{f"all layers {x}": (all_layers, x) for x in VARIANTS[:2]},
    "scatter far slots": (scatter, (BETWEEN, APART)),
    "scatter far layers": (scatter, (APART, BETWEEN)),
}


def check(name: str, call: Call, device: str, room: Tensor) -> None:
    does, what = CHECKS[name]
    does(call, device, room, what)
