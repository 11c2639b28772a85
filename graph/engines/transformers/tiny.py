"""Try the adapter on this machine, on tiny models with random weights.

    python -m replayssm.graph.engines.transformers.tiny \\
        --model qwen3-next|qwen3.5|qwen3.5-moe|kimi-linear [--draft 8]

Downloads nothing, lets `generate` look up drafts in the text so far, and compares with the
model's plain greedy decoding; exit code 1 if the tokens differ, 2 for bad input.
"""

import argparse
import math
import sys

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    KimiLinearConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    logging,
)

from .cache import speculate

# transformers' initializer_range would give layers that add next to nothing.
COMMON = {
    "vocab_size": 32, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "initializer_range": 0.15, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 512,
}  # fmt: skip
# Three value heads a key head, and K != V.
GDN = {
    "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
}  # fmt: skip


# All experts are chosen: rounding could swap some, and would hide what is compared.
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _qwen3_next() -> PreTrainedConfig:
    return Qwen3NextConfig(**COMMON, **GDN, **EXPERTS, shared_expert_intermediate_size=32)


def _qwen3_5() -> PreTrainedConfig:
    return Qwen3_5TextConfig(**COMMON, **GDN)


def _qwen3_5_moe() -> PreTrainedConfig:
    common = {name: value for name, value in COMMON.items() if name != "intermediate_size"}
    return Qwen3_5MoeTextConfig(
        **common, **GDN, **EXPERTS, shared_expert_intermediate_size=32
    )


def _kimi_linear() -> PreTrainedConfig:
    return KimiLinearConfig(
        **COMMON, **EXPERTS, num_key_value_heads=4, linear_num_heads=3, linear_head_dim=16,
        kv_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )  # fmt: skip


MODELS = {
    "qwen3-next": _qwen3_next,
    "qwen3.5": _qwen3_5,
    "qwen3.5-moe": _qwen3_5_moe,
    "kimi-linear": _kimi_linear,
}


def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of ``MODELS`` in eval mode on the CPU, its decays like a trained model's."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(MODELS[name]()).eval().requires_grad_(False)
    for parameter, value in model.named_parameters():
        # softplus(dt_bias) is log-uniform in [1e-3, 0.1] and A uniform in [1, 16], as in
        # Mamba2. transformers draws Qwen's so that a state is forgotten at once.
        if parameter.endswith("dt_bias"):
            step = value.uniform_(math.log(1e-3), math.log(0.1)).exp()
            value.copy_(step + torch.log(-torch.expm1(-step)))
        elif parameter.endswith("A_log"):
            value.uniform_(1, 16).log_()
    # An embedding that outweighs what the layers add: the text comes back to what it said,
    # as text does, so that lookups hit.
    model.get_input_embeddings().weight.mul_(24)
    return model.to(dtype)


def repeated(model: PreTrainedModel, seed: int = 0, batch: int = 1) -> Tensor:
    """[batch, 48] tokens on the model's device, half of them a repetition: a lookup finds it."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.config.vocab_size, (batch, 24), generator=draw)
    return torch.cat((tokens, tokens), 1).to(model.device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="qwen3-next")
    parser.add_argument("--draft", type=int, default=8, help="rows of a window, 2 or more")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompt")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    for name, least in (("draft", 2), ("tokens", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name}: want {least} or more, got {getattr(args, name)}")
    logging.set_verbosity_error()  # it recommends faster kernels than torch's
    torch.set_num_threads(1)  # the matrices are tiny: two threads take many times as long
    # Or cuDNN may round a window's convolution otherwise than one token's.
    torch.backends.cudnn.allow_tf32 = False
    model = build(args.model, args.seed).to(args.device)
    prompt = repeated(model, args.seed)
    want = model.generate(prompt, do_sample=False, max_new_tokens=args.tokens)
    text, cache = speculate(model, prompt, args.tokens, args.draft)
    same, memory = torch.equal(text, want), cache.pools.memory
    rows, kept = (sum(column) for column in zip((0, 0), *cache.commits, strict=True))
    windows = (memory.windows + memory.conv_windows) / 2**10
    snapshots = (memory.snapshots + memory.conv_snapshots) / 2**10
    print(f"model          {type(model).__name__}, random weights, fp32, {args.device}")
    print(f"tokens         {args.tokens} after a prompt of {prompt.shape[1]}")
    print(f"acceptance     {kept} of {rows} rows, {len(cache.commits)} windows")
    print(f"memory         {windows:.1f} KiB of windows; snapshots: {snapshots:.1f} KiB")
    print(f"output         {'equal to' if same else 'DIFFERS from'} plain generate's")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
