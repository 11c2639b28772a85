"""Speculative sampling, draw by draw: exact, and the same in any row of any batch."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from replayssm.graph import rejection_accept
from replayssm.graph.sampling import _draw, _uniform
from samples import bits_equal, unsynced

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def probabilities(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (1.5 * torch.randn(*shape, generator=generator)).softmax(-1).to(dtype)


def case(
    device: str, *, B: int, D: int, vocab: int, dense: bool = True, cut: bool = True,
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> dict:  # fmt: skip
    """Arguments of rejection_accept, with lengths and drafts out of range among them."""
    generator = torch.Generator().manual_seed(seed)
    drafts = torch.randint(-1, vocab + 1, (B, D), generator=generator)
    inside = torch.randint(0, vocab, (B, D), generator=generator)
    rare = torch.rand(B, D, generator=generator) < 0.1
    arguments = {
        "draft_tokens": torch.where(rare, drafts, inside),
        "draft_probs": probabilities(B, D - 1, vocab, seed=seed + 1, dtype=dtype),
        "target_probs": probabilities(B, D, vocab, seed=seed + 2, dtype=dtype),
        "seed": torch.tensor(seed - 7),
        "counters": torch.randint(-(2**62), 2**62, (B,), generator=generator),
        "verify_lens": torch.randint(-1, D + 2, (B,), generator=generator),
    }
    arguments = {name: value.to(device) for name, value in arguments.items()}
    if not dense:
        arguments["draft_probs"] = None
    if not cut:
        arguments["verify_lens"] = None
    return arguments


def rows_of(arguments: dict, rows: list[int]) -> dict:
    """The same call for these rows only."""
    return {n: x if n == "seed" or x is None else x[rows] for n, x in arguments.items()}


def assert_same(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        bits_equal(one, other)


def mixed(x: int) -> int:
    """splitmix64 in plain integers."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def number(seed: int, counter: int, key: int) -> float:
    state = mixed(mixed(mixed(seed % 2**64) ^ counter % 2**64) ^ key)
    return (state >> 11) / 2**53


def picked(weights: list[float], u: float) -> int:
    counts = [int(w * 2**52) for w in weights]
    wanted = int(u * sum(counts))
    for token, count in enumerate(counts):
        if wanted < count:
            return token
        wanted -= count
    raise AssertionError("no weight")


def one_row(arguments: dict) -> tuple[int, int]:
    """rejection_accept of a batch of one, token by token."""
    drafts = arguments["draft_tokens"][0].tolist()
    P = arguments["target_probs"][0].float().cpu()
    Q = arguments["draft_probs"]
    D, vocab = P.shape
    lens = arguments["verify_lens"]
    verified = D if lens is None else min(max(int(lens), 0), D)
    if verified == 0:
        return 0, -1
    seed, counter = int(arguments["seed"]), int(arguments["counters"])
    accepted, weights = 1, None
    while accepted < verified:
        p, x = P[accepted - 1], drafts[accepted]
        known = 0 <= x < vocab
        if Q is None:
            q = (torch.arange(vocab) == x).float()
        else:
            q = Q[0, accepted - 1].float().cpu()
        if not (known and number(seed, counter, 2 * accepted) * q[x].item() < p[x].item()):
            weights = (p - q).clamp(min=0)
            break
        accepted += 1
    weights = P[accepted - 1] if weights is None else weights
    return accepted, picked(weights.tolist(), number(seed, counter, 2 * accepted - 1))


@pytest.mark.parametrize("vocab", [2, 5, 511, 512, 1300])
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "one-hot"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_equals_a_loop_over_the_drafts_in_exact_arithmetic(device, vocab, dense, dtype):
    for D in (1, 2, 5):
        arguments = case(device, B=24, D=D, vocab=vocab, dense=dense, dtype=dtype, seed=D)
        accept_lens, bonus = rejection_accept(**arguments)
        assert (accept_lens.dtype, bonus.dtype) == (torch.int32, torch.int64)
        want = [one_row(rows_of(arguments, [i])) for i in range(24)]
        assert list(zip(accept_lens.tolist(), bonus.tolist(), strict=True)) == want


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "one-hot"])
def test_a_request_gets_the_same_tokens_in_any_row_of_any_batch(device, dense):
    """Alone, in another order, and among rows of garbage."""
    arguments = case(device, B=37, D=4, vocab=1001, dense=dense)
    want = rejection_accept(**arguments)
    for i in range(37):
        alone = rejection_accept(**rows_of(arguments, [i]))
        assert_same(alone, [x[i : i + 1] for x in want])
    order = torch.randperm(37, generator=torch.Generator().manual_seed(1)).tolist()
    assert_same(rejection_accept(**rows_of(arguments, order)), [x[order] for x in want])
    rows = list(range(0, 37, 2))
    for name in ("draft_probs", "target_probs"):
        if arguments[name] is not None:
            arguments[name][1::2] = float("nan")
    arguments["draft_tokens"][1::2] = 2**40
    assert_same([x[rows] for x in rejection_accept(**arguments)], [x[rows] for x in want])


def test_another_seed_or_counter_gives_other_tokens(device):
    arguments = case(device, B=64, D=4, vocab=100, cut=False)
    want = rejection_accept(**arguments)
    for name in ("seed", "counters"):
        other = rejection_accept(**arguments | {name: arguments[name] + 1})
        assert (other[1] != want[1]).sum() > 16


def test_random_numbers_are_those_of_splitmix64_and_below_one(device):
    counters = torch.tensor([0, 1, -1, 2**62, -(2**63)], device=device)
    keys = torch.arange(4, device=device)
    for seed in (0, 5, -1, 2**63 - 1):
        got = _uniform(torch.tensor(seed, device=device), counters[:, None], keys)
        want = [[number(seed, c, k) for k in range(4)] for c in counters.tolist()]
        assert got.tolist() == want


@pytest.mark.parametrize("dtype", DTYPES)
def test_drafts_of_the_target_itself_are_all_accepted(device, dtype):
    p = probabilities(512, 6, 50, seed=0, dtype=dtype).to(device)
    drafts = torch.multinomial(p.float().flatten(0, 1), 1).view(512, 6).roll(1, 1)
    accept_lens, _ = rejection_accept(
        drafts, p[:, :-1], p,
        seed=torch.tensor(0, device=device), counters=torch.arange(512, device=device),
    )  # fmt: skip
    assert accept_lens.eq(6).all()


@pytest.mark.parametrize("q", ["disjoint", "one-hot", "equal"])
def test_drafts_that_the_target_never_says_are_rejected_and_never_emitted(device, q):
    """Where the distributions are equal, the draft's own never says them either."""
    p, other = probabilities(2, 512, 4, 50, seed=0)
    p[..., ::2], other[..., 1::2] = 0, 0
    Q = {"disjoint": other[:, :3].to(device), "one-hot": None, "equal": p[:, :3].to(device)}
    drafts = torch.randint(0, 25, (512, 4), generator=torch.Generator().manual_seed(0)) * 2
    accept_lens, bonus = rejection_accept(
        drafts.to(device), Q[q], p.to(device),
        seed=torch.tensor(0, device=device), counters=torch.arange(512, device=device),
    )  # fmt: skip
    assert accept_lens.eq(1).all()
    assert (bonus % 2 == 1).all()


def test_half_of_the_unit_interval_draws_a_token_with_half_the_weight(
    device,
):
    for vocab in (4, 512, 513, 5000):
        weights = torch.zeros(4, vocab, device=device)
        weights[:, 1], weights[:, vocab - 2] = 0.5, 0.5
        u = [0.0, 0.5 - 2.0**-53, 0.5, 1 - 2.0**-53]
        u = torch.tensor(u, dtype=torch.float64, device=device)
        assert _draw(weights, u).tolist() == [1, 1, vocab - 2, vocab - 2]


def test_a_rejection_that_rounding_leaves_nothing_to_draw_from_draws_from_the_target(
    device,
):
    """All weight on token 2, but less than 1 of it: some of many drafts are refused."""
    target = torch.tensor([0, 0, 0.5, 0]).expand(64, 2, 4).to(device)
    for q in (None, torch.tensor([0, 0, 1.0, 0]).expand(64, 1, 4).to(device)):
        accept_lens, bonus = rejection_accept(
            torch.full((64, 2), 2, device=device), q, target,
            seed=torch.tensor(0, device=device), counters=torch.arange(64, device=device),
        )  # fmt: skip
        assert accept_lens.unique().tolist() == [1, 2]
        assert bonus.eq(2).all()


def test_rows_without_any_weight_give_a_token_in_range(device):
    for value in (0.0, float("nan"), float("inf"), -1.0):
        arguments = case(device, B=8, D=3, vocab=600, cut=False)
        arguments["target_probs"].fill_(value)
        accept_lens, bonus = rejection_accept(**arguments)
        assert ((accept_lens >= 1) & (accept_lens <= 3)).all()
        assert ((bonus >= 0) & (bonus < 600)).all()


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation made in memory of its own."""

    def __init__(self, arguments: dict) -> None:
        super().__init__()
        self.inputs = {x.untyped_storage().data_ptr() for x in tree_leaves(arguments)}
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        for x in tree_leaves(out):
            if x.untyped_storage().data_ptr() not in self.inputs:
                self.elements = max(
                    self.elements, x.untyped_storage().nbytes() // x.itemsize
                )
        return out


def test_a_large_vocabulary_costs_one_row_a_request_and_not_one_a_draft(device):
    arguments = case(device, B=2, D=8, vocab=250_001)
    with Largest(arguments) as largest:
        got = rejection_accept(**arguments)
    assert largest.elements <= 2 * (250_001 + 512)
    want = [one_row(rows_of(arguments, [i])) for i in range(2)]
    assert list(zip(*(x.tolist() for x in got), strict=True)) == want


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "one-hot"])
def test_it_compiles_as_one_graph_with_equal_results(device, dense, backend):
    torch._dynamo.reset()
    compiled = torch.compile(
        rejection_accept, fullgraph=True, backend=backend, dynamic=True
    )
    for B in (3, 9):
        arguments = case(device, B=B, D=4, vocab=700, dense=dense, cut=dense, seed=B)
        assert_same(compiled(**arguments), rejection_accept(**arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "one-hot"])
def test_a_captured_call_follows_its_inputs_and_waits_for_nothing(dense):
    arguments = case("cuda", B=16, D=4, vocab=1000, dense=dense)
    rejection_accept(**arguments)
    graph = torch.cuda.CUDAGraph()
    with unsynced():
        rejection_accept(**arguments)
        with torch.cuda.graph(graph):
            got = rejection_accept(**arguments)
    for seed in range(1, 6):
        for name, value in case("cuda", B=16, D=4, vocab=1000, seed=seed).items():
            if arguments[name] is not None:
                arguments[name].copy_(value)
        graph.replay()
        assert_same(got, rejection_accept(**arguments))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"draft_tokens": torch.ones(3)}, ValueError),
        ({"draft_tokens": torch.ones(3, 2)}, TypeError),
        ({"target_probs": torch.ones(3, 3, 5)}, ValueError),
        ({"target_probs": torch.ones(3, 2, 0)}, ValueError),
        ({"target_probs": torch.ones(3, 2, 5, dtype=torch.float64)}, TypeError),
        ({"draft_probs": torch.ones(3, 2, 5)}, ValueError),
        ({"draft_probs": torch.ones(3, 1, 5, dtype=torch.int64)}, TypeError),
        ({"seed": torch.ones(2, dtype=torch.int64)}, ValueError),
        ({"seed": torch.tensor(1, dtype=torch.int32)}, TypeError),
        ({"seed": torch.tensor(1, device="meta")}, ValueError),
        ({"counters": torch.ones(2, dtype=torch.int64)}, ValueError),
        ({"counters": torch.ones(3, dtype=torch.int32)}, TypeError),
        ({"verify_lens": torch.ones(2, dtype=torch.int32)}, ValueError),
        ({"verify_lens": torch.ones(3)}, TypeError),
    ],
)
def test_a_mistake_is_refused_with_its_argument_named(change, error):
    arguments = case("cpu", B=3, D=2, vocab=5) | change
    with pytest.raises(error, match=f"rejection_accept: {next(iter(change))} must"):
        rejection_accept(**arguments)
