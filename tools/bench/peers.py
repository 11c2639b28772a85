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

tools/bench/install_peers.py fills the folder that the wheels' sources are read from. Here
stand what all peers share, and fla; SGLang's are in peer_sglang.py. A peer's kernel files are
imported without the __init__ files of its packages, which import whole engines. Its own
Python wrappers are called, so that it chooses its tiles itself.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch

from install_peers import installed, pins
from replayssm import ops

if TYPE_CHECKING:
    from problem import Problem

# Of the largest output: two bf16 ulps, since tf32 and a bf16 beta come within one of ours.
OUTPUT = 2**-6

Layers = Callable[[], Iterator[torch.Tensor]]


class Prepared:
    """An op of a peer on one problem; a call queues it for every layer, once.

    layers() does so layer by layer, and yields each output, [N, HV, V] of verify and step,
    [B, HV, V] of decode. state() is what the peer has committed by now, [L, S, HV, V, K];
    tolerance bounds its error, relative to its largest number; 1e-5 is for fp32 recurrences
    that sum in another order. conv_states are the pools that a commit moves too.

    It owns its pools: keep it for as long as a graph of its calls is replayed.
    """

    def __init__(
        self,
        layers: Layers,
        state: Callable[[], torch.Tensor] | None = None,
        conv_states: Sequence[torch.Tensor] = (),
        tolerance: float = 1e-5,
    ) -> None:
        self.layers, self.state, self.tolerance = layers, state, tolerance
        self.conv_states = conv_states

    def __call__(self) -> None:
        for _ in self.layers():
            pass


Prepare = Callable[[str, "Problem"], Prepared | None]


def part(
    op: str,
    verify: Layers,
    commit: Callable[[], None],
    state: Callable[[], torch.Tensor],
    conv_states: Sequence[torch.Tensor],
    tolerance: float = 1e-5,
) -> Prepared:
    """The part of a step that op names. A commit alone finds the rows of one verify."""

    def step() -> Iterator[torch.Tensor]:
        yield from verify()
        commit()

    def commit_alone() -> Iterator[torch.Tensor]:
        commit()
        yield from ()

    if op not in ("verify", "step"):
        Prepared(verify)()
    layers = {"verify": verify, "step": step}.get(op, commit_alone)
    return Prepared(layers, state, conv_states, tolerance)


def shell(folder: Path, *names: str) -> None:
    """Stands in for packages whose submodules are wanted without their __init__."""
    for name in names:
        path = [str(folder.resolve().joinpath(*name.split(".")))]
        there = sys.modules.setdefault(name, ModuleType(name))
        if getattr(there, "__path__", path) != path:
            raise ImportError(f"{name} is imported already, from {there.__path__}")
        there.__path__ = path


def stand_in(name: str, **names: object) -> None:
    """Stands in for a module of which only names are wanted."""
    sys.modules.setdefault(name, ModuleType(name)).__dict__.update(names)


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


# Name -> package, and what loads its kernels from a folder.
Loaders = dict[str, tuple[str, Callable[[Path], Prepare]]]


def find(folder: Path, loaders: Loaders) -> tuple[list[Peer], dict[str, str]]:
    """The peers that folder holds, and {name: reason} of those that are missing."""
    peers, missing, versions = [], {}, installed(folder)
    for name, (package, load) in loaders.items():
        pin, have = pins()[package], versions.get(package)
        if have is None:
            missing[name] = f"no {package} in {folder}: run tools/bench/install_peers.py"
        elif have != pin:
            missing[name] = f"{package} {have} in {folder}, but {pin} is pinned"
        else:
            try:
                peers.append(Peer(name, load(folder)))
            except Exception as error:  # whatever a peer raises, the others go on
                missing[name] = f"{type(error).__name__}: {error}"
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


def fla(version: str, folder: Path) -> Prepare:
    """fused_recurrent_gated_delta_rule and fused_recurrent_kda."""
    shell(
        folder, "fla", "fla.ops", "fla.ops.utils", "fla.ops.gated_delta_rule", "fla.ops.kda"
    )
    stand_in("fla", __version__=version)
    gdn = importlib.import_module("fla.ops.gated_delta_rule.fused_recurrent")
    kda = importlib.import_module("fla.ops.kda.fused_recurrent")

    def prepare(op: str, p: "Problem") -> Prepared | None:
        m = p.model
        if op not in ("verify", "decode"):
            return None
        tokens = [x.unflatten(1, (p.B, m.D)) for x in p.tokens]
        if op == "decode":
            tokens = [x[:, :, :1].contiguous() for x in tokens]
        state = p.state[:, p.slots].mT.contiguous()  # [K, V], the wheel's default
        kernel = kda.fused_recurrent_kda if m.kda else gdn.fused_recurrent_gated_delta_rule
        options = {"lower_bound": m.lower_bound} if m.kda else {}

        def layers() -> Iterator[torch.Tensor]:
            for layer in range(m.layers):
                q, k, v, a, b = (x[layer] for x in tokens)
                out, _ = kernel(
                    q, k, v, g=a, beta=b, A_log=p.A_log[layer], dt_bias=p.dt_bias[layer],
                    initial_state=state[layer], output_final_state=op == "decode",
                    use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                    use_beta_sigmoid_in_kernel=True, **options,
                )  # fmt: skip
                yield out.flatten(0, 1)

        return Prepared(layers)

    return prepare


FLA: Loaders = {"fla": ("fla-core", partial(fla, pins()["fla-core"]))}
