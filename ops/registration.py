"""The torch.library namespace and the one way an op gets into it."""

import functools
from collections.abc import Callable
from types import SimpleNamespace

import torch

from . import checks, debug, launch

_LIBRARY = torch.library.Library("replayssm", "DEF")

# Inductor must hand our ops the very strides it saw while tracing: the kernels
# take pool and packed-projection strides at run time and never copy.
_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)


_PLANS: dict[str, tuple[Callable, Callable]] = {}


def _nothing(*args, **kwargs) -> None:
    """The fake of an op that only mutates."""


def register(
    schema: str,
    *,
    check: Callable[..., checks.Check],
    cpu: Callable,
    arrange: Callable,
    plan: Callable[..., launch.Plan],
    fake: Callable = _nothing,
) -> Callable:
    """Define one op and its kernels; return its ``torch.ops`` overload.

    ``check`` guards every path, CPU, CUDA and fake alike, so a mistake raises the
    same error eagerly and under torch.compile, before anything is written.
    ``arrange`` and ``plan`` make the CUDA kernel, see ``launch.launcher``.
    ``Library.define`` + ``impl`` costs 3-5 us a call where ``custom_op`` and
    ``triton_op`` cost 20-100.
    """
    name = schema.split("(", 1)[0]
    _PLANS[name] = arrange, plan
    _LIBRARY.define(schema, tags=_TAGS)
    op = getattr(torch.ops.replayssm, name).default
    check = _complete(op, check)

    def checked(kernel: Callable) -> Callable:
        def call(*args, **kwargs):
            check(*args, **kwargs)
            return kernel(*args, **kwargs)

        return call

    kernels = {"CPU": checked(cpu), "CUDA": launch.launcher(check, arrange, plan)}
    for key, kernel in kernels.items():
        kernel = debug.guarded(name, check, kernel) if debug.ENABLED else kernel
        _LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(f"replayssm::{name}", checked(fake), lib=_LIBRARY)
    return op


def _complete(
    op: torch._ops.OpOverload, check: Callable[..., checks.Check]
) -> Callable[..., checks.Check]:
    """check, after a look at what the dispatcher lets through: None for a tensor."""
    name, arguments = op._schema.name.split("::")[1], op._schema.arguments
    tensors = [(i, x.name) for i, x in enumerate(arguments) if str(x.type) == "Tensor"]

    @functools.wraps(check)  # debug mode binds a call's arguments by its names
    def call(*args, **kwargs):
        for i, argument in tensors:
            if (args[i] if i < len(args) else kwargs.get(argument)) is None:
                raise TypeError(f"{name}: {argument} must be a tensor, got None")
        return check(*args, **kwargs)

    return call


def run(kernels: SimpleNamespace, name: str, *args, **kwargs) -> tuple[torch.Tensor, ...]:
    """Run op ``name`` with the kernels of a chosen lowering, unchecked and uncached.

    For tests and benchmarks, which compare lowerings and tiles on one device; outputs
    come filled with NaN, or the least integer, where a kernel does not write them.
    """
    arrange, plan = _PLANS[name]
    tensors, rest = arrange(*args, **kwargs)
    made = plan(kernels, tensors, rest)
    device = tensors[0].device
    outputs = tuple(
        torch.full(shape, _unwritten(dtype), dtype=dtype, device=device)
        for shape, dtype in made.outputs
    )
    made.compile_and_launch(tensors, outputs)
    return outputs


def _unwritten(dtype: torch.dtype) -> float | int:
    return torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min
