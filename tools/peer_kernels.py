"""What the adapters of tools/peers.py share, and the one for flash-linear-attention.

A peer's kernel files are imported without the __init__ files of its packages, which import
whole engines. Its own Python wrappers are called, so that it chooses its tiles itself.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from problem import Problem

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
