"""The plain Triton kernels on the CPU, in Triton's interpreter; run as a script.

Prints one line of JSON per case: [case, "" or what is wrong]. The interpreter is
chosen when triton is imported, so it needs a process of its own.
"""

import contextlib
import dataclasses
import io
import json
import os
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import interpreter_builder

import far
from calls import CALLS, mutated, named
from replayssm import ops
from replayssm.ops import debug, registration, select
from samples import WINDOWS, bits_equal, make, pages

KERNELS = select.load("portable")
# The interpreter takes milliseconds a program and token: tiny shapes, K != V, HV/H = 3.
SHAPE = {"H": 1, "HV": 3, "K": 48, "V": 16, "dtype": torch.float32}
RAGGED = {"lengths": [3, 0, 2], "tail": 1, "R": 4}


def run(name, *args, **kwargs):
    return registration.run(KERNELS, name, *args, **kwargs)


def close(got, want, what):
    # Sums are ordered differently from torch's: fp32 rounding.
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6, equal_nan=True, msg=what)


def fold(p, accept, **tracks):
    run(
        "fold", p.state, *p.windows, p.state_indices, p.indices(accept),
        window_indices=p.window_indices, **tracks,
    )  # fmt: skip


def verify_like_the_reference(variant, **options):
    p = make("cpu", variant, **SHAPE, **options)
    other = p.copy()
    want = p.verify()
    (got,) = run("verify", *other.args, lower_bound=other.lower_bound)
    close(got, want, "outputs")
    for name in WINDOWS:
        close(getattr(other, name), getattr(p, name), name)


def fold_like_the_reference(variant, state_dtype=torch.float32):
    p = make("cpu", variant, B=3, D=3, S=7, state_dtype=state_dtype, **SHAPE)
    p.verify()
    other = p.copy()
    free = [slot for slot in range(7) if slot not in p.state_indices.tolist()][:2]
    tracks = {
        "track_indices": p.indices([*free, -1]), "track_steps": p.indices([1, 2, 0])
    }  # fmt: skip
    p.fold([3, 2, 9], **tracks)
    fold(other, [3, 2, 9], **tracks)
    close(other.state, p.state, "state")


def commits_what_it_decodes(variant):
    p = make("cpu", variant, B=2, D=3, **SHAPE)
    plain = p.copy()
    (out,) = run("verify", *p.args, lower_bound=p.lower_bound)
    fold(p, [3, 3])
    for t in range(3):
        tokens = (x.unflatten(0, (2, 3))[:, t] for x in plain.tokens)
        (one,) = run(
            "decode", *tokens, plain.A_log, plain.dt_bias, plain.state,
            plain.state_indices, lower_bound=plain.lower_bound,
        )  # fmt: skip
        bits_equal(one, out.unflatten(0, (2, 3))[:, t], f"outputs of token {t}")
    bits_equal(p.state, plain.state, "state")


def gates_and_store_fill_the_windows(variant):
    p = make("cpu", variant, **SHAPE, **RAGGED)
    other = p.copy()
    run("verify", *p.args, lower_bound=p.lower_bound)
    g, beta = run("gate", p.a, p.b, p.A_log, p.dt_bias, lower_bound=p.lower_bound)
    run(
        "store", p.k, p.v, g, beta, *other.windows, p.window_indices, p.cu_seqlens
    )  # fmt: skip
    for name in WINDOWS:
        bits_equal(getattr(other, name), getattr(p, name), name)


def wide_offsets_are_clamped_and_not_cut(variant):
    """cu_seqlens past 2^31: its low 32 bits are other offsets."""
    p = make("cpu", variant, **SHAPE, lengths=[3, 2], R=4)
    for ends in ([0, 3, 2**32 + 1], [-(2**32) + 2, 3, 5]):
        wide = torch.tensor(ends)
        one, other = p.copy(), p.copy()
        one, other = (x.with_(cu_seqlens=wide) for x in (one, other))
        (got,) = run("verify", *one.args, lower_bound=p.lower_bound)
        close(got, other.verify(), f"outputs of {ends}")
        g, beta = run("gate", p.a, p.b, p.A_log, p.dt_bias, lower_bound=p.lower_bound)
        run("store", p.k, p.v, g, beta, *one.windows, p.window_indices, wide)
        for name in WINDOWS:
            close(getattr(one, name), getattr(other, name), name)


def scatter_like_the_reference():
    draw = torch.Generator().manual_seed(0)
    state = torch.randn(2, 5, 3, 7, generator=draw)
    args = (
        torch.randn(2, 4, 3, 3, 7, generator=draw), torch.tensor([3, -1, 1]),
        torch.tensor([2, 1, 5]),
    )  # fmt: skip
    options = {
        "source_indices": torch.tensor([1, 0, 3]), "track_indices": torch.tensor([0, 2, 4]),
        "track_steps": torch.tensor([1, 0, 0]),
    }  # fmt: skip
    want, got = state.clone(), state.clone()
    ops.scatter(want, *args, **options)
    run("scatter", got, *args, **options)
    bits_equal(got, want, "state")


def like_the_reference(*labels):
    """The integer ops and the copies: equal bits."""
    for label in labels:
        op, args, kwargs = CALLS[label]("cpu")
        _, other_args, other_kwargs = CALLS[label]("cpu")
        want = getattr(ops, op)(*args, **kwargs) or ()
        got = run(op, *other_args, **other_kwargs)
        for i, (one, other) in enumerate(zip(got, want, strict=True)):
            bits_equal(one, other, f"{label}: output {i}")
        wanted, tensors = named(op, args, kwargs), named(op, other_args, other_kwargs)
        for name in mutated(op, tensors):
            bits_equal(pages(tensors[name]), pages(wanted[name]), f"{label}: {name}")


def beyond_32_bits(check):
    with tempfile.TemporaryDirectory() as folder:
        far.check(check, run, "cpu", far.room("cpu", Path(folder)))


def stopped(*rows):
    """The message of debug mode's stop where these rows of 40 break a rule, and whether
    their values were printed."""
    values, holds = torch.arange(100, 140), torch.ones(40, dtype=torch.bool)
    holds[list(rows)] = False
    made = debug.stop("fold", debug.Rule("state_indices", values, holds, "is no slot"))
    printed, message = io.StringIO(), ""
    with contextlib.redirect_stdout(printed):
        try:
            made.compile_and_launch((values, holds), ())
        except InterpreterError as error:
            message = str(error.__cause__)
    return message, [row for row in rows if f"{100 + row}" in printed.getvalue()]


def the_stop_fails_where_a_row_breaks_the_rule():
    # The interpreter takes no notice of a kernel's debug=True, only of its own.
    interpreter_builder.options = dataclasses.replace(
        interpreter_builder.options, debug=True
    )
    text = "replayssm.fold: state_indices[32 * block + thread] is no slot"
    assert stopped() == ("", [])
    for rows in ([0], [31], [32], [39], [3, 4]):
        assert stopped(*rows) == (text, rows), rows


CASES = {
    "verify gdn": lambda: verify_like_the_reference("gdn", B=2, D=3),
    "verify kda ragged": lambda: verify_like_the_reference("kda", **RAGGED),
    "verify kda-safe": lambda: verify_like_the_reference("kda-safe", B=2, D=3),
    "fold gdn": lambda: fold_like_the_reference("gdn"),
    "fold kda": lambda: fold_like_the_reference("kda"),
    "decode gdn": lambda: commits_what_it_decodes("gdn"),
    "decode kda": lambda: commits_what_it_decodes("kda"),
    "store gdn": lambda: gates_and_store_fill_the_windows("gdn"),
    "store kda-safe": lambda: gates_and_store_fill_the_windows("kda-safe"),
    "wide offsets": lambda: wide_offsets_are_clamped_and_not_cut("gdn"),
    "scatter": scatter_like_the_reference,
    "accept": lambda: like_the_reference("accept", "accept-ragged", "accept-rows"),
    "commit_indices": lambda: like_the_reference("commit_indices", "commit_indices-track"),
    "conv_commit dense": lambda: like_the_reference(
        "conv_commit", "conv_commit-dense-track"
    ),
    "conv_commit sliding": lambda: like_the_reference("conv_commit-sliding-track"),
    "conv_commit channels_last": lambda: like_the_reference(
        "conv_commit-dense-last-track", "conv_commit-sliding-last-track"
    ),
    **{f"far {name}": lambda name=name: beyond_32_bits(name) for name in far.CHECKS},
    "debug stop": the_stop_fails_where_a_row_breaks_the_rule,
}

if __name__ == "__main__":
    for case, check in CASES.items():
        try:
            check()
            wrong = ""
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        print(json.dumps([case, wrong]), flush=True)
