"""The recurrence in fp64 on the CPU, written from the formulas alone."""

import torch
from torch import Tensor

from samples import Problem

FP32_MAX = torch.finfo(torch.float32).max


def gates(p: Problem) -> tuple[Tensor, Tensor]:
    """g and beta of every token."""
    a, b, A_log, dt_bias = (x.cpu().double() for x in (p.a, p.b, p.A_log, p.dt_bias))
    x = a + dt_bias
    rate = A_log.exp().clamp(max=FP32_MAX).reshape(-1, *[1] * (dt_bias.dim() - 1))
    if p.lower_bound is None:
        g = -rate * torch.where(x > 20, x, x.exp().log1p())
    else:
        g = p.lower_bound * torch.sigmoid(rate * x)
    return g, torch.sigmoid(b)


def run(
    p: Problem, states: list[Tensor] | None = None, *, scale: float | None = None,
    use_qk_l2norm: bool = True,
) -> tuple[Tensor, list[list[Tensor]]]:  # fmt: skip
    """Outputs [N, HV, V] and, per request, the state before and after each token.

    ``states``: where each request starts, default its slot. Padding rows have none.
    """
    q, k, v = (x.cpu().double() for x in (p.q, p.k, p.v))
    HV, K = v.shape[1], k.shape[2]
    if use_qk_l2norm:
        q, k = (x / ((x * x).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q = q * (K**-0.5 if scale is None else scale)
    head = torch.arange(HV) // (HV // q.shape[1])
    g, beta = gates(p)
    decay = (g if g.dim() == 3 else g.unsqueeze(-1)).exp().unsqueeze(2)
    out, trajectories = torch.zeros(v.shape, dtype=torch.float64), []
    for i, (slot, span) in enumerate(zip(p.state_indices.tolist(), p.spans(), strict=True)):
        if slot < 0:
            trajectories.append([])
            continue
        S = p.state[slot].cpu().double() if states is None else states[i]
        trajectory = [S]
        for n in span:
            S = S * decay[n]
            u = beta[n, :, None] * (v[n] - torch.einsum("hvk,hk->hv", S, k[n, head]))
            S = S + u[:, :, None] * k[n, head, None, :]
            out[n] = torch.einsum("hvk,hk->hv", S, q[n, head])
            trajectory.append(S)
        trajectories.append(trajectory)
    return out, trajectories


def state_error(got: Tensor, want: Tensor) -> float:
    """Relative error of a state, in the Frobenius norm."""
    return ((got.cpu().double() - want).norm() / want.norm()).item()


def assert_outputs(got: Tensor, want: Tensor, relative: float = 5e-6) -> None:
    """got is want rounded to its dtype, after an error of ``relative``.

    Half a step of the dtype, of each element; and ``relative`` of the largest output
    of the token's head, because an output is an fp32 sum whose terms may cancel: over
    many seeds the worst is 1.3e-6.
    """
    largest = want.abs().amax(-1, keepdim=True)
    bound = torch.finfo(got.dtype).eps / 2 * want.abs() + relative * largest
    # fp16 cannot hold less than its smallest subnormal.
    bound = bound + torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps
    excess = (got.cpu().double() - want).abs() / bound.clamp(min=1e-300)
    worst = excess.argmax().item() if excess.numel() else 0
    assert excess.numel() == 0 or excess.max() <= 1, (
        f"output {list(torch.unravel_index(torch.tensor(worst), want.shape))}: got "
        f"{got.flatten()[worst]}, fp64 says {want.flatten()[worst]}, "
        f"{excess.max():.1f} times the bound"
    )
