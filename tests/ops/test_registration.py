"""Each op keeps its schema's word: opcheck, and what opcheck cannot see."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from calls import CALLS, gathered, mutated, named
from contract import TABLE
from replayssm import ops
from samples import bits_equal, make, pages

every_call = pytest.mark.parametrize("label", CALLS)


def overload(op):
    return getattr(torch.ops.replayssm, op).default


def outputs_of(result):
    if result is None:
        return ()
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("label", TABLE)
def test_opcheck_passes(device, label):
    """Schema, autograd registration, fake kernel and AOT dispatch (field case 76)."""
    op, args, kwargs = TABLE[label](device)
    for x in named(op, args, kwargs).values():
        if x.is_floating_point():  # to opcheck no NaN is equal to another
            pages(x).nan_to_num_()
    torch.library.opcheck(overload(op), args, kwargs)


@every_call
def test_just_the_declared_arguments_are_written(device, label):
    """Every one of them really is, and no bit of any other's memory."""
    op, args, kwargs = CALLS[label](device)
    tensors = named(op, args, kwargs)
    before = {name: pages(x).clone() for name, x in tensors.items()}
    overload(op)(*args, **kwargs)
    for name, x in tensors.items():
        if name in mutated(op, tensors):
            with pytest.raises(AssertionError, match="elements differ"):
                bits_equal(pages(x), before[name])
        else:
            bits_equal(pages(x), before[name], name)


@every_call
def test_the_public_function_is_the_registered_op(device, label):
    op, args, kwargs = CALLS[label](device)
    _, other_args, other_kwargs = CALLS[label](device)
    got = outputs_of(getattr(ops, op)(*args, **kwargs))
    want = outputs_of(overload(op)(*other_args, **other_kwargs))
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        bits_equal(one, other, f"output {i}")
    written, others = named(op, args, kwargs), named(op, other_args, other_kwargs)
    for name in mutated(op, written):
        bits_equal(pages(written[name]), pages(others[name]), name)


@every_call
def test_outputs_are_fresh_tensors(device, label):
    """No output shares memory with an input or another output (field case 77)."""
    op, args, kwargs = CALLS[label](device)
    outputs = outputs_of(overload(op)(*args, **kwargs))
    inputs = named(op, args, kwargs).values()
    storages = [x.untyped_storage().data_ptr() for x in (*outputs, *inputs)]
    for i, output in enumerate(outputs):
        assert output._base is None
        assert storages.count(storages[i]) == 1


def like(x, mode):
    return torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, x)


def assert_same_metadata(fakes, reals):
    for fake, real in zip(fakes, reals, strict=True):
        assert fake.shape == real.shape
        assert fake.dtype == real.dtype
        assert fake.device == real.device
        assert fake.stride() == real.stride()


@every_call
def test_the_fake_kernel_has_the_real_outputs_metadata(device, label):
    """Shape, dtype, device and strides, for strided and ragged inputs (case 78)."""
    op, args, kwargs = CALLS[label](device)
    with FakeTensorMode() as mode:
        fake_args = [like(x, mode) for x in args]
        fake_kwargs = {name: like(x, mode) for name, x in kwargs.items()}
        fakes = outputs_of(overload(op)(*fake_args, **fake_kwargs))
    reals = outputs_of(overload(op)(*args, **kwargs))
    assert_same_metadata(fakes, reals)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 3, 5), (2, 3, 2, 6, 7, 9), (5, 16, 3, 3, 64, 8)]
)
def test_fake_outputs_follow_the_input_sizes(device, shape):
    """Drafts as rows, packed, and as rows beside packed targets, in other dtypes."""
    B, D, H, HV, K, V = shape
    p = make(device, "kda", B=B, D=D, H=H, HV=HV, K=K, V=V, dtype=torch.float16)
    tokens = torch.zeros(B, D, dtype=torch.int64, device=device)
    packed, ends = tokens.flatten().int(), p.indices(range(0, B * D + 1, D))
    anchors = [x[::D] for x in p.tokens]
    for op, args in (
        ("verify", p.args),
        ("gate", (p.a, p.b, p.A_log, p.dt_bias)),
        ("decode", (*anchors, p.A_log, p.dt_bias, p.state, p.state_indices)),
        ("accept", (tokens, tokens.int())),
        ("accept", (tokens.flatten(), packed, ends)),
        ("accept", (tokens, packed, ends)),
    ):
        with FakeTensorMode() as mode:
            fakes = outputs_of(overload(op)(*[like(x, mode) for x in args]))
        reals = outputs_of(overload(op)(*args))
        assert_same_metadata(fakes, reals)


@every_call
def test_meta_tensors_give_meta_outputs(label):
    op, args, kwargs = CALLS[label]("cpu")
    reals = outputs_of(overload(op)(*args, **kwargs))
    args, kwargs = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda x: x.to("meta"), (args, kwargs)
    )
    for meta, real in zip(outputs_of(overload(op)(*args, **kwargs)), reals, strict=True):
        assert meta.device.type == "meta"
        assert meta.shape == real.shape
        assert meta.dtype == real.dtype
        assert meta.stride() == real.stride()


FLOATING = [
    (label, name)
    for label in (
        "gate-gdn",
        "store-gdn",
        "verify-gdn",
        "decode-gdn",
        "fold-gdn",
        "scatter-state",
        "conv_commit-dense-track",
    )
    for name, x in named(*CALLS[label]("cpu")).items()
    if x.is_floating_point()
]


@pytest.mark.parametrize(("label", "name"), FLOATING)
def test_a_tensor_that_requires_grad_is_refused_in_grad_mode(device, label, name):
    """Any of the arguments; its gradient would be silently wrong."""
    op, args, kwargs = CALLS[label](device)
    overload(op)(*args, **kwargs)  # what was accepted once is checked again
    tensors = named(op, args, kwargs)
    before = {written: tensors[written].clone() for written in mutated(op, tensors)}
    tensors[name] = tensors[name].detach().requires_grad_()
    with pytest.raises(ValueError, match=re.escape(f"{op}: {name} requires grad")):
        overload(op)(**gathered(tensors))
    for written, value in before.items():
        bits_equal(tensors[written], value, written)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("label", ["gate-gdn", "verify-kda", "decode-gdn"])
def test_parameters_are_accepted_without_grad_mode(device, label, mode):
    """A_log and dt_bias are nn.Parameters in every model."""
    op, args, kwargs = CALLS[label](device)
    want = outputs_of(overload(op)(*args, **kwargs))
    op, args, kwargs = CALLS[label](device)
    tensors = named(op, args, kwargs)
    for name in ("A_log", "dt_bias"):
        tensors[name] = torch.nn.Parameter(tensors[name])
    with mode():
        got = outputs_of(overload(op)(**tensors))
    for one, other in zip(got, want, strict=True):
        bits_equal(one.clone(), other, "output")
        assert not one.requires_grad


def test_inference_tensors_are_written_in_inference_mode(device):
    """Pools made under inference_mode, as engines make them."""
    plain = make(device, "gdn")
    with torch.inference_mode():
        p = make(device, "gdn")
        outputs = p.verify()
        p.fold([1, 1, 1])
        bits_equal(outputs[::4].clone(), plain.decode(0), "outputs")
        bits_equal(p.state.clone(), plain.state, "state")
