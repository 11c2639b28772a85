"""The commit under torch.compile, torch.export and AOTInductor: eager's bits, few graphs."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.cudagraph_trees import get_manager
from torch._inductor.utils import run_and_get_code
from torch.func import functional_call

from engine import REQUESTS, VOCAB, D, Engine
from samples import bits_equal

BATCHES = (1, 2, 3, 4, 7, 8, 16, 33, 64)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def arguments(engine: Engine, B: int, seed: int = 0) -> tuple:
    """forward's arguments for B requests, some of them padding."""
    draw = torch.Generator().manual_seed(seed)
    request = torch.arange(B) % 7 - 1  # -1 and one past the map are padding
    request = torch.where(torch.arange(B) < 7, request, -1)
    drafts, targets = torch.randint(0, VOCAB, (2, B, D), generator=draw)
    lens = torch.randint(0, D + 1, (B,), generator=draw)
    given = (request, torch.arange(B) + seed, drafts, targets, lens)
    return tuple(x.to(engine.device) for x in given)


def pair(device: str, variant: str, B: int, interval: int = 3) -> tuple[Engine, Engine]:
    engine = Engine(device, variant, B, interval)
    draw = torch.Generator().manual_seed(1)
    for window in (*engine.pools.windows, *engine.pools.conv_windows):
        window.copy_(torch.rand(window.shape, generator=draw) - 1)  # g <= 0
    return engine, engine.twin()


def move(seed: int, *engines: Engine) -> None:
    """Their requests get other slots, where the slot map lies."""
    slots = torch.randperm(REQUESTS, generator=torch.Generator().manual_seed(seed))
    for engine in engines:
        engine.commit.slot_map.copy_(slots)


def same(got: Engine, want: Engine) -> None:
    for (name, one), other in zip(
        got.pools.named_buffers(), want.pools.buffers(), strict=True
    ):
        bits_equal(one, other, name)


def check(commit, engine: Engine, eager: Engine, args: tuple) -> None:
    for got, want in zip(commit(*args), eager.commit(*args), strict=True):
        bits_equal(got, want)
    same(engine, eager)


@pytest.mark.parametrize("variant", ["gdn", "kda"])
def test_a_compiled_commit_equals_eager_and_copies_no_pool(device, variant):
    engine, eager = pair(device, variant, 5)
    args = arguments(engine, 5)
    codes = []

    def commit(*args):
        result, code = run_and_get_code(torch.compile(engine.commit, fullgraph=True), *args)
        codes.extend(code)
        return result

    check(commit, engine, eager, args)
    shapes = re.findall(r"empty_strided\w*\(\(([^()]*)\)", "".join(codes))
    sizes = [math.prod(int(x) for x in shape.split(",") if x.strip()) for shape in shapes]
    # The largest thing a commit may allocate is its four index vectors.
    assert codes and max(sizes, default=0) <= 4 * 5
    assert not re.findall(r"\.clone\b|clone_preserve", "".join(codes))


@pytest.mark.parametrize("variant", ["gdn", "kda"])
def test_batch_sizes_1_to_64_compile_at_most_twice(device, variant):
    engine, eager = pair(device, variant, 64)
    counter = CompileCounterWithBackend("inductor")
    commit = torch.compile(engine.commit, fullgraph=True, backend=counter)
    for B in BATCHES:
        move(B, engine, eager)
        check(commit, engine, eager, arguments(engine, B, seed=B))
    assert counter.frame_count <= 2


def test_the_graph_is_our_four_ops_in_order():
    engine, _ = pair("cpu", "gdn", 5)
    seen = []

    def record(graph, inputs):
        seen.extend(
            str(node.target)
            for node in graph.graph.nodes
            if "replayssm" in str(node.target)
        )
        return graph

    torch.compile(engine.commit, fullgraph=True, backend=record)(*arguments(engine, 5))
    assert_expected_inline(
        "\n".join(seen),
        """\
replayssm.accept.default
replayssm.commit_indices.default
replayssm.fold.default
replayssm.conv_commit.default""",
    )


@pytest.mark.parametrize("variant", ["gdn", "kda"])
def test_an_exported_commit_equals_eager(device, variant):
    engine, eager = pair(device, variant, 5)
    args = arguments(engine, 5)
    program = torch.export.export(engine.commit, args)
    check(program.module(), engine, eager, args)


@pytest.mark.gpu
@pytest.mark.parametrize("interval", [0, 3], ids=["no tracks", "tracks"])
@pytest.mark.parametrize("variant", ["gdn", "kda"])
def test_reduce_overhead_captures_the_commit(variant, interval):
    """Pools are module buffers, which is what it takes; the ops' optional arguments are
    given or not (field cases 79, 80)."""
    engine, eager = pair("cuda", variant, 5, interval)
    commit = torch.compile(engine.commit, fullgraph=True, mode="reduce-overhead")
    for seed in range(6):
        move(seed, engine, eager)
        args = arguments(engine, 5, seed)
        torch.compiler.cudagraph_mark_step_begin()
        for got, want in zip(commit(*args), eager.commit(*args), strict=True):
            bits_equal(got.clone(), want)
        same(engine, eager)
    assert counters["inductor"]["cudagraph_skips"] == 0
    manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    # One graph, recorded in the second call and replayed from then on.
    (graphs,) = manager.roots.values()
    assert [type(node.graph) for node in graphs] == [torch.cuda.CUDAGraph]


class Plain(torch.nn.Module):
    """AOTInductor cannot name a named tuple, and keeps the values that a slot map has when
    it compiles: the map becomes an input."""

    def __init__(self, commit: torch.nn.Module) -> None:
        super().__init__()
        self.commit = commit

    def forward(self, slot_map, *args):
        return tuple(functional_call(self.commit, {"slot_map": slot_map}, args))


ADD_ONE = """
import sys, torch

class AddOne(torch.nn.Module):
    def forward(self, x):
        return x + 1

x = torch.zeros(1, device="cuda")
program = torch.export.export(AddOne(), (x,))
torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1])
torch._inductor.aoti_load_package(sys.argv[1])(x)
"""


def loads_packages(folder: Path) -> bool:
    """Whether torch's own addition survives it here, tried in a process of its own.

    It takes the CUDA toolkit, and where the compiler links another C++ library than
    torch's, loading any package ends the process.
    """
    command = [sys.executable, "-c", ADD_ONE, folder / "add_one.pt2"]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.parametrize("variant", ["gdn", "kda"])
def test_a_commit_compiled_ahead_of_time_equals_eager(tmp_path, device, variant):
    """AOTInductor, its package folding into our own pools."""
    if device == "cuda" and not loads_packages(tmp_path):
        pytest.skip("AOTInductor cannot build or load a plain torch module here")
    engine, eager = pair(device, variant, 5)
    slot_map = engine.commit.slot_map
    program = torch.export.export(
        Plain(engine.commit), (slot_map.clone(), *arguments(engine, 5))
    )
    path = str(tmp_path / "commit.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=path)
    commit = torch._inductor.aoti_load_package(path)
    known = set(commit.get_constant_fqns())
    buffers = {f"commit.{name}": b for name, b in engine.commit.named_buffers()}
    mine = {name: b for name, b in buffers.items() if name in known}
    commit.load_constants(mine, check_full_update=False, user_managed=True)
    for seed in range(2):
        move(seed, engine, eager)
        args = arguments(engine, 5, seed)
        check(lambda *args: commit(slot_map, *args), engine, eager, args)
