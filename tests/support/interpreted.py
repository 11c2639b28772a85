"""The kernels on the CPU, in Triton's interpreter; run as a script.

    python interpreted.py portable|gluon [WORD ...]   the cases whose name holds a word

Every call of ``contract.TABLE`` beside the reference, and what a table cannot say: that
verify and fold commit what decode does, offsets of 64 bits, pools that are far apart.
"gluon" runs the tuned kernels' own source, see stand_in. Prints one line of JSON per case:
[case, "" or what is wrong]. The interpreter is chosen when triton is imported, so it needs
a process of its own.
"""

import contextlib
import dataclasses
import functools
import io
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import interpreter_builder

import far
import lowered
import stand_in
from calls import mutated, named
from contract import TABLE
from interpreting import cases, labels
from replayssm.ops import debug, select
from samples import WINDOWS, bits, bits_equal, make, pages

# Ops that compute nothing, and windows that take tokens as they are: equal bits.
COPIES = ("store", "scatter", "accept", "commit_indices", "conv_commit")
RAW = ("k_window", "v_window")
# Sums in another order; and the interpreter cuts 16-bit numbers where a GPU rounds them.
NEAR = {
    torch.float32: (2e-5, 5e-6),
    torch.bfloat16: (2**-7, 1e-5),
    torch.float16: (2**-9, 1e-5),
}


def close(got: Tensor, want: Tensor, what: str) -> None:
    relative, absolute = NEAR[got.dtype]
    got, want = got.float(), want.float()
    largest = want.nan_to_num(0, 0, 0).abs().amax() if want.numel() else 0
    torch.testing.assert_close(
        got, want, rtol=relative, atol=absolute * max(1, float(largest)), equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )  # fmt: skip


def like_the_reference(run, label: str) -> None:
    """Outputs, and all memory of what is written: what stays as it was to the bit."""
    op, args, kwargs = TABLE[label]("cpu")
    _, other_args, other_kwargs = TABLE[label]("cpu")
    wanted, tensors = named(op, args, kwargs), named(op, other_args, other_kwargs)
    before = {name: pages(wanted[name]).clone() for name in mutated(op, wanted)}
    want = getattr(torch.ops.replayssm, op).default(*args, **kwargs)
    want = () if want is None else want if isinstance(want, tuple) else (want,)
    got = run(op, *other_args, **other_kwargs)
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        compare = bits_equal if op in COPIES else close
        compare(one, other, f"output {i}")
    for name, start in before.items():
        one, other = pages(tensors[name]), pages(wanted[name])
        if op in COPIES or name in RAW:
            bits_equal(one, other, name)
            continue
        # By rows: one number of 16 bits may come out as it was.
        kept = (bits(other) == bits(start)).all(-1)
        bits_equal(one[kept], start[kept], f"{name}, where nothing is written")
        close(one, other, name)


# The interpreter takes milliseconds a program and token: tiny shapes, K != V, HV/H = 3.
SHAPE = {"H": 1, "HV": 3, "K": 48, "V": 16, "dtype": torch.float32}


def commits_what_it_decodes(run, variant: str, D: int = 5) -> None:
    """Equal bits, here too: the same sums in the same order."""
    p = make("cpu", variant, B=2, D=D, **SHAPE)
    plain, bound = p.copy(), {"lower_bound": p.lower_bound}
    (out,) = run("verify", *p.args, **bound)
    run(
        "fold", p.state, *p.windows, p.state_indices, p.indices([D, D]),
        window_indices=p.window_indices,
    )  # fmt: skip
    for t in range(D):
        tokens = (x.unflatten(0, (2, D))[:, t] for x in plain.tokens)
        (one,) = run(
            "decode", *tokens, plain.A_log, plain.dt_bias, plain.state,
            plain.state_indices, **bound,
        )  # fmt: skip
        bits_equal(one, out.unflatten(0, (2, D))[:, t], f"outputs of token {t}")
    bits_equal(p.state, plain.state, "state")


def decays_at_the_edges(run, variant: str) -> None:
    """Rates from nothing to past the largest fp32, times softplus from 0 up."""
    rates = torch.tensor([-100.0, 0.0, 5.0, 88.0, 100.0])
    inputs = torch.tensor([-200.0, -20.0, 0.0, 20.0, 200.0])
    p = make("cpu", variant, **SHAPE | {"HV": 5}, B=5, D=1)
    a = inputs.view(-1, 1, *[1] * (p.a.dim() - 2)).expand_as(p.a).contiguous()
    p = p.with_(A_log=rates, a=a, dt_bias=torch.zeros_like(p.dt_bias))
    other = p.copy()
    want = p.verify()
    (got,) = run("verify", *other.args, lower_bound=p.lower_bound)
    close(got, want, "outputs")
    close(other.g_window, p.g_window, "g_window")
    gates = run("gate", p.a, p.b, p.A_log, p.dt_bias, lower_bound=p.lower_bound)
    for got, name in zip(gates, ("g_window", "beta_window"), strict=True):
        window = getattr(p, name)[p.state_indices.long(), :, 0]
        close(got, window, name)


def gates_and_store_fill_the_windows(run, variant: str) -> None:
    """The bits of verify's windows."""
    p = make("cpu", variant, **SHAPE, lengths=[3, 0, 2], tail=1, R=4)
    other = p.copy()
    run("verify", *p.args, lower_bound=p.lower_bound)
    g, beta = run("gate", p.a, p.b, p.A_log, p.dt_bias, lower_bound=p.lower_bound)
    run("store", p.k, p.v, g, beta, *other.windows, p.window_indices, p.cu_seqlens)
    for name in WINDOWS:
        bits_equal(getattr(other, name), getattr(p, name), name)


def wide_offsets_are_clamped_and_not_cut(run) -> None:
    """cu_seqlens past 2^31: its low 32 bits are other offsets."""
    p = make("cpu", "gdn", **SHAPE, lengths=[3, 2], R=4)
    for ends in ([0, 3, 2**32 + 1], [-(2**32) + 2, 3, 5]):
        one, other = (x.with_(cu_seqlens=torch.tensor(ends)) for x in (p.copy(), p.copy()))
        (got,) = run("verify", *one.args, lower_bound=p.lower_bound)
        close(got, other.verify(), f"outputs of {ends}")
        g, beta = run("gate", p.a, p.b, p.A_log, p.dt_bias, lower_bound=p.lower_bound)
        run("store", p.k, p.v, g, beta, *one.windows, p.window_indices, one.cu_seqlens)
        for name in WINDOWS:
            close(getattr(one, name), getattr(other, name), name)


def beyond_32_bits(run, check: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        far.check(check, run, "cpu", far.room("cpu", Path(folder)))


def stopped(*rows: int) -> tuple[str, list[int]]:
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


def the_stop_fails_where_a_row_breaks_the_rule(run) -> None:
    # The interpreter takes no notice of a kernel's debug=True, only of its own.
    interpreter_builder.options = dataclasses.replace(
        interpreter_builder.options, debug=True
    )
    text = "replayssm.fold: state_indices[32 * block + thread] is no slot"
    assert stopped() == ("", [])
    for rows in ([0], [31], [32], [39], [3, 4]):
        assert stopped(*rows) == (text, rows), rows


CHECKS = {
    "commits what it decodes": commits_what_it_decodes,
    "gates and store fill the windows": gates_and_store_fill_the_windows,
    "decays at the edges": decays_at_the_edges,
    "offsets of 64 bits": wide_offsets_are_clamped_and_not_cut,
    "debug stop": the_stop_fails_where_a_row_breaks_the_rule,
}


def check_of(case: str, lowering: str):
    """check(run) of a case, see ``interpreting.cases``."""
    if case in labels(lowering):
        return functools.partial(like_the_reference, label=labels(lowering)[case])
    if case.startswith("far "):
        return functools.partial(beyond_32_bits, check=case.removeprefix("far "))
    name, *variant = case.split(", ")
    return functools.partial(CHECKS[name], **({"variant": variant[0]} if variant else {}))


def main(lowering: str, *words: str) -> None:
    kernels = stand_in.load() if lowering == "gluon" else select.load(lowering)
    run = functools.partial(lowered.run, kernels)
    for case in cases(lowering):
        if words and not any(word in case for word in words):
            continue
        try:
            check_of(case, lowering)(run)
            wrong = ""
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        print(json.dumps([case, wrong]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
