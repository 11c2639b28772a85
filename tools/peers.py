"""Other libraries' kernels, from their released wheels, to time beside the ops.

| peer | verify | fold | decode |
|---|---|---|---|
| sglang | recurrent; writes raw rows into a ring | replays the accepted rows | packed |
| sglang-circular-16, -32 | chunked, in tf32, after up to 16 or 32 pending rows; GDN only \
| in step and commit: moves cursors, and updates the states whose ring is full | - |
| sglang-snapshot | recurrent; writes a state per draft token | in step and commit: \
copies the accepted one | - |
| fla | recurrent; keeps nothing that a commit could use | - | recurrent |

step is verify and then fold, or what stands for it, of problem.accept_lens; commit moves the
conv windows besides, from indices that are given. decode is one token per request. fla's
kernels take states in batch order, not by slot, and write new ones elsewhere.

tools/install_peers.py fills the folder that the wheels' sources are read from.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

import peer_sglang
from install_peers import installed, pins
from peer_kernels import Prepare, Prepared, fla
from replayssm import ops

if TYPE_CHECKING:
    from problem import Problem

LOADERS = {
    "sglang": ("sglang", peer_sglang.exact),
    "sglang-circular-16": ("sglang", partial(peer_sglang.circular, 16)),
    "sglang-circular-32": ("sglang", partial(peer_sglang.circular, 32)),
    "sglang-snapshot": ("sglang", peer_sglang.snapshot),
    "fla": ("fla-core", partial(fla, pins()["fla-core"])),
}
# Of the largest output: two bf16 ulps, since tf32 and a bf16 beta come within one of ours.
OUTPUT = 2**-6


class Peer(NamedTuple):
    """A peer that was found.

    prepare(op, problem), with op one of verify, fold, commit, step and decode, gives a
    callable that queues op for every layer of problem once, or None where this peer has
    nothing comparable for the op, the variant or the shape. The first call compiles; later
    ones may be captured in a CUDA graph. Raises torch.OutOfMemoryError where the pools of
    the peer have no room.
    """

    name: str
    prepare: Prepare


def find(folder: Path) -> tuple[list[Peer], dict[str, str]]:
    """The peers that folder holds, and {name: reason} of those that are missing."""
    peers, missing, versions = [], {}, installed(folder)
    for name, (package, load) in LOADERS.items():
        pin, have = pins()[package], versions.get(package)
        if have is None:
            missing[name] = f"no {package} in {folder}: run tools/install_peers.py"
        elif have != pin:
            missing[name] = f"{package} {have} in {folder}, but {pin} is pinned"
        else:
            try:
                peers.append(Peer(name, load(folder)))
            except Exception as error:  # whatever a peer raises, the others go on
                missing[name] = f"{type(error).__name__}: {error}"
    if any(peer.name == "sglang" for peer in peers):
        missing["sglang: KDA decode, 8 requests or more"] = peer_sglang.NO_JIT
    return peers, missing


def agrees(peer: Peer, problem: "Problem") -> str | None:
    """None where peer computes what we do, else the first difference.

    Compares the outputs of verify, decode and two steps, and the states that decode, steps
    and commit leave, as far as peer has them. Starts from problem.state, and restores it;
    problem.windows are overwritten. Waits for the device.
    """
    start = problem.state.clone()
    for op in ("verify", "decode", "step", "commit"):
        prepared = peer.prepare(op, problem)
        if prepared is None:
            continue
        try:
            wrong = _difference(op, prepared, problem)
        finally:
            problem.state.copy_(start)
        if wrong:
            return f"{peer.name} {op}: {wrong}"
    return None


def _difference(op: str, prepared: Prepared, p: "Problem") -> str:
    run, lens = p.decode if op == "decode" else p.verify, p.accept_lens
    for _ in range(2 if op == "step" else 1):
        ours = [run(layer) for layer in range(p.model.layers)]
        for layer, out in enumerate(prepared.layers()):
            if wrong := _apart(out, ours[layer], OUTPUT):
                return f"outputs of layer {layer} {wrong}"
        if op in ("step", "commit"):
            ops.fold(p.state, *p.windows, p.slots, lens)
    state = prepared.state() if prepared.state and op != "verify" else p.state
    if wrong := _apart(state, p.state, prepared.tolerance):
        return f"states {wrong}"
    if prepared.conv_states:
        convs = [pool.clone() for pool in p.pools.conv_states]
        rows = torch.arange(p.B, device=lens.device)
        ops.conv_commit(convs, p.pools.conv_windows, p.slots, lens, window_indices=rows)
        if not all(map(torch.equal, convs, prepared.conv_states)):
            return "conv states differ"
    return ""


def _apart(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> str:
    if got.shape != want.shape:
        return f"are {list(got.shape)}, not {list(want.shape)}"
    error = ((got.float() - want.float()).abs().max() / want.abs().max()).item()
    if error <= tolerance:  # which no NaN is
        return ""
    return f"differ by {error:.1e}, allowed are {tolerance:.1e}"
