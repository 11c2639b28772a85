"""gate and store: what one verify caches of its tokens."""

import torch
from torch import Tensor

from . import checks, debug, reference
from .launch import Plan, ceil_div, stride
from .registration import register
from .window_rule import Windows


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


def _check_gate(x):
    check = checks.Check("gate", x.a, "a")
    kda = checks.gates(check, x, "N")
    check.lower_bound(x.lower_bound, kda)
    return check


def _plan_gate(kernels, x):
    kda, elements, block = x.a.dim() == 3, x.a.numel(), 256
    return Plan(
        kernels.gate,
        (ceil_div(elements, block), 1, 1),
        (
            0.0 if x.lower_bound is None else x.lower_bound, elements,
            x.a.stride(0), x.a.stride(1), x.b.stride(0), x.b.stride(1), x.A_log.stride(0),
            x.dt_bias.stride(0), stride(x.dt_bias, 1),
        ),
        {
            "HV": x.a.shape[1], "K": x.a.shape[2] if kda else 1,
            "SAFE": x.lower_bound is not None, "BLOCK": block,
        },
        4,
    )  # fmt: skip


_gate = register(
    "gate(Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, *, "
    "float? lower_bound=None) -> (Tensor g, Tensor beta)",
    check=_check_gate,
    cpu=reference.gate,
    plan=_plan_gate,
    outputs=lambda x: ((x.a.shape, torch.float32), (x.b.shape, torch.float32)),
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


def _check_store(x):
    check = checks.Check("store", x.k, "k")
    checks.projections(check, None, x.k, x.v, "N")
    kda = checks.is_kda(check, "g", x.g, "N HV", "N HV K")
    check.tensor("g", x.g, "N HV K" if kda else "N HV", checks.GATE, dense=int(kda))
    check.tensor("beta", x.beta, "N HV", checks.GATE)
    checks.windows(
        check, Windows.of(x), kda=kda, dtype=(x.k.dtype,), of=" like k", written=True
    )
    check.index("window_indices", x.window_indices, "B")
    check.rows(x.cu_seqlens)
    return check


def _rules_store(x, sizes):
    named = x.window_indices.long()
    yield from debug.offsets(x.cu_seqlens, sizes["N"])
    yield from debug.rows("window_indices", named, sizes["R"])
    yield from debug.stored_rows("window_indices", named, x.cu_seqlens, sizes["T"])


def _plan_store(kernels, x):
    (tokens, H, K), (HV, V) = x.k.shape, x.v.shape[1:]
    windows, batch = Windows.of(x), x.window_indices.shape[0]
    ragged = x.cu_seqlens is not None
    length = tokens // batch if batch and not ragged else 0
    span = windows.capacity if ragged else length
    return Plan(
        kernels.store,
        (span * HV * batch, 1, 1),
        (
            span, tokens, length, windows.rows, windows.capacity,
            *(step for value in (x.k, x.v, x.g, x.beta) for step in value.stride()[:2]),
            *(stride(window) for window in windows),
            x.window_indices.stride(0), stride(x.cu_seqlens),
        ),
        {
            "H": H, "HV": HV, "K": K, "V": V, "KDA": x.g.dim() == 3,
            "BK": 1 << (K - 1).bit_length(), "BV": 1 << (V - 1).bit_length(),
        },
        1,
    )  # fmt: skip


_store = register(
    "store(Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) k_window, "
    "Tensor(b!) v_window, Tensor(c!) g_window, Tensor(d!) beta_window, "
    "Tensor window_indices, Tensor? cu_seqlens=None) -> ()",
    check=_check_store,
    cpu=reference.store,
    plan=_plan_store,
    rules=_rules_store,
)
