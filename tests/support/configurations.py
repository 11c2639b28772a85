"""Every kernel configuration that is compiled without a GPU, and the arguments of each."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from compiling import meta

F32, BF16, I32 = torch.float32, torch.bfloat16, torch.int32

# One batch for each choice that the tables make at 32 heads.
BATCHES = (1, 5, 8, 32)
TUNED = ("gate", "verify", "inexact", "ragged", "decode", "fold", "track")
PORTABLE = ("gate", "store", "verify", "ragged", "decode", "fold", "track", "scatter")
COMMIT = (
    "accept", "accept packed", "commit_indices", "conv_commit dense",
    "conv_commit sliding", "conv_commit channels_last",
)  # fmt: skip
HEAD_DIMS = ((32, 64), (64, 64), (96, 96), (192, 128), (256, 256))
INEXACT_DIMS = ((32, 64), (64, 128), (96, 96), (128, 128), (192, 32))


class Configuration(NamedTuple):
    """lowering: "gluon" or "portable"; op: see ``arguments``, and its options."""

    lowering: str
    op: str
    options: dict[str, Any]

    def __str__(self) -> str:
        options = " ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.lowering} {self.op} {options}".rstrip()


def configurations() -> Iterator[Configuration]:
    """What test_compile_only compiles, once each."""
    for kda in (False, True):
        for op in PORTABLE:
            yield Configuration("portable", op, {"kda": kda})
        for op in TUNED:
            for B in BATCHES:
                yield Configuration("gluon", op, {"kda": kda, "B": B})
        for op in ("verify", "inexact", "decode", "fold"):
            for K, V in HEAD_DIMS:
                for B in (1, 64):
                    options = {"kda": kda, "K": K, "V": V, "H": 8, "HV": 8, "B": B}
                    yield Configuration("gluon", op, options)
        for K, V in INEXACT_DIMS:
            for D in (8, 16):
                options = {"kda": kda, "D": D, "K": K, "V": V, "H": 8, "HV": 8}
                yield Configuration("gluon", "inexact", options)
    for op in ("gate", "verify", "inexact", "ragged", "decode"):
        for B in (1, 6, 8):
            yield Configuration("gluon", op, {"safe": True, "kda": True, "B": B})
    for op in ("verify", "decode", "fold"):
        yield Configuration("portable", op, {"state": BF16})
        yield Configuration("gluon", op, {"state": BF16})
    for op in COMMIT:
        yield Configuration("portable", op, {})


def arguments(op: str, *, B=32, D=8, H=16, HV=32, K=128, V=128, kda=False, state=F32):
    """(args, kwargs) of one op at a model's shape, on meta tensors."""
    N, S, T, L = B * D, 64, 8, 3
    tokens = N if op != "decode" else B
    q, k = (meta(tokens, H, K, dtype=BF16) for _ in range(2))
    v = meta(tokens, HV, V, dtype=BF16)
    a = meta(tokens, *((HV, K) if kda else (HV,)), dtype=BF16)
    b, A_log = meta(tokens, HV, dtype=BF16), meta(HV, dtype=F32)
    dt_bias = meta(*((HV, K) if kda else (HV,)), dtype=F32)
    pool = meta(L, S, HV, V, K, dtype=state)
    windows = (
        meta(L, S, H, T, K, dtype=BF16), meta(L, S, HV, T, V, dtype=BF16),
        meta(L, S, HV, T, *((K,) if kda else ()), dtype=F32), meta(L, S, HV, T, dtype=F32),
    )  # fmt: skip
    one = [window[0] for window in windows]
    slots = meta(B, dtype=I32)
    gates = (a, b, A_log, dt_bias)
    index = {"track_indices": slots, "track_steps": slots}
    tokens, live = meta(B, D, dtype=torch.int64), meta(1, dtype=I32)
    # q, k and v of KDA; the sizes are not multiples of a block.
    channels = (H * K, H * K, HV * V - 16)
    conv = [meta(L, S, C, 3, dtype=BF16) for C in channels]
    conv_last = [meta(L, S, 3, C, dtype=BF16) for C in channels]
    return {
        "gate": (gates, {}),
        "store": ((k, v, a.float(), b.float(), *one, slots), {}),
        "verify": ((q, k, v, *gates, pool[0], *one, slots), {}),
        "inexact": ((q, k, v, *gates, pool[0], *one, slots), {"exact": False}),
        "ragged": ((q, k, v, *gates, pool[0], *one, slots, meta(B + 1, dtype=I32)), {}),
        "decode": ((q, k, v, *gates, pool[0], slots), {}),
        "fold": ((pool, *windows, slots, slots), {}),
        "track": ((pool, *windows, slots, slots), index),
        "scatter": ((pool, meta(L, 4, 8, HV, V, K, dtype=state), slots, slots), index),
        "accept": ((tokens, tokens), {"verify_lens": slots}),
        "accept packed": ((tokens[0], tokens[0].int(), meta(B + 1, dtype=I32)), {}),
        "commit_indices": (
            [slots] * 4 + [live] + [slots] * 4,
            {"track_slot_map": slots, "track_interval": 256},
        ),
        "conv_commit dense": (
            (conv, [meta(L, S, D, C, 3, dtype=BF16) for C in channels], slots, slots),
            index,
        ),
        "conv_commit sliding": (
            (conv, [meta(L, S, C, D + 2, dtype=BF16) for C in channels], slots, slots),
            {"window_indices": slots},
        ),
        "conv_commit channels_last": (
            (conv_last, [meta(L, S, D + 2, C, dtype=BF16) for C in channels], slots, slots),
            {"channels_last": True, **index},
        ),
    }[op]


def call_of(op: str, safe: bool = False, **shape):
    """The op's own name, and (args, kwargs) with the safe gate where it is asked for."""
    args, kwargs = arguments(op, **shape)
    kwargs |= {"lower_bound": -5.0} if safe else {}
    name = {"ragged": "verify", "inexact": "verify", "track": "fold"}.get(op, op.split()[0])
    return name, args, kwargs
