"""What speculative sampling emits follows the target: chi-square tests of fixed draws."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from replayssm.graph import choose_verify_lens, rejection_accept

N = 40_000


def markov(generator: torch.Generator, D: int, vocab: int, *, without: int = -1) -> Tensor:
    """[D, vocab, vocab]: the distribution of token t + 1 by the token before it."""
    logits = 1.5 * torch.randn(D, vocab, vocab, generator=generator)
    if without >= 0:
        logits[:, :, without] = -torch.inf
    return logits.softmax(-1)


def drawn(generator: torch.Generator, probs: Tensor) -> Tensor:
    return torch.multinomial(probs, 1, generator=generator)[:, 0]


def joint(steps: list[Tensor]) -> Tensor:
    """The probability of every sequence from token 0, first token slowest."""
    chances = steps[0][0]
    for step in steps[1:]:
        chances = (chances.view(-1, len(step), 1) * step).flatten()
    return chances


def assert_follows(cells: Tensor, chances: Tensor) -> None:
    """Chi-square at about 3 in 100,000; cells with fewer than 5 expected count as one."""
    seen = torch.bincount(cells, minlength=chances.numel()).double()
    want = chances.double() * cells.numel()
    assert (seen[want == 0] == 0).all(), "a token of probability 0 came out"
    few = want < 5
    seen = torch.cat([seen[~few], seen[few].sum()[None]])
    want = torch.cat([want[~few], want[few].sum()[None]])
    seen, want = seen[want > 0], want[want > 0]
    freedom = len(want) - 1
    assert freedom > 1
    statistic = ((seen - want) ** 2 / want).sum().item()
    bulk = 2 / (9 * freedom)  # Wilson and Hilferty: its cube root is near normal
    z = ((statistic / freedom) ** (1 / 3) - 1 + bulk) / math.sqrt(bulk)
    assert z < 4, f"chi-square {statistic:.1f} with {freedom} degrees of freedom"


def emitted(
    generator: torch.Generator, target: Tensor, drafts: Tensor, accept_lens: Tensor,
    bonus: Tensor,
) -> Tensor:  # fmt: skip
    """Every request's first D tokens as one number.

    What a call leaves open is drawn from the target, so any bias of the call shows.
    """
    accept_lens, bonus = accept_lens.cpu(), bonus.cpu()
    (D, vocab, _), token, cell = target.shape, drafts[:, 0], 0
    for t in range(D):
        later = drawn(generator, target[t][token])
        draft = drafts[:, min(t + 1, drafts.shape[1] - 1)]
        token = torch.where(t + 1 < accept_lens, draft, later)
        token = torch.where(t + 1 == accept_lens, bonus, token)
        cell = cell * vocab + token
    return cell


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "one-hot"])
@pytest.mark.parametrize(
    ("D", "cut"), [(1, False), *itertools.product((2, 3, 4), (False, True))]
)
def test_the_sequence_follows_the_target(device, D, cut, dense, dtype):
    """All D tokens jointly; target and draft both depend on the token before."""
    generator = torch.Generator().manual_seed(D)
    target = markov(generator, D, 5, without=1).to(dtype).float()
    draft = markov(generator, D, 5)
    tokens, P, Q = [torch.zeros(N, dtype=torch.long)], [], []
    for t in range(D):
        P.append(target[t][tokens[-1]])
        Q.append(draft[t][tokens[-1]])
        tokens.append(drawn(generator, Q[-1]) if dense else Q[-1].argmax(-1))
    drafts = torch.stack(tokens[:D], 1)
    lens = torch.randint(1, D + 1, (N,), generator=generator) if cut else None
    accept_lens, bonus = rejection_accept(
        drafts.to(device),
        torch.stack(Q, 1)[:, : D - 1].to(device) if dense else None,
        torch.stack(P, 1).to(dtype).to(device),
        seed=torch.tensor([D], device=device),
        counters=torch.arange(N, device=device) << 32,
        verify_lens=None if lens is None else lens.to(device),
    )
    if lens is not None:
        assert (accept_lens.cpu() <= lens).all()
    target = target / target.sum(-1, keepdim=True)
    assert_follows(emitted(generator, target, drafts, accept_lens, bonus), joint([*target]))


@pytest.mark.parametrize("step", [0, 1, 1 << 32], ids=["positions", "counters", "requests"])
def test_draws_of_neighbouring_positions_and_counters_are_independent(device, step):
    """Two bonuses of one distribution: after the anchor, and after a certain draft."""
    p = torch.tensor([0.1, 0.2, 0.3, 0.4])
    target = torch.stack([torch.eye(4)[0], p]).expand(N, 2, 4)
    counters = torch.arange(N, device=device) << 8

    def bonus(target: Tensor, counters: Tensor) -> Tensor:
        drafts = torch.zeros(target.shape[:2], dtype=torch.long, device=device)
        seed = torch.tensor(3, device=device)
        accepted = rejection_accept(
            drafts, None, target.to(device), seed=seed, counters=counters
        )
        assert accepted[0].eq(target.shape[1]).all()
        return accepted[1].cpu()

    first = bonus(target[:, 1:], counters)
    second = bonus(target if step == 0 else target[:, 1:], counters + step)
    assert_follows(first * 4 + second, (p[:, None] * p).flatten())


def games(device: str, causal: bool) -> tuple[Tensor, Tensor]:
    """Both tokens of two requests whose lengths depend on each other's first draft.

    Returns the sequences of N games as one number each, and their probabilities.
    """
    q, p = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.3, 0.5])
    confidence = torch.tensor([0.95, 0.3, 0.02])  # of draft 2, by the token of draft 1
    first, second = torch.tensor([0.5, 0.45]), torch.cartesian_prod(*[torch.arange(3)] * 2)
    # The third row is only worth its time if a fourth is likely to follow.
    cost = torch.tensor([1, 1, 1, 1.48, 1.48])
    lens = torch.stack(
        [
            choose_verify_lens(
                torch.stack([first, confidence[x]], 1), cost=cost, causal=causal
            )
            for x in second
        ]
    )
    assert len(lens.unique(dim=0)) > 1
    generator = torch.Generator().manual_seed(5)
    x = torch.multinomial(q, 4 * N, replacement=True, generator=generator).view(N, 2, 2)
    drafts = torch.nn.functional.pad(x.flatten(0, 1), (1, 0))
    accepted = rejection_accept(
        drafts.to(device),
        q.expand(2 * N, 2, 3).to(device),
        p.expand(2 * N, 3, 3).to(device),
        seed=torch.tensor(1, device=device),
        counters=torch.arange(2 * N, device=device),
        verify_lens=lens[x[:, 0, 0] * 3 + x[:, 1, 0]].flatten().to(device),
    )
    target = p.expand(2, 3, 3)
    cells = emitted(generator, target, drafts, *accepted).view(N, 2)
    return cells[:, 0] * 9 + cells[:, 1], joint([*p.expand(4, 3, 3)])


def test_causal_lengths_leave_the_joint_distribution_of_a_batch_alone(device):
    assert_follows(*games(device, causal=True))


def test_lengths_chosen_by_looking_ahead_skew_it(device):
    """Without this the test above would prove nothing."""
    with pytest.raises(AssertionError, match="chi-square"):
        assert_follows(*games(device, causal=False))
