"""Of an argument's memory an op touches its elements alone."""

import pytest
import torch

from calls import gathered, mutated, named
from contract import TABLE
from samples import bits_equal

AROUND = 2**14  # elements on either side, the slot past the last among them


def guarded(x):
    """The same values, strides and alignment amid NaN, or the least integer, and the
    memory all around, with what of it is beside the elements."""
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    first = AROUND + x.data_ptr() % 16 // x.element_size()
    filler = torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).min
    memory = x.new_full((first + max(extent, 0) + AROUND,), filler)
    beside = torch.ones_like(memory, dtype=torch.bool)
    for tensor, value in ((memory, x), (beside, False)):
        tensor.as_strided(x.shape, x.stride(), first).copy_(torch.as_tensor(value))
    return memory.as_strided(x.shape, x.stride(), first), memory, beside


@pytest.mark.parametrize("label", TABLE)
def test_what_lies_around_the_arguments_is_neither_read_nor_written(device, label):
    """On both sides of each, and between the pages and slices of strided ones."""
    op, args, kwargs = TABLE[label](device)
    plain = named(op, args, kwargs)
    guards = {name: guarded(x) for name, x in plain.items()}
    views = {name: view for name, (view, _, _) in guards.items()}
    before = {name: memory.clone() for name, (_, memory, _) in guards.items()}
    options = {name: x for name, x in kwargs.items() if name not in plain}
    call, written = getattr(torch.ops.replayssm, op), mutated(op, plain)
    outputs = call(*args, **kwargs), call(**options | gathered(views))
    want, got = ((x if isinstance(x, tuple) else (x,)) for x in outputs)
    for one, other in zip(got, want, strict=True):
        if one is not None:
            bits_equal(one, other, "output")
    for name, (view, memory, beside) in guards.items():
        bits_equal(view, plain[name], name)
        here = beside if name in written else slice(None)
        bits_equal(memory[here], before[name][here], f"around {name}")
