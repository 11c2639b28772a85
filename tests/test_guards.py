"""Of an argument's memory an op touches its elements alone."""

import functools

import pytest
import torch

import calls
from calls import gathered, mutated, named
from debugged import OUTSIDE
from samples import bits_equal

AROUND = 2**14  # elements on either side, the slot past the last among them


def _masked():
    """Heads and windows that end inside a chunk of keys, a tile or a block of tokens."""
    for variant in ("gdn", "kda"):
        for build in (calls.verify, calls.decode, calls.fold, calls.store):
            for K, V in ((80, 48), (5, 3)):
                label = f"{build.__name__}-{variant}-{K}-{V}"
                yield label, functools.partial(build, variant=variant, K=K, V=V)
        for build in (calls.verify, calls.store):
            ragged = {"lengths": [11, 0, 9], "tail": 2, "R": 5}
            label = f"{build.__name__}-{variant}-ragged-11"
            yield label, functools.partial(build, variant=variant, **ragged)
        long = {"D": 11, "accept": (11, 0, 9)}
        yield f"fold-{variant}-11", functools.partial(calls.fold, variant=variant, **long)
        for D in (3, 11):  # both sizes of the inexact kernel
            yield (
                f"verify-{variant}-inexact-{D}",
                functools.partial(calls.verify, variant=variant, exact=False, D=D, K=64),
            )


CALLS = calls.CALLS | OUTSIDE | dict(_masked())


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


@pytest.mark.parametrize("label", CALLS)
def test_what_lies_around_the_arguments_is_neither_read_nor_written(device, label):
    """On both sides of each, and between the pages and slices of strided ones."""
    op, args, kwargs = CALLS[label](device)
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
