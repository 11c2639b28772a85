"""Every call that the contract speaks of: what opcheck sees, values that are clamped or
skipped, and sizes that end inside a chunk, a tile or a block. One table for the reference,
the kernels on a GPU and the kernels in the interpreter.

TABLE[label](device) -> op, args, kwargs, as ``calls.CALLS``.
"""

import functools

import torch

import calls
import wrong_values
from calls import CALLS, gathered, named


def put(**vectors):
    """New values for index arguments, in the dtype and on the device of the old ones."""
    return lambda x: {name: x[name].new_tensor(v) for name, v in vectors.items()}


def call(label, change, device="cpu"):
    """The op of a label, its tensors by name and its arguments, with a change made."""
    op, args, kwargs = CALLS[label](device)
    good = kwargs | named(op, args, kwargs)
    values = good | put(**change)(good)
    return getattr(torch.ops.replayssm, op).default, values, gathered(values)


def _changed(label, change, device):
    op, _, arguments = call(label, change, device)
    return op._schema.name.split("::")[1], (), arguments


# The first values that are too large, and negative ones, several at once; one at a time;
# and what only looks wrong. Where the ops promise nothing is left out.
OUTSIDE = {
    f"outside-{name}": functools.partial(_changed, *case)
    for name, case in wrong_values.OUTSIDE.items()
}
CLAMPED = {
    name: functools.partial(_changed, case.label, case.change)
    for name, case in wrong_values.CASES.items()
    if case.means is not None
}
HARMLESS = {
    name: functools.partial(_changed, *case) for name, case in wrong_values.HARMLESS.items()
}


def _masked():
    """Heads and windows that end inside a chunk of keys, a tile or a block of tokens, and
    requests that are longer than their windows."""
    for variant in ("gdn", "kda"):
        for build in (calls.verify, calls.decode, calls.fold, calls.store):
            for K, V in ((80, 48), (5, 3)):
                label = f"{build.__name__}-{variant}-{K}-{V}"
                yield label, functools.partial(build, variant=variant, K=K, V=V)
            many = {"H": 2, "HV": 6, "K": 16, "V": 8}
            label = f"{build.__name__}-{variant}-6-heads"
            yield label, functools.partial(build, variant=variant, **many)
        for build in (calls.verify, calls.store):
            ragged = {"lengths": [11, 0, 9], "tail": 2, "R": 5}
            label = f"{build.__name__}-{variant}-ragged-11"
            yield label, functools.partial(build, variant=variant, **ragged)
            past = {"lengths": [5, 0, 3], "T": 3, "R": 5}
            label = f"{build.__name__}-{variant}-past-T"
            yield label, functools.partial(build, variant=variant, **past)
        full = {"T": 4, "accept": (9, 2, -3)}
        yield (
            f"fold-{variant}-past-T",
            functools.partial(calls.fold, variant=variant, **full),
        )
        long = {"D": 11, "accept": (11, 0, 9)}
        yield f"fold-{variant}-11", functools.partial(calls.fold, variant=variant, **long)
        for D in (3, 11):  # both sizes of the inexact kernel
            yield (
                f"verify-{variant}-inexact-{D}",
                functools.partial(calls.verify, variant=variant, exact=False, D=D, K=64),
            )


MASKED = dict(_masked())
TABLE = CALLS | OUTSIDE | CLAMPED | HARMLESS | MASKED
