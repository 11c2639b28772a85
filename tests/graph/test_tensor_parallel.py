"""Ranks that share the heads commit what one process with all of them commits."""

import dataclasses
import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from expecttest import assert_expected_inline

from engine import D, Engine, L
from ranks import Case, Step, run_alone, run_ranks
from replayssm.graph import Bucket, Captured, LinearAttention, StaticBatch
from samples import bits_equal

# The heads of Qwen3.5-27B and of Kimi-K3, which serve on 2 and on 8 ranks.
GDN = LinearAttention(L, 16, 48, 8, 8, "gdn")
KDA = LinearAttention(L, 96, 96, 8, 8, "kda", lower_bound=-5.0)
WHOLE = {"gdn": GDN, "kda": KDA}


def devices(count: int) -> list[pytest.MarkDecorator]:
    """Marks of a test that needs so many CUDA devices."""
    few = torch.cuda.device_count() < count
    return [pytest.mark.gpu, pytest.mark.skipif(few, reason=f"needs {count} CUDA devices")]


RUNS = [
    pytest.param("cpu", "gdn", 2),
    pytest.param("cpu", "kda", 8),
    *(
        pytest.param("cuda", variant, ranks, marks=devices(ranks))
        for variant in WHOLE
        for ranks in (2, 4, 8)
    ),
]
GRAPHS = [run for run in RUNS if run.values[0] == "cuda"]


def error(function, *args):
    try:
        function(*args)
    except (ValueError, TypeError) as raised:
        return f"{type(raised).__name__}: {raised}"
    return "accepted"


@pytest.mark.parametrize("ranks", (1, 2, 4, 8, 16))
@pytest.mark.parametrize("variant", WHOLE)
def test_ranks_part_the_heads_in_order_and_each_value_head_stays_with_its_key_head(
    variant, ranks
):
    model = WHOLE[variant]
    shards = [model.shard(rank, ranks) for rank in range(ranks)]
    share = model.rank(ranks)
    for whole, key in ((model.H, True), (model.HV, False)):
        parts = [s.key_heads if key else s.value_heads for s in shards]
        assert [i for part in parts for i in range(whole)[part]] == list(range(whole))
    for shard in shards:
        key_heads = range(model.H)[shard.key_heads]
        for i, value_head in enumerate(range(model.HV)[shard.value_heads]):
            # Local head i // (HV / H) is the same key head as that of the whole model.
            local = key_heads[i // (share.HV // share.H)]
            assert local == value_head // (model.HV // model.H)


@pytest.mark.parametrize("ranks", (1, 2, 4, 8, 16))
@pytest.mark.parametrize("variant", WHOLE)
def test_a_ranks_channels_are_those_of_its_heads_in_the_order_of_its_own_convolution(
    variant, ranks
):
    model = WHOLE[variant]
    q, k, v = (
        torch.tensor([(part, head) for head in range(heads) for _ in range(size)])
        for part, (heads, size) in enumerate(
            ((model.H, model.K), (model.H, model.K), (model.HV, model.V))
        )
    )
    whole = [torch.cat([q, k, v])] if variant == "gdn" else [q, k, v]
    for rank in range(ranks):
        shard, share = model.shard(rank, ranks), model.rank(ranks)
        assert tuple(map(len, shard.channels)) == share.conv_groups
        got = torch.cat([x[c] for x, c in zip(whole, shard.channels, strict=True)])
        heads = (shard.key_heads, shard.key_heads, shard.value_heads)
        want = [
            (part, head)
            for part, (run, size) in enumerate(
                zip(heads, (model.K, model.K, model.V), strict=True)
            )
            for head in range(run.start, run.stop)
            for _ in range(size)
        ]
        assert got.tolist() == list(map(list, want))
        assert all(len(c.unique()) == len(c) for c in shard.channels)


def test_a_model_without_a_convolution_has_no_channels_to_share():
    assert dataclasses.replace(GDN, conv_width=1).shard(1, 2).channels == ()


def test_uneven_shares_and_ranks_that_are_not_there_are_refused():
    lines = [
        error(model.shard, rank, ranks)
        for model, rank, ranks in (
            (GDN, 0, 3), (GDN, 0, 32), (GDN, 0, 48), (KDA, 0, 5), (KDA, 0, 64), (GDN, 0, 0),
            (KDA, 8, 8), (KDA, -1, 8), (KDA, 1.0, 8), (KDA, True, 8), (KDA, 0, 2.0),
        )
    ]  # fmt: skip
    assert_expected_inline(
        "\n".join(lines),
        """\
ValueError: LinearAttention.rank: tensor_parallel must divide the heads, got 3 for H = 16 and HV = 48
ValueError: LinearAttention.rank: tensor_parallel must divide the heads, got 32 for H = 16 and HV = 48
ValueError: LinearAttention.rank: tensor_parallel must divide the heads, got 48 for H = 16 and HV = 48
ValueError: LinearAttention.rank: tensor_parallel must divide the heads, got 5 for H = 96 and HV = 96
ValueError: LinearAttention.rank: tensor_parallel must divide the heads, got 64 for H = 96 and HV = 96
ValueError: LinearAttention.rank: tensor_parallel must be at least 1, got 0
ValueError: LinearAttention.shard: rank must be 0 to 7 with tensor_parallel = 8, got 8
ValueError: LinearAttention.shard: rank must be 0 to 7 with tensor_parallel = 8, got -1
TypeError: LinearAttention.shard: rank must be an int, got 1.0
TypeError: LinearAttention.shard: rank must be an int, got True
TypeError: LinearAttention.rank: tensor_parallel must be an int, got 2.0""",
    )


@functools.cache
def runs(device: str, variant: str, ranks: int) -> SimpleNamespace:
    """The record of every rank, and of one process with all heads."""
    model, steps = WHOLE[variant], 16
    if device == "cuda":
        model, steps = dataclasses.replace(model, K=128, V=128), 50
    case = Case(model, ranks, steps, device)
    with tempfile.TemporaryDirectory() as folder:
        records = run_ranks(case, Path(folder))
    alone = run_alone(case, [step.sums for step in records[0].steps])
    shards = [model.shard(rank, ranks) for rank in range(ranks)]
    return SimpleNamespace(ranks=records, alone=alone, shards=shards)


def steps(run: SimpleNamespace) -> list[list[Step]]:
    return [record.steps for record in run.ranks]


@pytest.mark.parametrize("device, variant, ranks", RUNS)
def test_a_ranks_pools_are_its_heads_of_the_one_process_run_bit_for_bit(
    device, variant, ranks
):
    run = runs(device, variant, ranks)
    for rank, (record, shard) in enumerate(zip(run.ranks, run.shards, strict=True)):
        assert record.pools.keys() == run.alone.pools.keys()
        for name, got in record.pools.items():
            whole = run.alone.pools[name]
            if name.startswith("conv"):
                want = whole[:, :, shard.channels[int(name[-1])]]
            else:
                want = whole[:, :, shard.key_heads if name[0] == "k" else shard.value_heads]
            bits_equal(got, want, f"{name} of rank {rank}")


@pytest.mark.parametrize("device, variant, ranks", RUNS)
def test_gathered_head_outputs_are_the_one_process_runs_bit_for_bit(device, variant, ranks):
    run = runs(device, variant, ranks)
    for i, (want, *parts) in enumerate(zip(run.alone.steps, *steps(run), strict=True)):
        heads = torch.cat([part.heads for part in parts], dim=2)
        bits_equal(heads, want.heads, f"head outputs of step {i}")


@pytest.mark.parametrize("device, variant, ranks", RUNS)
def test_every_rank_decides_what_the_one_process_run_does(device, variant, ranks):
    run = runs(device, variant, ranks)
    lengths = set()
    for i, (want, *parts) in enumerate(zip(run.alone.steps, *steps(run), strict=True)):
        lengths.update(want.committed.accept_lens.tolist())
        for part in parts:
            bits_equal(part.sums, parts[0].sums, f"sums of step {i}")
            for got, other in zip(part.committed, want.committed, strict=True):
                bits_equal(got, other, f"decision of step {i}")
    assert lengths == set(range(D + 1)), "the run accepted too little to tell"


@pytest.mark.parametrize("device, variant, ranks", RUNS)
def test_a_reduced_output_is_the_whole_projection_within_its_roundings(
    device, variant, ranks
):
    """Of two partial sums it is the sum to the last bit, since addition commutes."""
    run = runs(device, variant, ranks)
    unit = torch.finfo(torch.bfloat16).eps / 2
    # Every partial is rounded, as are n - 1 additions and the whole; one more unit is for
    # the products of these roundings.
    roundings = (ranks + 2) * unit
    for i, (want, *parts) in enumerate(zip(run.alone.steps, *steps(run), strict=True)):
        partials = torch.stack([part.partials for part in parts])
        if ranks == 2:
            bits_equal(parts[0].sums, partials[0] + partials[1], f"sums of step {i}")
        bound = partials.float().abs().sum(0) * roundings
        off = (parts[0].sums.float() - want.partials.float()).abs()
        assert (off <= bound).all(), f"step {i}: off by {off.max()}"


@pytest.mark.parametrize("device, variant, ranks", GRAPHS)
def test_the_all_reduce_of_every_layer_is_in_the_captured_step(device, variant, ranks):
    for record in runs(device, variant, ranks).ranks:
        assert sum("AllReduce" in name for name in record.nodes) == L


@devices(2)[0]
@devices(2)[1]
def test_a_step_is_captured_on_its_own_device_whatever_the_current_one_is():
    eager = Engine("cuda:1", "gdn", 2)
    captured, bucket = eager.twin(), Bucket(2, 2 * D)
    graphs = Captured(captured.step, [bucket], draft=D, device="cuda:1", mode="cap-accept")
    batch = StaticBatch(bucket, D, "cuda:1", "cap-accept")
    with torch.cuda.device(0):
        graphs.warmup()
        graphs.capture()
        for seed in range(10):
            for engine, rows in ((captured, graphs.batches[bucket]), (eager, batch)):
                rows.fill(engine.load(seed))
            for got, want in zip(graphs.replay(bucket), eager.step(batch), strict=True):
                bits_equal(got, want, f"decision of step {seed}")
    for (name, got), want in zip(
        captured.pools.named_buffers(), eager.pools.buffers(), strict=True
    ):
        bits_equal(got, want, name)
