"""Every shape and layout the ops promise, against fp64 and bitwise against dense runs."""

import pytest
import torch

import oracle
from calls import transposed
from replayssm import ops
from samples import POOLS, TOKENS, VARIANTS, WINDOWS, bits_equal, make

variants = pytest.mark.parametrize("variant", VARIANTS)
HEAD_DIMS = [
    (32, 32), (64, 64), (96, 96), (128, 128), (192, 192), (256, 256),
    (32, 64), (64, 128), (192, 128), (128, 64), (80, 80), (48, 40), (5, 3),
]  # fmt: skip
HEADS = [  # H, HV, K, V
    (2, 2, 32, 64), (12, 12, 32, 64), (2, 4, 128, 64), (1, 3, 96, 96), (2, 8, 192, 128),
    (2, 10, 64, 64), (1, 6, 32, 48), (2, 14, 48, 40), (1, 8, 5, 3),
]  # fmt: skip


def check_against_fp64(p, accept):
    """Outputs and committed states."""
    want, trajectories = oracle.run(p)
    oracle.assert_outputs(p.verify(), want)
    p.fold(accept)
    for slot, n, states in zip(p.state_indices.tolist(), accept, trajectories, strict=True):
        assert oracle.state_error(p.state[slot], states[n]) <= 1e-6


@variants
@pytest.mark.parametrize(("K", "V"), HEAD_DIMS)
def test_any_head_dims_follow_fp64(device, variant, K, V):
    """Unequal dims catch a transposed state, odd ones a missing mask (case 48, 53)."""
    check_against_fp64(make(device, variant, B=2, D=2, K=K, V=V, H=1, HV=2), [2, 1])


@variants
@pytest.mark.parametrize(("H", "HV", "K", "V"), HEADS)
def test_any_ratio_of_value_to_key_heads_follows_fp64(device, variant, H, HV, K, V):
    """Key head hv // (HV / H), ratios 1 to 8 (field cases 50, 51)."""
    p = make(device, variant, B=2, D=3, H=H, HV=HV, K=K, V=V)
    check_against_fp64(p, [3, 1])


@variants
@pytest.mark.parametrize("D", [*range(1, 18), 40])
def test_any_window_length_follows_fp64(device, variant, D):
    """With T larger than D, as one buffer serves several D (field case 55)."""
    check_against_fp64(make(device, variant, B=2, D=D, T=40), [D, (D + 1) // 2])


@variants
@pytest.mark.parametrize("B", [1, 2, 256])
def test_any_batch_size_follows_fp64(device, variant, B):
    p = make(device, variant, B=B, D=1)
    oracle.assert_outputs(p.copy().decode(0), oracle.run(p)[0])
    check_against_fp64(p, [1] * B)


def gate(p):
    return ops.gate(p.a, p.b, p.A_log, p.dt_bias, lower_bound=p.lower_bound)


def check_the_same_bits(one, other):
    """Of every op that takes tokens, given the same ones in another form."""
    for name, got, want in zip(("g", "beta"), gate(one), gate(other), strict=True):
        bits_equal(got, want, name)
    for exact in (True, False):
        left, right = one.copy(), other.copy()
        outputs = left.verify(exact=exact), right.verify(exact=exact)
        bits_equal(*outputs, f"outputs with exact={exact}")
        left.assert_untouched(right.memory())
    one, other = one.copy(), other.copy()
    bits_equal(one.decode(1), other.decode(1), "decode")
    one.assert_untouched(other.memory("state"))


@variants
@pytest.mark.parametrize("shift", range(3))
def test_each_gate_input_has_its_own_dtype(device, variant, shift):
    """As if upcast before; a and dt_bias share one: their sum is not to be of it."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16] * 2
    one, other, third = dtypes[shift : shift + 3]
    p = make(device, variant, dtype=other)
    inputs = {"a": one, "b": other, "A_log": third, "dt_bias": one}
    narrow = p.with_(**{name: getattr(p, name).to(kind) for name, kind in inputs.items()})
    wide = narrow.with_(**{name: getattr(narrow, name).float() for name in inputs})
    check_the_same_bits(narrow, wide)


@variants
def test_ragged_rows_follow_fp64(device, variant):
    """Zero-length rows and an uncovered tail, whose output is zero (field case 15)."""
    p = make(device, variant, lengths=[0, 4, 1, 0, 7], tail=5)
    want, _ = oracle.run(p)
    check_against_fp64(p, [0, 4, 1, 0, 3])
    assert not want[12:].any()


@variants
@pytest.mark.parametrize("cu_seqlens", [None, [0]])
def test_an_empty_batch_does_nothing(device, variant, cu_seqlens):
    """B = 0 (field case 37)."""
    p = make(device, variant).take([])
    p = p.with_(cu_seqlens=None if cu_seqlens is None else p.indices(cu_seqlens))
    before = p.memory()
    assert p.verify().shape == (0, *p.v.shape[1:])
    p.fold([])
    p.assert_untouched(before)
    if cu_seqlens is None:
        assert p.decode(0).shape == (0, *p.v.shape[1:])


@variants
def test_a_batch_of_padding_does_nothing(device, variant):
    """Every slot -1 (field cases 35, 37)."""
    p = make(device, variant)
    p = p.with_(state_indices=torch.full_like(p.state_indices, -1))
    before = p.memory()
    assert not p.verify().any()
    assert not p.decode(0).any()
    p.fold([4, 4, 4])
    p.assert_untouched(before)


@variants
@pytest.mark.parametrize("lengths", [[0, 0], []], ids=str)
def test_a_batch_without_tokens_returns_zeros_of_the_tail(device, variant, lengths):
    p = make(device, variant, lengths=lengths, tail=3)
    before = p.memory()
    out = p.verify()
    assert out.shape[0] == 3
    assert not out.any()
    p.assert_untouched(before)


@variants
def test_int64_and_strided_indices_give_the_same_bits(device, variant):
    """Field case 44."""
    plain = make(device, variant, lengths=[3, 1, 4], R=6)
    other = plain.copy()
    wide = {}
    for name in ("state_indices", "window_indices", "cu_seqlens"):
        value = getattr(plain, name).long()
        wide[name] = torch.stack([value, value - 100], dim=1)[:, 0]
    other = other.with_(**wide)
    bits_equal(other.verify(), plain.verify(), "outputs")
    plain.fold([3, 1, 2])
    accept = torch.tensor([[3, 9], [1, 9], [2, 9]], device=device)[:, 0]
    other.fold(accept)
    plain.assert_untouched(other.memory())


@variants
def test_strided_pools_and_packed_tokens_give_the_same_bits_as_dense(device, variant):
    """Writes land in the view, other pages keep their NaN (field cases 45, 46)."""
    strided = make(device, variant, R=5)
    dense = strided.with_(
        **{name: getattr(strided, name).contiguous() for name in (*POOLS, *TOKENS)}
    )
    bits_equal(strided.verify(), dense.verify(), "outputs")
    for problem in (strided, dense):
        problem.fold([4, 2, 0])
    bits_equal(strided.decode(1), dense.decode(1), "decode")
    for name in POOLS:
        bits_equal(getattr(strided, name), getattr(dense, name), name)
        assert strided.memory(name)[name][:, 0].isnan().all(), f"{name}'s other pages"


@variants
def test_strided_heads_give_the_same_bits(device, variant):
    """In memory a head's tokens lie together; in a dense tensor a token's heads do."""
    packed = make(device, variant, H=2, HV=4)
    dense, strided = (
        packed.with_(**{name: lay(getattr(packed, name)) for name in TOKENS})
        for lay in (torch.Tensor.contiguous, transposed)
    )
    check_the_same_bits(strided, dense)
    g, beta = gate(dense)
    stored, plain = strided.copy(), dense.copy()
    for p, lay in ((stored, transposed), (plain, torch.Tensor.contiguous)):
        ops.store(p.k, p.v, lay(g), lay(beta), *p.windows, p.state_indices)
    stored.assert_untouched(plain.memory(*WINDOWS))


def pitched(x, pitch):
    """x with its last dimension ``pitch`` elements apart, NaN between."""
    room = torch.full((*x.shape, pitch), float("nan"), dtype=x.dtype, device=x.device)
    room[..., 0] = x
    return room[..., 0]


@variants
def test_strided_gates_give_the_same_bits(device, variant):
    """b and GDN's a may have any stride, dt_bias and A_log too (field case 46)."""
    plain = make(device, variant)
    kda = variant != "gdn"
    odd = plain.copy().with_(
        b=pitched(plain.b, 40),
        a=plain.a if kda else plain.a.t().contiguous().t(),
        A_log=pitched(plain.A_log, 3),
        dt_bias=plain.dt_bias.t().contiguous().t() if kda else pitched(plain.dt_bias, 7),
    )
    bits_equal(odd.verify(), plain.verify(), "outputs")
    odd.assert_untouched(plain.memory())
    bits_equal(odd.decode(0), plain.decode(0), "decode")
    odd.assert_untouched(plain.memory("state"))
