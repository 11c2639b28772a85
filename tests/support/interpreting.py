"""What interpreted.py runs, and running it, for the tests of the kernels."""

import functools
import json

import far
from contract import TABLE
from process import SUPPORT, python, skip_where_triton_cannot_interpret
from samples import VARIANTS

# What Gluon kernels do; the rest is plain Triton in both lowerings.
TUNED = ("verify", "decode", "fold")
# Checks of each variant, and of none, that no table can say.
OF_VARIANTS = (
    "commits what it decodes",
    "gates and store fill the windows",
    "decays at the edges",
)
OTHERS = ("offsets of 64 bits", *(f"far {name}" for name in far.CHECKS), "debug stop")


@functools.cache
def labels(lowering: str) -> dict[str, str]:
    """Case -> label of the table."""
    ops = {label: make("cpu")[0] for label, make in TABLE.items()}
    tuned = lowering == "gluon"
    return {
        f"{label} ({op})": label
        for label, op in ops.items()
        # exact=False is one of the tuned kernels.
        if (op in TUNED if tuned else "inexact" not in label)
    }


def others(lowering: str) -> list[str]:
    plain = ("far scatter", "debug stop")  # one kernel for both lowerings
    return [
        *(f"{check}, {variant}" for check in OF_VARIANTS for variant in VARIANTS),
        *(x for x in OTHERS if lowering == "portable" or not x.startswith(plain)),
    ]


def cases(lowering: str) -> list[str]:
    """The names of all cases."""
    return [*labels(lowering), *others(lowering)]


def outcomes_of(lowering: str) -> dict[str, str]:
    """Case -> "" or what is wrong."""
    skip_where_triton_cannot_interpret()
    done = python(SUPPORT / "interpreted.py", lowering)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())
