"""Offsets beyond 32 bits into every pool: the kernels on a GPU, the reference on the CPU.

``test_interpreter.py`` runs the same checks with the portable kernels, without a GPU.
"""

import pytest
import torch

import far
from replayssm import ops
from samples import bits_equal, make


def call(name, *args, **kwargs):
    got = getattr(ops, name)(*args, **kwargs)
    return got if isinstance(got, tuple) else (got,)


@pytest.mark.parametrize("check", far.CHECKS)
def test_pages_beyond_int32_offsets_are_addressed_rightly(device, tmp_path, check):
    """Slots, window rows, track slots and layers, one axis at a time (field cases 41, 42,
    43)."""
    far.check(check, call, device, far.room(device, tmp_path))
    torch.cuda.empty_cache()  # other processes share the card


@pytest.mark.gpu
def test_the_end_of_dense_pools_beyond_32_bits_is_addressed_rightly():
    """State of 17.6 GB, v_window of 8.6 GB: in the last layer alone the last slot and the
    last row start past 2^31, from the pool's start past 2^32 (field cases 41, 42, 43)."""
    torch.cuda.empty_cache()  # what the tests before left counts as free
    free, _ = torch.cuda.mem_get_info()
    if free < 40 * 10**9:
        pytest.skip(f"needs 40 GB of the GPU's memory, {free / 10**9:.0f} GB are free")
    far.dense("cuda", slots=4200, rows=65_600)
    torch.cuda.empty_cache()  # other processes share the card


@pytest.mark.gpu
def test_a_slot_whose_offset_aliases_anothers_in_32_bits_is_told_from_it():
    """Slot 8,295 of an 8.7 GB pool aliases slot 103 (field case 41)."""
    p = make("cuda", "gdn", B=2, D=2, H=16, HV=32, K=128, V=128, state_dtype=torch.bfloat16)
    slots = torch.tensor([8295, 4199], device="cuda", dtype=torch.int32)
    state = torch.zeros(8300, 32, 128, 128, device="cuda", dtype=torch.bfloat16)
    state[slots.long()] = p.state[p.state_indices.long()]
    big = p.copy().with_(state=state, state_indices=slots, window_indices=p.state_indices)
    bits_equal(big.verify(), p.verify(), "outputs")
    for problem in (big, p):
        problem.fold([2, 1])
    bits_equal(big.state[slots.long()], p.state[p.state_indices.long()], "state")
    touched = {int(slot) for slot in state.flatten(1).any(1).nonzero()}
    assert touched == {8295, 4199}
