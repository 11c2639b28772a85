"""conv_commit: the causal convolution's window moves to the last accepted token."""

from torch import Tensor

from . import checks, debug, reference
from .launch import ABSENT, Plan, ceil_div, stride
from .registration import register
from .window_rule import named_rows

MAX_GROUPS = 4


def conv_commit(
    conv_states: list[Tensor],
    conv_windows: list[Tensor],
    state_indices: Tensor,
    accept_lens: Tensor,
    *,
    window_indices: Tensor | None = None,
    track_indices: Tensor | None = None,
    track_steps: Tensor | None = None,
    channels_last: bool = False,
) -> None:
    """Set each request's conv state to its last W - 1 inputs, in one launch.

    The inputs up to the last accepted token, that is: with accept_lens < W - 1 some of
    the inputs before this step are still among them. W is the convolution's width; with
    W = 1 there is nothing to move. All groups (q, k and v of KDA, say) and all layers
    at once.

    Args:
        conv_states: 1 to 4 tensors [L, S, C, W-1] bf16, fp16 or fp32, written, oldest
            input first; with ``channels_last`` [L, S, W-1, C]. Inner two dense, layer
            and slot strides free. L, S, W and the dtype are common to the groups, C and
            strides are each one's own.
        conv_windows: one tensor per conv state, in its dtype, all of one of two forms
            and of equal R and D:
            dense, the conv state after each token: [L, R, D, C, W-1], with
            channels_last [L, R, D, W-1, C]; or
            sliding, the W - 2 newest inputs before this step and its D new ones, oldest
            first: [L, R, C, D+W-2], with channels_last [L, R, D+W-2, C].
            Inner two dense, other strides free; memory of its own, apart from the states.
        state_indices: [B] int32 or int64, the slot of each request; live ones are
            distinct. Negative is padding; slots at or past S are skipped.
        accept_lens: [B] int32 or int64, tokens to commit, the anchor included and the
            bonus token not: 0 = nothing, D = all. Clamped to [0, D].
        window_indices: [B] int32 or int64, default state_indices; a request whose
            row lies outside [0, R) is skipped.
        track_indices: [B] int32 or int64, slot that receives the conv state after step
            ``track_steps[i]``; out of [0, S) = none. Not a slot that is live here.
        track_steps: [B] int32 or int64, 0-based; below 0 or >= accept_lens = none.
        channels_last: the channel is the innermost dimension of states and windows.

    Raises:
        ValueError, TypeError: naming the argument, what was wanted and what came;
            nothing is written.
    """
    _conv_commit(
        conv_states, conv_windows, state_indices, accept_lens,
        window_indices=window_indices, track_indices=track_indices,
        track_steps=track_steps, channels_last=channels_last,
    )  # fmt: skip


def _check(x):
    conv_states, conv_windows = x.conv_states, x.conv_windows
    first, name = (
        (conv_states[0], "conv_states[0]") if conv_states
        else (x.state_indices, "state_indices")
    )  # fmt: skip
    check = checks.Check("conv_commit", first, name)
    if not 1 <= len(conv_states) <= MAX_GROUPS:
        check.fail(f"conv_states must be 1 to {MAX_GROUPS} tensors, got {len(conv_states)}")
    if len(conv_windows) != len(conv_states):
        check.fail(
            f"conv_windows must be {len(conv_states)} tensors, one per conv state, "
            f"got {len(conv_windows)}"
        )
    dims = {
        taps: f"{taps} C" if x.channels_last else f"C {taps}" for taps in ("W-1", "D+W-2")
    }
    forms = {5: f"L R D {dims['W-1']}", 4: f"L R {dims['D+W-2']}"}
    rank = conv_windows[0].dim()
    if rank not in forms:
        dense, sliding = (", ".join(form.split()) for form in forms.values())
        check.fail(
            f"conv_windows[0] must be [{dense}] (dense) or [{sliding}] (sliding), got "
            f"{rank} dimensions: {list(conv_windows[0].shape)}"
        )
    variant = " (channels_last)" if x.channels_last else ""
    dtype: tuple = checks.ACTIVATION
    of = ""
    for i, (state, window) in enumerate(zip(conv_states, conv_windows, strict=True)):
        # With W = 1 the states are empty, and strides of nothing mean nothing.
        some = state.dim() == 4 and state.shape[2 if x.channels_last else 3] != 0
        check.tensor(
            f"conv_states[{i}]", state, f"L S {dims['W-1']}", dtype,
            dense=2 * some, of=of, variant=variant, written=some,
        )  # fmt: skip
        dtype, of = (state.dtype,), " like conv_states[0]"
        check.tensor(
            f"conv_windows[{i}]", window, forms[rank], dtype,
            dense=2 * some, of=of, variant=variant,
        )  # fmt: skip
        for letters in (check.sizes, check.sources):
            del letters["C"]  # the next group has its own
    if rank == 4:
        columns, taps = check.sizes["D+W-2"], check.sizes["W-1"]
        check.require(
            columns >= taps,
            lambda: (
                f"conv_windows[0] must hold W-2 = {taps - 1} inputs before this step and "
                f"at least 1 new one, got D+W-2 = {columns}"
            ),
        )
    check.index("state_indices", x.state_indices, "B")
    check.index("accept_lens", x.accept_lens, "B")
    check.index("window_indices", x.window_indices, "B")
    check.tracks(x.track_indices, x.track_steps)
    return check


def _draft(x) -> int:
    """D, the tokens that a conv window holds."""
    states, windows = x.conv_states[0], x.conv_windows[0]
    if windows.dim() == 5:
        return windows.shape[2]
    columns = 2 if x.channels_last else 3
    return windows.shape[columns] - states.shape[columns] + 1


def _rules(x, sizes):
    name = "state_indices" if x.window_indices is None else "window_indices"
    named = named_rows(x.state_indices, x.window_indices)
    yield from debug.slots(x.state_indices, sizes["S"])
    yield from debug.rows(name, named, sizes["R"])
    yield from debug.lengths("accept_lens", x.accept_lens, x.state_indices, 0, _draft(x))
    yield from debug.tracks(x, named, x.accept_lens, sizes["S"])


def _plan(kernels, x):
    groups, absent = len(x.conv_states), MAX_GROUPS - len(x.conv_states)
    layers, S, *inner = x.conv_states[0].shape
    R, dense = x.conv_windows[0].shape[1], x.conv_windows[0].dim() == 5
    sizes, strides = [], []
    for state, window in zip(x.conv_states, x.conv_windows, strict=True):
        sizes.append(state.shape[2] * state.shape[3])
        # From one accepted length to the next the source moves by one token.
        token = window.stride(2) if dense or x.channels_last else 1
        strides.extend([*state.stride()[:2], *window.stride()[:2], token])
    batch, block = x.state_indices.shape[0], 2048
    optional = x.window_indices, x.track_indices, x.track_steps
    return Plan(
        kernels.conv_commit,
        (batch * layers, ceil_div(max(sizes), block), groups),
        (
            batch, S, R, _draft(x), *sizes, *[0] * absent, *strides, *[0] * 5 * absent,
            x.state_indices.stride(0), x.accept_lens.stride(0), *map(stride, optional),
        ),
        {
            "TAPS": inner[0 if x.channels_last else 1],
            "ROWS": not dense and not x.channels_last, "BLOCK": block,
        },
        4,
        (
            *range(groups), *[ABSENT] * absent, *range(groups, 2 * groups),
            *[ABSENT] * absent, *range(2 * groups, 2 * groups + 5),
        ),
    )  # fmt: skip


_conv_commit = register(
    "conv_commit(Tensor(a!)[] conv_states, Tensor[] conv_windows, "
    "Tensor state_indices, Tensor accept_lens, *, Tensor? window_indices=None, "
    "Tensor? track_indices=None, Tensor? track_steps=None, "
    "bool channels_last=False) -> ()",
    check=_check,
    cpu=reference.conv_commit,
    plan=_plan,
    rules=_rules,
)
