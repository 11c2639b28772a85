"""The contract within the portable lowering, on a GPU that another serves."""

import functools

import pytest
import test_decode
import test_exactness
import test_fold
import test_geometry
import test_verify

import lowered
import samples
from replayssm import ops
from replayssm.ops import select

pytestmark = pytest.mark.gpu
variants = pytest.mark.parametrize("variant", samples.VARIANTS)


@pytest.fixture(autouse=True)
def portable(monkeypatch):
    """Whoever calls an op runs its portable kernel. Two of three chunks of K are whole,
    and one of two tiles of V."""
    kernels = select.load("portable")

    def call(name, *args, **kwargs):
        outputs = lowered.run(kernels, name, *args, **kwargs)
        return outputs if len(outputs) > 1 else outputs[0] if outputs else None

    for name in ("gate", "store", "verify", "fold", "decode"):
        monkeypatch.setattr(ops, name, functools.partial(call, name))
    make = functools.partial(samples.make, K=80, V=40)
    for module in (test_decode, test_exactness, test_fold, test_geometry, test_verify):
        monkeypatch.setattr(module, "make", make)


@variants
@pytest.mark.parametrize("D", [1, 5, 11])
def test_every_accepted_length_equals_decoding_it(variant, D):
    test_exactness.check_against_decode("cuda", variant, D, H=2, HV=6)


@variants
@pytest.mark.parametrize(
    "clause",
    [
        test_exactness.test_any_split_into_windows_commits_the_same_state,
        test_exactness.test_a_request_does_not_depend_on_its_batch,
        test_exactness.test_neighbours_full_of_nan_and_infinity_change_nothing,
        test_verify.test_ragged_and_uniform_batches_agree,
        test_verify.test_verify_leaves_the_state_and_other_window_rows_untouched,
        test_exactness.test_fold_leaves_unnamed_slots_and_the_windows_untouched,
        test_fold.test_slots_and_window_rows_out_of_range_are_skipped,
        test_decode.test_verify_and_decode_skip_slots_out_of_range,
        test_geometry.test_strided_heads_give_the_same_bits,
    ],
    ids=lambda test: test.__name__.removeprefix("test_"),
)
def test_a_clause_of_the_contract_holds(variant, clause):
    clause("cuda", variant)


@variants
@pytest.mark.parametrize(("step", "tracked"), test_fold.STEPS)
def test_a_track_slot_gets_the_state_after_its_step(variant, step, tracked):
    test_fold.test_a_track_slot_gets_the_state_after_its_step(
        "cuda", variant, step, tracked
    )


@variants
@test_exactness.state_dtypes
def test_a_16_bit_state_is_rounded_once(variant, state_dtype):
    test_exactness.test_a_16_bit_state_is_rounded_once("cuda", variant, state_dtype)
