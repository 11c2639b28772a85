"""fold: which rows are committed, to which slots, and what is left alone."""

import pytest
import torch
from expecttest import assert_expected_inline

import oracle
from mistakes import cast, given, longer, moved, overlapping, rank, swapped, texts
from samples import POOLS, VARIANTS, bits_equal, make, stack

variants = pytest.mark.parametrize("variant", ["gdn", "kda"])
NAN = float("nan")


def folded(p, accept, **options):
    """The state pool after folding a copy of p; no live slot may be NaN."""
    copy = p.copy()
    copy.fold(accept, **options)
    slots = p.state_indices.long()
    live = slots[(slots >= 0) & (slots < p.state.shape[0])]
    assert copy.state[live].isfinite().all()
    return copy.state


@variants
@pytest.mark.parametrize(
    ("accept", "means"), [(0, 0), (-1, 0), (-(2**31), 0), (4, 4), (5, 4), (2**31 - 1, 4)]
)
def test_accept_lens_are_clamped_to_the_window(device, variant, accept, means):
    """Nothing past row T is read, whatever lies there (field cases 4, 5)."""
    p = make(device, variant, T=4, R=3)
    p.verify()
    bits_equal(folded(p, [accept, 1, 2]), folded(p, [means, 1, 2]), "state")


@variants
def test_an_accept_length_of_zero_leaves_the_slot_untouched(device, variant):
    """Bitwise, and without a snapshot (field case 4)."""
    p = make(device, variant)
    p.verify()
    before = p.memory()
    p.fold([0, 0, 0], track_indices=p.indices([0, 1, 2]), track_steps=p.indices([0, 0, 0]))
    p.assert_untouched(before)


@variants
def test_window_rows_past_the_accepted_ones_do_not_matter(device, variant):
    p = make(device, variant, R=4)
    p.verify()
    accept = [0, 1, 3]
    want = folded(p, accept)
    for window in p.windows:
        for row, n in zip(p.window_indices.tolist(), accept, strict=True):
            window[row, :, n:] = NAN
    bits_equal(folded(p, accept), want, "state")


@variants
def test_stale_rows_of_an_earlier_longer_window_do_not_matter(device, variant):
    """D = 4, then a ragged row of 2 over old rows (field case 6)."""
    p = make(device, variant, B=1, D=4)
    first = oracle.run(p)[1][0][4]
    p.verify()
    p.fold([4])
    for window in p.windows:
        window[p.state_indices.long(), :, 2:] = NAN
    p = p.next_tokens(9, N=2)
    second = oracle.run(p, [first])[1][0][2]
    p.with_(cu_seqlens=p.indices([0, 2])).verify()
    p.fold([2])
    assert oracle.state_error(p.state[p.state_indices[0]], second) <= 1e-6


@variants
def test_changing_draft_lengths_step_by_step_follow_fp64(device, variant):
    """4 drafted and 3 accepted, then 1, then 4 (field case 14)."""
    p = make(device, variant, B=1, D=4)
    exact = [p.state[p.state_indices[0]].cpu().double()]
    for seed, (D, accept) in enumerate([(4, 3), (1, 1), (4, 4), (2, 0), (4, 1)]):
        p = p.next_tokens(seed, N=D)
        outputs, trajectories = oracle.run(p, exact)
        oracle.assert_outputs(p.verify(), outputs)
        p.fold([accept])
        exact = [trajectories[0][accept]]
    assert oracle.state_error(p.state[p.state_indices[0]], exact[0]) <= 1e-6


@variants
def test_a_second_fold_of_a_window_applies_it_again(device, variant):
    """Documented: the window keeps no count of what was folded (field case 7)."""
    p = make(device, variant, B=1, D=2, dtype=torch.float32)
    p.verify()
    p.fold([2])
    start = p.state[p.state_indices[0]].cpu().double()
    again = oracle.run(p, [start])[1][0][2]
    p.fold([2])
    assert oracle.state_error(p.state[p.state_indices[0]], again) <= 1e-6
    assert oracle.state_error(p.state[p.state_indices[0]], start) > 1e-3


@variants
def test_slots_and_window_rows_out_of_range_are_skipped(device, variant):
    """The requests beside them are served; no neighbour is written (field case 38)."""
    p = make(device, variant, B=6, R=8)
    p.verify()
    want = p.memory("state")["state"]
    live = p.state_indices[0]
    want[live, 1] = folded(p, [3, 0, 0, 0, 0, 0])[live]
    slots, rows = p.state_indices.clone(), p.window_indices.clone()
    slots[1], slots[2], slots[3] = -1, p.state.shape[0], 2**31 - 1
    rows[4], rows[5] = -1, p.k_window.shape[0]
    p.with_(state_indices=slots, window_indices=rows).fold([3, 4, 4, 4, 4, 4])
    p.assert_untouched({"state": want})


@variants
def test_padding_never_touches_slot_zero(device, variant):
    """-1 is nothing, never clamped to a live slot 0 (field cases 35, 36)."""
    p = make(device, variant, B=4)
    slots = p.indices([0, 5, -1, -1])
    p.state[:] = 1.0
    p = p.with_(state_indices=slots, window_indices=p.indices([0, 1, 0, 1]))
    p.verify()
    pair = p.with_(state_indices=slots[:2], window_indices=p.window_indices[:2])
    want = folded(pair, [2, 3])
    assert (want[0] != 1).any()
    assert (want[[1, 2, 3, 4, 6]] == 1).all()
    bits_equal(folded(p, [2, 3, 7, 7]), want, "state")


STEPS = [(0, True), (1, True), (2, True), (3, False), (4, False), (-1, False)]


@variants
@pytest.mark.parametrize(("step", "tracked"), STEPS)
def test_a_track_slot_gets_the_state_after_its_step(device, variant, step, tracked):
    """Only inside the accepted prefix; live slots do not change (field case 56)."""
    accept = [3, 3, 3]
    p = make(device, variant, S=9)
    p.verify()
    free = sorted(set(range(9)) - set(p.state_indices.tolist()))[:3]
    want = folded(p, accept)
    if tracked:
        short = folded(p, [step + 1] * 3)
        want[free] = short[p.state_indices.long()]
    tracks = {"track_indices": p.indices(free), "track_steps": p.indices([step] * 3)}
    bits_equal(folded(p, accept, **tracks), want, "state")


@variants
def test_track_slots_out_of_range_are_skipped(device, variant):
    p = make(device, variant)
    p.verify()
    bad = [-1, p.state.shape[0], 2**31 - 1]
    tracks = {"track_indices": p.indices(bad), "track_steps": p.indices([0, 1, 2])}
    bits_equal(folded(p, [3, 3, 3], **tracks), folded(p, [3, 3, 3]), "state")


@variants
def test_a_snapshot_is_not_an_alias_of_the_live_slot(device, variant):
    """Later commits leave it alone (field case 59)."""
    p = make(device, variant, B=1)
    p.verify()
    free = (p.state_indices + 1) % p.state.shape[0]
    p.fold([2], track_indices=free, track_steps=p.indices([1]))
    snapshot = p.state[free.long()].clone()
    bits_equal(snapshot, p.state[p.state_indices.long()], "snapshot")
    p.fold([2])
    bits_equal(p.state[free.long()], snapshot, "snapshot")


@variants
def test_copying_a_slot_between_verify_and_fold_copies_the_checkpoint(device, variant):
    """Pending rows belong to the window, not to the slot (field case 60)."""
    p = make(device, variant, B=1)
    slot, free = p.state_indices[0], (p.state_indices[0] + 1) % p.state.shape[0]
    start = p.state[slot].clone()
    p.verify()
    p.state[free] = p.state[slot]
    p.fold([3])
    bits_equal(p.state[free], start, "the copy")


@variants
def test_a_recycled_slot_starts_from_its_own_state(device, variant):
    """Windows full of NaN, state zero-filled (field cases 11, 12)."""
    p = make(device, variant, B=1)
    p.verify()
    p.fold([4])
    p.state[p.state_indices.long()] = 0
    for window in p.windows:
        window.fill_(NAN)
    p = p.next_tokens(5, N=1)
    want = oracle.run(p)[1][0][1]
    p.verify()
    p.fold([1])
    assert oracle.state_error(p.state[p.state_indices[0]], want) <= 1e-6


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_layers_at_once_equal_a_loop_over_them(device, variant):
    """The layer axis, with tracking and rows apart from slots, on strided pools."""
    layers = [make(device, variant, R=5, S=8, seed=0).next_tokens(i) for i in range(3)]
    together, views = stack([layer.copy() for layer in layers])
    free = sorted(set(range(8)) - set(together.state_indices.tolist()))[:3]
    options = {
        "track_indices": together.indices(free),
        "track_steps": together.indices([1, 0, 3]),
    }
    for view, layer in zip(views, layers, strict=True):
        bits_equal(view.verify(), layer.verify(), "outputs")
        layer.fold([4, 1, 2], **options)
    together.fold([4, 1, 2], **options)
    for i, layer in enumerate(layers):
        for name in POOLS:
            bits_equal(getattr(views[i], name), getattr(layer, name), f"{name} of {i}")
    assert together.memory("state")["state"][:, :, 0].isnan().all()


@variants
@pytest.mark.parametrize("exact", [True, False])
def test_a_large_state_survives_fp16_activations(device, variant, exact):
    """65536 is beyond fp16, its decayed value is not staged there (field case 23)."""
    # Of this seed no token's output cancels to less than a fifth of its terms.
    p = make(device, variant, B=1, D=2, dtype=torch.float16, seed=7)
    slot = p.state_indices.long()
    p.state[slot] = 65536.0
    p.k.zero_()
    p.dt_bias.fill_(4.0)  # decays so fast that outputs are below fp16's 65504
    p.A_log.zero_()
    want, _ = oracle.run(p)
    oracle.assert_outputs(p.verify(exact=exact), want, 5e-6 if exact else 1e-5)
    p.g_window.fill_(-4)
    p.fold([1])
    got = p.state[slot]
    # 65536 * exp(-4), to fp32's precision.
    torch.testing.assert_close(got, torch.full_like(got, 1200.3329), rtol=1e-6, atol=0)


def test_fold_refuses_wrong_metadata(device):
    """Windows without the state's layers, half a track, a short batch."""
    got = texts(
        device, "fold-gdn-layers-track",
        lambda x: {"state": x["state"][0, 0]}, lambda x: {"state": x["state"][0]},
        longer("state", 0), longer("state"), longer("k_window"), longer("v_window", 2),
        longer("g_window", 1), longer("accept_lens"), longer("window_indices"),
        rank("accept_lens"), rank("track_steps"), longer("track_indices"),
        cast("state", torch.float64), cast("state", torch.float8_e5m2),
        cast("k_window", torch.float64), cast("v_window", torch.float16),
        cast("g_window", torch.bfloat16), cast("accept_lens", torch.float32),
        cast("track_steps", torch.int8), moved("k_window"), moved("accept_lens"),
        swapped("state"), swapped("g_window"), overlapping("state"),
        lambda x: {"state": x["state"].as_strided(x["state"].shape, (4096, 4096, 2048, 32, 1))},
        lambda x: {"g_window": x["g_window"][..., None].expand(*x["g_window"].shape, 32)},
        given(track_indices=None), given(track_steps=None),
        lambda x: {"k_window": torch.cat([x["k_window"]] * 3, 2)},
        lambda x: {name: torch.cat([x[name]] * 9, -1) for name in ("state", "k_window")},
        lambda x: {"state": x["state"][..., :0, :], "v_window": x["v_window"][..., :0]},
    )  # fmt: skip
    assert_expected_inline(
        got,
        """\
ValueError: fold: state must be [S, HV, V, K] or [L, S, HV, V, K], got 3 dimensions: [2, 64, 32]
ValueError: fold: k_window must be [R, H, T, K], got 5 dimensions: [2, 5, 1, 6, 32]
ValueError: fold: k_window must be [L, R, H, T, K] with L = 3 as in state, got [2, 5, 1, 6, 32]
ValueError: fold: k_window must be [L, R, H, T, K] with K = 33 as in state, got [2, 5, 1, 6, 32]
ValueError: fold: k_window must be [L, R, H, T, K] with K = 32 as in state, got [2, 5, 1, 6, 33]
ValueError: fold: v_window must be [L, R, HV, T, V] with HV = 2 as in state, got [2, 5, 3, 6, 64]
ValueError: fold: g_window must be [L, R, HV, T] with R = 5 as in k_window (GDN), got [2, 6, 2, 6]
ValueError: fold: accept_lens must be [B] with B = 3 as in state_indices, got [4]
ValueError: fold: window_indices must be [B] with B = 3 as in state_indices, got [4]
ValueError: fold: accept_lens must be [B], got 2 dimensions: [1, 3]
ValueError: fold: track_steps must be [B], got 2 dimensions: [1, 3]
ValueError: fold: track_indices must be [B] with B = 3 as in state_indices, got [4]
TypeError: fold: state must be bfloat16 or float16 or float32, got float64
TypeError: fold: state must be bfloat16 or float16 or float32, got float8_e5m2
TypeError: fold: k_window must be bfloat16 or float16 or float32, got float64
TypeError: fold: v_window must be bfloat16 like k_window, got float16
TypeError: fold: g_window must be float32, got bfloat16
TypeError: fold: accept_lens must be int32 or int64, got float32
TypeError: fold: track_steps must be int32 or int64, got int8
ValueError: fold: k_window must be on DEVICE like state, got meta
ValueError: fold: accept_lens must be on DEVICE like state, got meta
ValueError: fold: state's innermost 3 dimensions must be contiguous, got shape [2, 8, 2, 64, 32] with strides [32768, 4096, 2048, 1, 64]
ValueError: fold: g_window's innermost 2 dimensions must be contiguous, got shape [2, 5, 2, 6] with strides [60, 12, 1, 2]
ValueError: fold: state is written and must not overlap itself, got shape [2, 8, 2, 64, 32] with strides [0, 8192, 2048, 32, 1]
ValueError: fold: state is written and must not overlap itself, got shape [2, 8, 2, 64, 32] with strides [4096, 4096, 2048, 32, 1]
ValueError: fold: g_window's innermost 3 dimensions must be contiguous, got shape [2, 5, 2, 6, 32] with strides [120, 24, 6, 1, 0]
ValueError: fold: track_steps needs track_indices beside it, got None
ValueError: fold: track_indices needs track_steps beside it, got None
ValueError: fold: HV must be a multiple of H, got HV = 2 (state) and H = 3 (k_window)
ValueError: fold: K must be 1 to 256, got 288 (state)
ValueError: fold: V must be at least 1, got 0 (state)""",
    )
