"""transformers' own hybrid models through the ops: tools/hf.py and hf_cache.py."""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", "5.24", "needs transformers 5.24 or newer")
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from transformers import DynamicCache

import hf
from hf_cache import Replay, ReplayCache, ReplayLayer
from hf_mixers import RULES
from replayssm import ops
from samples import bits_equal

D, P = 8, 48
names = pytest.mark.parametrize("name", hf.MODELS)
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"]
)
# Relative to the largest number. fp32: another summation order. bf16: what 2^-8 a rounding
# comes to in four layers; transformers' own path is up to 0.015 from an fp32 run, so are ours.
NEAR = {torch.float32: 1e-5, torch.bfloat16: 0.03}
# transformers takes KDA's softplus as log(1 + exp(x)), 2e-4 off where x is -7; the ops do not.
NEAR_KDA = NEAR | {torch.float32: 3e-5}


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


def own_path(model, text):
    """Logits of the last token, and the cache, by the model's own path in one forward."""
    cache = DynamicCache(config=model.config)
    return model(text, cache=cache, use_cache=True).logits[:, -1], cache


def near(got, want, model, what=""):
    kda = model.config.model_type == "kimi_linear"
    bound = (NEAR_KDA if kda else NEAR)[model.dtype]
    got, want = got.float(), want.float()
    error = (got - want).abs().max() / want.abs().max()
    assert error <= bound, f"{what}: {error:.2g}"


def equals_own_path(model, cache, text):
    """State, conv inputs and the keys and values are what the model has after ``text``."""
    want, pools, linear = own_path(model, text)[1], cache.pools, 0
    assert cache.get_seq_length() == text.shape[1]
    for i, (layer, own) in enumerate(zip(cache.layers, want.layers, strict=True)):
        if isinstance(layer, ReplayLayer):
            conv = torch.cat([state[linear] for state in pools.conv_states], 1)
            near(pools.state[linear], own.recurrent_states[0].mT, model, f"state {i}")
            near(conv, own.conv_states[0][..., 1:], model, f"conv {i}")
            linear += 1
        else:
            near(layer.keys, own.keys, model, f"keys {i}")
            near(layer.values, own.values, model, f"values {i}")
    assert linear == pools.model.layers == 3


def test_the_models_have_two_widths_and_three_value_heads_a_key_head_where_they_can():
    sizes = {}
    for name in hf.MODELS:
        mixers = Replay(hf.build(name)).mixers
        sizes[name] = next(iter(mixers.values())).sizes
    gdn = {"H": 2, "HV": 6, "K": 16, "V": 24, "variant": "gdn"}
    kda = {"H": 3, "HV": 3, "K": 16, "V": 16, "variant": "kda"}
    assert sizes.pop("kimi-linear") == kda
    assert sizes == dict.fromkeys(("qwen3-next", "qwen3.5", "qwen3.5-moe"), gdn)


@names
@dtypes
def test_prefill_and_decode_give_the_logits_of_the_models_own_path(name, dtype, device):
    model = hf.build(name, dtype=dtype).to(device)
    text = hf.repeated(model, batch=2)
    want = model(text).logits
    with Replay(model) as replay:
        cache = ReplayCache(replay, batch=2, window=D)
        got = [model(text[:, :30], cache=cache).logits]
        got += [model(text[:, t : t + 1], cache=cache).logits for t in range(30, P)]
    near(torch.cat(got, 1), want, model)
    equals_own_path(model, cache, text)


@names
def test_a_window_gives_the_logits_of_its_tokens_and_leaves_the_state_alone(name, device):
    model = hf.build(name).to(device)
    text = hf.repeated(model, batch=2)
    with Replay(model) as replay:
        cache = ReplayCache(replay, batch=2, window=D)
        model(text[:, :30], cache=cache)
        held = [x.clone() for x in (cache.pools.state, *cache.pools.conv_states)]
        got = model(text[:, 30 : 30 + D], cache=cache).logits
    near(got, model(text).logits[:, 30 : 30 + D], model)
    for now, before in zip(
        (cache.pools.state, *cache.pools.conv_states), held, strict=True
    ):
        bits_equal(now, before)


WINDOWS = ((8, 3), (8, 1), (5, 5), (2, 1), (8, 8), (8, 7), (6, 2), (7, 4), (8, 6))


@names
@dtypes
def test_after_any_rejection_the_cache_is_that_of_the_accepted_text(name, dtype, device):
    """Two prompts; windows of 2 to 8 rows, of which every number is kept in turn."""
    model = hf.build(name, dtype=dtype).to(device)
    text, draw = hf.repeated(model, batch=2), torch.Generator().manual_seed(1)
    with Replay(model) as replay:
        cache = ReplayCache(replay, batch=2, window=D)
        model(text, cache=cache)
        for rows, kept in WINDOWS:
            window = torch.randint(model.config.vocab_size, (2, rows), generator=draw)
            window = window.to(device)
            model(window, cache=cache)
            cache.crop(kept - rows)
            text = torch.cat((text, window[:, :kept]), 1)
            equals_own_path(model, cache, text)
        token = window[:, :1]
        got = model(token, cache=cache).logits[:, -1]
    near(got, own_path(model, torch.cat((text, token), 1))[0], model)


@names
def test_speculative_generation_gives_the_tokens_of_generate(name, device):
    model = hf.build(name).to(device)
    prompt = hf.repeated(model)
    want = model.generate(prompt, do_sample=False, max_new_tokens=64)
    best = model(want).logits[:, P - 1 :].topk(2).values
    assert (best[..., 0] - best[..., 1]).min() > 1e-3  # no tie that rounding could decide
    got, cache = hf.speculate(model, prompt, 64, D)
    bits_equal(got, want)
    rows, kept = map(set, zip(*cache.commits, strict=True))
    assert max(rows) == D and {1, D} <= kept  # all rejected, all accepted
    equals_own_path(model, cache, got[:, :-1])


@names
def test_generate_without_drafts_gives_the_same_tokens_through_the_ops(name, device):
    """Several prompts, which transformers does not speculate for."""
    model = hf.build(name).to(device)
    prompt = hf.repeated(model, batch=3)
    want = model.generate(prompt, do_sample=False, max_new_tokens=24)
    with Replay(model) as replay:
        cache = ReplayCache(replay, batch=3, window=D)
        bits_equal(
            model.generate(prompt, cache=cache, do_sample=False, max_new_tokens=24), want
        )
    equals_own_path(model, cache, want[:, :-1])


@names
def test_what_was_replaced_is_back_afterwards(name):
    model = hf.build(name)
    prompt = hf.repeated(model)
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
    with pytest.raises(ValueError, match="not supported with stateful models"):
        model.generate(
            prompt, prompt_lookup_num_tokens=D, do_sample=False, max_new_tokens=4
        )


def test_another_cache_is_the_models_own_while_the_adapter_is_open():
    model = hf.build("qwen3.5")
    text = hf.repeated(model)
    want, own = own_path(model, text)
    with Replay(model):
        got, cache = own_path(model, text)
    bits_equal(got, want)
    bits_equal(cache.layers[0].recurrent_states[0], own.layers[0].recurrent_states[0])


def test_what_cannot_be_undone_is_refused():
    model = hf.build("qwen3.5")
    text = hf.repeated(model)
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
    monkeypatch.setattr(sys, "argv", ["hf.py", "--model", "qwen3.5"])
    assert hf.main() == CHANGES[broken]
    says = "equal to" if broken == "nothing" else "DIFFERS from"
    shown = capsys.readouterr()
    assert f"\noutput         {says} plain generate's\n" in shown.out
    assert shown.err == ""


@pytest.mark.parametrize("argument", [("--draft", "1"), ("--tokens", "0")])
def test_the_command_refuses_what_cannot_be(argument, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hf.py", *argument])
    with pytest.raises(SystemExit) as exit:
        hf.main()
    assert exit.value.code == 2
    assert f"error: {argument[0]}: want " in capsys.readouterr().err
