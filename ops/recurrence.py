"""verify and decode: outputs of draft windows and of single tokens."""

from torch import Tensor

from . import checks, launch, reference
from .registration import register


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


def _check_verify(
    q, k, v, a, b, A_log, dt_bias, state, k_window, v_window, g_window, beta_window,
    state_indices, cu_seqlens=None, window_indices=None, *, scale=None,
    lower_bound=None, use_qk_l2norm=True, exact=True,
):  # fmt: skip
    check = checks.Check("verify", q, "q")
    checks.projections(check, q, k, v, "N")
    kda = checks.gates(check, a, b, A_log, dt_bias, "N")
    check.tensor("state", state, "S HV V K", checks.ACTIVATION, dense=3)
    checks.windows(
        check, k_window, v_window, g_window, beta_window,
        kda=kda, dtype=(q.dtype,), of=" like q", written=True,
    )  # fmt: skip
    check.index("state_indices", state_indices, "B")
    check.index("window_indices", window_indices, "B")
    check.rows(cu_seqlens)
    check.lower_bound(lower_bound, kda)
    return check


def _outputs(q, k, v, *args, **kwargs):
    return v.new_empty(v.shape)


def _arrange_verify(
    q, k, v, a, b, A_log, dt_bias, state, k_window, v_window, g_window, beta_window,
    state_indices, cu_seqlens=None, window_indices=None, *, scale=None,
    lower_bound=None, use_qk_l2norm=True, exact=True,
):  # fmt: skip
    return (
        q, k, v, a, b, A_log, dt_bias, state, k_window, v_window, g_window,
        beta_window, state_indices, cu_seqlens, window_indices,
    ), (scale, lower_bound, use_qk_l2norm, exact)  # fmt: skip


_verify = register(
    "verify(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, "
    "Tensor dt_bias, Tensor state, Tensor(a!) k_window, Tensor(b!) v_window, "
    "Tensor(c!) g_window, Tensor(d!) beta_window, Tensor state_indices, "
    "Tensor? cu_seqlens=None, Tensor? window_indices=None, *, float? scale=None, "
    "float? lower_bound=None, bool use_qk_l2norm=True, bool exact=True) -> Tensor",
    check=_check_verify,
    cpu=reference.verify,
    arrange=_arrange_verify,
    plan=launch.recur,
    fake=_outputs,
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


def _check_decode(
    q, k, v, a, b, A_log, dt_bias, state, state_indices, *, scale=None,
    lower_bound=None, use_qk_l2norm=True,
):  # fmt: skip
    check = checks.Check("decode", q, "q")
    checks.projections(check, q, k, v, "B")
    kda = checks.gates(check, a, b, A_log, dt_bias, "B")
    check.tensor("state", state, "S HV V K", checks.ACTIVATION, dense=3, written=True)
    check.index("state_indices", state_indices, "B")
    check.lower_bound(lower_bound, kda)
    return check


def _arrange_decode(
    q, k, v, a, b, A_log, dt_bias, state, state_indices, *, scale=None,
    lower_bound=None, use_qk_l2norm=True,
):  # fmt: skip
    return (
        q, k, v, a, b, A_log, dt_bias, state, None, None, None, None, state_indices,
        None, None,
    ), (scale, lower_bound, use_qk_l2norm, True)  # fmt: skip


_decode = register(
    "decode(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, "
    "Tensor dt_bias, Tensor(a!) state, Tensor state_indices, *, float? scale=None, "
    "float? lower_bound=None, bool use_qk_l2norm=True) -> Tensor",
    check=_check_decode,
    cpu=reference.decode,
    arrange=_arrange_decode,
    plan=launch.recur,
    fake=_outputs,
)
