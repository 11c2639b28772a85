"""engines.transformers: transformers' own hybrid models through the ops."""

import sys

import pytest
import torch

pytest.importorskip("transformers", "5.24", "needs transformers 5.24 or newer")
from torch.nn.functional import softplus
from transformers import DynamicCache
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForgetGate

from replayssm import ops
from replayssm.graph.engines.transformers import (
    Replay,
    ReplayCache,
    ReplayLayer,
    speculate,
    tiny,
)
from replayssm.graph.engines.transformers.mixers import RULES
from samples import bits_equal

D, P = 8, 48
names = pytest.mark.parametrize("name", tiny.MODELS)
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"]
)
# fp32, relative to the largest number: another summation order.
NEAR = 1e-5
# bf16: how many times as far from an fp32 run of the same weights, in the root mean square,
# as transformers' own path is. It rounds as often, elsewhere: 1.2 times on the CPU.
TIMES = 2


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Two threads take many times as long for matrices this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # Or cuDNN may round a window's convolution otherwise than one token's.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def torchs_softplus(monkeypatch):
    """transformers takes KDA's as log(1 + exp(x)), 2e-4 off where x is -7; the ops do not."""

    def forward(self, hidden_states):
        x = self.f_b_proj(self.f_a_proj(hidden_states)).float() + self.dt_bias.float()
        return -self.A_log.float().exp() * softplus(x.unflatten(-1, (-1, self.head_dim)))

    monkeypatch.setattr(KimiLinearForgetGate, "forward", forward)


def build(name, dtype, device):
    """A model, and for one in bf16 the same weights in fp32."""
    model = tiny.build(name, dtype=dtype).to(device)
    half = dtype != torch.float32
    return model, tiny.build(name, dtype=dtype).float().to(device) if half else None


def own_path(model, text):
    """Logits of the last token, and the cache, by the model's own path in one forward."""
    cache = DynamicCache(config=model.config)
    return model(text, cache=cache, use_cache=True).logits[:, -1], cache


def near(got, own, fp32=None, what="logits", bound=NEAR):
    """got is within bound of own; in bf16 no further from fp32 than own is, TIMES as far."""
    got, own = got.float(), own.float()
    if fp32 is None:
        error = (got - own).abs().max() / own.abs().max()
        assert error <= bound, f"{what}: {error:.2g}"
    else:
        error, theirs = ((x - fp32).norm() / fp32.norm() for x in (got, own))
        assert error <= TIMES * theirs + bound, f"{what}: {error:.2g}, own {theirs:.2g}"


def held(layer):
    """What a layer of transformers' own cache holds, by name."""
    if hasattr(layer, "recurrent_states"):
        # It keeps the last W inputs of the convolution, which reads W-1 of them.
        state, conv = layer.recurrent_states[0].mT, layer.conv_states[0][..., 1:]
        return {"state": state, "conv": conv}
    return {"keys": layer.keys, "values": layer.values}


def equals_own_path(model, cache, text, fp32=None, bound=NEAR):
    """State, conv inputs and the keys and values are what the model has after ``text``."""
    assert cache.get_seq_length() == text.shape[1]
    pools, linear = cache.pools, 0
    own, exact = (m and own_path(m, text)[1].layers for m in (model, fp32))
    for i, (layer, want) in enumerate(zip(cache.layers, own, strict=True)):
        if isinstance(layer, ReplayLayer):
            conv = torch.cat([state[linear] for state in pools.conv_states], 1)
            got = {"state": pools.state[linear], "conv": conv}
            linear += 1
        else:
            got = held(layer)
        for name, wanted in held(want).items():
            exactly = exact and held(exact[i])[name]
            near(got[name], wanted, exactly, f"{name} {i}", bound)
    assert linear == pools.model.layers == 3


def test_the_models_have_two_widths_and_three_value_heads_a_key_head_where_they_can():
    sizes = {}
    for name in tiny.MODELS:
        mixers = Replay(tiny.build(name)).mixers
        sizes[name] = next(iter(mixers.values())).sizes
    gdn = {"H": 2, "HV": 6, "K": 16, "V": 24, "variant": "gdn"}
    kda = {"H": 3, "HV": 3, "K": 16, "V": 16, "variant": "kda"}
    assert sizes.pop("kimi-linear") == kda
    assert sizes == dict.fromkeys(("qwen3-next", "qwen3.5", "qwen3.5-moe"), gdn)


@names
@dtypes
def test_prefill_and_decode_give_the_logits_of_the_models_own_path(name, dtype, device):
    model, fp32 = build(name, dtype, device)
    text = tiny.repeated(model, batch=2)
    own, exact = (m and m(text).logits for m in (model, fp32))
    with Replay(model) as replay:
        cache = ReplayCache(replay, batch=2, window=D)
        got = [model(text[:, :30], cache=cache).logits]
        got += [model(text[:, t : t + 1], cache=cache).logits for t in range(30, P)]
    near(torch.cat(got, 1), own, exact)
    equals_own_path(model, cache, text, fp32)


@names
def test_a_window_gives_the_logits_of_its_tokens_and_leaves_the_state_alone(name, device):
    model = tiny.build(name).to(device)
    text = tiny.repeated(model, batch=2)
    with Replay(model) as replay:
        cache = ReplayCache(replay, batch=2, window=D)
        model(text[:, :30], cache=cache)
        before = [x.clone() for x in (cache.pools.state, *cache.pools.conv_states)]
        got = model(text[:, 30 : 30 + D], cache=cache).logits
    near(got, model(text).logits[:, 30 : 30 + D])
    after = cache.pools.state, *cache.pools.conv_states
    for now, then in zip(after, before, strict=True):
        bits_equal(now, then)


WINDOWS = ((8, 3), (8, 1), (5, 5), (2, 1), (8, 8), (8, 7), (6, 2), (7, 4), (8, 6))


@names
@dtypes
def test_after_any_rejection_the_cache_is_that_of_the_accepted_text(name, dtype, device):
    """Two prompts; windows of 2 to 8 rows, of which every number is kept in turn."""
    model, fp32 = build(name, dtype, device)
    text, draw = tiny.repeated(model, batch=2), torch.Generator().manual_seed(1)
    with Replay(model) as replay:
        cache = ReplayCache(replay, batch=2, window=D)
        model(text, cache=cache)
        for rows, kept in WINDOWS:
            window = torch.randint(model.config.vocab_size, (2, rows), generator=draw)
            window = window.to(device)
            model(window, cache=cache)
            cache.crop(kept - rows)
            text = torch.cat((text, window[:, :kept]), 1)
            equals_own_path(model, cache, text, fp32)
        token = window[:, :1]
        got = model(token, cache=cache).logits[:, -1]
    text = torch.cat((text, token), 1)
    own, exact = (m and own_path(m, text)[0] for m in (model, fp32))
    near(got, own, exact)


@names
@pytest.mark.usefixtures("torchs_softplus")
def test_speculative_generation_gives_the_tokens_of_generate(name, device):
    model = tiny.build(name).to(device)
    prompt = tiny.repeated(model)
    want = model.generate(prompt, do_sample=False, max_new_tokens=64)
    best = model(want).logits[:, P - 1 :].topk(2).values
    assert (best[..., 0] - best[..., 1]).min() > 1e-3  # no tie that rounding could decide
    got, cache = speculate(model, prompt, 64, D)
    bits_equal(got, want)
    rows, kept = map(set, zip(*cache.commits, strict=True))
    assert max(rows) == D and {1, D} <= kept  # all rejected, all accepted
    equals_own_path(model, cache, got[:, :-1])


@names
def test_speculation_in_bf16_takes_no_token_that_rounding_could_not(name, device):
    """Each token's logit in the model's own forward is its best one, or as near to it as
    the logits there are to an fp32 run's."""
    model, fp32 = build(name, torch.bfloat16, device)
    got, _ = speculate(model, tiny.repeated(model), 64, D)
    own, exact = (m(got[:, :-1]).logits[:, P - 1 :].float() for m in (model, fp32))
    chosen = own.gather(-1, got[:, P:, None]).squeeze(-1)
    assert (own.amax(-1) - chosen <= TIMES * (own - exact).abs().amax(-1)).all()


def test_kimi_as_it_ships_gives_the_same_tokens_from_a_state_3e_5_away(device):
    """Its softplus rounds 1 + exp(x): g is 2e-4 off, the state 1.1e-5 after 111 tokens."""
    model = tiny.build("kimi-linear").to(device)
    prompt = tiny.repeated(model)
    want = model.generate(prompt, do_sample=False, max_new_tokens=64)
    got, cache = speculate(model, prompt, 64, D)
    bits_equal(got, want)
    equals_own_path(model, cache, got[:, :-1], bound=3e-5)


@names
def test_generate_without_drafts_gives_the_same_tokens_through_the_ops(name, device):
    """Several prompts, which transformers does not speculate for."""
    model = tiny.build(name).to(device)
    prompt = tiny.repeated(model, batch=3)
    want = model.generate(prompt, do_sample=False, max_new_tokens=24)
    with Replay(model) as replay:
        cache = ReplayCache(replay, batch=3, window=D)
        bits_equal(
            model.generate(prompt, cache=cache, do_sample=False, max_new_tokens=24), want
        )
    equals_own_path(model, cache, want[:, :-1])


@names
def test_what_was_replaced_is_back_afterwards(name):
    model = tiny.build(name)
    prompt = tiny.repeated(model)
    modeling = sys.modules[type(model).__module__]

    def rules():
        return [getattr(modeling, rule, None) for pair in RULES.values() for rule in pair]

    before, attributes = rules(), set(vars(model))
    with Replay(model) as replay:
        assert rules() != before
        hooks = [p for m in replay.mixers.values() for p in m.projections]
        assert all(p._forward_hooks for p in hooks)
    assert rules() == before and set(vars(model)) == attributes
    assert not any(p._forward_hooks for p in hooks)
    # Its own cache then cannot speculate, or from 5.25 on keeps a state for each draft.
    if not hasattr(DynamicCache, "get_recurrent_states_to_keep"):
        with pytest.raises(ValueError, match="not supported with stateful models"):
            model.generate(prompt, prompt_lookup_num_tokens=D, max_new_tokens=4)


def test_another_cache_is_the_models_own_while_the_adapter_is_open():
    model = tiny.build("qwen3.5")
    text = tiny.repeated(model)
    want, own = own_path(model, text)
    with Replay(model):
        got, cache = own_path(model, text)
    bits_equal(got, want)
    bits_equal(cache.layers[0].recurrent_states[0], own.layers[0].recurrent_states[0])


def test_what_cannot_be_undone_is_refused():
    model = tiny.build("qwen3.5")
    text = tiny.repeated(model)
    with Replay(model) as replay:
        cache = ReplayCache(replay, batch=1, window=D)
        # The drafts would come with the prompt.
        with pytest.raises(ValueError, match="cache that can be cropped"):
            model.generate(text, cache=cache, prompt_lookup_num_tokens=4, max_new_tokens=4)
        with pytest.raises(ValueError, match="crop: want 0 to 0, got -1"):
            cache.crop(-1)
        with pytest.raises(ValueError, match="forward: want 1 to 8 tokens, got 9"):
            model(text[:, : D + 1], cache=cache)
        model(text[:, :4], cache=cache)
        for removed in (-4, 1):
            with pytest.raises(ValueError, match=f"crop: want -3 to 0, got {removed}"):
                cache.crop(removed)
        with pytest.raises(
            ValueError, match="crop must follow the window of 4 tokens first"
        ):
            model(text[:, :1], cache=cache)
    with pytest.raises(ValueError, match="got Linear"):
        Replay(torch.nn.Linear(2, 2))


CHANGES = {"nothing": 0, "fold": 1, "conv_commit": 1}


@pytest.mark.parametrize("broken", CHANGES)
def test_the_command_says_whether_the_tokens_are_equal(broken, monkeypatch, capsys):
    if broken != "nothing":
        monkeypatch.setattr(ops, broken, lambda *args: None)
    monkeypatch.setattr(sys, "argv", ["tiny", "--model", "qwen3.5"])
    assert tiny.main() == CHANGES[broken]
    says = "equal to" if broken == "nothing" else "DIFFERS from"
    shown = capsys.readouterr()
    assert f"\noutput         {says} plain generate's\n" in shown.out
    assert shown.err == ""


@pytest.mark.parametrize("argument", [("--draft", "1"), ("--tokens", "0")])
def test_the_command_refuses_what_cannot_be(argument, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tiny", *argument])
    with pytest.raises(SystemExit) as exit:
        tiny.main()
    assert exit.value.code == 2
    assert f"error: {argument[0]}: want " in capsys.readouterr().err
