"""The bugs that tools/mutate.py plants in kernels."""

from mutants import Mutation

PORTABLE, GLUON = "portable", "gluon"

# Plain Triton first, of which step.py is in both lowerings.
STEP, PLAIN, COPIES, BATCH = (
    f"ops/kernels/{name}.py" for name in ("step", "portable", "copies", "batch")
)
BUGS = [
    Mutation(
        "a slot or row equal to the pool's size is in it", STEP,
        "return (index < 0) | (index >= size)", "return (index < 0) | (index > size)",
        PORTABLE, ("outside",), "tests/ops/test_fold.py -k out_of_range",
    ),
    Mutation(
        "negative slots and rows are in the pool", STEP,
        "return (index < 0) | (index >= size)", "return index >= size",
        PORTABLE, ("outside",), "tests/ops/test_fold.py -k out_of_range",
    ),
    Mutation(
        "rows past T are stored", STEP,
        "return tl.where((row >= 0) & (row < R), tl.minimum(n, T), 0)",
        "return tl.where((row >= 0) & (row < R), n, 0)",
        PORTABLE, ("past-T",), "tests/ops/test_verify.py -k longer_than",
    ),
    Mutation(
        "a window row equal to R is stored", STEP,
        "return tl.where((row >= 0) & (row < R), tl.minimum(n, T), 0)",
        "return tl.where((row >= 0) & (row <= R), tl.minimum(n, T), 0)",
        PORTABLE, ("outside-verify",), "tests/ops/test_guards.py -k outside-verify",
    ),
    Mutation(
        "more is folded than the window holds", STEP,
        "return tl.maximum(tl.minimum(tl.load(p_len), T), 0).to(tl.int32)",
        "return tl.maximum(tl.load(p_len), 0).to(tl.int32)",
        PORTABLE, ("past-T",), "tests/ops/test_fold.py -k clamped",
    ),
    Mutation(
        "offsets are cut to 32 bits before they are clamped", STEP,
        "return tl.minimum(tl.maximum(tl.load(p), 0), N).to(tl.int32)",
        "return tl.minimum(tl.maximum(tl.load(p).to(tl.int32), 0), N)",
        PORTABLE, ("offsets of 64",), "tests/ops/test_fuzz.py tests/ops/test_geometry.py",
    ),
    Mutation(
        "the exponential of a huge decay is not clamped", STEP,
        "return tl.where(x < -87.3, 0.0, p)", "return p",
        PORTABLE, ("edges",), "tests/ops/test_gate.py",
    ),
    Mutation(
        "a rate past the largest fp32 is infinite", STEP,
        "return tl.where(rate > 3.4028234663852886e38, 3.4028234663852886e38, rate)",
        "return rate",
        PORTABLE, ("edges",), "tests/ops/test_gate.py -k huge",
    ),
    Mutation(
        "the state does not decay", STEP,
        "faded = faded + (h[c] * decay[c % len(decay)],)", "faded = faded + (h[c],)",
        PORTABLE, ("fold-gdn",), "tests/ops/test_exactness.py -k fp64",
    ),
    Mutation(
        "all requests have window row 0 by default", STEP,
        "    row = slot\n", "    row = slot * 0\n",
        PORTABLE, ("verify-gdn",), "tests/ops/test_store.py",
    ),
    Mutation(
        "tokens before the first row are not zeroed", PLAIN,
        "_zero_tokens(o, 0, first, i_hv", "_zero_tokens(o, first, first, i_hv",
        PORTABLE, ("tokens of no request",),
    ),
    Mutation(
        "tokens behind the last row are not zeroed", PLAIN,
        "_zero_tokens(o, tl.maximum(first, last), N,", "_zero_tokens(o, N, N,",
        PORTABLE, ("ragged",),
    ),
    Mutation(
        "no more than three rows are folded", PLAIN,
        "    for t in range(0, n):\n        b_k = _load_chunks(p_kw",
        "    for t in range(0, tl.minimum(n, 3)):\n        b_k = _load_chunks(p_kw",
        PORTABLE, ("fold",),
    ),
    Mutation(
        "the stride of a second layer is that of a slot", PLAIN,
        "p_layer = state + i_l * state_l", "p_layer = state + i_l * state_s",
        PORTABLE, ("layers",),
    ),
    Mutation(
        "a slot is multiplied in 32 bits", PLAIN,
        "    slot = tl.load(state_indices + i_b * si_s).to(tl.int64)\n    if outside",
        "    slot = tl.load(state_indices + i_b * si_s)\n    if outside",
        PORTABLE, ("far one layer",),
    ),
    Mutation(
        "half of K is read", PLAIN,
        """\
        mask = mask_row[:, None] & (c * 32 + o_k < K)[None, :]
        p = tl.max_contiguous(p_row[:, None] + (c * 32 + o_k)[None, :], [1, WIDTH])
        out""",
        """\
        mask = mask_row[:, None] & (c * 32 + o_k < K // 2)[None, :]
        p = tl.max_contiguous(p_row[:, None] + (c * 32 + o_k)[None, :], [1, WIDTH])
        out""",
        PORTABLE, ("decode-gdn",),
    ),
    Mutation(
        "the snapshot comes a step late", PLAIN,
        "if t == track_t:", "if t == track_t + 1:",
        PORTABLE, ("track",),
    ),
    Mutation(
        "a track slot equal to S is written", PLAIN,
        "track_t = tl.where((track >= 0) & (track < S), track_t, -1)",
        "track_t = tl.where((track >= 0) & (track <= S), track_t, -1)",
        PORTABLE, ("fold-tracks",),
    ),
    Mutation(
        "keys are stored by value head", PLAIN,
        "p_kw = k_window + row * kw_s + (i_h * T + t) * K + one",
        "p_kw = k_window + row * kw_s + (i_hv * T + t) * K + one",
        PORTABLE, ("6-heads",),
    ),
    Mutation(
        "the keys of the first head alone are stored", COPIES,
        "if i_hv % (HV // H) == 0:", "if i_hv == 0:",
        PORTABLE, ("6-heads",),
    ),
    Mutation(
        "store writes past T", COPIES,
        "if outside(row, R) | (t >= n):", "if outside(row, R) | (t > n):",
        PORTABLE, ("store",),
    ),
    Mutation(
        "scatter's default source is row 0", COPIES,
        "source = tl.zeros([], tl.int64) + i_b", "source = tl.zeros([], tl.int64)",
        PORTABLE, ("scatter",),
    ),
    Mutation(
        "a step equal to D is scattered", COPIES,
        "inside = (slot >= 0) & (slot < S) & (step >= 0) & (step < D)",
        "inside = (slot >= 0) & (slot < S) & (step >= 0) & (step <= D)",
        PORTABLE, ("outside-scatter",),
    ),
    Mutation(
        "no snapshot of the accepted step itself", COPIES,
        "(at >= 0) & (at <= step):", "(at >= 0) & (at < step):",
        PORTABLE, ("scatter-tracks",),
    ),
    Mutation(
        "more conv inputs are committed than there are", COPIES,
        "n = tl.minimum(tl.load(accept_lens + i_b * al_s).to(tl.int64), D)",
        "n = tl.load(accept_lens + i_b * al_s).to(tl.int64)",
        PORTABLE, ("conv_commit",),
    ),
    Mutation(
        "a sliding conv window is a column wider", COPIES,
        "o_from = o // TAPS * (D + TAPS - 1) + o % TAPS",
        "o_from = o // TAPS * (D + TAPS) + o % TAPS",
        PORTABLE, ("conv_commit-sliding",),
    ),
    Mutation(
        "the anchor must match too", BATCH,
        "mask = (o_t > 0) & (o_t < length)", "mask = o_t < length",
        PORTABLE, ("accept",),
    ),
    Mutation(
        "rows past live are no padding to the kernel", BATCH,
        "alive = mask & (o_b < tl.load(live))", "alive = mask",
        PORTABLE, ("commit_indices",),
    ),
    Mutation(
        "gate takes the bias of the first key dim for all", "ops/kernels/gates.py",
        "dt = tl.load(dt_bias + i_hv * dt_h + i_k * dt_k,",
        "dt = tl.load(dt_bias + i_hv * dt_h,",
        PORTABLE, ("gate-kda",),
    ),
]  # fmt: skip

TUNED, CHUNKS, EFFECTIVE, GRAMS = (
    f"ops/kernels/{name}.py" for name in ("gluon", "chunks", "effective", "grams")
)
BUGS += [
    Mutation(
        "a later block of tokens is the first one again", TUNED,
        "start + t0, n - t0, o_t,", "start, n - t0, o_t,",
        GLUON, ("ragged-11",), "tests/ops/test_kernels.py -k ragged",
    ),
    Mutation(
        "every block of tokens is stored as the first", TUNED,
        "row, stored, t0, T,", "row, stored, 0, T,",
        GLUON, ("ragged-11",), "tests/ops/test_guards.py -k ragged-11",
    ),
    Mutation(
        "the last output is of the token before", TUNED,
        "b_o = _output(h, m - 1, s_q", "b_o = _output(h, 0, s_q",
        GLUON, ("verify-gdn",), "tests/ops/test_exactness.py -k accepted_tokens",
    ),
    Mutation(
        "a tuned slot is multiplied in 32 bits", TUNED,
        "    slot = gl.load(state_indices + i_b * si_s).to(gl.int64)\n    row = row_of"
        "(slot, window_indices, i_b * wi_s)\n    b_A",
        "    slot = gl.load(state_indices + i_b * si_s)\n    row = row_of"
        "(slot, window_indices, i_b * wi_s).to(gl.int64)\n    b_A",
        GLUON, ("far one layer",), "tests/ops/test_far.py -k one",
    ),
    Mutation(
        "a later block of folded keys is the first one again", TUNED,
        "b_k = load_chunks(p_kw + (i_h * T + t0 + o_t) * K",
        "b_k = load_chunks(p_kw + (i_h * T + o_t) * K",
        GLUON, ("fold-gdn-11", "fold-kda-11"), "tests/ops/test_exactness.py -k long_windows",
    ),
    Mutation(
        "all layers fold into the first", TUNED,
        "p_layer = state + i_l * state_l + (i_hv * V + o_v) * K",
        "p_layer = state + (i_hv * V + o_v) * K",
        GLUON, ("layers",), "tests/ops/test_fold.py -k layers",
    ),
    Mutation(
        "a tuned snapshot comes a step late", TUNED,
        "if t0 + t == track_t:", "if t0 + t == track_t + 1:",
        GLUON, ("track",), "tests/ops/test_fold.py -k track",
    ),
    Mutation(
        "a lane's numbers change places", CHUNKS,
        "(x0, x1, x2, x3)[x]", "(x0, x2, x1, x3)[x]",
        GLUON, ("decode-gdn",), "tests/ops/test_exactness.py -k fp64",
    ),
    Mutation(
        "a short chunk of K has a number more", CHUNKS,
        "mask = mask & (c * 32 + o_k < K)[None, :]",
        "mask = mask & (c * 32 + o_k <= K)[None, :]",
        GLUON, ("80-48",), "tests/ops/test_geometry.py -k head_dims",
    ),
    Mutation(
        "the tuned keys of the first head alone are stored", CHUNKS,
        "if i_hv % (HV // H) == 0:", "if i_hv == 0:",
        GLUON, ("6-heads",), "tests/ops/test_store.py tests/ops/test_guards.py -k heads",
    ),
    Mutation(
        "the low halves of a product are left out", GRAMS,
        'right = mma_v2(x_high, y_low, right, input_precision="tf32")',
        'right = mma_v2(x_high, y_low * 0.0, right, input_precision="tf32")',
        GLUON, ("inexact",), "tests/ops/test_verify.py -k inexact",
    ),
    Mutation(
        "a token does not read what it writes", GRAMS,
        "m = m + (gl.where(o_t >= i, dot_q, 0.0),)",
        "m = m + (gl.where(o_t > i, dot_q, 0.0),)",
        GLUON, ("inexact",), "tests/ops/test_verify.py -k inexact",
    ),
    Mutation(
        "the solve leaves out a token", GRAMS,
        "for j in gl.static_range(TB - 1, i, -1):",
        "for j in gl.static_range(TB - 1, i + 1, -1):",
        GLUON, ("inexact",), "tests/ops/test_verify.py -k inexact",
    ),
    Mutation(
        "effective queries start without the first decay", GRAMS,
        "decay = ((faded * s_decay[0].index(0).load(ROW))[:, None],)",
        "decay = (faded[:, None],)",
        GLUON, ("inexact",), "tests/ops/test_verify.py -k inexact",
    ),
    Mutation(
        "exact=False stores whole blocks", EFFECTIVE,
        "stored = rows_stored(row, D, R, T)", "stored = rows_stored(row, TB, R, T)",
        GLUON, ("inexact-3", "inexact-11"), "tests/ops/test_guards.py -k inexact",
    ),
]  # fmt: skip
