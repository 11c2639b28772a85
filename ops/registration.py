"""The torch.library namespace and the one way an op gets into it."""

from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from . import checks, debug, launch

_LIBRARY = torch.library.Library("replayssm", "DEF")

# Inductor must hand our ops the very strides it saw while tracing: the kernels
# take pool and packed-projection strides at run time and never copy.
_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)

# By the ops' names: whoever compiles or runs kernels without a dispatch looks here.
REGISTERED: dict[str, "launch.Op"] = {}


def _nothing(x: Any) -> tuple:
    return ()


def register(
    schema: str,
    *,
    check: Callable[[Any], checks.Check],
    cpu: Callable[[Any], Any],
    plan: Callable[[Any, Any], launch.Plan],
    outputs: Callable[[Any], Sequence[launch.Output]] = _nothing,
    rules: Callable[[Any, dict[str, int]], Iterable[debug.Rule]] = lambda x, sizes: (),
) -> Callable:
    """Define one op and its kernels; return its ``torch.ops`` overload.

    The schema alone says the order of the arguments. Everything else takes one call's
    arguments as x, a named tuple with the schema's names and defaults:

    check: guards every path, CPU, CUDA and fake alike, so a mistake raises the same error
        eagerly and under torch.compile, before anything is written.
    cpu: the reference, called as the CPU kernel.
    plan: plan(kernels, x), the launch of the CUDA kernel.
    outputs: shape and dtype of each fresh tensor that is returned.
    rules: rules(x, sizes), what debug mode checks of the values on the device.

    ``Library.define`` + ``impl`` costs 3-5 us a call where ``custom_op`` and
    ``triton_op`` cost 20-100.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=_TAGS)
    op = getattr(torch.ops.replayssm, name).default
    bind = _binder(op)
    check = _complete(op, check)
    tensors, lists = _leading_tensors(op)
    REGISTERED[name] = registered = launch.Op(
        bind, *_places(op), check, plan, outputs, tensors, lists,
    )  # fmt: skip

    def fake(x):
        like = next(y for y in registered.flat(x[:tensors], []) if y is not None)
        return launch.returned(launch.allocate(outputs(x), like.new_empty))

    def kernel(does: Callable[[Any], Any]) -> Callable:
        def call(*args, **kwargs):
            x = bind(*args, **kwargs)
            check(x)
            return does(x)

        return call

    kernels = {"CPU": kernel(cpu), "CUDA": launch.launcher(registered)}
    for key, does in kernels.items():
        if debug.ENABLED:
            does = debug.guarded(name, bind, check, rules, does)
        _LIBRARY.impl(name, does, key)
    torch.library.register_fake(f"replayssm::{name}", kernel(fake), lib=_LIBRARY)
    return op


def _binder(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """The named tuple of an op's arguments, with the defaults of its schema."""
    arguments = op._schema.arguments
    defaults = [x.default_value for x in arguments if x.has_default_value()]
    name = op._schema.name.split("::")[1]
    return namedtuple(name, [x.name for x in arguments], defaults=defaults)


def _places(op: torch._ops.OpOverload) -> tuple[dict[str, int], tuple]:
    """The place of each argument by name, and its default by place, None where it has none."""
    arguments = op._schema.arguments
    places = {x.name: i for i, x in enumerate(arguments)}
    return places, tuple(x.default_value for x in arguments)


def _leading_tensors(op: torch._ops.OpOverload) -> tuple[int, bool]:
    """How many arguments are tensors or lists of them, which every schema has first; and
    whether there are lists."""
    kinds = [str(x.type) for x in op._schema.arguments]
    tensors = ["Tensor" in kind for kind in kinds]
    assert tensors == sorted(tensors, reverse=True), op._schema
    return sum(tensors), any(kind.startswith("List") for kind in kinds)


def _complete(
    op: torch._ops.OpOverload, check: Callable[[Any], checks.Check]
) -> Callable[[Any], checks.Check]:
    """check, after a look at what the dispatcher lets through: None for a tensor."""
    name = op._schema.name.split("::")[1]
    tensors = [x.name for x in op._schema.arguments if str(x.type) == "Tensor"]

    def complete(x):
        for argument in tensors:
            if getattr(x, argument) is None:
                raise TypeError(f"{name}: {argument} must be a tensor, got None")
        return check(x)

    return complete
