"""verify and decode: outputs of draft windows and of single tokens."""

import torch
from torch import Tensor

from . import checks, debug, reference
from .launch import ABSENT, MAX_BLOCK, Plan, ceil_div, stride, token_block
from .registration import register
from .window_rule import Windows, named_rows

# What ``effective`` can take in: tokens, and key dims of a short and of a long window
# (more would spill registers).
_MAX_WINDOW, _MAX_KEY, _MAX_KEY_LONG = 16, 256, 224


def _outputs(x):
    return ((x.v.shape, x.v.dtype),)


def _one_pass(kernels, state: Tensor, length: int) -> bool:
    """Whether verify's outputs may come from effective queries: by shape alone."""
    V, K = state.shape[-2:]
    return (
        kernels.effective is not None
        and 2 <= length <= _MAX_WINDOW
        and state.dtype == torch.float32
        and K % 32 == 0
        and (_MAX_KEY if length <= MAX_BLOCK else _MAX_KEY_LONG) >= K
        and V % 32 == 0
    )


def _tuned(kernels, heads: int, kda: bool, decode: bool, one_block: bool) -> dict:
    """Constants of the tuned exact kernel alone."""
    if kernels.streams is None:
        return {}
    return {"ONE": one_block, "STREAM": kernels.streams(heads, kda, decode)}


def _plan(kernel, x, tile, block, length, tuned, windows=None) -> Plan:
    """verify and, without windows, decode: the same kernel, so the same bits."""
    (tokens, H, K), (HV, V), (BV, warps) = x.q.shape, x.v.shape[1:], tile
    batch, S = len(x.state_indices), x.state.shape[0]
    order, cu_seqlens, rows, window_sizes = None, None, None, (0, 0)
    if windows is None:  # decode: no windows, no ragged batch
        order = (*range(8), *[ABSENT] * 4, 8, ABSENT, ABSENT)
    else:
        cu_seqlens, rows = x.cu_seqlens, x.window_indices
        window_sizes = windows.rows, windows.capacity
    # Ragged batches get one row of programs more: it zeroes uncovered tokens.
    heads = HV * (batch + (cu_seqlens is not None)) if tokens else 0
    return Plan(
        kernel,
        (ceil_div(V, BV) * heads, 1, 1),
        (
            K**-0.5 if x.scale is None else x.scale,
            0.0 if x.lower_bound is None else x.lower_bound,
            batch, tokens, length, S, *window_sizes,
            *(step for y in (x.q, x.k, x.v, x.a, x.b) for step in y.stride()[:2]),
            x.A_log.stride(0), x.dt_bias.stride(0), stride(x.dt_bias, 1), x.state.stride(0),
            *(stride(window) for window in windows or [None] * 4),
            x.state_indices.stride(0), stride(cu_seqlens), stride(rows),
        ),
        {
            "H": H, "HV": HV, "K": K, "V": V, "KDA": x.a.dim() == 3,
            "SAFE": x.lower_bound is not None, "L2NORM": x.use_qk_l2norm, "BV": BV,
            "TB": block, "NW": warps, **tuned,
        },
        warps,
        order,
    )  # fmt: skip


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    k_window: Tensor,
    v_window: Tensor,
    g_window: Tensor,
    beta_window: Tensor,
    state_indices: Tensor,
    cu_seqlens: Tensor | None = None,
    window_indices: Tensor | None = None,
    *,
    scale: float | None = None,
    lower_bound: float | None = None,
    use_qk_l2norm: bool = True,
    exact: bool = True,
) -> Tensor:
    """Outputs of every draft token from the frozen state, and the window of inputs.

    Runs the recurrence over each request's tokens starting from its committed
    state, which is only read, and writes the tokens' k, v, g and beta into the
    request's window row, from which ``fold`` commits any prefix.

    Args:
        q, k: [N, H, K] bf16, fp16 or fp32, before l2norm; innermost dense.
        v: [N, HV, V] in q's dtype; innermost dense. HV is a multiple of H.
        a: [N, HV] (GDN, any strides) or [N, HV, K] (KDA, innermost dense).
        b: [N, HV]. A_log: [HV]. dt_bias: [HV] (GDN) or [HV, K] (KDA).
            a, b, A_log and dt_bias are each fp32, bf16 or fp16; see ``gate``.
        state: [S, HV, V, K] fp32, bf16 or fp16; inner three dense, slot stride free.
        k_window: [R, H, T, K] in q's dtype, written. Inner three dense.
        v_window: [R, HV, T, V] in q's dtype, written. Inner three dense.
        g_window: [R, HV, T] or [R, HV, T, K] fp32, written. Inner two / three dense.
        beta_window: [R, HV, T] fp32, written. Inner two dense.
        state_indices: [B] int32 or int64, the slot of each request. Negative is
            padding: it reads and writes nothing and its outputs are zero; a slot at
            or past S is treated the same.
        cu_seqlens: [B + 1] int32 or int64, token offsets of ragged requests, on the
            device; row 0 of a request is its anchor. Tokens no request covers get
            zero output. None: each request has D = N / B <= T tokens.
        window_indices: [B] int32 or int64, the window row of each request; default
            state_indices. Rows outside [0, R), and tokens past T of a ragged
            request, are verified but not stored.
        scale: multiplies q; default K ** -0.5.
        lower_bound: KDA's safe gate, see ``gate``.
        use_qk_l2norm: normalise q and k: x / sqrt(sum(x^2) + 1e-6).
        exact: outputs equal token-by-token ``decode`` bit for bit (fp32 state).
            False allows outputs within 1e-5 of fp64, relative to the largest of their
            token's head; windows and state never differ. On NVIDIA sm_80 and newer it
            is faster for dense windows of 2 to 16 tokens over an fp32 state with K and
            V multiples of 32, K up to 256 (224 above 8 tokens); anything else runs the
            exact kernel. There a NaN or an infinity in one token reaches every output
            of its request's head, tokens before it included.

    Returns:
        [N, HV, V] in q's dtype, a fresh tensor.

    Raises:
        ValueError, TypeError: naming the argument, what was wanted and what came;
            nothing is written.

    Source: Gated DeltaNet (arXiv 2412.06464) and Kimi Linear (arXiv 2510.26692).
    """
    return _verify(
        q, k, v, a, b, A_log, dt_bias, state, k_window, v_window, g_window,
        beta_window, state_indices, cu_seqlens, window_indices, scale=scale,
        lower_bound=lower_bound, use_qk_l2norm=use_qk_l2norm, exact=exact,
    )  # fmt: skip


def _check_verify(x):
    check = checks.Check("verify", x.q, "q")
    checks.projections(check, x.q, x.k, x.v, "N")
    kda = checks.gates(check, x, "N")
    check.tensor("state", x.state, "S HV V K", checks.ACTIVATION, dense=3)
    checks.windows(
        check, Windows.of(x), kda=kda, dtype=(x.q.dtype,), of=" like q", written=True
    )
    check.index("state_indices", x.state_indices, "B")
    check.index("window_indices", x.window_indices, "B")
    check.rows(x.cu_seqlens)
    check.lower_bound(x.lower_bound, kda)
    return check


def _rules_verify(x, sizes):
    name = "state_indices" if x.window_indices is None else "window_indices"
    named = named_rows(x.state_indices, x.window_indices)
    yield from debug.offsets(x.cu_seqlens, sizes["N"])
    yield from debug.slots(x.state_indices, sizes["S"])
    yield from debug.rows(name, named, sizes["R"])
    yield from debug.stored_rows(name, named, x.cu_seqlens, sizes["T"])


def _plan_verify(kernels, x):
    windows, batch, ragged = Windows.of(x), len(x.state_indices), x.cu_seqlens is not None
    (tokens, _, K), (HV, V) = x.q.shape, x.v.shape[1:]
    length = tokens // batch if batch and not ragged else 0
    if not x.exact and _one_pass(kernels, x.state, length):
        block = MAX_BLOCK if length <= MAX_BLOCK else 16
        tile = kernels.effective_tile(HV, K, V, batch, block)
        return _plan(kernels.effective, x, tile, block, length, {}, windows)
    block = MAX_BLOCK if ragged else token_block(length)
    safe = x.lower_bound is not None
    tile = kernels.recur_tile(HV, K, V, batch, windows.kda, ragged, safe)
    tuned = _tuned(kernels, HV * batch, windows.kda, False, not ragged and length <= block)
    return _plan(kernels.recur, x, tile, block, length, tuned, windows)


_verify = register(
    "verify(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, "
    "Tensor dt_bias, Tensor state, Tensor(a!) k_window, Tensor(b!) v_window, "
    "Tensor(c!) g_window, Tensor(d!) beta_window, Tensor state_indices, "
    "Tensor? cu_seqlens=None, Tensor? window_indices=None, *, float? scale=None, "
    "float? lower_bound=None, bool use_qk_l2norm=True, bool exact=True) -> Tensor",
    check=_check_verify,
    cpu=reference.verify,
    plan=_plan_verify,
    outputs=_outputs,
    rules=_rules_verify,
)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_indices: Tensor,
    *,
    scale: float | None = None,
    lower_bound: float | None = None,
    use_qk_l2norm: bool = True,
) -> Tensor:
    """One token per request: its output, and its state update in place.

    Args:
        q, k, v, a, b, A_log, dt_bias: as for ``verify`` with N = B.
        state: [S, HV, V, K] fp32, bf16 or fp16, written: each request's slot gets
            the new state, rounded once. Inner three dense, slot stride free.
        state_indices: [B] int32 or int64; live slots are distinct. Negative, or at
            or past S: reads and writes nothing, output zero.
        scale, lower_bound, use_qk_l2norm: as for ``verify``.

    Returns:
        [B, HV, V] in q's dtype, a fresh tensor.

    Raises:
        ValueError, TypeError: naming the argument, what was wanted and what came;
            nothing is written.
    """
    return _decode(
        q, k, v, a, b, A_log, dt_bias, state, state_indices, scale=scale,
        lower_bound=lower_bound, use_qk_l2norm=use_qk_l2norm,
    )  # fmt: skip


def _check_decode(x):
    check = checks.Check("decode", x.q, "q")
    checks.projections(check, x.q, x.k, x.v, "B")
    kda = checks.gates(check, x, "B")
    check.tensor("state", x.state, "S HV V K", checks.ACTIVATION, dense=3, written=True)
    check.index("state_indices", x.state_indices, "B")
    check.lower_bound(x.lower_bound, kda)
    return check


def _rules_decode(x, sizes):
    yield from debug.slots(x.state_indices, sizes["S"])


def _plan_decode(kernels, x):
    (batch, _, K), (HV, V) = x.q.shape, x.v.shape[1:]
    kda, safe = x.a.dim() == 3, x.lower_bound is not None
    tile = kernels.recur_tile(HV, K, V, batch, kda, False, safe)
    tuned = _tuned(kernels, HV * batch, kda, decode=True, one_block=True)
    return _plan(kernels.recur, x, tile, 1, min(batch, 1), tuned)


_decode = register(
    "decode(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, "
    "Tensor dt_bias, Tensor(a!) state, Tensor state_indices, *, float? scale=None, "
    "float? lower_bound=None, bool use_qk_l2norm=True) -> Tensor",
    check=_check_decode,
    cpu=reference.decode,
    plan=_plan_decode,
    outputs=_outputs,
    rules=_rules_decode,
)
