"""Temperature above 0: rejection_accept and Commit.commit in one captured function."""

import pytest
import torch

from engine import REQUESTS, VOCAB, D, Engine
from replayssm.graph import Bucket, Captured, StaticBatch, buckets, rejection_accept
from samples import bits_equal

STEPS, B = 20, 4
RUNS = [
    pytest.param("cpu", False),
    pytest.param("cuda", False, marks=pytest.mark.gpu),
    pytest.param("cuda", True, marks=pytest.mark.gpu),
]


def probabilities(outputs):
    """The toy target's head: [.., VOCAB] from a layer's outputs [.., HV, V]."""
    return (6 * outputs[..., 0, :VOCAB].float()).softmax(-1)


class Sampler:
    """What a step samples with; the drafts of the toy engine are uniform."""

    def __init__(self, engine: Engine) -> None:
        self.engine, device = engine, engine.device
        self.draft_probs = torch.full((B, D - 1, VOCAB), 1 / VOCAB, device=device)
        self.seed = torch.tensor([7], device=device)
        self.counters = torch.arange(REQUESTS, device=device) << 32

    def commit(self, requests, seq_lens, drafts, target_probs, verify_lens):
        """Dense rows, with request -1 as padding that verifies nothing."""
        request = requests.clamp(min=0)
        accept_lens, bonus = rejection_accept(
            drafts, self.draft_probs[: len(drafts)], target_probs, seed=self.seed,
            counters=self.counters[request], verify_lens=verify_lens,
        )  # fmt: skip
        self.counters.index_add_(0, request, accept_lens.long())
        return self.engine.commit.commit(requests, seq_lens, accept_lens, bonus)

    def step(self, batch: StaticBatch):
        """A captured step: what compact packs goes to its place in [B, D, VOCAB]."""
        cu_seqlens, rows = batch.cu_seqlens(), batch.bucket.batch
        probs = probabilities(self.engine.verify(batch, cu_seqlens))
        if cu_seqlens is None:
            probs = probs.view(rows, D, VOCAB)
        else:
            row, column, covered = batch.places(cu_seqlens)
            # Tokens that no row covers go to a row more, which nobody reads.
            dense = probs.new_zeros(rows + 1, D, VOCAB)
            dense[torch.where(covered, row, rows), column.long()] = probs
            probs = dense[:rows]
        return self.commit(
            batch.req_indices, batch.seq_lens, batch.draft_tokens, probs, batch.verify_lens
        )


@pytest.mark.parametrize("device, graphs", RUNS)
@pytest.mark.parametrize("mode", ["static", "cap-accept", "compact"])
@pytest.mark.parametrize("variant", ["gdn", "kda"])
def test_sampled_steps_commit_what_the_live_rows_alone_commit(
    device, graphs, mode, variant
):
    """Against the same calls on [b, D], without buckets, padding, packing or graphs."""
    sampler = Sampler(Engine(device, variant, B, interval=3))
    plain = Sampler(sampler.engine.twin())
    budgets = [4, 8, 16] if mode == "compact" else None
    captured = Captured(
        sampler.step, buckets([1, B], D, mode, budgets), draft=D, device=device, mode=mode,
        graphs=graphs,
    )  # fmt: skip
    captured.warmup()
    captured.capture()
    lengths = set()
    for seed in range(STEPS):
        rows, _ = (one.engine.load(seed) for one in (sampler, plain))
        if mode == "static":
            rows[:, 2] = D
        b, tokens = max(len(rows), 1), max(int(rows[:, 2].sum()), 1)
        choice = captured.bucket(b, tokens if mode == "compact" else None)
        batch, alone = captured.batches[choice], StaticBatch(Bucket(b, b * D), D, device)
        batch.fill(rows)
        alone.fill(rows)
        if mode == "compact":
            sampler.engine.pack(batch)
        result, want = captured.replay(choice), plain.step(alone)
        for got, other in zip(result, want, strict=True):
            bits_equal(got[:b], other)
        for name in ("state", "conv_state_0"):
            got, other = (x.engine.pools.get_buffer(name) for x in (sampler, plain))
            bits_equal(got, other, name)
        bits_equal(sampler.counters, plain.counters)
        lengths |= set(want.accept_lens[: len(rows)].tolist())
    assert lengths >= {1, D}
