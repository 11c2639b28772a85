"""accept: the rows the target agrees with, and its next token, against worked answers."""

import pytest
import torch
from expecttest import assert_expected_inline

from mistakes import cast, longer, moved, rank, texts
from replayssm import ops
from samples import bits_equal

I32, I64 = torch.int32, torch.int64


def check(device, drafts, targets, want, ends=None, verify_lens=None, dtypes=(I64, I64)):
    """accept of lists; want is (accept_lens, bonus)."""
    tensors = [
        torch.tensor(x, dtype=dtype, device=device)
        for x, dtype in zip((drafts, targets), dtypes, strict=True)
    ]
    optional = [
        None if x is None else torch.tensor(x, dtype=I32, device=device)
        for x in (ends, verify_lens)
    ]
    accept_lens, bonus = ops.accept(*tensors, optional[0], verify_lens=optional[1])
    assert (accept_lens.tolist(), bonus.tolist()) == want
    assert (accept_lens.dtype, bonus.dtype) == (I32, dtypes[1])


DRAFTS = [[9, 10, 20, 30], [9, 10, 20, 31], [9, 10, 21, 30], [9, 11, 20, 30]]
TARGETS = [[10, 20, 30, 40]] * 4


def test_the_anchor_counts_and_the_bonus_token_does_not(device):
    """Row 0 is accepted whatever the target says (field case 3)."""
    check(device, DRAFTS, TARGETS, ([4, 3, 2, 1], [40, 30, 20, 10]))


def test_a_match_after_a_mismatch_is_not_accepted(device):
    check(device, [[9, 0, 20, 30, 40]], [[10, 20, 30, 40, 50]], ([1], [10]))


def test_the_anchor_itself_is_never_compared(device):
    check(device, [[-1, 10]], [[10, 20]], ([2], [20]))


@pytest.mark.parametrize("draft", [I32, I64])
@pytest.mark.parametrize("target", [I32, I64])
def test_int32_and_int64_tokens_mix(device, draft, target):
    """Field case 44."""
    want = ([4, 3, 2, 1], [40, 30, 20, 10])
    check(device, DRAFTS, TARGETS, want, dtypes=(draft, target))


def test_int64_tokens_are_compared_whole(device):
    check(device, [[0, 5 + 2**32, 7]], [[5, 7, 8]], ([1], [5]), dtypes=(I64, I32))


def test_verify_lens_cap_the_accepted_rows(device):
    """The bonus is then the target's token at the cap (field cases 4, 5)."""
    drafts, targets = [DRAFTS[0]] * 8, [TARGETS[0]] * 8
    caps = [0, 1, 2, 3, 4, 5, -3, 2**31 - 1]
    want = ([0, 1, 2, 3, 4, 4, 0, 4], [-1, 10, 20, 30, 40, 40, -1, 40])
    check(device, drafts, targets, want, verify_lens=caps)


def test_a_cap_does_not_hide_a_mismatch(device):
    want = ([3, 3, 2, 1], [30, 30, 20, 10])
    check(device, DRAFTS, TARGETS, want, verify_lens=[3, 4, 3, 2])


def test_packed_rows_are_those_of_cu_seqlens(device):
    """Rows of 3, 0, 1 and 2 tokens and an uncovered tail; nothing crosses a row."""
    drafts = [9, 10, 20, 30, 8, 21, 22, 30]
    targets = [10, 20, 30, 8, 21, 22, 40, 30]
    want = ([3, 0, 1, 2], [30, -1, 8, 22])
    check(device, drafts, targets, want, ends=[0, 3, 3, 4, 6])
    capped = ([2, 0, 1, 1], [20, -1, 8, 21])
    check(device, drafts, targets, capped, ends=[0, 3, 3, 4, 6], verify_lens=[2, 5, 9, 1])


def test_rows_of_drafts_meet_packed_targets_in_place(device):
    """Each request's first drafts count, as many as it has tokens; none crosses a row."""
    targets = [10, 20, 30, 8, 21, 22, 40, 30]
    drafts = [[9, 10, 20, 30], [9, 8, 21, 22], [8, 21, 22, 40], [9, 21, 7, 7]]
    want = ([3, 0, 1, 2], [30, -1, 8, 22])
    check(device, drafts, targets, want, ends=[0, 3, 3, 4, 6])
    capped = ([2, 0, 1, 1], [20, -1, 8, 21])
    check(device, drafts, targets, capped, ends=[0, 3, 3, 4, 6], verify_lens=[2, 5, 9, 1])
    narrow = [row[:2] for row in drafts]  # no more than a row has
    check(device, narrow, targets, ([2, 0, 1, 2], [20, -1, 8, 22]), ends=[0, 3, 3, 4, 6])


@pytest.mark.parametrize(
    ("ends", "last"), [([-2, 2, 3, 3], 0), ([0, 2, 3, 2**31 - 1], 1), ([0, 2, 3, 1], 0)]
)
def test_offsets_outside_the_packed_tokens_read_nothing_beyond_them(device, ends, last):
    """A row that runs backwards is empty."""
    want = ([2, 1, last], [20, 7, 8 if last else -1])
    check(device, [1, 10, 2, 3], [10, 20, 7, 8], want, ends=ends)


@pytest.mark.parametrize("D", [1, 2, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("packed", [False, True, "targets"])
def test_every_accepted_length_of_every_width_is_found(device, D, packed):
    """Around the kernel's block of 32 too; the wrong row is also the only one."""
    tokens = torch.arange(D, device=device)
    drafts = tokens.repeat(D, 1)
    targets = drafts + 1
    for n in range(1, D):  # row n - 1 accepts n rows
        drafts[n - 1, n] = -7
    ends = torch.arange(0, D * D + 1, D, device=device) if packed else None
    if packed:
        targets = targets.flatten()
    if packed is True:
        drafts = drafts.flatten()
    accept_lens, bonus = ops.accept(drafts, targets, ends)
    assert accept_lens.tolist() == list(range(1, D + 1))
    bits_equal(bonus, accept_lens.long(), "bonus")


def test_strided_tokens_are_read_where_they_are(device):
    """Columns of a wider tensor, every second row, a transposed matrix."""
    drafts, targets = (torch.tensor(x, device=device) for x in (DRAFTS, TARGETS))
    want = ops.accept(drafts, targets)
    wide = torch.full((8, 9), -1, device=device)
    wide[::2, 1:8:2] = drafts
    caps = torch.tensor([[9, 0], [9, 0], [9, 0], [9, 0]], device=device)[:, 0]
    got = ops.accept(wide[::2, 1:8:2], targets.t().contiguous().t(), verify_lens=caps)
    for one, other in zip(got, want, strict=True):
        bits_equal(one, other)
    packed = torch.stack([drafts.flatten(), drafts.flatten() * 0], 1)[:, 0]
    ends = torch.tensor([[x, -1] for x in (0, 4, 8, 12, 16)], device=device)[:, 0]
    for rows in (packed, wide[::2, 1:8:2]):
        for one, other in zip(ops.accept(rows, targets.flatten(), ends), want, strict=True):
            bits_equal(one, other)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_empty_batches_and_windows_accept_nothing(device, shape):
    """Field case 37."""
    empty = torch.zeros(shape, dtype=I64, device=device)
    accept_lens, bonus = ops.accept(empty, empty)
    assert accept_lens.tolist() == [0] * shape[0]
    assert bonus.tolist() == [-1] * shape[0]


def test_a_packed_batch_without_tokens_accepts_nothing(device):
    check(device, [], [], ([0, 0], [-1, -1]), ends=[0, 0, 0])
    check(device, [], [], ([], []), ends=[0])


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
