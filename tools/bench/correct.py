"""The gate before any figure: what is timed computes what it should."""

import torch
from torch import Tensor

from problem import Problem, Workload
from replayssm import ops


def mistake(model: Workload, device: torch.device | str = "cuda") -> str | None:
    """What the ops get wrong on three requests of all layers; None where nothing is.

    verify + fold of all rows equals D decodes bit for bit, exact=False writes the same
    windows and outputs as near as their bound, and a commit folds and moves the
    convolutions' inputs to the accepted token.
    """
    p = Problem(model, 3, device)
    layers, D, start = range(model.layers), model.D, p.state.clone()
    outputs = [p.verify(layer) for layer in layers]
    windows = [window.clone() for window in p.windows]
    for window in p.windows:
        window.zero_()
    for layer in layers:
        other = p.verify(layer, exact=False)
        if found := apart(*(x.unflatten(0, (3, D)) for x in (outputs[layer], other))):
            return f"verify, exact=False, layer {layer}: {found}"
    if not all(map(torch.equal, windows, p.windows)):
        return "verify, exact=False, writes other windows"
    if not torch.equal(p.state, start):
        return "verify changes the state"
    p.accept("all")
    p.fold()
    folded = p.state.clone()
    p.state.copy_(start)
    for t in range(D):
        for layer in layers:
            out = p.decode(layer, t)
            if not torch.equal(out, outputs[layer].unflatten(0, (3, D))[:, t]):
                return f"outputs of layer {layer}, token {t} are not decode's"
    if not torch.equal(p.state, folded):
        return "the folded state is not decode's"
    p.state.copy_(start)
    return _wrong_commit(p, start)


def _wrong_commit(p: Problem, want: Tensor) -> str | None:
    mixed_lengths(p)
    lens, rows = p.accept_lens, p.requests
    ops.fold(want, *p.windows, p.slots, lens, window_indices=rows)
    p.commit_step()
    if not torch.equal(p.state, want):
        return "the commit's state is not fold's"
    for state, window in zip(p.pools.conv_states, p.pools.conv_windows, strict=True):
        taps = state.shape[-1]
        for i, n in enumerate(lens.tolist()):
            # A sliding window starts one input after the state before the step.
            if not torch.equal(state[:, p.slots[i]], window[:, i, :, n - 1 : n - 1 + taps]):
                return f"the conv state of request {i} does not end at token {n - 1}"
    return None


def mixed_lengths(p: Problem) -> None:
    """Unequal accept lengths for three requests: about half, all and one."""
    D = p.model.D
    p.accept_lens.copy_(torch.tensor([(D + 1) // 2, D, 1]))


def apart(exact: Tensor, other: Tensor) -> str | None:
    """Why bf16 outputs [..., D, HV, V] cannot be two roundings of numbers 2e-5 apart.

    None if they can. Both kinds of outputs lie within 1e-5 of fp64, relative to the
    largest of a head's outputs in the window, because sums cancel: of a head that has
    forgotten its state, where a key and a query are by chance orthogonal, a token's every
    output. Rounding moves each by half a bf16 step, 2^-8 of itself. Plain tf32 products,
    5e-4 off, do not pass: small outputs are rounded finely.
    """
    a, b = exact.double(), other.double()
    largest = a.abs().amax((-3, -1), keepdim=True)
    bound = 2**-7 * a.abs().maximum(b.abs()) + 2e-5 * largest
    excess = ((a - b).abs() / bound.clamp(min=1e-300)).nan_to_num(torch.inf).max()
    if excess > 1:
        return f"an output is {excess:.1f} times further off than roundings allow"
    return None
