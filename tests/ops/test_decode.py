"""decode: the slots it skips, and its mistakes; what it computes is test_exactness.py's."""

import pytest
import torch
from expecttest import assert_expected_inline

from mistakes import cast, given, longer, moved, overlapping, rank, spaced, swapped, texts
from samples import WINDOWS, bits_equal, make

variants = pytest.mark.parametrize("variant", ["gdn", "kda"])


@variants
def test_verify_and_decode_skip_slots_out_of_range(device, variant):
    """A live slot with no window row is verified and not stored; others are nothing
    (field case 38)."""
    p = make(device, variant, B=6, R=8)
    want = p.copy()
    outputs = want.verify().unflatten(0, (6, 4))
    slots, rows = p.state_indices.clone(), p.window_indices.clone()
    slots[1], slots[2] = -7, p.state.shape[0]
    rows[3], rows[4] = -1, p.k_window.shape[0]
    odd = p.with_(state_indices=slots, window_indices=rows)
    got = odd.verify().unflatten(0, (6, 4))
    skipped = torch.tensor([1, 2], device=device)
    bits_equal(got[skipped], torch.zeros_like(got[skipped]), "skipped outputs")
    others = torch.tensor([0, 3, 4, 5], device=device)
    bits_equal(got[others], outputs[others], "outputs")
    for name in WINDOWS:
        untouched = getattr(p, name)[p.window_indices[1:5].long()]
        assert untouched.isnan().all(), f"{name} of skipped requests"
        for i in (0, 5):
            row = p.window_indices[i]
            bits_equal(getattr(p, name)[row], getattr(want, name)[row], name)
    odd.decode(0)
    want.decode(0, torch.tensor([True, False, False, True, True, True], device=device))
    p.assert_untouched(want.memory("state"))


def test_decode_refuses_wrong_metadata(device):
    got = texts(
        device, "decode-gdn",
        rank("q"), rank("state"), longer("k", 0), longer("a"), longer("state"),
        longer("state_indices"), cast("v", torch.float32), cast("state", torch.float64),
        moved("dt_bias"), spaced("v"), swapped("state"), overlapping("state"),
        given(lower_bound=-5.0),
        lambda x: {name: torch.cat([x[name]] * 3, 1) for name in ("q", "k")},
    )  # fmt: skip
    assert_expected_inline(
        got,
        """\
ValueError: decode: q must be [B, H, K], got 4 dimensions: [1, 3, 1, 32]
ValueError: decode: state must be [S, HV, V, K], got 5 dimensions: [1, 6, 2, 64, 32]
ValueError: decode: k must be [B, H, K] with B = 3 as in q, got [4, 1, 32]
ValueError: decode: a must be [B, HV] with HV = 2 as in v, got [3, 3]
ValueError: decode: state must be [S, HV, V, K] with K = 32 as in q, got [6, 2, 64, 33]
ValueError: decode: state_indices must be [B] with B = 3 as in q, got [4]
TypeError: decode: v must be bfloat16 like q, got float32
TypeError: decode: state must be bfloat16 or float16 or float32, got float64
ValueError: decode: dt_bias must be on DEVICE like q, got meta
ValueError: decode: v's innermost dimension must be contiguous, got shape [3, 2, 64] with strides [256, 128, 2]
ValueError: decode: state's innermost 3 dimensions must be contiguous, got shape [6, 2, 64, 32] with strides [4096, 2048, 1, 64]
ValueError: decode: state is written and must not overlap itself, got shape [6, 2, 64, 32] with strides [0, 2048, 32, 1]
ValueError: decode: lower_bound is KDA's safe gate and must be None for GDN (a is [N, HV]), got -5.0
ValueError: decode: HV must be a multiple of H, got HV = 2 (v) and H = 3 (q)""",
    )
