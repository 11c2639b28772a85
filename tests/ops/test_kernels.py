"""What only a GPU can show of the kernels: tiles, lowerings, what is compiled."""

import pytest
import torch

from lowered import run, tiled
from replayssm import ops
from replayssm.ops import select
from samples import TOKENS, VARIANTS, bits, bits_equal, make

pytestmark = pytest.mark.gpu

# Every tile the tables may pick, and more: (BV, warps) with 1 to 8 rows a thread.
TILES = [(16, 1), (16, 2), (16, 4), (32, 1), (32, 2), (32, 4), (64, 2), (64, 4), (128, 4)]


INEXACT_TILES = [(32, 2), (64, 2), (32, 4), (64, 4), (128, 4)]


def kernels(name: str, tile: tuple[int, int] | None = None):
    return select.load(name) if tile is None else tiled(name, tile)


def verify(chosen, p, **options):
    return run(
        chosen, "verify", *p.args, lower_bound=p.lower_bound, **options
    )[0]  # fmt: skip


def fold(chosen, p, accept):
    run(
        chosen, "fold", p.state, *p.windows, p.state_indices, p.indices(accept),
        window_indices=p.window_indices,
    )  # fmt: skip


def decode(chosen, p, t):
    tokens = (x.unflatten(0, p.batch_and_length)[:, t] for x in p.tokens)
    return run(
        chosen, "decode", *tokens, p.A_log, p.dt_bias, p.state, p.state_indices,
        lower_bound=p.lower_bound,
    )[0]  # fmt: skip


# One block of tokens, and more than one: by the shape, and by what the device says.
BATCHES = {
    "6": ({"D": 6}, [6, 3, 1]),
    "11": ({"D": 11}, [11, 9, 4]),
    "ragged": ({"lengths": [11, 0, 9], "tail": 2}, [11, 0, 9]),
}


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("batch", "accept"), BATCHES.values(), ids=BATCHES)
def test_every_tile_gives_the_same_bits(variant, tile, batch, accept):
    p = make("cuda", variant, **batch, H=2, HV=6, K=128, V=128)
    other = p.copy()
    bits_equal(verify(kernels("gluon", tile), other), p.verify(), "outputs")
    for name in ("k_window", "v_window", "g_window", "beta_window"):
        bits_equal(getattr(other, name), getattr(p, name), name)
    p.fold(accept)
    fold(kernels("gluon", tile), other, accept)
    bits_equal(other.state, p.state, "state")


@pytest.mark.parametrize("tile", [(32, 2), (16, 4), (32, 4)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tile_of_wide_heads_gives_the_same_bits(variant, tile):
    p = make("cuda", variant, D=6, H=2, HV=2, K=256, V=256)
    first, other = p.copy(), p.copy()
    bits_equal(
        verify(kernels("gluon", tile), other),
        verify(kernels("gluon", (16, 2)), first),
        "outputs",
    )
    for one, last in ((first, (16, 2)), (other, tile)):
        fold(kernels("gluon", last), one, [6, 3, 1])
    bits_equal(other.state, first.state, "state")


@pytest.mark.parametrize(
    ("variant", "H", "HV", "B", "tile"),
    [("gdn", 16, 48, 64, (32, 2)), ("kda", 12, 12, 16, (64, 2))],
)
def test_a_large_ragged_batch_equals_decoding_it(variant, H, HV, B, tile):
    """So many heads that the tables choose their widest tiles for ragged batches."""
    tables = select.load("gluon")
    assert tables.recur_tile(HV, 128, 128, B, variant == "kda", ragged=True) == tile
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 9, (B,), generator=draw).tolist()
    p = make("cuda", variant, lengths=lengths, tail=3, H=H, HV=HV, K=128, V=128)
    state, outputs, spans = p.copy().state, p.verify(), p.spans()
    p.fold(lengths)
    for t in range(max(lengths)):
        rows = [i for i, span in enumerate(spans) if len(span) > t]
        tokens = [spans[i][t] for i in rows]
        one = ops.decode(
            *(x[tokens] for x in p.tokens), p.A_log, p.dt_bias, state,
            p.state_indices[rows],
        )  # fmt: skip
        bits_equal(one, outputs[tokens], f"outputs of token {t}")
    bits_equal(p.state, state, "state")
    assert not outputs[sum(lengths) :].any()


@pytest.mark.parametrize("tile", INEXACT_TILES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("D", [6, 11])
@pytest.mark.parametrize("K", [64, 128])
def test_every_inexact_tile_gives_the_same_bits(variant, tile, D, K):
    p = make("cuda", variant, B=3, D=D, H=2, HV=6, K=K, V=128)
    other = p.copy()
    got = verify(kernels("gluon", tile), other, exact=False)
    bits_equal(got, p.verify(exact=False), "outputs")
    for name in ("k_window", "v_window", "g_window", "beta_window"):
        bits_equal(getattr(other, name), getattr(p, name), name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_streamed_state_changes_no_bits(variant):
    p = make("cuda", variant, B=3, D=6, H=2, HV=6, K=128, V=128)
    results = []
    for stream in (False, True):
        other = p.copy()
        chosen = kernels("gluon")._replace(streams=lambda *heads, stream=stream: stream)
        outputs = verify(chosen, other), decode(chosen, other, 0), other.state
        results.append(outputs)
    for plain, streamed in zip(*results, strict=True):
        bits_equal(plain, streamed)


@pytest.mark.parametrize("variant", ["gdn", "kda"])
def test_no_launch_overtakes_the_one_before(variant):
    """A long chain in one CUDA graph, where each launch reads what the last one wrote: the
    state, and tokens that a copy writes just before and another just after. Every one of
    1,000 replays is compared, and none waited for (field case 69)."""
    p = make("cuda", variant, B=4, D=4, H=2, HV=6, K=128, V=128)
    sources, apart, start = (p, p.next_tokens(1)), kernels("gluon"), p.state.clone()
    shared = p.with_(**{name: torch.empty_like(getattr(p, name)) for name in TOKENS})
    accept, outputs = p.indices([4, 2, 1, 0]), []

    def chain():
        for source in sources:
            for name in TOKENS:
                getattr(shared, name).copy_(getattr(source, name))
            outputs.extend(shared.decode(t) for t in range(4))
            outputs.append(shared.verify())
            outputs.append(shared.verify(exact=False))
            shared.fold(accept)

    expected, other = [], p.copy()
    for source in sources:
        other = other.with_(**{name: getattr(source, name) for name in TOKENS})
        expected.extend(decode(apart, other, t) for t in range(4))
        expected.append(verify(apart, other))
        expected.append(verify(apart, other, exact=False))
        fold(apart, other, accept)
    chain()  # compiles
    outputs.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    results, wanted = [*outputs, p.state], [*map(bits, [*expected, other.state])]
    differ = torch.zeros(len(results), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        p.state.copy_(start)
        graph.replay()
        pairs = zip(results, wanted, strict=True)
        differ |= torch.stack([(bits(got) != right).any() for got, right in pairs])
    assert differ.nonzero().flatten().tolist() == [], "results that some replay got wrong"


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("K, V", [(128, 128), (96, 40), (64, 192)])
def test_the_portable_lowering_commits_what_it_decodes(variant, K, V, state_dtype):
    chosen = kernels("portable")
    n = 4 if state_dtype == torch.float32 else 1
    p = make("cuda", variant, B=3, D=4, H=2, HV=6, K=K, V=V, state_dtype=state_dtype)
    plain = p.copy()
    out = verify(chosen, p).unflatten(0, (3, 4))
    fold(chosen, p, [n] * 3)
    for t in range(n):
        bits_equal(decode(chosen, plain, t), out[:, t], f"outputs of token {t}")
    bits_equal(p.state, plain.state, "state")


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_lowerings_agree_to_rounding(variant):
    """Across lowerings only sums are ordered differently: fp32 rounding."""
    p = make("cuda", variant, B=3, D=4, H=1, HV=3, K=64, V=96, dtype=torch.float32)
    other = p.copy()
    want, got = p.verify(), verify(kernels("portable"), other)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    p.fold([4, 2, 1])
    fold(kernels("portable"), other, [4, 2, 1])
    torch.testing.assert_close(other.state, p.state, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_larger_pool_compiles_nothing_new():
    """Field case 81: pool sizes and strides are run-time arguments."""
    chosen = select.load(ops.lowering().name)

    def compiled() -> int:
        caches = chosen.recur.device_caches, chosen.fold.device_caches
        return sum(len(cache[torch.cuda.current_device()][0]) for cache in caches)

    for S in (64, 65, 66):
        p = make("cuda", "gdn", B=8, S=S)
        p.verify()
        p.fold([1] * 8)
        if S == 64:
            before = compiled()
    assert compiled() == before


def test_the_lowering_of_this_card_is_named_with_its_reason():
    name, reason = ops.lowering()
    assert name == ("portable" if torch.version.hip else "gluon")
    assert "sm_" in reason or "ROCm" in reason
