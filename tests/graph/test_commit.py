"""A commit is one thing, however it runs and whatever stands in the padding."""

import gc
import itertools
from typing import get_args

import pytest
import torch

from engine import REQUESTS, SLOTS, D, Engine
from replayssm.graph import (
    Bucket,
    Captured,
    Mode,
    StaticBatch,
    buckets,
    live_rows,
    smallest,
)
from samples import VARIANTS, bits, bits_equal, unsynced


def differ(got, want) -> torch.Tensor:
    """Whether any bit differs, as a tensor that nobody has read."""
    pairs = zip(got, want, strict=True)
    return torch.stack([(bits(one) != bits(other)).any() for one, other in pairs]).any()


def everything(decided, engine: Engine) -> tuple[torch.Tensor, ...]:
    return (*decided, *engine.pools.buffers())


def untouched(engine: Engine, start: dict, rows: torch.Tensor, decided) -> tuple:
    """The slots that a step must leave alone, now and before it."""
    committed = rows[:, 0][decided.accept_lens[: rows.shape[0]] > 0]
    kept = torch.ones(SLOTS, dtype=torch.bool, device=rows.device)
    kept[engine.commit.slot_map[committed].long()] = False
    if engine.commit.track_interval:
        kept[REQUESTS + committed] = False
    pools = {n: b for n, b in engine.pools.named_buffers() if "window" not in n}
    return [b[:, kept] for b in pools.values()], [start[n][:, kept] for n in pools]


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
        packed.pack(compact)
        for got, want in zip(packed.step(compact), dense.step(batch), strict=True):
            bits_equal(got, want)
        for name in ("state", *(f"conv_state_{i}" for i in range(len(dense.conv)))):
            bits_equal(packed.pools.get_buffer(name), dense.pools.get_buffer(name), name)


WAYS = [
    *itertools.product(("gdn", "kda-safe"), (0, 3), get_args(Mode)),
    ("kda", 3, "cap-accept"),
    ("kda", 0, "compact"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("variant, interval, mode", WAYS)
def test_500_replays_equal_eager_and_compiled_steps(variant, interval, mode):
    """Every length often, batches below the bucket, moved slots; nothing syncs or allocates
    (field cases 8, 65, 66, 67, 70)."""
    eager = Engine("cuda", variant, 4, interval)
    captured, compiled = eager.twin(), eager.twin()
    choices = buckets([1, 2, 4], D, mode, [4, 8, 16] if mode == "compact" else None)
    graphs = Captured(captured.step, choices, draft=D, device="cuda", mode=mode)
    graphs.warmup()
    graphs.capture()
    torch._dynamo.reset()  # its limit of graphs is for all commits of a process
    compiled.commit.compile(fullgraph=True)
    plain = {c: StaticBatch(c, D, "cuda", mode) for c in choices}
    # One flag for each replay and comparison, on the device: what a sync would hide stays.
    flags = torch.zeros(500, 3, dtype=torch.bool, device="cuda")
    seen = torch.zeros(D + 1, dtype=torch.int64, device="cuda")  # of each accept length
    for seed in range(500):
        rows, *_ = (engine.load(seed) for engine in (eager, captured, compiled))
        if mode == "static":
            rows[:, 2] = D
        tokens = max(int(rows[:, 2].sum()), 1) if mode == "compact" else None
        choice = smallest(choices, max(rows.shape[0], 1), tokens)
        start = eager.memory()
        with unsynced():
            graphs.batches[choice].fill(rows)
        plain[choice].fill(rows)
        if mode == "compact":
            for engine in (eager, captured, compiled):
                engine.pack(plain[choice])
        with unsynced():
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            result = graphs.replay(choice)
            after = torch.cuda.memory_stats()["allocation.all.allocated"]
        assert after == before
        want = eager.step(plain[choice])
        other = compiled.step(plain[choice])
        for i, got in enumerate(((result, captured), (other, compiled))):
            flags[seed, i] = differ(everything(*got), everything(want, eager))
        flags[seed, 2] = differ(*untouched(eager, start, rows, want))
        lens = want.accept_lens[: rows.shape[0]].long()
        seen.index_add_(0, lens, torch.ones_like(lens))
    found = [flags[:, i].nonzero()[:, 0].tolist() for i in range(3)]
    assert found == [[], [], []], "captured, compiled, or another slot: these replays"
    # A dense row without a cap takes at least its anchor.
    often = [n > 50 for n in seen.tolist()]
    assert often == [mode != "static", *[True] * D], seen


@pytest.mark.gpu
def test_a_result_that_is_read_before_the_next_replay_is_right():
    """Buckets share memory, and a larger one was captured and replayed before."""
    eager = Engine("cuda", "gdn", 4, interval=3)
    captured = eager.twin()
    small, large = buckets([1, 4], D, "cap-accept")

    def step(engine):
        """With results and temporaries that differ in size from bucket to bucket."""
        return lambda batch: (
            *engine.step(batch),
            batch.rows.repeat(1, 2000),
            batch.rows.repeat(1, 5000).cumsum(1)[:, -1],
        )

    graphs = Captured(
        step(captured), [small, large], draft=D, device="cuda", mode="cap-accept"
    )
    graphs.warmup()
    graphs.capture()
    assert graphs.graphs[small].pool() == graphs.graphs[large].pool()
    plain = {c: StaticBatch(c, D, "cuda", "cap-accept") for c in (small, large)}
    draw = torch.Generator().manual_seed(0)
    order = [1, 0, *torch.randint(0, 2, (50,), generator=draw).tolist()]
    for seed, which in enumerate(order):
        choice = (small, large)[which]
        rows, _ = (engine.load(seed)[: choice.batch] for engine in (captured, eager))
        graphs.batches[choice].fill(rows)
        result = [x.cpu() for x in graphs.replay(choice)]
        plain[choice].fill(rows)
        for got, want in zip(result, step(eager)(plain[choice]), strict=True):
            bits_equal(got, want.cpu(), f"replay {seed}")


@pytest.mark.gpu
def test_capturing_cold_kernels_is_refused():
    """Field case 66."""
    engine = Engine("cuda", "gdn", 2)
    graphs = Captured(engine.step, [Bucket(2, 2 * D)], draft=D, device="cuda")
    with pytest.raises(RuntimeError, match=r"call warmup\(\) before capture\(\)"):
        graphs.capture()
    with pytest.raises(RuntimeError, match=r"capture\(\) .* before replaying"):
        graphs.replay(Bucket(2, 2 * D))


@pytest.mark.gpu
def test_a_graph_among_garbage_does_not_end_a_capture():
    """The garbage collector would free it there, and CUDA refuse that and the capture."""
    x = torch.zeros(1, device="cuda")
    other = torch.cuda.CUDAGraph()
    with torch.cuda.graph(other):
        x.add_(1)
    owners = [other]
    del other

    def function(batch):
        if torch.cuda.is_current_stream_capturing():
            cycle = [owners.pop()]
            cycle.append(cycle)
            del cycle
            young = [[] for _ in range(10**4)]
            del young
        return x + 1

    graphs = Captured(function, [Bucket(1, D)], draft=D, device="cuda")
    graphs.warmup()
    graphs.capture()
    assert gc.isenabled() and not owners
    assert graphs.replay(Bucket(1, D)).item() == 1


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
