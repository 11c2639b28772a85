"""The bridge's commits beside SGLang's kernels and fla's; a script: beside_sglang.py DEVICE.

On the CPU the peers' kernels run in Triton's interpreter. Prints one line of JSON per check
and shape: [check, shape, "" or what is wrong, whether the states were equal bit for bit],
which two kernels that sum in different orders need not be.
"""

import importlib
import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1" if sys.argv[1] == "cpu" else "0"

import torch

import peer_sglang
from install_peers import FOLDER, pins
from oracle import state_error
from peers import shell, stand_in
from replayssm import ops
from replayssm.graph import Route
from replayssm.graph.engines import sglang
from samples import bits_equal
from sglang_state import RINGS, Case, Shape

FOLDS = {
    False: f"{peer_sglang.LINEAR}.gdn_replayssm_spec_fold",
    True: f"{peer_sglang.LINEAR}.kda_replayssm_spec_decode",
}
# Single precision, relative to the state: sums of K products in another order.
ERROR = 1e-6


def same(ours: Case, theirs: Case, error: float) -> bool:
    """Every field of both is equal bit for bit, states in use up to ``error``."""
    wanted, equal = theirs.tensors(), True
    for name, got in ours.tensors().items():
        if name == "temporal[0]" and error:
            written = list(ours.written())
            for slot in written:
                one, other = got[:, slot, 1], wanted[name][:, slot, 1]
                apart = state_error(one, other.cpu().double())
                assert apart <= error, f"state of slot {slot} is {apart:.1e} away"
                equal &= torch.equal(one, other)
            rest = torch.ones(got.shape[1:3], dtype=torch.bool)
            rest[written, 1] = False
            bits_equal(got[:, rest], wanted[name][:, rest], "other slots")
        else:
            bits_equal(got, wanted[name], name)
    return equal


def fold_like_sglang(shape: Shape, device: str) -> bool:
    """Fold, conv states and tracking, by SGLang's fold of the same variant."""
    ours, theirs = Case(shape, device), Case(shape, device)
    _commit(ours, _fold_of(shape), ours.tracks)
    _fold_by_sglang(theirs)
    return same(ours, theirs, ERROR)


def scatter_like_sglang(shape: Shape, device: str) -> bool:
    """The accepted snapshot's copy, by SGLang's: the same bits."""
    ours, theirs = Case(shape, device), Case(shape, device)
    for case in (ours, theirs):
        case.add_snapshots()
    _commit(ours, "scatter", ours.tracks)
    _scatter_by_sglang(theirs)
    return same(ours, theirs, 0)


def fold_like_sglangs_scatter(shape: Shape, device: str) -> bool:
    """A fold leaves what SGLang's path without replay leaves, snapshots apart."""
    ours, theirs = Case(shape, device), Case(shape, device)
    _commit(ours, _fold_of(shape), ours.tracks)
    theirs.add_snapshots()
    _scatter_by_sglang(theirs)
    return same(ours, theirs, ERROR)


def decode_like_fla(shape: Shape, device: str) -> bool:
    """verify into SGLang's rings, then the bridge: fla's recurrence of accepted tokens.

    fla's kernels decode in another order and with approximate exponentials.
    """
    m, c = shape, Case(shape, device)
    recurrent = _fla(m.kda)
    draw = torch.Generator().manual_seed(1)

    def some(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*size, generator=draw).to(device, dtype)

    N, start = m.B * m.D, c.spec_state.temporal.clone()
    gate = (m.HV, m.K) if m.kda else (m.HV,)
    equal = True
    rings = [getattr(c.spec_state, name) for name in RINGS]
    for layer in range(m.L):
        q, k = (some(N, m.H, m.K, dtype=m.dtype) for _ in range(2))
        v = some(N, m.HV, m.V, dtype=m.dtype)
        a, b = some(N, *gate, dtype=m.dtype), some(N, m.HV, dtype=m.dtype)
        A_log, dt_bias = some(m.HV), some(*gate)
        out = ops.verify(
            q, k, v, a, b, A_log, dt_bias, c.spec_state.temporal[layer],
            *(ring[layer] for ring in rings), c.state_indices,
        )  # fmt: skip
        # Not the ops' gate: g = -exp(A_log) softplus(a + dt_bias), a rate per head.
        rate = A_log.exp().view(-1, *(1,) * (len(gate) - 1))
        g = -rate * torch.nn.functional.softplus(a.float() + dt_bias)
        beta = b.float().sigmoid()
        if layer == m.L - 1:
            _commit(c, _fold_of(m), {})
        for i, slot in c.live:
            n = m.accept_lens[i]
            if n == 0:
                continue
            tokens = slice(i * m.D, i * m.D + n)
            want, final = recurrent(
                *(x[None, tokens].contiguous() for x in (q, k, v)),
                g=g[None, tokens], beta=beta[None, tokens],
                initial_state=start[layer, slot, None].mT.contiguous(),
                output_final_state=True, use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            # Both are rounded to the activation dtype, by half a step each.
            apart = (out[tokens].float() - want[0].float()).abs().max()
            bound = (torch.finfo(m.dtype).eps + 1e-5) * want.abs().max()
            assert apart <= bound, f"outputs of request {i} are {apart:.1e} away"
            if layer == m.L - 1:
                got, final = c.spec_state.temporal[layer, slot], final[0].mT
                apart = state_error(got, final.cpu().double())
                assert apart <= 1e-5, f"state of slot {slot} is {apart:.1e} away"
                equal &= torch.equal(got, final)
    return equal


def _fold_of(shape: Shape) -> str:
    return "kda_fold" if shape.kda else "gdn_fold"


def _commit(c: Case, way: str, tracks: dict[str, torch.Tensor]) -> None:
    """By the bridge."""
    sglang.commit(
        Route(way, "a test's"), c.spec_state, c.state_indices, c.last_steps, **tracks,
        source_rows=c.source_rows,
    )  # fmt: skip


def _fold_by_sglang(c: Case) -> None:
    module = peer_sglang.load(FOLDER, FOLDS[c.shape.kda])
    call = (
        module.commit_kda_replayssm_after_verify if c.shape.kda
        else module.commit_gdn_replayssm_fold_after_verify
    )  # fmt: skip
    call(
        spec_state=c.spec_state, state_batch_indices=c.state_indices,
        accept_lens=c.accept_lens, last_correct_step_indices=c.last_steps,
        mamba_track_indices=c.track_indices, mamba_steps_to_track=c.track_steps,
        src_indices_raw=c.source_rows,
    )  # fmt: skip


def _scatter_by_sglang(c: Case) -> None:
    name = f"{peer_sglang.OPS}.mamba.mamba_state_scatter_triton"
    peer_sglang.load(FOLDER, name).scatter_mamba_states_after_mtp_verify(
        c.spec_state, c.state_indices, c.last_steps, c.track_indices, c.track_steps,
        src_indices_raw=c.source_rows,
    )  # fmt: skip


def _fla(kda: bool):
    shell(
        FOLDER, "fla", "fla.ops", "fla.ops.utils", "fla.ops.gated_delta_rule", "fla.ops.kda"
    )
    stand_in("fla", __version__=pins()["fla-core"])
    if kda:
        return importlib.import_module("fla.ops.kda.fused_recurrent").fused_recurrent_kda
    return importlib.import_module(
        "fla.ops.gated_delta_rule.fused_recurrent"
    ).fused_recurrent_gated_delta_rule


CHECKS = fold_like_sglang, scatter_like_sglang, fold_like_sglangs_scatter, decode_like_fla
# fp16: the interpreter multiplies the bits of bf16 numbers.
SMALL = {
    "H": 1, "HV": 3, "K": 32, "V": 16, "D": 3, "dtype": torch.float16,
    "slots": (7, 2, 4, -1), "accept_lens": (3, 1, 0, 2),
}  # fmt: skip
REAL = {
    "K": 128, "V": 128, "D": 8, "S": 12, "slots": (7, 2, 4, -1, 11, 0, 9, 5),
    "accept_lens": (8, 1, 6, 2, 3, 5, 0, 2),
}  # fmt: skip
SHAPES = {
    "cpu": {
        "gdn": Shape(False, **SMALL, source_rows=(3, 0, 2, 1)),
        "kda": Shape(True, **SMALL),
    },
    "cuda": {
        "gdn": Shape(False, H=16, HV=48, **REAL),
        "gdn by request": Shape(
            False, H=16, HV=32, **REAL, source_rows=(3, 8, 2, 1, 0, 6, 7, 5)
        ),
        "kda": Shape(True, H=32, HV=32, **REAL),
    },
}  # fmt: skip

if __name__ == "__main__":
    device = sys.argv[1]
    if device == "cpu":
        from interpreted_peers import help_the_interpreter

        for name in FOLDS.values():
            peer_sglang.load(FOLDER, name)
        help_the_interpreter()
    for label, shape in SHAPES[device].items():
        for check in CHECKS:
            try:
                equal, wrong = check(shape, device), ""
            except Exception as error:
                equal, wrong = False, f"{type(error).__name__}: {error}"
            print(json.dumps([check.__name__, label, wrong, equal]), flush=True)
