"""Every kernel once on the GPU, for a sanitizer to watch; run as a script.

With a name of HALVES those calls alone, with one of PLANTED that mistake instead. Run it
with PYTORCH_NO_CUDA_MEMORY_CACHING=1: one allocation per tensor, so that a neighbour's
memory is nobody's, and what is new nobody wrote.
"""

import functools
import sys

import torch

import calls
import contract
import lowered
from replayssm.graph import inspect
from replayssm.ops import debug, registration, select
from samples import VARIANTS, WINDOWS, pages

# The matrix's small heads are one tile of one warp group; these take several.
WIDE = {"H": 1, "HV": 3, "K": 128, "V": 128}
# More than one block of tokens, so that shared memory is filled again.
RAGGED = {"lengths": [11, 0, 9], "tail": 2}
LONG = {"D": 11, "accept": (11, 0, 9)}


def _more():
    def case(label, build, variant, **options):
        return f"{label}-{variant}", functools.partial(build, variant=variant, **options)

    for variant in ("gdn", "kda"):
        # Both sizes of the inexact kernel.
        for D in (8, 11):
            yield case(f"verify-{D}", calls.verify, variant, D=D, **WIDE)
            yield case(f"inexact-{D}", calls.verify, variant, D=D, exact=False, **WIDE)
        yield case("verify-ragged", calls.verify, variant, **RAGGED, **WIDE)
        yield case("fold-long", calls.fold, variant, **LONG, **WIDE)
        yield case("fold-long-track", calls.fold, variant, track=True, **LONG, **WIDE)
        for build in (calls.verify, calls.decode, calls.fold):
            name, narrow = build.__name__, torch.bfloat16
            yield case(f"{name}-narrow", build, variant, state_dtype=narrow, **WIDE)
            yield case(f"{name}-widest", build, variant, **WIDE | {"K": 256})
        for D, K in ((8, 256), (11, 224)):
            widest = {"D": D, "exact": False, **WIDE, "K": K}
            yield case(f"inexact-widest-{D}", calls.verify, variant, **widest)
    inexact = {"exact": False, **WIDE}
    yield case("inexact-8", calls.verify, "kda-safe", D=8, **inexact)
    for D in (8, 11):  # not 16-bit: products of keys are no longer the tensor core's
        fp32 = torch.float32
        yield case(f"inexact-fp32-{D}", calls.verify, "gdn", D=D, dtype=fp32, **inexact)


# The kernels of the other lowering, which this card does not choose.
def _portable():
    for variant in VARIANTS:
        for build in (calls.gate, calls.verify, calls.decode, calls.fold):
            options = {"track": True} if build is calls.fold else {}
            yield (
                f"portable-{build.__name__}-{variant}",
                functools.partial(build, variant=variant, **WIDE, **options),
            )
    yield (
        "portable-verify-ragged",
        functools.partial(calls.verify, variant="gdn", **RAGGED, **WIDE),
    )


# The chosen lowering with tiles that its tables pick for larger batches.
def _tiled():
    tiles = {
        "recur_tile": [(32, 2), (64, 2), (64, 4)],
        "effective_tile": [(128, 4), (64, 2)],
    }
    for variant in ("gdn", "kda"):
        for table, picks in tiles.items():
            inexact = {"exact": False, "K": 64} if table == "effective_tile" else {}
            options = WIDE | inexact
            for tile in picks:
                build = functools.partial(calls.verify, variant=variant, **options)
                yield f"{table}-{tile}-{variant}", (build, table, tile)
        build = functools.partial(calls.decode, variant=variant, **WIDE)
        yield f"streams-{variant}", (build, "streams", False)


MORE = contract.OUTSIDE | dict(_more())
PORTABLE = dict(_portable())
TILED = dict(_tiled())
STOP = "stop"
LABELS = [*calls.CALLS, *MORE, *PORTABLE, *TILED, STOP]
HALVES = {"half-0": LABELS[::2], "half-1": LABELS[1::2]}


def unwritten(view):
    """A pool of the same layout that nobody wrote."""
    memory = torch.empty_like(pages(view))
    return memory.as_strided(view.size(), view.stride(), view.storage_offset())


def with_unwritten_windows(op, args, kwargs, extra=0):
    """A call's arguments by name, with windows of which nobody wrote more than the op may
    read: nothing, or fold's accepted rows, to which ``extra`` are added afterwards."""
    values = calls.gathered(calls.named(op, args, kwargs))
    layers = (slice(None),) * (op == "fold" and values["state"].dim() == 5)
    for name in WINDOWS if op in ("store", "verify", "fold") else ():
        old, new = values[name], unwritten(values[name])
        for row, n in _accepted(values, len(layers)) if op == "fold" else ():
            at = (*layers, row, slice(None), slice(n))
            new[at] = old[at]
        values[name] = new
    if op == "fold":
        values["accept_lens"] += extra
    others = {name: x for name, x in kwargs.items() if not torch.is_tensor(x)}
    return values | others


def _accepted(values, axis):
    """fold's window rows and how much of each it takes, without requests it skips."""
    slots, lens = values["state_indices"], values["accept_lens"]
    rows = values.get("window_indices", slots)
    S, R = (values[name].shape[axis] for name in ("state", "k_window"))
    for slot, row, n in zip(*(x.tolist() for x in (slots, rows, lens)), strict=True):
        if 0 <= slot < S and 0 <= row < R:
            yield row, max(n, 0)


def past_the_end():
    """gate, told of 64 KiB more than there is."""
    a, b = torch.zeros(2, 1, 4, device="cuda")
    vector = torch.zeros(4, device="cuda")
    tensors, op = (a, b, vector, vector), registration.REGISTERED["gate"]
    plan = op.plan(select.kernels(0), op.bind(*tensors))
    lower_bound, elements, *strides = plan.scalars
    plan = plan._replace(
        programs=(65, 1, 1), scalars=(lower_bound, elements + 2**14, *strides)
    )
    plan.compile_and_launch(tensors, [torch.empty_like(a), torch.empty_like(b)])


def never_written():
    """fold, told to take one row more than anybody wrote."""
    op, args, kwargs = calls.fold("cuda", "gdn")
    torch.ops.replayssm.fold(**with_unwritten_windows(op, args, kwargs, extra=1))


# Two warps; each reads what the other writes, and nobody waits. Triton would.
RACE = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry race()
{
    .shared .align 4 .b32 both[64];
    .reg .b32 %r<6>;
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, both;
    mad.lo.u32 %r2, %r0, 4, %r1;
    st.volatile.shared.u32 [%r2], %r0;
    xor.b32 %r3, %r0, 63;
    mad.lo.u32 %r4, %r3, 4, %r1;
    ld.volatile.shared.u32 %r5, [%r4];
    ret;
}
\0"""


def without_a_barrier():
    ask = functools.partial(inspect._ask, inspect._driver())
    torch.zeros(1, device="cuda")  # makes the context
    module = ask("cuModuleLoadData", RACE)
    kernel = ask("cuModuleGetFunction", module, b"race")
    ask("cuLaunchKernel", kernel, 1, 1, 1, 64, 1, 1, 0, 0, 0, 0)


PLANTED = {"memcheck": past_the_end, "initcheck": never_written,
           "racecheck": without_a_barrier}  # fmt: skip


def run(label):
    if label == STOP:
        values = torch.arange(40, device="cuda")
        rule = debug.Rule("state_indices", values, values >= 0, "is no slot")
        debug.stop("fold", rule).compile_and_launch((values, rule.holds), ())
        return
    build, table, value = TILED.get(label, (None, None, None))
    op, args, kwargs = (build or (calls.CALLS | MORE | PORTABLE)[label])("cuda")
    values = with_unwritten_windows(op, args, kwargs)
    if label in PORTABLE:
        lowered.run(select.load("portable"), op, **values)
    elif build:
        chosen = select.load(select.lowering().name)
        chosen = chosen._replace(**{table: lambda *_, **__: value})
        lowered.run(chosen, op, **values)
    else:
        getattr(torch.ops.replayssm, op)(**values)


def main(labels):
    for label in labels:
        run(label)
        torch.cuda.synchronize()
        print("ran", label, flush=True)


if __name__ == "__main__":
    (name,) = sys.argv[1:] or [None]
    if name in PLANTED:
        PLANTED[name]()
        torch.cuda.synchronize()
    else:
        main(HALVES[name] if name else LABELS)
