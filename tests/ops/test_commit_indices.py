"""commit_indices: which slot, which step, which snapshot, against worked answers."""

import itertools

import pytest
import torch
from expecttest import assert_expected_inline

from mistakes import cast, given, longer, moved, overlapping, rank, texts
from replayssm import ops
from samples import bits_equal

NONE = (-1, -1, -1, -1)
TOP, BOTTOM = 2**31 - 1, -(2**31)


def commit(
    device, accept, seq, requests, slots, live=None, tracks=None, interval=0,
    index=torch.int32, strided=False,
):  # fmt: skip
    """(slot, last step, track slot, track step) of each row."""

    def tensor(values):
        values = torch.tensor(values, dtype=index, device=device)
        if not strided:
            return values
        # Every second element; what lies between is no answer.
        return torch.stack([values, torch.full_like(values, 76)], 1)[:, 0]

    outputs = [tensor([55] * len(accept)) for _ in range(4)]
    ops.commit_indices(
        tensor(accept), tensor(seq), tensor(requests), tensor(slots),
        tensor([len(accept) if live is None else live]), *outputs,
        track_slot_map=None if tracks is None else tensor(tracks), track_interval=interval,
    )  # fmt: skip
    if strided:
        for output in outputs:
            assert (output._base[:, 1] == 76).all()
    return list(zip(*(output.tolist() for output in outputs), strict=True))


def one(device, accept, seq, interval):
    """The track step of one request, or None."""
    ((_, _, slot, step),) = commit(
        device, [accept], [seq], [0], [4], tracks=[6], interval=interval
    )
    assert slot == (-1 if step == -1 else 6)
    return None if step == -1 else step


def test_a_slot_comes_from_the_map_and_the_last_step_is_the_last_accepted(device):
    rows = commit(device, [1, 4, 0], [9, 9, 9], [2, 0, 1], [7, 3, 5])
    assert rows == [(5, 0, -1, -1), (7, 3, -1, -1), (3, -1, -1, -1)]


@pytest.mark.parametrize("live", [0, 1, 2, 3])
def test_rows_at_or_past_live_are_padding(device, live):
    """Whatever garbage they hold (field cases 35, 36)."""
    garbage = ([2, 3, 7, TOP], [0, 1, BOTTOM, TOP], [1, 0, 0, TOP])
    rows = commit(device, *garbage, [7, 3], live=live, tracks=[5, 6], interval=2)
    want = [(3, 1, 6, 1), (7, 2, 5, 2), (7, 6, -1, -1)]
    assert rows == want[:live] + [NONE] * (4 - live)


def test_live_is_read_on_the_device(device):
    """One number may pass: replays follow it (field case 65)."""
    args = [torch.tensor(x, device=device) for x in ([2, 2], [0, 0], [0, 1], [4, 5])]
    live, outputs = torch.tensor([1], device=device), torch.zeros(4, 2, device=device).int()
    for count in (1, 2, 0):
        live.fill_(count)
        ops.commit_indices(*args, live, *outputs)
        assert outputs[0].tolist() == [[4, 5][i] if i < count else -1 for i in range(2)]


@pytest.mark.parametrize("live", [-1, BOTTOM, 4, TOP])
def test_a_live_outside_the_batch_is_clamped(device, live):
    rows = commit(device, [2], [0], [0], [4], live=live)
    assert rows == [NONE if live < 0 else (4, 1, -1, -1)]


@pytest.mark.parametrize("request_index", [-1, 2, TOP, BOTTOM])
def test_a_request_outside_the_map_is_padding(device, request_index):
    rows = commit(
        device, [2, 2], [1, 1], [request_index, 1], [7, 3], tracks=[5, 6], interval=2
    )
    assert rows == [NONE, (3, 1, 6, 0)]


@pytest.mark.parametrize("slot", [-1, -9, BOTTOM])
def test_a_request_without_a_slot_is_padding(device, slot):
    assert commit(device, [2], [1], [0], [slot], tracks=[5], interval=2) == [NONE]


@pytest.mark.parametrize("accept", [0, -1, BOTTOM])
def test_nothing_accepted_tracks_nothing(device, accept):
    """Not on the boundary itself either, and the slot stays named (field case 4)."""
    for seq in (7, 8, 9):
        rows = commit(device, [accept], [seq], [0], [4], tracks=[6], interval=8)
        assert rows == [(4, -1, -1, -1)]


def test_a_boundary_inside_the_accepted_rows_is_tracked(device):
    """Interval 256, 254 tokens, 5 accepted: the state after 2 of them (field case 56)."""
    assert one(device, 5, 254, 256) == 1


@pytest.mark.parametrize(
    ("accept", "seq", "step"),
    [(1, 255, 0), (2, 254, 1), (1, 254, None), (4, 256, None), (8, 249, 6), (7, 248, None)],
)
def test_the_first_and_the_last_accepted_row_may_land_on_the_boundary(
    device, accept, seq, step
):
    """A state already on it before the step is not tracked again."""
    assert one(device, accept, seq, 256) == step


@pytest.mark.parametrize(
    ("accept", "seq", "step"), [(8, 0, 7), (7, 0, 5), (8, 1, 6), (5, 3, 4), (3, 4, 1)]
)
def test_of_two_boundaries_in_one_window_the_last_counts(device, accept, seq, step):
    """Interval 2 (field case 58)."""
    assert one(device, accept, seq, 2) == step


def test_tracked_states_hold_a_multiple_of_the_interval(device):
    """Every small case against counting the tokens one by one."""
    cases = list(itertools.product(range(6), range(14), (1, 2, 3, 5, 8)))
    for interval in (1, 2, 3, 5, 8):
        rows = [(accept, seq) for accept, seq, i in cases if i == interval]
        accept, seq = zip(*rows, strict=True)
        ids = list(range(len(rows)))
        got = commit(device, accept, seq, ids, ids, tracks=ids, interval=interval)
        for i, (n, before) in enumerate(rows):
            steps = [t for t in range(n) if (before + t + 1) % interval == 0]
            want = (i, steps[-1]) if steps else (-1, -1)
            assert got[i] == (i, n - 1, *want), (interval, n, before)


@pytest.mark.parametrize("tracks", [[5], [5, -1], [5, -7], []])
def test_a_request_without_a_track_slot_is_not_tracked(device, tracks):
    """Negative in its map, or past the end of a shorter one."""
    rows = commit(device, [2, 2], [1, 1], [0, 1], [7, 3], tracks=tracks, interval=2)
    assert rows == [(7, 1, 5, 0) if tracks else (7, 1, -1, -1), (3, 1, -1, -1)]


@pytest.mark.parametrize(("tracks", "interval"), [(None, 8), ([6], 0), (None, 0)])
def test_without_a_map_or_an_interval_nothing_is_tracked(device, tracks, interval):
    rows = commit(device, [2], [7], [0], [4], tracks=tracks, interval=interval)
    assert rows == [(4, 1, -1, -1)]


def test_long_sequences_do_not_overflow(device):
    """seq_lens + accept_lens past 2**31, and int64 lengths past that."""
    assert one(device, 5, TOP - 1, 2**30) == 1
    ((_, _, slot, step),) = commit(
        device, [5], [2**40 - 2], [0], [4], tracks=[6], interval=2**20, index=torch.int64
    )
    assert (slot, step) == (6, 1)


def test_a_negative_length_is_not_tracked(device):
    assert one(device, 5, -3, 2) is None


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_int64_and_strided_tensors_give_the_same_rows(device, index):
    """Field case 44."""
    args = ([2, 3, 1], [1, 1, 1], [1, 0, 2], [7, 3, 9])
    options = {"tracks": [5, 6, -1], "interval": 2, "live": 3}
    want = commit(device, *args, **options)
    assert want == [(3, 1, 6, 0), (7, 2, 5, 2), (9, 0, -1, -1)]
    assert commit(device, *args, **options, index=index, strided=True) == want


@pytest.mark.parametrize("B", [1, 127, 128, 129, 300])
def test_a_row_does_not_depend_on_the_batch_size(device, B):
    """Around the kernel's block of 128 too; the padded tail has no one's slot."""
    ids = torch.arange(B, device=device)
    outputs = torch.full((4, B), 99, device=device)
    live = torch.tensor([B - B // 4], device=device)
    slots = ids.flip(0)
    ops.commit_indices(
        ids % 5, ids, ids, slots, live, *outputs, track_slot_map=slots + 1000,
        track_interval=4,
    )  # fmt: skip
    alive = ids < live
    bits_equal(outputs[0], torch.where(alive, slots, -1), "state_indices")
    bits_equal(outputs[1], torch.where(alive, ids % 5 - 1, -1), "last_steps")
    crossed = alive & ((ids + ids % 5) // 4 != ids // 4)
    bits_equal(outputs[2], torch.where(crossed, slots + 1000, -1), "track_indices")
    step = (ids + ids % 5) // 4 * 4 - ids - 1
    bits_equal(outputs[3], torch.where(crossed, step, -1), "track_steps")


def test_an_empty_batch_writes_nothing(device):
    """Field case 37."""
    assert commit(device, [], [], [], [4], live=3) == []
    assert commit(device, [1], [0], [0], []) == [NONE]


def test_an_unbacked_batch_size_compiles():
    """No check asks how large the batch is (field case 81)."""

    def call(*args):
        ops.commit_indices(*args)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    args = [torch.tensor(x) for x in ([2, 1], [0, 0], [1, 0], [4, 5], [2])]
    outputs = [torch.zeros(2, dtype=torch.int32) for _ in range(4)]
    for x in (*args[:3], *outputs):
        torch._dynamo.decorators.mark_unbacked(x, 0)
    compiled(*args, *outputs)
    assert [x.tolist() for x in outputs] == [[5, 4], [1, 0], [-1, -1], [-1, -1]]


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
