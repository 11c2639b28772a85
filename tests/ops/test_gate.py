"""Gates, norms and flags: values at the edges of fp32, and one source for all ops."""

import math

import pytest
import torch
from expecttest import assert_expected_inline

import oracle
from mistakes import cast, given, longer, moved, rank, spaced, texts
from replayssm import ops
from samples import VARIANTS, bits_equal, make

variants = pytest.mark.parametrize("variant", VARIANTS)
exactness = pytest.mark.parametrize("exact", [True, False])
RELATIVE = {True: 5e-6, False: 1e-5}  # what oracle.assert_outputs grants, what is promised
BELOW_NORMAL = torch.finfo(torch.float32).tiny  # kernels may flush subnormals to zero


def gate(device, x, *, A_log=0.0, b=0.0, dtype=torch.float32, lower_bound=None):
    """g and beta of a token per x, one head, dt_bias = 0; the safe gate is KDA's."""
    a = torch.tensor(x, device=device, dtype=dtype)[:, None]
    bias = torch.zeros((1,), device=device)
    g, beta = ops.gate(
        a if lower_bound is None else a[:, :, None],
        torch.full_like(a, b),
        torch.full((1,), A_log, device=device),
        bias if lower_bound is None else bias[:, None],
        lower_bound=lower_bound,
    )
    return g.flatten().cpu(), beta


SOFTPLUS = [-100.0, -20.0, -1.0, 0.0, 1.0, 19.99, 20.0, 20.01, 88.0, 100.0, 1e4]


def test_softplus_is_right_around_its_threshold(device):
    """Field case 26."""
    g, _ = gate(device, SOFTPLUS)
    want = [-math.log1p(math.exp(x)) if x < 700 else -x for x in SOFTPLUS]
    torch.testing.assert_close(g, torch.tensor(want), rtol=1e-6, atol=BELOW_NORMAL)


@pytest.mark.parametrize("variant", ["gdn", "kda"])
def test_verify_and_decode_gate_rightly_around_softplus_threshold(device, variant):
    """As gate does, for each of KDA's channels too: bias included (field case 26)."""
    # Of this seed no token's output cancels to less than 8 % of its terms.
    p = make(device, variant, B=1, D=len(SOFTPLUS), dtype=torch.float32, seed=7)
    p.A_log.zero_()
    p.dt_bias.fill_(0.5)
    x = torch.tensor(SOFTPLUS, device=device)
    p = p.with_(a=(x - 0.5).reshape(-1, *[1] * (p.a.dim() - 1)).expand(p.a.shape).clone())
    want, trajectories = oracle.run(p)
    exact_g, _ = oracle.gates(p)
    decoded = p.copy()
    oracle.assert_outputs(p.verify(), want)
    row = p.g_window[p.state_indices[0], :, : len(SOFTPLUS)].transpose(0, 1).cpu().double()
    torch.testing.assert_close(row, exact_g, rtol=1e-6, atol=BELOW_NORMAL)
    for t in range(len(SOFTPLUS)):
        oracle.assert_outputs(decoded.decode(t), want[t : t + 1])
    state = decoded.state[p.state_indices[0]]
    assert oracle.state_error(state, trajectories[0][-1]) <= 1e-6


def test_softplus_is_right_everywhere(device):
    """1e-6 relative to fp64, over a dense grid of x and several rates."""
    x = torch.linspace(-80, 30, 5001)
    for A_log in (-3.0, 0.0, 2.5):
        g, _ = gate(device, x.tolist(), A_log=A_log)
        want = -math.exp(A_log) * torch.nn.functional.softplus(x.double(), threshold=40)
        torch.testing.assert_close(g.double(), want, rtol=1e-6, atol=BELOW_NORMAL)


def test_beta_is_right_everywhere(device):
    x = torch.linspace(-80, 80, 4001)
    _, beta = ops.gate(
        *(z.to(device) for z in (x[:, None] * 0, x[:, None], *torch.zeros(2, 1)))
    )
    want = torch.sigmoid(x.double())
    torch.testing.assert_close(
        beta.flatten().cpu().double(), want, rtol=1e-6, atol=BELOW_NORMAL
    )


@variants
@pytest.mark.parametrize("heads", (1, 7, 24))
def test_a_heads_gates_do_not_depend_on_how_many_heads_are_beside_it(
    device, variant, heads
):
    """A tensor-parallel rank computes the bits of the whole model."""
    p = make(device, variant, HV=48)
    whole = ops.gate(p.a, p.b, p.A_log, p.dt_bias, lower_bound=p.lower_bound)
    for first in range(0, 49 - heads, heads):
        some = slice(first, first + heads)
        share = ops.gate(
            p.a[:, some], p.b[:, some], p.A_log[some], p.dt_bias[some],
            lower_bound=p.lower_bound,
        )  # fmt: skip
        for got, want in zip(share, whole, strict=True):
            bits_equal(got, want[:, some], f"gates of heads {some}")


def test_a_huge_A_log_makes_no_nan(device):
    """inf * 0 for A_log = 100, a = -200 (field case 25)."""
    g, _ = gate(device, [-200.0, 0.0, 200.0], A_log=100.0)
    assert not g.isnan().any()
    assert (g <= 0).all()
    assert g[0] == 0
    assert g[1] < -1e38
    g, _ = gate(device, [-200.0, 0.0, 200.0], A_log=100.0, lower_bound=-5.0)
    torch.testing.assert_close(g, torch.tensor([0.0, -2.5, -5.0]))


def test_the_safe_gate_is_a_scaled_sigmoid(device):
    """Not a softplus clamped at lower_bound (field case 19)."""
    g, _ = gate(device, [-20.0, 0.0, 20.0], lower_bound=-5.0)
    want = torch.tensor([-5 / (1 + math.exp(20)), -2.5, -5 / (1 + math.exp(-20))])
    torch.testing.assert_close(g, want, rtol=1e-6, atol=0)


def test_the_rate_of_the_safe_gate_multiplies_inside_the_sigmoid(device):
    """lower_bound * sigmoid(exp(A_log) * x), x with its bias."""
    x = torch.tensor([[0.5, -1.5]], device=device)
    bias = torch.tensor([[0.25, -0.5]], device=device)
    g, _ = ops.gate(
        x[None], x[:1, :1], torch.tensor([1.0], device=device), bias, lower_bound=-3.0
    )
    want = [-3 / (1 + math.exp(-math.e * z)) for z in (0.75, -2.0)]
    torch.testing.assert_close(g.flatten().cpu(), torch.tensor(want), rtol=1e-6, atol=0)


def test_beta_keeps_fp32_under_bf16_inputs(device):
    """sigmoid(0.5) is 0.62245935, bf16 would store 0.62109375 (field case 17)."""
    _, beta = gate(device, [0.0], b=0.5, dtype=torch.bfloat16)
    assert beta.dtype == torch.float32
    assert beta.item() == pytest.approx(0.62245935, rel=1e-7)


@variants
@pytest.mark.parametrize("g", [-30.0, -88.0, -1e4, -math.inf])
def test_any_decay_stays_finite_and_follows_fp64(device, variant, g):
    """No exp of a positive number is ever formed (field case 24)."""
    p = make(device, variant, B=1, D=8, dtype=torch.float32)
    p.verify()
    p.g_window.fill_(-0.1)
    if variant == "gdn":
        p.g_window[:, :, 1::3] = g
    else:
        p.g_window[:, :, 1::3, 5] = g  # one channel, the others slow
    start = p.state[p.state_indices[0]].cpu().double()
    p.fold([8])
    k, v, g_rows, beta = (window[p.state_indices[0]].cpu().double() for window in p.windows)
    k = k / ((k * k).sum(-1, keepdim=True) + 1e-6).sqrt()
    S = start
    for t in range(8):
        S = S * g_rows[:, t].exp().reshape(S.shape[0], 1, -1)
        u = beta[:, t, None] * (v[:, t] - (S * k[:, t, None]).sum(-1))
        S = S + u[:, :, None] * k[:, t, None]
    assert p.state[p.state_indices[0]].isfinite().all()
    assert oracle.state_error(p.state[p.state_indices[0]], S) <= 1e-6


@variants
def test_outputs_stay_finite_at_infinite_rates(device, variant):
    """g = -inf from a huge A_log and a large input (field cases 24, 25)."""
    p = make(device, variant)
    p = p.with_(A_log=torch.full_like(p.A_log, 100.0), a=p.a * 50)
    assert p.verify().isfinite().all()
    p.fold([4, 2, 1])
    assert p.state[p.state_indices.long()].isfinite().all()


@pytest.mark.parametrize("variant", ["gdn", "kda"])
def test_fold_uses_the_cached_gate_verbatim(device, variant):
    """Edited g and beta are followed: nothing is recomputed (field cases 18, 27)."""
    p = make(device, variant, B=1, dtype=torch.float32)
    slot = p.state_indices[0]
    p.verify()
    p.g_window.zero_()
    p.beta_window.zero_()
    before = p.state[slot].clone()
    p.fold([4])
    bits_equal(p.state[slot], before, "g = 0 and beta = 0 leave the state")
    p.beta_window.fill_(1)
    p.k_window.zero_()
    p.k_window[:, :, :, 3] = 1
    p.fold([1], use_qk_l2norm=False)
    # S k = v for a unit key at beta = 1 and g = 0, to the rounding of v - S k and back.
    got = p.state[slot][:, :, 3]
    torch.testing.assert_close(got, p.v_window[slot, :, 0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("variant", ["gdn", "kda"])
@exactness
@pytest.mark.parametrize("size", [0.0, 1e-7, 1e-3 / 32**0.5])
def test_tiny_keys_and_queries_follow_the_eps_rule(device, variant, exact, size):
    """x / sqrt(|x|^2 + 1e-6), eps inside the root; |k|^2 = 1e-6 (cases 28, 29)."""
    p = make(device, variant, dtype=torch.float32)
    p.q[1::4], p.k[1::4] = size, size
    p.q[2::4], p.k[2::4] = -size, size
    want, trajectories = oracle.run(p)
    oracle.assert_outputs(p.verify(exact=exact), want, RELATIVE[exact])
    p.fold([4, 2, 3])
    for slot, n, states in zip(
        p.state_indices.tolist(), [4, 2, 3], trajectories, strict=True
    ):
        assert oracle.state_error(p.state[slot], states[n]) <= 1e-6


@pytest.mark.parametrize("variant", ["gdn", "kda"])
@exactness
@pytest.mark.parametrize("use_qk_l2norm", [True, False])
@pytest.mark.parametrize("scale", [None, 0.25])
def test_the_norm_flag_and_scale_are_respected(
    device, variant, exact, use_qk_l2norm, scale
):
    """Long keys without the norm would explode, so they are short (field case 30)."""
    p = make(device, variant, dtype=torch.float32)
    p.k.mul_(0.1)
    options = {"use_qk_l2norm": use_qk_l2norm}
    want, trajectories = oracle.run(p, scale=scale, **options)
    other, _ = oracle.run(p, scale=scale, use_qk_l2norm=not use_qk_l2norm)
    assert (other - want).abs().max() > 1e-3, "the sample tells the flag's values apart"
    decoded = p.copy()
    outputs = p.verify(scale=scale, exact=exact, **options)
    oracle.assert_outputs(outputs, want, RELATIVE[exact])
    p.fold([1, 1, 1], **options)
    one = decoded.decode(0, scale=scale, **options)
    if exact:
        bits_equal(one, outputs[::4], "decode")
    p.assert_untouched(decoded.memory("state"))
    slot, after = p.state_indices[0], trajectories[0][1]
    assert oracle.state_error(p.state[slot], after) <= 1e-6


def test_gate_refuses_wrong_metadata(device):
    got = texts(
        device, "gate-gdn",
        lambda x: {"a": x["a"][:, 0]}, rank("b"), longer("b", 0), longer("A_log"),
        longer("dt_bias"), cast("a", torch.int32), cast("dt_bias", torch.float64),
        moved("A_log"), given(lower_bound=-5.0),
    ) + "\n" + texts(
        device, "gate-kda", longer("dt_bias"), spaced("a"), given(lower_bound=1.0)
    )  # fmt: skip
    assert_expected_inline(
        got,
        """\
ValueError: gate: a must be [N, HV] (GDN) or [N, HV, K] (KDA), got 1 dimensions: [12]
ValueError: gate: b must be [N, HV], got 3 dimensions: [1, 12, 2]
ValueError: gate: b must be [N, HV] with N = 12 as in a, got [13, 2]
ValueError: gate: A_log must be [HV] with HV = 2 as in a, got [3]
ValueError: gate: dt_bias must be [HV] with HV = 2 as in a (GDN, from a), got [3]
TypeError: gate: a must be bfloat16 or float16 or float32, got int32
TypeError: gate: dt_bias must be bfloat16 or float16 or float32, got float64
ValueError: gate: A_log must be on DEVICE like a, got meta
ValueError: gate: lower_bound is KDA's safe gate and must be None for GDN (a is [N, HV]), got -5.0
ValueError: gate: dt_bias must be [HV, K] with K = 32 as in a (KDA, from a), got [2, 33]
ValueError: gate: a's innermost dimension must be contiguous, got shape [12, 2, 32] with strides [128, 64, 2]
ValueError: gate: lower_bound must be a finite number below 0, got 1.0""",
    )
