"""A commit is one thing, however it runs and whatever stands in the padding."""

import pytest
import torch

from engine import REQUESTS, SLOTS, D, Engine
from replayssm.graph import Bucket, Captured, StaticBatch, buckets, live_rows, smallest
from samples import bits_equal

VARIANTS = ("gdn", "kda")


def same(got: Engine, want: Engine) -> None:
    for (name, one), other in zip(
        got.pools.named_buffers(), want.pools.buffers(), strict=True
    ):
        bits_equal(one, other, name)


def batch_of(engine: Engine, mode: str = "cap-accept", tokens: int | None = None):
    bucket = Bucket(engine.B, engine.B * D if tokens is None else tokens)
    return StaticBatch(bucket, D, engine.device, mode)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_request_commits_alone_what_it_commits_in_a_batch(device, variant):
    """Accepted rows, state, conv and snapshot, whatever the neighbours and the padding."""
    for seed in range(6):
        together, batch = Engine(device, variant, 4, interval=3), None
        batch = batch_of(together)
        rows = together.load(seed)
        start = together.memory()
        batch.fill(rows)
        decided = together.step(batch)
        for i in range(rows.shape[0]):
            alone = Engine(device, variant, 4, interval=3)
            alone.load(seed)
            for name, value in alone.inputs.items():
                value[:, :D] = together.inputs[name][:, i * D : (i + 1) * D]
            alone.targets[:D] = together.targets[i * D : (i + 1) * D]
            for value, other in zip(alone.conv, together.conv, strict=True):
                value[:, 0] = other[:, i]
            one = batch_of(alone)
            one.fill(rows[i : i + 1])
            single = alone.step(one)
            for got, want in zip(decided, single, strict=True):
                assert got[i] == want[0]
            slot = int(together.commit.slot_map[rows[i, 0]])
            for name, one_pool in alone.pools.named_buffers():
                if "window" not in name:
                    bits_equal(together.pools.get_buffer(name)[:, slot], one_pool[:, slot])
        named = {int(together.commit.slot_map[r]) for r in rows[:, 0]}
        kept = [s for s in range(REQUESTS) if s not in named] + [SLOTS - 1]
        for name, value in start.items():
            if "window" not in name:
                bits_equal(together.pools.get_buffer(name)[:, kept], value[:, kept], name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_compact_commits_what_cap_accept_commits(device, variant):
    """Packing only leaves out rows whose acceptance was capped anyway."""
    for seed in range(6):
        dense = Engine(device, variant, 4)
        packed = dense.twin()
        rows = dense.load(seed)
        packed.load(seed)
        batch, compact = batch_of(dense), batch_of(packed, "compact")
        batch.fill(rows)
        compact.fill(rows)
        cu_seqlens = compact.cu_seqlens()
        row, column, covered = compact.places(cu_seqlens)
        for value in (*packed.inputs.values(), packed.targets[None]):
            value.copy_(torch.where(
                covered.view(1, -1, *(1,) * (value.dim() - 2)), value[:, row * D + column], 0
            ))  # fmt: skip
        for got, want in zip(packed.step(compact), dense.step(batch), strict=True):
            bits_equal(got, want)
        for name in ("state", *(f"conv_state_{i}" for i in range(len(dense.conv)))):
            bits_equal(packed.pools.get_buffer(name), dense.pools.get_buffer(name), name)


@pytest.mark.gpu
@pytest.mark.parametrize("variant, interval", [("gdn", 0), ("gdn", 3), ("kda", 3)])
def test_500_replays_equal_eager_and_compiled_steps(variant, interval):
    """Random lengths, batches below the bucket, moved slots; nothing syncs or allocates
    (field cases 8, 65, 66, 67, 70)."""
    eager = Engine("cuda", variant, 4, interval)
    captured, compiled = eager.twin(), eager.twin()
    choices = [Bucket(b, b * D) for b in (1, 2, 4)]
    graphs = Captured(captured.step, choices, draft=D, device="cuda", mode="cap-accept")
    graphs.warmup()
    graphs.capture()
    captured.pools.load_state_dict({})
    for (_, one), other in zip(
        captured.pools.named_buffers(), eager.pools.buffers(), strict=True
    ):
        one.copy_(other)  # the warmup wrote windows
    fast = torch.compile(compiled.commit, fullgraph=True)
    whole, compiled.commit = compiled.commit, lambda *args: fast(*args)
    compiled.commit.slot_map = whole.slot_map
    plain = {c: StaticBatch(c, D, "cuda", "cap-accept") for c in choices}
    twin = {c: StaticBatch(c, D, "cuda", "cap-accept") for c in choices}
    allocated = None
    for seed in range(500):
        rows = eager.load(seed)
        captured.load(seed)
        compiled.load(seed)
        choice = smallest(choices, max(rows.shape[0], 1))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            graphs.batches[choice].fill(rows)
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            result = graphs.replay(choice)
            after = torch.cuda.memory_stats()["allocation.all.allocated"]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        allocated = after - before
        assert allocated == 0
        plain[choice].fill(rows)
        want = eager.step(plain[choice])
        for got, other in zip(result, want, strict=True):
            bits_equal(got, other)
        if seed < 60:
            twin[choice].fill(rows)
            for got, other in zip(compiled.step(twin[choice]), want, strict=True):
                bits_equal(got, other)
            same(compiled, eager)
        if seed % 20 == 0 or seed == 499:
            same(captured, eager)


@pytest.mark.gpu
def test_capturing_cold_kernels_is_refused():
    """Field case 66."""
    engine = Engine("cuda", "gdn", 2)
    graphs = Captured(engine.step, [Bucket(2, 2 * D)], draft=D, device="cuda")
    with pytest.raises(RuntimeError, match=r"call warmup\(\) before capture\(\)"):
        graphs.capture()
    with pytest.raises(RuntimeError, match=r"capture\(\) .* before replaying"):
        graphs.replay(Bucket(2, 2 * D))


def test_graphs_are_refused_on_a_cpu():
    engine = Engine("cpu", "gdn", 2)
    with pytest.raises(ValueError, match="device must be a CUDA device to capture on"):
        Captured(engine.step, [Bucket(2, 8)], draft=D, device="cpu")


def test_a_filled_bucket_pads_its_tail(device):
    """A stale row of a larger batch before it cannot stay live (field case 36)."""
    batch = StaticBatch(Bucket(4, 16), 4, device)
    index = torch.arange(4, device=device)
    batch.fill(live_rows(index, index, torch.ones(4, 4, device=device).long(), None))
    batch.fill(
        live_rows(index[:1], index[:1], torch.ones(1, 4, device=device).long(), None)
    )
    assert batch.req_indices.tolist() == [0, -1, -1, -1]
    assert batch.verify_lens.tolist() == [4, 0, 0, 0]
    assert batch.slots(index + 5).tolist() == [5, -1, -1, -1]


def test_packed_rows_never_exceed_the_bucket(device):
    batch = StaticBatch(Bucket(3, 5), 4, device, "compact")
    index = torch.arange(3, device=device)
    tokens = torch.arange(12, device=device).unflatten(0, (3, 4))
    batch.fill(live_rows(index, index, tokens, torch.tensor([2, 9, 4], device=device)))
    cu_seqlens = batch.cu_seqlens()
    assert cu_seqlens.tolist() == [0, 2, 5, 5]
    assert batch.pack(cu_seqlens).tolist() == [0, 1, 4, 5, 6]
    batch.fill(live_rows(index, index, tokens, torch.tensor([1, 0, 2], device=device)))
    cu_seqlens = batch.cu_seqlens()
    assert cu_seqlens.tolist() == [0, 1, 1, 3]
    assert batch.pack(cu_seqlens).tolist() == [0, 8, 9, 0, 0]


def test_the_smallest_bucket_that_holds_a_batch_is_chosen():
    compact = buckets([2, 4], 4, "compact", [4, 8])
    assert compact == [(2, 4), (2, 8), (4, 4), (4, 8)]
    assert smallest(compact, 1, 5) == (2, 8)
    assert smallest(compact, 3) == (4, 4)
    assert smallest(buckets([8, 1, 4], 8, "static"), 2) == (4, 32)
    with pytest.raises(ValueError, match="no bucket holds 5 requests"):
        smallest(compact, 5)


@pytest.mark.parametrize(
    "args, text",
    [
        (([1], 4, "dense"), "mode must be one of static, cap-accept, compact, got 'dense'"),
        (([], 4, "static"), r"batches and draft must be at least 1, got \[\] and 4"),
        (([1], 4, "compact"), "budgets must be given for mode 'compact'"),
        (
            ([1], 4, "static", [3]),
            "budgets must be given for mode 'compact' and for no other",
        ),
        (([2], 4, "compact", [9]), r"budgets must hold an N with B <= N <= B \* D"),
    ],
)
def test_impossible_buckets_are_refused(args, text):
    with pytest.raises(ValueError, match=text):
        buckets(*args)
