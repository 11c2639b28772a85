"""scatter: the classic commit, against a Python loop."""

import pytest
import torch
from expecttest import assert_expected_inline

from mistakes import cast, given, longer, moved, overlapping, rank, swapped, texts
from samples import bits_equal, pages, pool

INNER = [(2, 8, 4), (6, 3), (5,), ()]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.uint8]
L, S, R, D = 2, 7, 4, 3


def make(device, inner=(2, 8, 4), dtype=torch.float32):
    """State and intermediate, random and strided where the dtype has NaN to pad with."""
    draw = torch.Generator().manual_seed(0)
    tensors = []
    for shape in ((L, S, *inner), (L, R, D, *inner)):
        value = (
            (torch.randn(shape, generator=draw, dtype=torch.float64) * 9)
            .to(dtype)
            .to(device)
        )
        tensors.append(pool(value, axis=2) if dtype.is_floating_point else value)
    return tensors


def indices(device, *values, dtype=torch.int32):
    return [torch.tensor(value, device=device, dtype=dtype) for value in values]


def expected(state, intermediate, slots, steps, sources=None, tracks=None, at=None):
    state = state.clone()
    for i, (slot, step) in enumerate(zip(slots, steps, strict=True)):
        source = i if sources is None else sources[i]
        if 0 <= slot < S and 0 <= step < D and 0 <= source < R:
            state[:, slot] = intermediate[:, source, step]
            if tracks is not None and 0 <= at[i] <= step and 0 <= tracks[i] < S:
                state[:, tracks[i]] = intermediate[:, source, at[i]]
    return state


def check(device, slots, steps, sources=None, tracks=None, at=None, **options):
    state, intermediate = make(device, **options)
    want = expected(state, intermediate, slots, steps, sources, tracks, at)
    snapshots = pages(intermediate).clone()
    names = ("source_indices", "track_indices", "track_steps")
    optional = {
        name: indices(device, value)[0]
        for name, value in zip(names, (sources, tracks, at), strict=True)
        if value is not None
    }
    torch.ops.replayssm.scatter(
        state, intermediate, *indices(device, slots, steps), **optional
    )
    bits_equal(state, want, "state")
    bits_equal(pages(intermediate), snapshots, "intermediate")
    if state._base is not None:
        assert state._base[:, :, 0].isnan().all(), "other pages"


@pytest.mark.parametrize("inner", INNER, ids=str)
def test_any_inner_shape_is_copied_as_a_loop_would(device, inner):
    """Recurrent states, conv windows and vectors alike."""
    check(device, [5, 0, 3], [2, 0, 1], inner=inner)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype_is_copied_bit_for_bit(device, dtype):
    check(device, [5, 0, 3], [2, 0, 1], dtype=dtype)


def test_nan_payloads_and_negative_zeros_are_copied(device):
    state, intermediate = make(device)
    odd = torch.tensor([0x7FC12345, -0x80000000, 0x7F800001], dtype=torch.int32)
    intermediate.view(torch.int32)[0, 0, 0, 0, 0, :3] = odd.to(device)
    torch.ops.replayssm.scatter(state, intermediate, *indices(device, [1], [0]))
    bits_equal(state[:, 1], intermediate[:, 0, 0], "state")


@pytest.mark.parametrize("step", [-1, D, 2**31 - 1, -(2**31)])
def test_steps_out_of_range_copy_nothing(device, step):
    check(device, [5, 0, 3], [step, 0, step], tracks=[1, 2, 4], at=[0, 0, 0])


@pytest.mark.parametrize("slot", [-1, -5, S, 2**31 - 1])
def test_slots_out_of_range_copy_nothing(device, slot):
    """-1 is no live slot 0 (field case 35)."""
    check(device, [slot, 4, slot], [0, 1, 2], tracks=[1, 2, 3], at=[0, 0, 0])


def test_sources_name_the_rows_of_intermediate(device):
    check(device, [5, 0, 3, 2], [2, 0, 1, 1], sources=[3, 0, 2, 1])
    check(device, [5, 0, 3, 2], [2, 0, 1, 1], sources=[-1, 0, R, 2**31 - 1])


def test_a_batch_wider_than_intermediate_skips_its_surplus_rows(device):
    check(device, [0, 1, 2, 3, 4, 5], [0] * 6)


@pytest.mark.parametrize("at", [-1, 0, 1, 2, 3])
def test_a_track_slot_gets_the_snapshot_of_its_step(device, at):
    """Up to the accepted step and no further."""
    check(device, [5, 0, 3], [1, 0, 2], tracks=[6, 4, 2], at=[at] * 3)


def test_track_slots_out_of_range_are_skipped(device):
    check(device, [5, 0, 3], [1, 0, 2], tracks=[-1, S, 2**31 - 1], at=[0, 0, 0])


def test_an_empty_batch_copies_nothing(device):
    check(device, [], [])


def test_int64_and_strided_indices_work(device):
    """Field case 44."""
    state, intermediate = make(device)
    want = expected(state, intermediate, [5, 0], [2, 1], [1, 3])
    slots, steps, sources = (
        torch.stack([x, x - 100], dim=1)[:, 0]
        for x in indices(device, [5, 0], [2, 1], [1, 3], dtype=torch.int64)
    )
    torch.ops.replayssm.scatter(state, intermediate, slots, steps, source_indices=sources)
    bits_equal(state, want, "state")


def test_scatter_refuses_wrong_metadata(device):
    got = texts(
        device, "scatter-conv-track",
        lambda x: {"state": x["state"][0, 0, 0]}, rank("state"), rank("intermediate"),
        longer("intermediate", 0), longer("intermediate"), longer("step_indices"),
        longer("source_indices"), longer("track_steps"),
        cast("state", torch.float16), cast("state", torch.float8_e4m3fn),
        cast("step_indices", torch.float32), moved("intermediate"),
        moved("state_indices"), swapped("state"), swapped("intermediate"),
        overlapping("state"), given(track_indices=None), given(track_steps=None),
    )  # fmt: skip
    assert_expected_inline(
        got,
        """\
ValueError: scatter: state must be [L, S, *inner], got [3]
ValueError: scatter: intermediate must be [L, R, D, *inner] beside state of 5 dimensions, got 5: [2, 4, 3, 6, 3]
ValueError: scatter: intermediate must be [L, R, D, *inner] beside state of 4 dimensions, got 6: [1, 2, 4, 3, 6, 3]
ValueError: scatter: intermediate must be [L, R, D, inner0, inner1] with L = 2 as in state, got [3, 4, 3, 6, 3]
ValueError: scatter: intermediate must be [L, R, D, inner0, inner1] with inner1 = 3 as in state, got [2, 4, 3, 6, 4]
ValueError: scatter: step_indices must be [B] with B = 3 as in state_indices, got [4]
ValueError: scatter: source_indices must be [B] with B = 3 as in state_indices, got [4]
ValueError: scatter: track_steps must be [B] with B = 3 as in state_indices, got [4]
TypeError: scatter: intermediate must be float16 like state, got float32
TypeError: scatter: state must be bfloat16 or float16 or float32 or float64 or int8 or uint8, got float8_e4m3fn
TypeError: scatter: step_indices must be int32 or int64, got float32
ValueError: scatter: intermediate must be on DEVICE like state, got meta
ValueError: scatter: state_indices must be on DEVICE like state, got meta
ValueError: scatter: state's innermost 2 dimensions must be contiguous, got shape [2, 6, 6, 3] with strides [108, 18, 1, 6]
ValueError: scatter: intermediate's innermost 2 dimensions must be contiguous, got shape [2, 4, 3, 6, 3] with strides [216, 54, 18, 1, 6]
ValueError: scatter: state is written and must not overlap itself, got shape [2, 6, 6, 3] with strides [0, 18, 3, 1]
ValueError: scatter: track_steps needs track_indices beside it, got None
ValueError: scatter: track_indices needs track_steps beside it, got None""",
    )
