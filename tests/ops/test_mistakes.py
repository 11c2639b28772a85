"""Every tensor argument of every op, with every kind of mistake in its metadata.

What the errors say, op by op, is in the test file of each.
"""

import pytest
import torch

from calls import CALLS, gathered, mutated, named
from samples import bits_equal, pages

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.bool, torch.complex64,
)  # fmt: skip


def mistakes(x):
    """Other tensors than x, by what is other; some may be as good."""
    yield "None", None
    yield "a dimension more", x[None]
    yield "requires grad", x.detach().double().requires_grad_()
    yield "on another device", x.to("cpu" if x.is_cuda else "meta")
    for dtype in DTYPES:
        yield str(dtype), x.to(dtype)
    for dim, size in enumerate(x.shape):
        yield f"longer in {dim}", torch.cat([x, x.narrow(dim, 0, 1)], dim)
        yield f"shorter in {dim}", x.narrow(dim, 0, size - 1)
    if x.dim():
        yield "a dimension less", x[0]
        yield "spaced", x.repeat_interleave(2, dim=-1)[..., ::2]
        yield "expanded", x[:1].expand_as(x)
    if x.dim() > 1:
        yield "swapped", x.transpose(-1, -2).contiguous().transpose(-1, -2)


# One call of each op and variant: the rest of the matrix differs in values.
LABELS = [
    "gate-gdn", "gate-kda", "store-gdn", "store-kda", "store-ragged", "verify-gdn",
    "verify-kda", "verify-ragged", "decode-gdn", "decode-kda", "fold-gdn",
    "fold-kda-layers-track", "scatter-conv-track", "accept", "accept-ragged", "accept-rows",
    "commit_indices-track", "conv_commit-dense-track", "conv_commit-sliding-last-track",
]  # fmt: skip


@pytest.mark.parametrize("label", LABELS)
def test_a_mistake_is_refused_by_op_and_argument_and_nothing_is_written(device, label):
    """A ValueError or TypeError that begins with the op and names the argument."""
    op, args, kwargs = CALLS[label](device)
    function = getattr(torch.ops.replayssm, op).default
    tensors = named(op, args, kwargs)
    good = kwargs | tensors
    before = {name: pages(good[name]).clone() for name in mutated(op, tensors)}
    refused = 0
    for name, value in tensors.items():
        for kind, other in mistakes(value):
            if kind == "None" and ("[" in name or name not in _required(function)):
                continue
            try:
                function(**gathered(good | {name: other}))
            except (ValueError, TypeError) as error:
                refused += 1
                says, where = str(error), f"{name}, {kind}: {error}"
                assert says.startswith(f"{op}: "), where
                assert name.split("[")[0] in says, where
                for written, memory in before.items():
                    bits_equal(pages(good[written]), memory, f"{written} after {where}")
            else:  # as good as the right one
                for written, memory in before.items():
                    pages(good[written]).copy_(memory)
    assert refused > 5 * len(tensors)


def _required(function):
    return {x.name for x in function._schema.arguments if str(x.type) == "Tensor"}


@pytest.mark.parametrize("label", LABELS)
def test_none_for_a_tensor_is_a_type_error_that_names_it(device, label):
    op, args, kwargs = CALLS[label](device)
    function, good = getattr(torch.ops.replayssm, op).default, named(op, args, kwargs)
    for name in _required(function):
        with pytest.raises(TypeError) as raised:
            function(**gathered(kwargs | good | {name: None}))
        assert str(raised.value) == f"{op}: {name} must be a tensor, got None"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "label",
    [
        "verify-ragged", "fold-kda-layers-track", "gate-gdn", "accept-ragged",
        "commit_indices-track", "conv_commit-dense-track",
    ],
)  # fmt: skip
def test_a_cpu_tensor_among_cuda_tensors_is_refused(label):
    """Whichever it is, also right after the same call went well."""
    op, args, kwargs = CALLS[label]("cuda")
    function = getattr(torch.ops.replayssm, op).default
    function(*args, **kwargs)
    good = kwargs | named(op, args, kwargs)
    for name in named(op, args, kwargs):
        with pytest.raises(ValueError, match="must be on"):
            function(**gathered(good | {name: good[name].cpu()}))


@pytest.mark.parametrize("name", ["state", "accept_lens"])
def test_what_is_no_dense_tensor_is_refused_by_torch(device, name):
    """Before anything is written (docs/limits.md)."""
    op, args, kwargs = CALLS["fold-gdn"](device)
    good, function = named(op, args, kwargs), getattr(torch.ops.replayssm, op).default
    before = good["state"].clone()
    for other, error in (
        (good[name].tolist(), RuntimeError), (good[name].cpu().numpy(), RuntimeError),
        (good[name].to_sparse(), NotImplementedError),
    ):  # fmt: skip
        with pytest.raises(error, match=r"'Tensor'|Sparse"):
            function(**gathered(good | {name: other}))
    bits_equal(good["state"], before, "state")
