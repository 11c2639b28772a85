"""Every op with a matrix of arguments: ``CALLS[label](device)`` -> op, args, kwargs."""

import functools

import torch

from samples import VARIANTS, make, stack

DECODE = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state", "state_indices")


def transposed(x):
    """The same values with the first two dimensions swapped in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def gate(device, variant, across=False, **options):
    p = make(device, variant, **options)
    p = p.with_(a=transposed(p.a)) if across else p
    return "gate", (p.a, p.b, p.A_log, p.dt_bias), {"lower_bound": p.lower_bound}


def store(device, variant, **options):
    p = make(device, variant, **options)
    g = torch.randn(p.a.shape, generator=torch.Generator().manual_seed(0)).to(device)
    beta = p.b.float()
    rows = p.state_indices if p.window_indices is None else p.window_indices
    return "store", (p.k, p.v, g, beta, *p.windows, rows, p.cu_seqlens), {}


def verify(device, variant, exact=True, across=False, **options):
    p = make(device, variant, **options)
    p = p.with_(q=transposed(p.q), v=transposed(p.v)) if across else p
    return "verify", p.args, {"lower_bound": p.lower_bound, "exact": exact}


def decode(device, variant, **options):
    p = make(device, variant, D=1, **options)
    args = tuple(getattr(p, name) for name in DECODE)
    return "decode", args, {"lower_bound": p.lower_bound}


def fold(device, variant, layers=0, track=False, **options):
    S = 8
    count = max(layers, 1)
    problems = [make(device, variant, S=S, **options).next_tokens(i) for i in range(count)]
    p, views = stack(problems) if layers else (problems[0], problems)
    for view in views:
        view.verify()
    free = sorted(set(range(S)) - set(p.state_indices.tolist()))[:3]
    accept = p.indices([4, 0, 2])
    kwargs = {"window_indices": p.window_indices}
    if track:
        kwargs["track_indices"] = p.indices(free)
        kwargs["track_steps"] = p.indices([1, 0, -1])
    return "fold", (p.state, *p.windows, p.state_indices, accept), kwargs


def scatter(device, inner, track=False, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    state, intermediate = (
        torch.randn(2, *outer, *inner, generator=draw).to(dtype).to(device)
        for outer in ((6,), (4, 3))
    )
    slots, steps = (torch.tensor(x, device=device) for x in ([5, 0, -1], [2, 1, 0]))
    kwargs = {"source_indices": torch.tensor([3, 0, 1], device=device)} if track else {}
    if track:
        kwargs["track_indices"] = torch.tensor([1, -1, 2], device=device)
        kwargs["track_steps"] = torch.tensor([0, 0, 0], device=device)
    return "scatter", (state, intermediate, slots, steps), kwargs


def _matrix():
    for variant in VARIANTS:
        for build in (gate, store, verify, decode, fold):
            yield f"{build.__name__}-{variant}", functools.partial(build, variant=variant)
    ragged = {"lengths": [3, 0, 4], "tail": 2, "R": 5, "index": torch.int64}
    for build in (store, verify):
        yield f"{build.__name__}-ragged", functools.partial(build, variant="gdn", **ragged)
    yield "verify-inexact", functools.partial(verify, variant="gdn", exact=False)
    for build in (gate, verify):
        name = f"{build.__name__}-transposed"
        yield name, functools.partial(build, variant="gdn", across=True)
    for build in (verify, decode):
        yield (
            f"{build.__name__}-narrow-state",
            functools.partial(build, variant="kda", state_dtype=torch.bfloat16),
        )
    for variant in ("gdn", "kda"):
        yield (
            f"fold-{variant}-layers-track",
            functools.partial(fold, variant=variant, layers=2, track=True, R=5),
        )
    yield "scatter-state", functools.partial(scatter, inner=(2, 8, 4))
    yield "scatter-conv-track", functools.partial(scatter, inner=(6, 3), track=True)
    yield (
        "scatter-bf16-vector",
        functools.partial(scatter, inner=(5,), dtype=torch.bfloat16),
    )


CALLS = dict(_matrix())


def mutated(op):
    """The names of the arguments an op's schema declares as written."""
    arguments = getattr(torch.ops.replayssm, op).default._schema.arguments
    return [x.name for x in arguments if x.alias_info and x.alias_info.is_write]


def named(op, args, kwargs):
    """All tensors of a call by argument name."""
    arguments = getattr(torch.ops.replayssm, op).default._schema.arguments
    values = dict(zip([x.name for x in arguments], args, strict=False)) | kwargs
    return {name: x for name, x in values.items() if isinstance(x, torch.Tensor)}
