"""Kinds of fault that engines met, and that no one op's tests would show; see field_cases."""

import itertools
import math

import pytest
import torch

import oracle
from calls import CALLS, mutated, named
from engine import D, Engine
from replayssm import ops
from replayssm.graph import Bucket, StaticBatch
from samples import POOLS, VARIANTS, WINDOWS, bits_equal, make, pages

variants = pytest.mark.parametrize("variant", ["gdn", "kda"])
RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_behind_a_ragged_batch_changes_nothing(device, variant):
    """3 requests in 8 rows: offsets are of rows, not of tokens (field case 15)."""
    three = make(device, variant, lengths=[4, 1, 4], tail=3, R=5)
    eight = three.copy()
    changes = {"cu_seqlens": eight.indices([0, 4, 5, 9, 9, 9, 9, 9, 9])}
    for name, filler in (("state_indices", -1), ("window_indices", 0)):
        value = getattr(eight, name)
        changes[name] = torch.cat([value, value.new_full((5,), filler)])
    eight = eight.with_(**changes)
    bits_equal(eight.verify(), three.verify(), "outputs")
    three.fold([4, 1, 2])
    eight.fold([4, 1, 2, 7, 7, 7, 7, 7])
    eight.assert_untouched(three.memory())


@variants
def test_a_step_does_not_remember_the_steps_before_it(device, variant):
    """No cursor and no count: whatever ran before on these pools (field cases 11, 21)."""
    fresh, used = (Engine(device, variant, 3, interval=3) for _ in range(2))
    start, decided = used.memory(), []
    batch = StaticBatch(Bucket(3, 3 * D), D, device, "cap-accept")
    for engine, seeds in ((fresh, []), (used, range(4))):
        for seed in seeds:
            batch.fill(engine.load(seed))
            engine.step(batch)
        for name, value in start.items():
            if "window" not in name:
                engine.pools.get_buffer(name).copy_(value)
        batch.fill(engine.load(7))
        before = batch.rows.clone()
        decided.append(engine.step(batch))
        bits_equal(batch.rows, before, "the batch")
    for one, other in zip(*decided, strict=True):
        bits_equal(one, other, "what was decided")
    lens, _, seq_lens = decided[0]
    assert lens.any()
    bits_equal(seq_lens, batch.seq_lens + lens, "seq_lens")
    for name, value in fresh.memory().items():
        if "window" not in name:
            bits_equal(used.pools.get_buffer(name), value, name)


@variants
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("D", [8, 16])
@pytest.mark.parametrize("strength", [30.0, 88.0, 1e4, math.inf])
def test_outputs_follow_fp64_through_sudden_decays(device, variant, exact, D, strength):
    """Between slow tokens, in one channel of KDA: a decay is never inverted, nor is
    the product of some divided by that of others (field case 24)."""
    p = make(device, variant, B=2, D=D, dtype=torch.float32)
    p.A_log.zero_()
    p.dt_bias.zero_()
    a = torch.full_like(p.a, -2.25)  # g = -0.1
    sudden = a[1::3] if variant == "gdn" else a[1::3, :, 5]
    sudden.fill_(strength)  # g = -strength
    p = p.with_(a=a)
    want, trajectories = oracle.run(p)
    got = p.verify(exact=exact)
    assert got.isfinite().all()
    oracle.assert_outputs(got, want, relative=5e-6 if exact else 1e-5)
    p.fold([D, 5])
    for slot, n, states in zip(p.state_indices.tolist(), [D, 5], trajectories, strict=True):
        assert oracle.state_error(p.state[slot], states[n]) <= 1e-6


@variants
def test_a_state_saved_after_a_commit_goes_on_in_another_slot(device, variant):
    """Nothing of it is pending elsewhere: through the host, windows lost (field case 61)."""
    p = make(device, variant, B=1)
    slot, other = p.state_indices[0], (p.state_indices[0] + 1) % p.state.shape[0]
    p.verify()
    p.fold([3])
    saved, restored = p.state[slot].cpu(), p.copy()
    for pool in (restored.state, *restored.windows):
        pool.fill_(float("nan"))
    restored.state[other] = saved.to(device)
    restored = restored.with_(state_indices=other[None].to(p.state_indices))
    for seed, accept in enumerate([2, 4, 0, 1]):
        p, restored = p.next_tokens(seed), restored.next_tokens(seed)
        bits_equal(restored.verify(), p.verify(), f"outputs of step {seed}")
        for problem in (p, restored):
            problem.fold([accept])
        bits_equal(restored.state[other], p.state[slot], f"state after step {seed}")


@variants
@pytest.mark.parametrize("accepts", [[8] * 4, [1] * 40, [5, 8, 3, 8, 1, 7] * 2])
def test_a_full_window_is_never_overrun_however_many_steps(device, variant, accepts):
    """D = T, from row 0 at every step: no ring, nothing to flush (field case 62)."""
    p = make(device, variant, B=1, D=8, T=8, R=3)
    plain, row = p.copy(), int(p.window_indices[0])
    for seed, accept in enumerate(accepts):
        p, plain = p.next_tokens(seed), plain.next_tokens(seed)
        p.verify()
        p.fold([accept])
        for t in range(accept):
            plain.decode(t)
        p.assert_untouched(plain.memory("state"))
    for name in WINDOWS:
        other = p.memory(name)[name]
        other[row, 1] = float("nan")
        assert other.isnan().all(), f"{name} beside the request's row"


def test_options_of_one_call_do_not_reach_the_next(device):
    """The same tensors, absent arguments and other numbers in turn (field case 63)."""
    p = make(device, "kda", B=2, S=6)
    ends = p.indices([0, 5, 8])
    ways = [
        {}, {"scale": 0.25}, {"lower_bound": -5.0}, {"lower_bound": -3.0},
        {"use_qk_l2norm": False}, {"cu_seqlens": ends},
        {"window_indices": p.indices([0, 1])}, {},
    ]  # fmt: skip
    rounds = [[ops.verify(*p.args[:13], **way) for way in ways] for _ in range(2)]
    for way, one, other in zip(ways, *rounds, strict=True):
        bits_equal(one, other, f"outputs with {way}")
    for (way, one), (_, other) in itertools.pairwise(
        zip(ways[:6], rounds[0], strict=False)
    ):
        assert not torch.equal(one, other), f"{way} makes no difference"
    free = sorted(set(range(6)) - set(p.state_indices.tolist()))[:2]
    tracks = {"track_indices": p.indices(free), "track_steps": p.indices([0, 1])}
    p.copy().fold([3, 3], **tracks)
    before = p.state[free].clone()
    p.fold([3, 3])
    bits_equal(p.state[free], before, "slots of the call before")


def test_a_call_goes_straight_to_its_kernel():
    """Nothing at the keys in between, where torch.library.custom_op puts Python that
    takes 20 to 100 us a call (field case 85)."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for op in sorted({label.split("-")[0] for label in CALLS}):
        name = f"replayssm::{op}"
        assert has_kernel(name, "CPU")
        assert has_kernel(name, "CUDA")
        for key in ("Autograd", "ADInplaceOrView", "CompositeExplicitAutograd"):
            assert not has_kernel(name, key), f"{name} at {key}"


def exchange(state, slots, sources, steps):
    """Slots trade places through a copy."""
    snapshots = state.clone().unsqueeze(2)
    ops.scatter(state, snapshots, slots, steps, source_indices=sources)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_copy_is_read_where_its_source_is_written(device, compiled):
    """op(x.clone(), x) may not become op(x, x) (field case 74)."""
    state = torch.arange(24.0, device=device).reshape(2, 4, 3)
    want = state[:, [1, 0, 2, 3]]
    slots = torch.tensor([0, 1], device=device)
    function = torch.compile(exchange, fullgraph=True) if compiled else exchange
    function(state, slots, slots.flip(0), slots * 0)
    if compiled and not torch.equal(state, want):
        pytest.xfail("this torch drops the copy: docs/limits.md")
    bits_equal(state, want, "state")


def in_one_storage(p):
    """The same problem with all pools in one allocation, and that."""
    dense = {name: getattr(p, name).contiguous() for name in POOLS}
    arena = torch.cat([x.flatten() for x in dense.values()])
    parts = arena.split([x.numel() for x in dense.values()])
    views = {n: part.view(dense[n].shape) for n, part in zip(dense, parts, strict=True)}
    return p.with_(**views), arena


def serve(args, accept):
    out = ops.verify(*args)
    ops.fold(*args[7:13], accept)
    return out


@pytest.mark.parametrize("compiled", [False, True])
def test_pools_in_one_storage_are_written_where_they_are(device, compiled):
    """torch.compile copies them, docs/limits.md, and writes back (field case 73)."""
    if compiled and RELEASE < (2, 12):
        pytest.xfail("this torch writes views of offset graph inputs to the wrong place")
    p, arena = in_one_storage(make(device, "gdn", dtype=torch.float32))
    apart = make(device, "gdn", dtype=torch.float32)
    accept = p.indices([4, 2, 0])
    function = torch.compile(serve, fullgraph=True) if compiled else serve
    bits_equal(function(p.args[:13], accept), serve(apart.args[:13], accept), "outputs")
    for name in POOLS:
        bits_equal(getattr(p, name), getattr(apart, name), name)
    assert pages(p.state).data_ptr() == arena.data_ptr()


@variants
def test_the_pools_of_an_engine_have_storages_of_their_own(variant):
    """Where two share one, a compiler copies the second (field case 73)."""
    buffers = list(Engine("cpu", variant, 2).pools.buffers())
    assert len({x.untyped_storage().data_ptr() for x in buffers}) == len(buffers)


@pytest.mark.gpu
@variants
@pytest.mark.parametrize("B", [0, 3])
def test_a_batch_of_padding_or_of_none_is_captured(variant, B):
    """And its replays do nothing (field case 37)."""
    p = make("cuda", variant).take([-1] * B)
    accept, replays = torch.full_like(p.state_indices, 4), torch.zeros(1, device="cuda")
    before = p.memory()

    def step():
        replays.add_(1)
        out = p.verify()
        p.fold(accept)
        return out

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(3):
        graph.replay()
    assert replays.item() == 4
    assert not out.any()
    p.assert_untouched(before)


@pytest.mark.gpu
@pytest.mark.parametrize("label", CALLS)
def test_an_op_waits_for_its_inputs_and_is_waited_for(label):
    """In one graph: every argument written right before it and overwritten right after
    it, its pools restored (field case 69)."""
    op, args, kwargs = CALLS[label]("cuda")
    call = getattr(torch.ops.replayssm, op).default
    tensors = named(op, args, kwargs)
    written = {pages(tensors[name]) for name in mutated(op, tensors)}
    read = {pages(x) for name, x in tensors.items() if name not in mutated(op, tensors)}
    sources = {x: x.clone() for x in (*written, *read)}

    def once():
        for x, source in sources.items():
            x.fill_(-1)
            x.copy_(source)
        outputs = call(*args, **kwargs)
        for x in read:
            x.fill_(-1)
        return [x for x in torch.utils._pytree.tree_leaves(outputs) if x is not None]

    want = [[x.clone() for x in once()], [x.clone() for x in written]]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = once()
    for _ in range(100):
        graph.replay()
        for one, other in zip((*outputs, *written), itertools.chain(*want), strict=True):
            bits_equal(one, other, label)
