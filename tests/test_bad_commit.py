"""The commit ops' metadata mistakes, as in test_bad_input: each raises and writes nothing."""

import torch
from expecttest import assert_expected_inline

from mistakes import cast, given, longer, moved, overlapping, rank, spaced, swapped, texts


def test_accept_refuses_wrong_metadata(device):
    got = texts(
        device, "accept",
        rank("draft_tokens"), rank("target_tokens"), longer("target_tokens"),
        longer("target_tokens", 0), longer("verify_lens"), rank("verify_lens"),
        cast("draft_tokens", torch.int16), cast("target_tokens", torch.float32),
        cast("verify_lens", torch.bool), moved("target_tokens"), moved("verify_lens"),
        lambda x: {"cu_seqlens": x["verify_lens"]},
        lambda x: {
            "cu_seqlens": x["verify_lens"], "target_tokens": x["target_tokens"].flatten()
        },
        lambda x: {name: x[name].flatten() for name in ("draft_tokens", "target_tokens")},
    ) + "\n" + texts(
        device, "accept-ragged",
        longer("target_tokens"), lambda x: {"draft_tokens": x["draft_tokens"][None, None]},
        rank("cu_seqlens"), cast("cu_seqlens", torch.float32),
        lambda x: {"cu_seqlens": x["cu_seqlens"][:0]},
        lambda x: {"verify_lens": x["cu_seqlens"]},
    )  # fmt: skip
    assert_expected_inline(
        got,
        """\
ValueError: accept: draft_tokens must be [B, D] without cu_seqlens, got 3 dimensions: [1, 4, 4]
ValueError: accept: target_tokens must be [B, D] without cu_seqlens, got 3 dimensions: [1, 4, 4]
ValueError: accept: target_tokens must be [B, D] with D = 4 as in draft_tokens without cu_seqlens, got [4, 5]
ValueError: accept: target_tokens must be [B, D] with B = 4 as in draft_tokens without cu_seqlens, got [5, 4]
ValueError: accept: verify_lens must be [B] with B = 4 as in draft_tokens, got [5]
ValueError: accept: verify_lens must be [B], got 2 dimensions: [1, 4]
TypeError: accept: draft_tokens must be int32 or int64, got int16
TypeError: accept: target_tokens must be int32 or int64, got float32
TypeError: accept: verify_lens must be int32 or int64, got bool
ValueError: accept: target_tokens must be on DEVICE like draft_tokens, got meta
ValueError: accept: verify_lens must be on DEVICE like draft_tokens, got meta
ValueError: accept: target_tokens must be [N] with cu_seqlens, got 2 dimensions: [4, 4]
ValueError: accept: cu_seqlens must be [B + 1] with B = 4 (draft_tokens), got [4]
ValueError: accept: draft_tokens must be [B, D] without cu_seqlens, got 1 dimensions: [16]
ValueError: accept: target_tokens must be [N] with N = 16 as in draft_tokens with cu_seqlens, got [17]
ValueError: accept: draft_tokens must be [N] with cu_seqlens, got 3 dimensions: [1, 1, 16]
ValueError: accept: cu_seqlens must be [B+1], got 2 dimensions: [1, 5]
TypeError: accept: cu_seqlens must be int32 or int64, got float32
ValueError: accept: cu_seqlens must be [B + 1], got [0]
ValueError: accept: verify_lens must be [B] with B = 4 as in cu_seqlens, got [5]""",
    )


def test_commit_indices_refuses_wrong_metadata(device):
    got = texts(
        device, "commit_indices-track",
        rank("accept_lens"), rank("slot_map"), longer("seq_lens"), longer("req_indices"),
        longer("state_indices"), longer("last_steps"), longer("track_indices"),
        longer("track_steps"), longer("live"), rank("live"), rank("track_slot_map"),
        cast("accept_lens", torch.float32), cast("live", torch.bool),
        cast("track_steps", torch.int16), moved("slot_map"), moved("live"),
        moved("track_slot_map"), overlapping("state_indices"), overlapping("track_steps"),
        given(track_interval=-1),
    )  # fmt: skip
    assert_expected_inline(
        got,
        """\
ValueError: commit_indices: accept_lens must be [B], got 2 dimensions: [1, 5]
ValueError: commit_indices: slot_map must be [requests], got 2 dimensions: [1, 4]
ValueError: commit_indices: seq_lens must be [B] with B = 5 as in accept_lens, got [6]
ValueError: commit_indices: req_indices must be [B] with B = 5 as in accept_lens, got [6]
ValueError: commit_indices: state_indices must be [B] with B = 5 as in accept_lens, got [6]
ValueError: commit_indices: last_steps must be [B] with B = 5 as in accept_lens, got [6]
ValueError: commit_indices: track_indices must be [B] with B = 5 as in accept_lens, got [6]
ValueError: commit_indices: track_steps must be [B] with B = 5 as in accept_lens, got [6]
ValueError: commit_indices: live must be [1], got [2]
ValueError: commit_indices: live must be [1], got 2 dimensions: [1, 1]
ValueError: commit_indices: track_slot_map must be [requests], got 2 dimensions: [1, 4]
TypeError: commit_indices: accept_lens must be int32 or int64, got float32
TypeError: commit_indices: live must be int32 or int64, got bool
TypeError: commit_indices: track_steps must be int32 or int64, got int16
ValueError: commit_indices: slot_map must be on DEVICE like accept_lens, got meta
ValueError: commit_indices: live must be on DEVICE like accept_lens, got meta
ValueError: commit_indices: track_slot_map must be on DEVICE like accept_lens, got meta
ValueError: commit_indices: state_indices is written and must not overlap itself, got shape [5] with strides [0]
ValueError: commit_indices: track_steps is written and must not overlap itself, got shape [5] with strides [0]
ValueError: commit_indices: track_interval must be 0 or more tokens, got -1""",
    )


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
