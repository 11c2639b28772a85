"""fold and scatter: the two ways an accepted prefix becomes the state."""

import math

from torch import Tensor

from . import checks, debug, reference
from .launch import Plan, ceil_div, stride, token_block
from .registration import register
from .window_rule import Windows, named_rows


def fold(
    state: Tensor,
    k_window: Tensor,
    v_window: Tensor,
    g_window: Tensor,
    beta_window: Tensor,
    state_indices: Tensor,
    accept_lens: Tensor,
    *,
    window_indices: Tensor | None = None,
    track_indices: Tensor | None = None,
    track_steps: Tensor | None = None,
    use_qk_l2norm: bool = True,
) -> None:
    """Replay window rows 0 .. accept-1 of each request into its state, in one launch.

    With a leading layer axis L on state and windows, all layers at once. Equal to
    ``decode`` of the same tokens bit for bit (fp32 state). Folding one window twice
    applies it twice: the window keeps no count of what was folded.

    Args:
        state: [L, S, HV, V, K] or [S, HV, V, K] fp32, bf16 or fp16, written. Inner
            three dense, other strides free. 16-bit states are rounded once, here.
        k_window: [L, R, H, T, K] bf16, fp16 or fp32, before l2norm. Inner three dense.
        v_window: [L, R, HV, T, V] in k_window's dtype. Inner three dense.
        g_window: [L, R, HV, T] (GDN, inner two dense) or [L, R, HV, T, K] (KDA, inner
            three dense) fp32, used verbatim.
        beta_window: [L, R, HV, T] fp32. Inner two dense.
        state_indices: [B] int32 or int64, the slot of each request; live ones are
            distinct. Negative is padding; slots at or past S are skipped.
        accept_lens: [B] int32 or int64, rows to commit, the anchor (row 0) included
            and the bonus token not: 0 = nothing, D = all. Clamped to [0, T].
        window_indices: [B] int32 or int64, default state_indices; a request whose
            row lies outside [0, R) is skipped.
        track_indices: [B] int32 or int64, slot that receives the state after row
            ``track_steps[i]``; out of [0, S) = none. Not a slot that is live here.
        track_steps: [B] int32 or int64, 0-based; below 0 or >= accept_lens = none.
        use_qk_l2norm: as given to ``verify``.

    Raises:
        ValueError, TypeError: naming the argument, what was wanted and what came;
            nothing is written.
    """
    _fold(
        state, k_window, v_window, g_window, beta_window, state_indices, accept_lens,
        window_indices=window_indices, track_indices=track_indices,
        track_steps=track_steps, use_qk_l2norm=use_qk_l2norm,
    )  # fmt: skip


def _check_fold(x):
    check = checks.Check("fold", x.state, "state")
    if x.state.dim() not in (4, 5):
        check.fail(
            "state must be [S, HV, V, K] or [L, S, HV, V, K], got "
            f"{x.state.dim()} dimensions: {list(x.state.shape)}"
        )
    outer = "L " if x.state.dim() == 5 else ""
    check.tensor(
        "state", x.state, f"{outer}S HV V K", checks.ACTIVATION, dense=3, written=True
    )
    kda = checks.is_kda(
        check, "g_window", x.g_window, f"{outer}R HV T", f"{outer}R HV T K",
        f" beside state of {x.state.dim()} dimensions",
    )  # fmt: skip
    checks.windows(check, Windows.of(x), kda=kda, dtype=checks.ACTIVATION, outer=outer)
    check.heads()
    check.index("state_indices", x.state_indices, "B")
    check.index("accept_lens", x.accept_lens, "B")
    check.index("window_indices", x.window_indices, "B")
    check.tracks(x.track_indices, x.track_steps)
    return check


def _rules_fold(x, sizes):
    name = "state_indices" if x.window_indices is None else "window_indices"
    named = named_rows(x.state_indices, x.window_indices)
    yield from debug.slots(x.state_indices, sizes["S"])
    yield from debug.rows(name, named, sizes["R"])
    yield from debug.lengths("accept_lens", x.accept_lens, x.state_indices, 0, sizes["T"])
    yield from debug.tracks(x, named, x.accept_lens, sizes["S"])


def _plan_fold(kernels, x):
    windows, layered = Windows.of(x), x.state.dim() == 5
    layers = x.state.shape[0] if layered else 1
    S, HV, V, K = x.state.shape[-4:]
    H, batch = windows.k.shape[-3], x.state_indices.shape[0]
    BV, warps = kernels.fold_tile(HV, K, V, batch, windows.kda)
    strides = [
        step
        for pool in (x.state, *windows)
        for step in (pool.stride()[:2] if layered else (0, pool.stride(0)))
    ]
    return Plan(
        kernels.fold,
        (ceil_div(V, BV) * HV * batch * layers if windows.capacity else 0, 1, 1),
        (
            batch, S, windows.rows, windows.capacity, *strides,
            x.state_indices.stride(0), x.accept_lens.stride(0), stride(x.window_indices),
            stride(x.track_indices), stride(x.track_steps),
        ),
        {
            "H": H, "HV": HV, "K": K, "V": V, "KDA": windows.kda,
            "L2NORM": x.use_qk_l2norm, "BV": BV, "TB": token_block(windows.capacity),
            "NW": warps,
        },
        warps,
    )  # fmt: skip


_fold = register(
    "fold(Tensor(a!) state, Tensor k_window, Tensor v_window, Tensor g_window, "
    "Tensor beta_window, Tensor state_indices, Tensor accept_lens, *, "
    "Tensor? window_indices=None, Tensor? track_indices=None, "
    "Tensor? track_steps=None, bool use_qk_l2norm=True) -> ()",
    check=_check_fold,
    cpu=reference.fold,
    plan=_plan_fold,
    rules=_rules_fold,
)


def scatter(
    state: Tensor,
    intermediate: Tensor,
    state_indices: Tensor,
    step_indices: Tensor,
    *,
    source_indices: Tensor | None = None,
    track_indices: Tensor | None = None,
    track_steps: Tensor | None = None,
) -> None:
    """Copy each request's accepted snapshot back into its slot, for all layers.

    The classic commit of backends whose verify keeps one state per draft token.

    Args:
        state: [L, S, *inner] fp64, fp32, bf16, fp16, int8 or uint8, written. inner dense, other strides free.
        intermediate: [L, R, D, *inner] in state's dtype: the state after each token.
            inner dense, other strides free.
        state_indices: [B] int32 or int64, the slot of each request; live ones are
            distinct. Out of [0, S): nothing is copied.
        step_indices: [B] int32 or int64, the accepted step, 0-based: accept_len - 1.
            Out of [0, D), -1 above all: nothing is copied.
        source_indices: [B] int32 or int64, the request's row of intermediate; default
            its batch position. Out of [0, R): nothing is copied.
        track_indices: [B] int32 or int64, slot that receives the state after step
            ``track_steps[i]``; out of [0, S) = none. Not a slot that is live here.
        track_steps: [B] int32 or int64; below 0 or above the accepted step = none.

    Raises:
        ValueError, TypeError: naming the argument, what was wanted and what came;
            nothing is written.
    """
    _scatter(
        state, intermediate, state_indices, step_indices,
        source_indices=source_indices, track_indices=track_indices,
        track_steps=track_steps,
    )  # fmt: skip


def _check_scatter(x):
    check = checks.Check("scatter", x.state, "state")
    inner = x.state.dim() - 2
    if inner < 0:
        check.fail(f"state must be [L, S, *inner], got {list(x.state.shape)}")
    letters = " ".join(f"inner{i}" for i in range(inner))
    check.tensor(
        "state", x.state, f"L S {letters}", checks.SNAPSHOT, dense=inner, written=True
    )
    if x.intermediate.dim() != inner + 3:
        check.fail(
            f"intermediate must be [L, R, D, *inner] beside state of {x.state.dim()} "
            f"dimensions, got {x.intermediate.dim()}: {list(x.intermediate.shape)}"
        )
    check.tensor(
        "intermediate", x.intermediate, f"L R D {letters}", (x.state.dtype,), dense=inner,
        of=" like state",
    )  # fmt: skip
    check.index("state_indices", x.state_indices, "B")
    check.index("step_indices", x.step_indices, "B")
    check.index("source_indices", x.source_indices, "B")
    check.tracks(x.track_indices, x.track_steps)
    return check


def _rules_scatter(x, sizes):
    named = named_rows(x.state_indices, reference.sources(x))
    yield from debug.slots(x.state_indices, sizes["S"])
    yield from debug.rows("source_indices", named, sizes["R"], "snapshots")
    yield from debug.lengths(
        "step_indices", x.step_indices, x.state_indices, -1, sizes["D"] - 1
    )
    yield from debug.tracks(x, named, x.step_indices.long() + 1, sizes["S"])


def _plan_scatter(kernels, x):
    layers, S, *inner = x.state.shape
    _, R, D, *_ = x.intermediate.shape
    size, batch, block = math.prod(inner), x.state_indices.shape[0], 2048
    return Plan(
        kernels.scatter,
        (layers * batch, ceil_div(size, block), 1),
        (
            size, batch, S, R, D, *x.state.stride()[:2], *x.intermediate.stride()[:3],
            x.state_indices.stride(0), x.step_indices.stride(0), stride(x.source_indices),
            stride(x.track_indices), stride(x.track_steps),
        ),
        {"BLOCK": block},
        4,
    )  # fmt: skip


_scatter = register(
    "scatter(Tensor(a!) state, Tensor intermediate, Tensor state_indices, "
    "Tensor step_indices, *, Tensor? source_indices=None, "
    "Tensor? track_indices=None, Tensor? track_steps=None) -> ()",
    check=_check_scatter,
    cpu=reference.scatter,
    plan=_plan_scatter,
    rules=_rules_scatter,
)
