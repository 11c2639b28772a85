"""The memory table: its bytes are what the allocators hand out, and what it refuses."""

import gc
import json
import sys
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

import memory
import problem
from replayssm import ops
from replayssm.graph import Pools

TINY = {
    "gdn": {"layers": 2, "H": 2, "HV": 4, "K": 16, "V": 32, "variant": "gdn"},
    "kda": {"layers": 1, "H": 4, "HV": 4, "K": 32, "V": 16, "variant": "kda", "lower_bound": -5},
    "bf16": {
        "layers": 3, "H": 2, "HV": 6, "K": 16, "V": 16, "variant": "gdn", "conv_width": 3,
        "state_dtype": "bfloat16", "activation_dtype": "float32",
    },
}  # fmt: skip
SIZES = {"slots": 5, "requests": 3, "window": 4}
tiny = pytest.mark.parametrize("name", TINY)
ranks = pytest.mark.parametrize("ranks", (1, 2))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "models.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Runs tools/memory.py; returns what it prints, and how it ends where that is early."""

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["memory.py", *map(str, arguments)])
        end = ""
        try:
            memory.main()
        except SystemExit as stop:
            end = "" if stop.code == 2 else f"{stop.code}\n"
        out, error = capsys.readouterr()
        return out + error.rpartition("error: ")[2] + end

    return run


def share_of(config: Path, name: str, ranks: int) -> memory.Share:
    taken, refused = memory.shares(memory.read(config), ranks, SIZES)
    assert not refused
    return taken[name]


@tiny
@ranks
def test_replays_figures_are_the_bytes_that_pools_are_allocated(config, name, ranks):
    share = share_of(config, name, ranks).memory
    model = memory.read(config)[name]
    pools = Pools(model, **SIZES, tensor_parallel=ranks, device="cpu")
    parts = {
        "state": [pools.state], "windows": pools.windows,
        "conv_states": pools.conv_states, "conv_windows": pools.conv_windows,
    }  # fmt: skip
    handed_out = {
        part: sum(x.untyped_storage().nbytes() for x in tensors)
        for part, tensors in parts.items()
    }
    assert handed_out == {part: getattr(share, part) for part in memory.REPLAY}
    everything = sum(x.untyped_storage().nbytes() for x in pools.buffers())
    assert everything == share.total


@tiny
@ranks
def test_the_snapshots_figures_are_the_bytes_that_scatter_and_conv_commit_take(
    config, name, ranks
):
    share, D, R = share_of(config, name, ranks), SIZES["window"], SIZES["requests"]
    pools = Pools(share.model, **SIZES, device="cpu")
    L, _, *inner = pools.state.shape
    snapshots = pools.state.new_zeros(L, R, D, *inner)
    dense = [x.new_zeros(L, R, D, *x.shape[2:]) for x in pools.conv_states]
    slots, lens = torch.tensor([4, 0, 2]), torch.tensor([4, 1, 0])
    ops.scatter(pools.state, snapshots, slots, lens - 1)
    ops.conv_commit(pools.conv_states, dense, slots, lens, window_indices=torch.arange(R))
    assert share.memory.snapshots == snapshots.untyped_storage().nbytes()
    assert share.memory.conv_snapshots == sum(x.untyped_storage().nbytes() for x in dense)


@pytest.mark.gpu
@tiny
@ranks
def test_replays_total_is_what_the_cuda_allocator_hands_out(config, name, ranks):
    share = share_of(config, name, ranks)
    torch.zeros(1, device="cuda")
    gc.collect()
    before = torch.cuda.memory_allocated()
    pools = Pools(share.model, **SIZES, device="cuda")
    taken = torch.cuda.memory_allocated() - before
    # The allocator rounds each buffer, all of them below a MiB here, to 512 bytes.
    sizes = [buffer.nbytes for buffer in pools.buffers()]
    assert sum(sizes) == share.memory.total
    assert taken == sum(-(-size // 512) * 512 for size in sizes)


@pytest.mark.gpu
def test_a_real_models_total_is_what_the_cuda_allocator_hands_out():
    """8.2 GB, of which whole pages of 2 MiB may stay unused behind each buffer."""
    share = memory.shares(
        {"qwen3.5-27b": memory.MODELS["qwen3.5-27b"]}, 1,
        {"slots": 48, "requests": 48, "window": 8},
    )[0]["qwen3.5-27b"]  # fmt: skip
    torch.zeros(1, device="cuda")
    gc.collect()
    before = torch.cuda.memory_allocated()
    pools = Pools(share.model, slots=48, requests=48, window=8, device="cuda")
    taken = torch.cuda.memory_allocated() - before
    count = len(list(pools.buffers()))
    assert share.memory.total <= taken <= share.memory.total + count * 2**21
    del pools
    torch.cuda.empty_cache()  # other processes share the card


def test_the_table_has_every_model_before_it_is_split_over_ranks(command):
    assert_expected_inline(
        command(),
        """\
MiB a rank: TP = 1, S = 48 slots, R = 48 requests, T = D = 8 rows

| model | H / HV | state | windows | conv states | conv windows | total | snapshots | dense conv snapshots | snapshot total |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
| qwen3-next-80b | 16/32 | 3,456.0 | 165.4 | 81.0 | 270.0 | 3,972.4 | 27,648.0 | 648.0 | 31,833.0 |
| qwen3.5-35b | 16/32 | 2,880.0 | 137.8 | 67.5 | 225.0 | 3,310.3 | 23,040.0 | 540.0 | 26,527.5 |
| qwen3.5-27b | 16/48 | 6,912.0 | 294.8 | 135.0 | 450.0 | 7,791.8 | 55,296.0 | 1,080.0 | 63,423.0 |
| qwen3.5-397b | 16/64 | 8,640.0 | 345.9 | 151.9 | 506.2 | 9,644.1 | 69,120.0 | 1,215.0 | 79,126.9 |
| kimi-linear-48b | 32/32 | 1,920.0 | 240.9 | 67.5 | 225.0 | 2,453.4 | 15,360.0 | 540.0 | 17,887.5 |
| kimi-k3 | 96/96 | 19,872.0 | 2,493.7 | 698.6 | 2,328.8 | 25,393.1 | 158,976.0 | 5,589.0 | 185,135.6 |
| ling-3.0-flash | 32/32 | 3,360.0 | 421.6 | 118.1 | 393.8 | 4,293.5 | 26,880.0 | 945.0 | 31,303.1 |
""",
    )


def test_a_rank_of_a_table_has_its_share_of_the_heads(command):
    assert_expected_inline(
        command("--model", "kimi-k3", "--tp", 8, "--requests", 1, "--slots", 2),
        """\
MiB a rank: TP = 8, S = 2 slots, R = 1 requests, T = D = 8 rows

| model | H / HV | state | windows | conv states | conv windows | total | snapshots | dense conv snapshots | snapshot total |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
| kimi-k3 | 12/12 | 103.5 | 6.5 | 3.6 | 6.1 | 119.7 | 414.0 | 14.6 | 535.7 |
""",
    )


@pytest.mark.parametrize("name", [name for name in problem.MODELS if "-tp" in name])
def test_a_rank_of_a_model_is_the_one_that_the_benchmarks_run(name):
    model, ranks = name.split("-tp")
    assert memory.MODELS[model].rank(int(ranks)) == problem.MODELS[name]


def test_what_cannot_be_is_refused_with_its_reason(command, config, tmp_path):
    broken = {
        "field": {"heads": 4}, "dtype": TINY["gdn"] | {"state_dtype": "fp8"},
        "heads": TINY["gdn"] | {"HV": 5},
    }  # fmt: skip
    lines = [
        command("--model", "qwen3.5-27b", "--tp", 3),
        command("--tp", 5),
        command("--tp", 0),
        command("--model", "qwen3.5-27b", "--requests", 0),
        command("--model", "qwen3.5-27b", "--window", -1),
        command("--config", config, "--model", "gdn", "kdb"),
    ]
    path = tmp_path / "broken.json"
    for name, fields in broken.items():
        path.write_text(json.dumps({name: fields}))
        lines.append(command("--config", path))
    path.write_text("[1]")
    lines.append(command("--config", path))
    path.unlink()
    lines.append(command("--config", path))
    assert_expected_inline(
        "".join(lines).replace(str(tmp_path), "."),
        """\
memory.py: qwen3.5-27b: LinearAttention.rank: tensor_parallel must divide the heads, got 3 for H = 16 and HV = 48
memory.py: qwen3-next-80b, qwen3.5-35b: LinearAttention.rank: tensor_parallel must divide the heads, got 5 for H = 16 and HV = 32
memory.py: qwen3.5-27b: LinearAttention.rank: tensor_parallel must divide the heads, got 5 for H = 16 and HV = 48
memory.py: qwen3.5-397b: LinearAttention.rank: tensor_parallel must divide the heads, got 5 for H = 16 and HV = 64
memory.py: kimi-linear-48b, ling-3.0-flash: LinearAttention.rank: tensor_parallel must divide the heads, got 5 for H = 32 and HV = 32
memory.py: kimi-k3: LinearAttention.rank: tensor_parallel must divide the heads, got 5 for H = 96 and HV = 96
memory.py: qwen3-next-80b, qwen3.5-35b, qwen3.5-27b, qwen3.5-397b, kimi-linear-48b, kimi-k3, ling-3.0-flash: LinearAttention.rank: tensor_parallel must be at least 1, got 0
memory.py: qwen3.5-27b: Pools: requests must be at least 1, got 0
memory.py: qwen3.5-27b: Pools: window must be at least 1, got -1
argument --model: have gdn, kda, bf16, got kdb
argument --config: ./broken.json, field: LinearAttention.__init__() got an unexpected keyword argument 'heads'
argument --config: ./broken.json, dtype: LinearAttention: state_dtype must be bfloat16 or float16 or float32, got fp8
argument --config: ./broken.json, heads: LinearAttention: HV must be a multiple of H, got HV = 5 and H = 2
argument --config: ./broken.json must hold an object of objects, one a model
argument --config: [Errno 2] No such file or directory: './broken.json'
""",
    )


def test_models_that_a_rank_count_fits_are_shown_beside_the_refusal_of_others(command):
    shown = command("--tp", 32)
    assert "| kimi-k3 | 3/3 |" in shown and "| qwen3.5-27b |" not in shown
    assert "memory.py: qwen3.5-27b: LinearAttention.rank: tensor_parallel" in shown


def test_the_plot_is_a_png(command, config, tmp_path):
    path = tmp_path / "new" / "memory.png"
    command("--config", config, "--plot", path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
