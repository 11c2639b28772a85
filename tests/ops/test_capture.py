"""The ops in CUDA graphs: nothing waits for the host and nothing of it is baked in."""

import itertools
import json

import pytest
import torch

from calls import CALLS, mutated, named
from process import python
from replayssm import ops
from samples import bits_equal, make, pages, unsynced

pytestmark = pytest.mark.gpu


def run(label):
    """A call's op, its tensors, and a function making the call."""
    op, args, kwargs = CALLS[label]("cuda")
    call = getattr(torch.ops.replayssm, op).default
    return op, named(op, args, kwargs), lambda: call(*args, **kwargs)


def capture(function):
    """A CUDA graph of function, whose kernels have been compiled, and its result."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


@pytest.mark.parametrize("label", CALLS)
def test_no_op_waits_for_the_device(label):
    """No .item(), no blocking copy (field case 67)."""
    _, _, call = run(label)
    call()  # compiles
    with unsynced():
        call()


@pytest.mark.parametrize("label", CALLS)
def test_a_captured_op_equals_eager(label):
    op, tensors, call = run(label)
    _, eager, eager_call = run(label)
    before = {name: pages(tensors[name]).clone() for name in mutated(op, tensors)}
    call()
    for name, value in before.items():
        pages(tensors[name]).copy_(value)
    graph, got = capture(call)
    for name, value in before.items():  # capturing ran nothing
        bits_equal(pages(tensors[name]), value, name)
    graph.replay()
    want = eager_call()
    if want is not None:
        pairs = zip(
            *(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True
        )
        for one, other in pairs:
            bits_equal(one, other, "output")
    for name in before:
        bits_equal(pages(tensors[name]), pages(eager[name]), name)


@pytest.mark.parametrize("variant", ["gdn", "kda"])
def test_replays_follow_the_values_in_device_memory(variant):
    """Accepted lengths, slots and lengths all change (field cases 8, 36, 65, 70)."""
    p = make("cuda", variant, lengths=[4, 4, 4, 4], S=9, R=7)
    accept = p.indices([4, 4, 4, 4])
    eager = p.copy()

    def step(problem, accept):
        out = problem.verify()
        problem.fold(accept)
        return out

    step(p.copy(), accept)
    graph, out = capture(lambda: step(p, accept))
    slots, rows = p.state_indices.clone(), p.window_indices.clone()
    cases = [([1, 0, 4, 2], []), ([3, 4, 0, 1], [3]), ([0] * 4, []), ([4, 1, 7, 7], [2, 3])]
    for seed, (lens, dead) in enumerate(cases * 10):
        fresh = eager.next_tokens(seed)
        order = torch.tensor([(i + seed) % 4 for i in range(4)], device="cuda")
        new_slots, new_rows = slots[order], rows[order]
        new_slots[dead] = -1
        p.state_indices.copy_(new_slots)
        p.window_indices.copy_(new_rows)
        ends = [0, 3, 8, 11, 16] if seed % 2 else [0, 4, 4, 9, 12]
        p.cu_seqlens.copy_(p.indices(ends))
        for name in ("q", "k", "v", "a", "b"):
            getattr(p, name).copy_(getattr(fresh, name))
        lengths = [end - start for start, end in itertools.pairwise(ends)]
        accept.copy_(p.indices([min(pair) for pair in zip(lens, lengths, strict=True)]))
        graph.replay()
        now = fresh.with_(
            state_indices=new_slots, window_indices=new_rows, cu_seqlens=p.indices(ends)
        )
        bits_equal(out, step(now, accept), f"outputs of replay {seed}")
        p.assert_untouched(eager.memory())


def test_a_producer_right_before_an_op_in_one_graph_is_waited_for():
    """The op never reads a row before its writer is done (field case 69)."""
    p = make("cuda", "gdn", B=64, D=4)
    source = p.k.clone()
    want = p.copy().verify()

    def step():
        p.k.fill_(0)
        p.k.copy_(source)
        out = p.verify()
        p.q.add_(0)
        return out

    step()
    graph, out = capture(step)
    for _ in range(200):
        graph.replay()
        bits_equal(out, want, "outputs")


def test_ops_run_on_the_current_stream():
    p = make("cuda", "gdn")
    want = p.copy().verify()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        q = p.q * 1
        out = ops.verify(q, *p.args[1:], lower_bound=p.lower_bound)
    torch.cuda.current_stream().wait_stream(stream)
    bits_equal(out, want, "outputs")


# Prints what triton compiles, or finds compiled, in each warmup and after it.
COLD = """
import json, sys
from triton import knobs
from engine import D, Engine
from replayssm.graph import Captured, buckets
made = []
knobs.compilation.listener = lambda *, src, **rest: made.append(src.name)
for mode, budgets in (("cap-accept", None), ("compact", [4, 7, 16])):
    engine = Engine("cuda", sys.argv[1], 4, interval=3)
    choices = buckets([1, 4], D, mode, budgets)
    graphs = Captured(engine.step, choices, draft=D, device="cuda", mode=mode)
    graphs.warmup()
    print(json.dumps(made))
    made.clear()
    graphs.capture()
    for choice in choices:
        graphs.replay(choice)
    print(json.dumps(made))
    made.clear()
"""


@pytest.mark.parametrize("variant", ["gdn", "kda"])
def test_warmup_compiles_all_that_is_captured(variant, tmp_path):
    """In a process of its own, that found nothing compiled (field case 66)."""
    done = python("-c", COLD, variant, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    dense, none, compact, nothing = map(json.loads, done.stdout.splitlines())
    assert {"recur", "fold", "accept", "commit_indices", "conv_commit"} <= {*dense}
    assert "recur" in compact
    assert none == nothing == []
