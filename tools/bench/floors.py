"""The bytes that an op cannot avoid moving, and what else it reads and writes."""

from collections.abc import Sequence
from typing import NamedTuple

from problem import Workload


class Traffic(NamedTuple):
    """Bytes for all layers. state: the fp32 state alone, which sets the floor. io: q, k, v,
    a, b, o, window rows and conv windows. fused: the state's bytes were a step's fold and
    the verify after it one pass."""

    state: int
    io: int
    fused: int | None = None


def traffic(model: Workload, op: str, accept_lens: Sequence[int]) -> Traffic:
    """What ``op`` moves for a batch that accepts these lengths, 0 for a request with none.

    verify reads each request's state once; decode reads and writes it; a fold, and so a
    commit, reads and writes the states of those that accept anything. A step is a verify
    and a fold: two reads and one write, fused one read and one write.
    """
    B, rows = len(accept_lens), sum(accept_lens)
    live = sum(n > 0 for n in accept_lens)
    keys, values = model.H * model.K, model.HV * model.V
    gates = model.HV * (model.K if model.kda else 1) + model.HV  # g and beta; a and b
    state = 4 * model.layers * values * model.K
    token = 2 * model.layers * (2 * keys + 2 * values + gates)  # bf16 q, k, v, o, a, b
    row = model.layers * (2 * (keys + values) + 4 * gates)  # bf16 k, v, fp32 g, beta
    verify = Traffic(B * state, B * model.D * (token + row))
    fold = Traffic(2 * live * state, rows * row)
    if op == "verify":
        return verify
    if op == "decode":
        return Traffic(2 * B * state, B * token)
    if op == "fold":
        return fold
    if op == "step":
        fused = (B + live) * state
        return Traffic(verify.state + fold.state, verify.io + fold.io, fused)
    channels, taps = sum(model.conv_groups), model.conv_width - 1
    conv = 2 * 2 * live * model.layers * channels * taps  # bf16, read and written
    return Traffic(fold.state, fold.io + conv)
