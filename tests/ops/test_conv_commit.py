"""conv_commit: a conv state holds the last W - 1 inputs, whatever was accepted.

Each request's inputs are drawn as one row, the W - 1 oldest of them in its conv state;
after n tokens the state is that row from n on.
"""

import dataclasses

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from mistakes import cast, given, longer, moved, overlapping, rank, spaced, swapped, texts
from replayssm import ops
from samples import bits_equal, copied, pages, pool

L, S, R, D = 2, 7, 5, 6
SLOTS, ROWS = [5, 0, 3], [4, 2, 0]

forms = pytest.mark.parametrize("sliding", [False, True], ids=["dense", "sliding"])
layouts = pytest.mark.parametrize("last", [False, True], ids=["channels", "channels_last"])


@dataclasses.dataclass
class Conv:
    """Groups of conv states and windows; slots and rows no request has are NaN."""

    states: list[Tensor]
    windows: list[Tensor]
    inputs: list[Tensor]  # [L, B, C, W-1+D] of each group
    W: int
    last: bool

    def commit(self, accept, slots=SLOTS, rows=ROWS, index=torch.int32, **tracks):
        named = {"window_indices": rows, **tracks}
        device = self.states[0].device
        slots, accept, *options = (
            None if x is None else torch.as_tensor(x, dtype=index, device=device)
            for x in (slots, accept, *named.values())
        )
        ops.conv_commit(
            self.states, self.windows, slots, accept, channels_last=self.last,
            **dict(zip(named, options, strict=True)),
        )  # fmt: skip

    def after(self, group: int, request: int, n: int) -> Tensor:
        """The conv state [L, C, W-1] (or channels_last) after n of the tokens."""
        state = self.inputs[group][:, request, :, n : n + self.W - 1]
        return state.transpose(1, 2) if self.last else state

    def expect(self, before: "Conv", accepted: dict, tracked: dict | None = None):
        """slot -> (request, tokens); every other bit of the states is as before."""
        for g, (state, old) in enumerate(zip(self.states, before.states, strict=True)):
            want = copied(old)
            for slot, (request, n) in {**accepted, **(tracked or {})}.items():
                want[:, slot] = self.after(g, request, n)
            bits_equal(pages(state), pages(want), f"conv_states[{g}]")
        for g, (window, old) in enumerate(zip(self.windows, before.windows, strict=True)):
            bits_equal(pages(window), pages(old), f"conv_windows[{g}]")

    def copy(self) -> "Conv":
        return dataclasses.replace(
            self,
            states=[copied(x) for x in self.states],
            windows=[copied(x) for x in self.windows],
        )


def make(
    device, *, channels=(5,), W=4, sliding=False, last=False, dtype=torch.bfloat16,
    layers=L, raw=False,
):  # fmt: skip
    """With ``raw`` the inputs are random bits: NaN payloads, -0 and all."""
    draw = torch.Generator().manual_seed(0)
    states, windows, inputs = [], [], []

    def paged(x):
        return pool((x.transpose(-1, -2) if last else x).contiguous(), axis=x.dim() - 2)

    for C in channels:
        row = torch.randn(layers, len(SLOTS), C, W - 1 + D, generator=draw).to(dtype)
        if raw:
            of = torch.int32 if dtype == torch.float32 else torch.int16
            least, most = torch.iinfo(of).min, torch.iinfo(of).max
            size = row.shape
            row = torch.randint(least, most, size, dtype=of, generator=draw).view(dtype)
        row = row.to(device)
        state = row.new_full((layers, S, C, W - 1), float("nan"))
        state[:, SLOTS] = row[..., : W - 1]
        if sliding:
            window = row.new_full((layers, R, C, D + W - 2), float("nan"))
            window[:, ROWS] = row[..., 1:]
        else:
            window = row.new_full((layers, R, D, C, W - 1), float("nan"))
            for t in range(D):
                window[:, ROWS, t] = row[..., t + 1 : t + W]
        states.append(paged(state))
        windows.append(paged(window))
        inputs.append(row)
    return Conv(states, windows, inputs, W, last)


def check(
    device, accept, means=None, tracks=(), at=(), live=(0, 1, 2), options=None, **conv
):
    """Commit; the live requests' slots hold ``means`` (default accept) tokens."""
    p = make(device, **conv)
    before = p.copy()
    if tracks:
        options = {"track_indices": tracks, "track_steps": at, **(options or {})}
    p.commit(accept, **(options or {}))
    means = accept if means is None else means
    accepted = {SLOTS[i]: (i, means[i]) for i in live if means[i]}
    tracked = {
        slot: (i, at[i] + 1)
        for i, slot in enumerate(tracks)
        if i in live and 0 <= at[i] < means[i] and 0 <= slot < S
    }
    p.expect(before, accepted, tracked)


@layouts
@forms
@pytest.mark.parametrize("W", [2, 3, 4, 5, 9])
@pytest.mark.parametrize("n", range(1, D + 1))
def test_the_state_is_the_last_inputs_up_to_the_accepted_token(device, sliding, last, W, n):
    """Below W - 1 tokens, old inputs and new ones; from there new ones only, and past
    the convolution's width too (field cases 2, 20)."""
    check(device, [n, 1, D], W=W, sliding=sliding, last=last)


@forms
def test_a_convolution_of_the_next_token_continues_the_sequence(device, sliding):
    """What the state is for; whole weights of bf16 inputs are exact in fp64."""
    W, n = 4, 2
    p = make(device, W=W, sliding=sliding)
    p.commit([n] * 3)
    weight = torch.arange(1.0, W + 1, device=device, dtype=torch.float64)
    row = p.inputs[0][..., : W - 1 + n + 1].double()  # accepted tokens and one more
    whole = (row.unfold(-1, W, 1) * weight).sum(-1)
    state = torch.cat([p.states[0][:, SLOTS].double(), row[..., -1:]], -1)
    bits_equal((state * weight).sum(-1), whole[..., -1].contiguous(), "output")


@layouts
@forms
def test_nothing_accepted_leaves_the_slot_untouched(device, sliding, last):
    """And no snapshot is taken (field case 4)."""
    check(
        device, [0, 2, -1], [0, 2, 0], tracks=[1, -1, 2], at=[0, 0, 0], sliding=sliding,
        last=last,
    )  # fmt: skip


@forms
@pytest.mark.parametrize(
    ("accept", "means"), [(D, D), (D + 1, D), (100, D), (2**31 - 1, D), (-(2**31), 0)]
)
def test_accept_lens_are_clamped_to_the_window(device, sliding, accept, means):
    """No row beyond its own is read: the next ones are NaN (field case 5)."""
    check(device, [accept, 1, 2], [means, 1, 2], sliding=sliding)


@layouts
@forms
def test_slot_zero_is_a_slot_and_a_negative_one_is_padding(device, sliding, last):
    """Padding rows hold garbage: 7 accepted, someone's window row, someone's snapshot
    (field cases 35, 36)."""
    p = make(device, sliding=sliding, last=last)
    before = p.copy()
    p.commit(
        [7, 2, 7], [-1, 0, -5], [4, 2, 0], track_indices=[5, 1, 3], track_steps=[0, 1, 0]
    )
    p.expect(before, {0: (1, 2)}, {1: (1, 2)})


@forms
@pytest.mark.parametrize("beyond", [S, 2**31 - 1, -1])
def test_slots_outside_the_pool_are_skipped(device, sliding, beyond):
    """With their snapshots (field case 38)."""
    options = {"slots": [beyond, SLOTS[1], beyond]}
    check(
        device, [1, 2, 3], live=[1], tracks=[1, 2, 4], at=[0, 0, 0], options=options,
        sliding=sliding,
    )  # fmt: skip


@forms
@pytest.mark.parametrize("beyond", [R, 2**31 - 1, -1])
def test_rows_outside_the_window_pool_are_skipped(device, sliding, beyond):
    options = {"rows": [beyond, ROWS[1], beyond]}
    check(
        device, [1, 2, 3], live=[1], tracks=[1, 2, 4], at=[0, 0, 0], options=options,
        sliding=sliding,
    )  # fmt: skip


@forms
def test_the_window_row_is_the_slot_by_default(device, sliding):
    p = make(device, sliding=sliding)
    before = p.copy()
    p.commit([1, 2, 3], rows=None, slots=[4, 2, 0])
    p.expect(before, {4: (0, 1), 2: (1, 2), 0: (2, 3)})


@layouts
@forms
@pytest.mark.parametrize("step", range(-1, D + 1))
def test_a_track_slot_gets_the_state_after_its_step(device, sliding, last, step):
    """Up to the accepted tokens and no further (field case 56)."""
    check(device, [4, D, 1], tracks=[1, 2, 4], at=[step] * 3, sliding=sliding, last=last)


@pytest.mark.parametrize("slot", [-1, S, 2**31 - 1])
def test_track_slots_outside_the_pool_are_skipped(device, slot):
    check(device, [1, 2, 3], tracks=[slot, 6, slot], at=[0, 0, 0])


@layouts
@forms
@pytest.mark.parametrize("channels", [(1,), (5, 3), (4, 8, 16), (2048, 700, 1, 683)])
def test_groups_of_different_channel_counts_move_together(device, sliding, last, channels):
    """Around a block of 2048 elements too: 3 * 700, 3 * 683."""
    check(
        device, [2, 0, 5], tracks=[1, 2, 4], at=[1, 0, 3], channels=channels,
        sliding=sliding, last=last,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@layouts
@forms
def test_any_dtype_is_moved_bit_for_bit(device, sliding, last, dtype):
    """NaN payloads and negative zeros too."""
    check(device, [1, 4, 2], dtype=dtype, sliding=sliding, last=last, raw=True)


@layouts
@forms
def test_a_width_of_one_moves_nothing(device, sliding, last):
    check(device, [1, 2, D], W=1, sliding=sliding, last=last)


@forms
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_int64_and_strided_indices_work(device, sliding, index):
    """Field case 44."""
    p = make(device, sliding=sliding)
    before = p.copy()
    columns = torch.tensor(
        [[3, 5, 4, 1, 2], [1, 0, 2, -1, 0], [6, 3, 0, 2, 1]], device=device, dtype=index
    )
    accept, slots, rows, track, at = columns.unbind(1)
    p.commit(accept, slots, rows, index, track_indices=track, track_steps=at)
    accepted = {5: (0, 3), 0: (1, 1), 3: (2, 6)}
    p.expect(before, accepted, {1: (0, 3), 2: (2, 2)})


def test_an_empty_batch_moves_nothing(device):
    """Field case 37."""
    p = make(device)
    before = p.copy()
    p.commit([], [], [])
    p.expect(before, {})


@pytest.mark.gpu
@forms
@pytest.mark.parametrize("strides", [(2**30, 2**22), (2**22, 2**29)], ids=str)
def test_offsets_beyond_int32_are_addressed_rightly(sliding, strides):
    """Layers, or slots and rows, far apart in memory (field cases 41, 42, 43)."""
    near = make("cuda", sliding=sliding, layers=3)
    room = torch.zeros(7 * 2**29, dtype=torch.bfloat16, device="cuda")

    def spread(x, start):
        inner = x[0, 0].contiguous().stride()
        return room.as_strided(x.shape, (*strides, *inner), start).copy_(x)

    far = dataclasses.replace(
        near, states=[spread(near.states[0], 0)], windows=[spread(near.windows[0], 2**20)]
    )
    for p in near, far:
        p.commit([2, 1, 5], track_indices=[1, 2, 6], track_steps=[1, -1, 0])
    bits_equal(far.states[0], near.states[0].contiguous(), "conv_states[0]")
    bits_equal(far.windows[0], near.windows[0].contiguous(), "conv_windows[0]")


def without(*names):
    return lambda x: dict.fromkeys(names)


STATES, WINDOWS = (
    [f"conv_{name}[{i}]" for i in range(3)] for name in ("states", "windows")
)


def test_conv_commit_refuses_wrong_metadata(device):
    got = texts(
        device, "conv_commit-dense-track",
        rank("conv_states[0]"), rank("conv_windows[0]"), rank("conv_states[1]"),
        lambda x: {"conv_windows[2]": x["conv_windows[2]"][:, :, 0]},
        longer("conv_states[1]", 0), longer("conv_states[1]", 1), longer("conv_states[1]", 2),
        longer("conv_states[1]"), longer("conv_windows[0]", 0), longer("conv_windows[1]", 1),
        longer("conv_windows[1]", 2), longer("conv_windows[1]", 3), longer("conv_windows[1]"),
        longer("accept_lens"), longer("window_indices"), longer("track_steps"),
        rank("state_indices"), cast("conv_states[0]", torch.float64),
        cast("conv_states[2]", torch.float16), cast("conv_windows[0]", torch.float32),
        cast("accept_lens", torch.float32), cast("state_indices", torch.int16),
        moved("conv_windows[1]"), moved("conv_states[1]"), moved("accept_lens"),
        swapped("conv_states[1]"), swapped("conv_windows[0]"), spaced("conv_windows[2]"),
        overlapping("conv_states[1]"), given(track_indices=None), given(track_steps=None),
        given(channels_last=True), without(*STATES, *WINDOWS), without("conv_windows[2]"),
        without("conv_states[0]"),
        lambda x: {f"conv_{k}[{i}]": x[f"conv_{k}[0]"] for k in ("states", "windows") for i in (3, 4)},
    ) + "\n" + texts(
        device, "conv_commit-sliding-last-track",
        rank("conv_states[0]"), longer("conv_windows[1]", 2), longer("conv_windows[1]"),
        lambda x: {name: x[name][:, :, :2] for name in WINDOWS}, given(channels_last=False),
    )  # fmt: skip
    assert_expected_inline(
        got,
        """\
ValueError: conv_commit: conv_states[0] must be [L, S, C, W-1], got 5 dimensions: [1, 2, 5, 6, 3]
ValueError: conv_commit: conv_windows[0] must be [L, R, D, C, W-1] (dense) or [L, R, C, D+W-2] (sliding), got 6 dimensions: [1, 2, 3, 3, 6, 3]
ValueError: conv_commit: conv_states[1] must be [L, S, C, W-1], got 5 dimensions: [1, 2, 5, 2, 3]
ValueError: conv_commit: conv_windows[2] must be [L, R, D, C, W-1], got 4 dimensions: [2, 3, 3, 3]
ValueError: conv_commit: conv_states[1] must be [L, S, C, W-1] with L = 2 as in conv_states[0], got [3, 5, 2, 3]
ValueError: conv_commit: conv_states[1] must be [L, S, C, W-1] with S = 5 as in conv_states[0], got [2, 6, 2, 3]
ValueError: conv_commit: conv_windows[1] must be [L, R, D, C, W-1] with C = 3 as in conv_states[1], got [2, 3, 3, 2, 3]
ValueError: conv_commit: conv_states[1] must be [L, S, C, W-1] with W-1 = 3 as in conv_states[0], got [2, 5, 2, 4]
ValueError: conv_commit: conv_windows[0] must be [L, R, D, C, W-1] with L = 2 as in conv_states[0], got [3, 3, 3, 6, 3]
ValueError: conv_commit: conv_windows[1] must be [L, R, D, C, W-1] with R = 3 as in conv_windows[0], got [2, 4, 3, 2, 3]
ValueError: conv_commit: conv_windows[1] must be [L, R, D, C, W-1] with D = 3 as in conv_windows[0], got [2, 3, 4, 2, 3]
ValueError: conv_commit: conv_windows[1] must be [L, R, D, C, W-1] with C = 2 as in conv_states[1], got [2, 3, 3, 3, 3]
ValueError: conv_commit: conv_windows[1] must be [L, R, D, C, W-1] with W-1 = 3 as in conv_states[0], got [2, 3, 3, 2, 4]
ValueError: conv_commit: accept_lens must be [B] with B = 3 as in state_indices, got [4]
ValueError: conv_commit: window_indices must be [B] with B = 3 as in state_indices, got [4]
ValueError: conv_commit: track_steps must be [B] with B = 3 as in state_indices, got [4]
ValueError: conv_commit: state_indices must be [B], got 2 dimensions: [1, 3]
TypeError: conv_commit: conv_states[0] must be bfloat16 or float16 or float32, got float64
TypeError: conv_commit: conv_states[2] must be bfloat16 like conv_states[0], got float16
TypeError: conv_commit: conv_windows[0] must be bfloat16 like conv_states[0], got float32
TypeError: conv_commit: accept_lens must be int32 or int64, got float32
TypeError: conv_commit: state_indices must be int32 or int64, got int16
ValueError: conv_commit: conv_windows[1] must be on DEVICE like conv_states[0], got meta
ValueError: conv_commit: conv_states[1] must be on DEVICE like conv_states[0], got meta
ValueError: conv_commit: accept_lens must be on DEVICE like conv_states[0], got meta
ValueError: conv_commit: conv_states[1]'s innermost 2 dimensions must be contiguous, got shape [2, 5, 2, 3] with strides [30, 6, 1, 2]
ValueError: conv_commit: conv_windows[0]'s innermost 2 dimensions must be contiguous, got shape [2, 3, 3, 6, 3] with strides [162, 54, 18, 1, 6]
ValueError: conv_commit: conv_windows[2]'s innermost 2 dimensions must be contiguous, got shape [2, 3, 3, 3, 3] with strides [162, 54, 18, 6, 2]
ValueError: conv_commit: conv_states[1] is written and must not overlap itself, got shape [2, 5, 2, 3] with strides [0, 12, 3, 1]
ValueError: conv_commit: track_steps needs track_indices beside it, got None
ValueError: conv_commit: track_indices needs track_steps beside it, got None
ValueError: conv_commit: conv_states[1] must be [L, S, W-1, C] with W-1 = 6 as in conv_states[0] (channels_last), got [2, 5, 2, 3]
ValueError: conv_commit: conv_states must be 1 to 4 tensors, got 0
ValueError: conv_commit: conv_windows must be 3 tensors, one per conv state, got 2
ValueError: conv_commit: conv_windows must be 2 tensors, one per conv state, got 3
ValueError: conv_commit: conv_states must be 1 to 4 tensors, got 5
ValueError: conv_commit: conv_states[0] must be [L, S, W-1, C] (channels_last), got 5 dimensions: [1, 2, 5, 3, 6]
ValueError: conv_commit: conv_windows[1] must be [L, R, D+W-2, C] with D+W-2 = 5 as in conv_windows[0] (channels_last), got [2, 3, 6, 2]
ValueError: conv_commit: conv_windows[1] must be [L, R, D+W-2, C] with C = 2 as in conv_states[1] (channels_last), got [2, 3, 5, 3]
ValueError: conv_commit: conv_windows[0] must hold W-2 = 2 inputs before this step and at least 1 new one, got D+W-2 = 2
ValueError: conv_commit: conv_windows[0] must be [L, R, C, D+W-2] with C = 3 as in conv_states[0], got [2, 3, 5, 6]""",
    )
