"""gate: plain Triton in every lowering, as its bits depend on no layout."""

import triton
import triton.language as tl

from .step import decay_rate, log_decay, sigmoid


@triton.jit(do_not_specialize=["elements"])
def gate(
    a, b, A_log, dt_bias, g, beta, lower_bound, elements,
    a_n, a_h, b_n, b_h, A_s, dt_h, dt_k,
    HV: tl.constexpr, K: tl.constexpr, SAFE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = o < elements
    i_k = o % K
    i_hv = (o // K) % HV
    token = o // (K * HV)
    rate = decay_rate(tl.load(A_log + i_hv * A_s, mask=mask, other=0.0))
    x = tl.load(a + token * a_n + i_hv * a_h + i_k, mask=mask, other=0.0)
    dt = tl.load(dt_bias + i_hv * dt_h + i_k * dt_k, mask=mask, other=0.0)
    tl.store(g + o, log_decay(x, dt, rate, lower_bound, SAFE), mask=mask)
    first = mask & (i_k == 0)
    b_b = tl.load(b + token * b_n + i_hv * b_h, mask=first, other=0.0)
    tl.store(beta + token * HV + i_hv, sigmoid(b_b.to(tl.float32)), mask=first)
