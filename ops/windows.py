"""gate and store: what one verify caches of its tokens."""

import torch
from torch import Tensor

from . import checks, launch, reference
from .registration import register


def gate(
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The log decay g and the write strength beta of every token.

    With x = a + dt_bias, in fp32: g = -exp(A_log) * softplus(x), or with
    ``lower_bound`` g = lower_bound * sigmoid(exp(A_log) * x); beta = sigmoid(b).
    exp(A_log) is clamped to the largest fp32. The same bits that ``verify``
    caches in its windows.

    Args:
        a: [N, HV] (GDN) or [N, HV, K] (KDA, innermost dense).
        b: [N, HV].
        A_log: [HV].
        dt_bias: [HV] (GDN) or [HV, K] (KDA).
            Each of the four is fp32, bf16 or fp16 on its own; strides are free.
        lower_bound: KDA's safe gate, a finite number below 0. None: softplus.

    Returns:
        g, fp32 of a's shape (natural log of the decay, <= 0), and beta [N, HV] fp32.

    Raises:
        ValueError, TypeError: naming the argument, what was wanted and what came.
    """
    return _gate(a, b, A_log, dt_bias, lower_bound=lower_bound)


def _check_gate(a, b, A_log, dt_bias, *, lower_bound=None):
    check = checks.Check("gate", a, "a")
    kda = checks.gates(check, a, b, A_log, dt_bias, "N")
    check.lower_bound(lower_bound, kda)
    return check


def _fake_gate(a, b, A_log, dt_bias, *, lower_bound=None):
    return (
        a.new_empty(a.shape, dtype=torch.float32),
        b.new_empty(b.shape, dtype=torch.float32),
    )


def _arrange_gate(a, b, A_log, dt_bias, *, lower_bound=None):
    return (a, b, A_log, dt_bias), (lower_bound,)


_gate = register(
    "gate(Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, *, "
    "float? lower_bound=None) -> (Tensor g, Tensor beta)",
    check=_check_gate,
    cpu=reference.gate,
    arrange=_arrange_gate,
    plan=launch.gate,
    fake=_fake_gate,
)


def store(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    k_window: Tensor,
    v_window: Tensor,
    g_window: Tensor,
    beta_window: Tensor,
    window_indices: Tensor,
    cu_seqlens: Tensor | None = None,
) -> None:
    """Write given recurrence inputs of packed tokens into one layer's windows.

    Token t of request i goes to row t of window ``window_indices[i]``. A request
    whose window index is negative is padding, and one at or past R is skipped;
    tokens past T are not stored. Nothing else is read or written.

    Args:
        k: [N, H, K] bf16, fp16 or fp32, before l2norm; innermost dense.
        v: [N, HV, V] in k's dtype; innermost dense.
        g: [N, HV] (GDN) or [N, HV, K] (KDA, innermost dense) fp32.
        beta: [N, HV] fp32.
        k_window: [R, H, T, K] in k's dtype, written. Inner three dense.
        v_window: [R, HV, T, V] in k's dtype, written. Inner three dense.
        g_window: [R, HV, T] or [R, HV, T, K] fp32, written. Inner two / three dense.
        beta_window: [R, HV, T] fp32, written. Inner two dense.
        window_indices: [B] int32 or int64, the window row of each request.
        cu_seqlens: [B + 1] int32 or int64, token offsets of ragged requests, on the
            device. None: each request has D = N / B <= T tokens.

    Raises:
        ValueError, TypeError: naming the argument, what was wanted and what came;
            nothing is written.
    """
    _store(
        k, v, g, beta, k_window, v_window, g_window, beta_window, window_indices,
        cu_seqlens,
    )  # fmt: skip


def _check_store(
    k, v, g, beta, k_window, v_window, g_window, beta_window, window_indices,
    cu_seqlens=None,
):  # fmt: skip
    check = checks.Check("store", k, "k")
    checks.projections(check, None, k, v, "N")
    kda = checks.is_kda(check, "g", g, "N HV", "N HV K")
    check.tensor("g", g, "N HV K" if kda else "N HV", checks.GATE, dense=int(kda))
    check.tensor("beta", beta, "N HV", checks.GATE)
    checks.windows(
        check, k_window, v_window, g_window, beta_window,
        kda=kda, dtype=(k.dtype,), of=" like k", written=True,
    )  # fmt: skip
    check.index("window_indices", window_indices, "B")
    check.rows(cu_seqlens)
    return check


def _arrange_store(
    k, v, g, beta, k_window, v_window, g_window, beta_window, window_indices,
    cu_seqlens=None,
):  # fmt: skip
    return (
        k, v, g, beta, k_window, v_window, g_window, beta_window, window_indices,
        cu_seqlens,
    ), ()  # fmt: skip


_store = register(
    "store(Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) k_window, "
    "Tensor(b!) v_window, Tensor(c!) g_window, Tensor(d!) beta_window, "
    "Tensor window_indices, Tensor? cu_seqlens=None) -> ()",
    check=_check_store,
    cpu=reference.store,
    arrange=_arrange_store,
    plan=launch.store,
)
