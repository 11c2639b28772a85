"""Every op with a matrix of arguments: ``CALLS[label](device)`` -> op, args, kwargs."""

import functools

import torch

from samples import VARIANTS, make, pool, stack

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


def fold(device, variant, layers=0, track=False, accept=(4, 0, 2), **options):
    S = 8
    count = max(layers, 1)
    problems = [make(device, variant, S=S, **options).next_tokens(i) for i in range(count)]
    p, views = stack(problems) if layers else (problems[0], problems)
    for view in views:
        view.verify()
    free = sorted(set(range(S)) - set(p.state_indices.tolist()))[:3]
    accept = p.indices(accept)
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


def accept(
    device, lengths=None, packed=True, draft=torch.int64, target=torch.int64, **options
):
    """Four requests; rows, packed rows, or rows beside packed targets; strided drafts."""
    drafts = torch.tensor([[5, 1, 2, 3], [6, 1, 9, 3], [7, 8, 2, 3], [8, 1, 2, 9]])
    targets = torch.tensor([[1, 2, 3, 4]] * 4)
    options = {name: torch.tensor(x, device=device) for name, x in options.items()}
    if lengths is not None:
        drafts = drafts.flatten() if packed else drafts
        targets = targets.flatten()
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
        options["cu_seqlens"] = ends.to(device)
    wide = torch.stack([drafts, drafts], dim=-1).to(device, draft)
    return "accept", (wide[..., 0], targets.to(device, target)), options


def commit_indices(device, track=False, index=torch.int32):
    def indices(*values):
        return torch.tensor(values, dtype=index, device=device)

    outputs = [torch.full((5, 2), 99, dtype=index, device=device)[:, 1] for _ in range(4)]
    args = (
        indices(4, 1, 0, 3, 7), indices(6, 8, 15, 13, 1), indices(2, 0, 1, 3, 0),
        indices(5, 3, 8, 1), indices(4), *outputs,
    )  # fmt: skip
    kwargs = {"track_slot_map": indices(9, 7, 6, 2), "track_interval": 8} if track else {}
    return "commit_indices", args, kwargs


def conv_commit(
    device, channels=(6,), W=4, sliding=False, channels_last=False, track=False,
    dtype=torch.bfloat16, index=torch.int32,
):  # fmt: skip
    """Two layers, five slots, three window rows, D = 3; the last request is padding."""
    L, S, R, D = 2, 5, 3, 3
    draw = torch.Generator().manual_seed(0)

    def tensor(*outer, channels, columns):
        inner = (columns, channels) if channels_last else (channels, columns)
        values = torch.randn(*outer, *inner, generator=draw).to(dtype).to(device)
        return pool(values, axis=len(outer))

    states = [tensor(L, S, channels=C, columns=W - 1) for C in channels]
    windows = [
        tensor(L, R, channels=C, columns=D + W - 2)
        if sliding
        else tensor(L, R, D, channels=C, columns=W - 1)
        for C in channels
    ]
    slots, accept, rows, to, at = (
        torch.tensor(x, dtype=index, device=device)
        for x in ([3, 0, -1], [3, 1, 2], [2, 1, 0], [1, 4, 2], [1, -1, 0])
    )
    kwargs = {"window_indices": rows, "channels_last": channels_last}
    if track:
        kwargs |= {"track_indices": to, "track_steps": at}
    return "conv_commit", (states, windows, slots, accept), kwargs


def _matrix():
    for variant in VARIANTS:
        for build in (gate, store, verify, decode, fold):
            yield f"{build.__name__}-{variant}", functools.partial(build, variant=variant)
    ragged = {"lengths": [3, 0, 4], "tail": 2, "R": 5, "index": torch.int64}
    for build in (store, verify):
        yield f"{build.__name__}-ragged", functools.partial(build, variant="gdn", **ragged)
    yield "verify-kda-ragged", functools.partial(verify, variant="kda", **ragged)
    for dtype in (torch.float16, torch.float32):
        name = f"verify-{str(dtype).removeprefix('torch.')}"
        yield name, functools.partial(verify, variant="gdn", dtype=dtype)
    yield "verify-inexact", functools.partial(verify, variant="gdn", exact=False)
    for build in (gate, verify):
        name = f"{build.__name__}-transposed"
        yield name, functools.partial(build, variant="gdn", across=True, H=2, HV=4)
    for build in (verify, decode):
        yield (
            f"{build.__name__}-narrow-state",
            functools.partial(build, variant="kda", state_dtype=torch.bfloat16),
        )
    # More requests than a warp has lanes.
    yield "decode-many", functools.partial(decode, variant="gdn", B=40, HV=1, V=16)
    for variant in ("gdn", "kda"):
        yield (
            f"fold-{variant}-layers-track",
            functools.partial(fold, variant=variant, layers=2, track=True, R=5),
        )
    yield (
        "fold-narrow-state-track",
        functools.partial(
            fold, variant="gdn", layers=2, track=True, R=5, state_dtype=torch.bfloat16,
            index=torch.int64,
        ),
    )  # fmt: skip
    yield "scatter-state", functools.partial(scatter, inner=(2, 8, 4))
    yield "scatter-conv-track", functools.partial(scatter, inner=(6, 3), track=True)
    yield (
        "scatter-bf16-vector",
        functools.partial(scatter, inner=(5,), dtype=torch.bfloat16),
    )
    yield "accept", functools.partial(accept, target=torch.int32, verify_lens=[4, 3, 1, 0])
    yield "accept-ragged", functools.partial(accept, lengths=[4, 0, 3, 5])
    yield "accept-rows", functools.partial(accept, lengths=[4, 0, 3, 4], packed=False)
    yield "commit_indices", functools.partial(commit_indices, index=torch.int64)
    yield "commit_indices-track", functools.partial(commit_indices, track=True)
    yield "conv_commit", conv_commit
    for last in (False, True):
        for sliding in (False, True):
            form = "-sliding" if sliding else "-dense"
            yield (
                f"conv_commit{form}{'-last' if last else ''}-track",
                functools.partial(
                    conv_commit, channels=(6, 2, 3), sliding=sliding, track=True,
                    channels_last=last,
                ),
            )  # fmt: skip


CALLS = dict(_matrix())


def named(op, args, kwargs):
    """All tensors of a call by argument name; those of a list are name[0], name[1], ..."""
    arguments = getattr(torch.ops.replayssm, op).default._schema.arguments
    values = dict(zip([x.name for x in arguments], args, strict=False)) | kwargs
    tensors = {}
    for name, x in values.items():
        if isinstance(x, list):
            tensors |= {f"{name}[{i}]": item for i, item in enumerate(x)}
        elif isinstance(x, torch.Tensor):
            tensors[name] = x
    return tensors


def gathered(values):
    """The arguments of a call from what ``named`` made of them; None is in no list."""
    call = {}
    for name, x in values.items():
        argument, bracket, _ = name.partition("[")
        if not bracket:
            call[name] = x
        else:
            call.setdefault(argument, []).extend([] if x is None else [x])
    return call


def mutated(op, tensors):
    """Those of a call's named tensors that the op's schema declares as written."""
    arguments = getattr(torch.ops.replayssm, op).default._schema.arguments
    written = {x.name for x in arguments if x.alias_info and x.alias_info.is_write}
    return [name for name in tensors if name.partition("[")[0] in written]
