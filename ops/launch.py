"""From an op's arguments to a kernel launch, the same for every op and lowering.

An op's arguments become a ``Plan``: which kernel, on what grid, with which sizes and
strides. A plan depends on metadata alone, so it is made, and its arguments checked,
once for every distinct metadata; after that a call costs a dictionary look-up and
the launch itself, a few microseconds against a hundred. How an op plans its launch
stands in the op's own file.

No kernel starts by programmatic dependent launch. It takes 0.6 us off each layer where
our kernels follow each other and nothing else runs, as in a benchmark; where engines
have other kernels in between it adds 0.5 us, and more where those let go early.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import select

# Contraction off: a fused multiply-add happens where the kernels say fma, nowhere
# else, whatever triton's default (it changes between releases).
PINNED = {"enable_fp_fusion": False}

# Tokens that a program of an exact kernel stages together, at most: more costs shared
# memory and gains nothing.
MAX_BLOCK = 8

# Plans kept per op. Serving meets a few dozen; a caller whose every batch has
# another shape must not grow memory without end.
_MAX_PLANS = 4096

# In ``Plan.order``: the kernel takes an argument there that this op does not have.
ABSENT = -1

Tensors = Sequence[Tensor | None]
Output = tuple[Sequence[int], torch.dtype]


class Plan(NamedTuple):
    """One launch: kernel(*tensors, *outputs, *scalars, *constants), for one metadata.

    tensors are those of the op's schema in its order, lists flattened; or, with ``order``,
    the ones with these numbers, None for ``ABSENT``.
    """

    kernel: Any
    programs: tuple[int, int, int]
    scalars: tuple[int | float, ...]
    constants: dict[str, int | bool | str]
    warps: int
    order: tuple[int, ...] | None = None

    def arranged(self, values: list) -> list:
        """Tensors or pointers of the schema's order, in the kernel's."""
        if self.order is None:
            return values
        values = [*values, None]  # ABSENT is the last place
        return [values[i] for i in self.order]

    def compile_and_launch(self, tensors: Tensors, outputs: Sequence[Tensor]) -> Any:
        """Launch through triton's own path; return the compiled kernel."""
        if 0 in self.programs:
            return None
        return self.kernel[self.programs](
            *self.arranged(tensors), *outputs, *self.scalars, **self.constants,
            num_warps=self.warps, **PINNED,
        )  # fmt: skip


class Op(NamedTuple):
    """What a launch needs of an op, see ``registration.register``.

    tensors: how many of its arguments, the first ones, are tensors or lists of tensors.
    """

    bind: Callable[..., Any]
    check: Callable[[Any], object]
    plan: Callable[[Any, Any], Plan]
    outputs: Callable[[Any], Sequence[Output]]
    tensors: int

    def split(self, x: tuple) -> tuple[list[Tensor | None], tuple]:
        """A call's tensors, lists flattened; its other arguments, and each list's length."""
        tensors: list[Tensor | None] = []
        rest = x[self.tensors :]
        for value in x[: self.tensors]:
            if value.__class__ is list:
                tensors.extend(value)
                rest = (*rest, len(value))
            else:
                tensors.append(value)
        return tensors, rest


def allocate(outputs: Sequence[Output], empty: Callable[..., Tensor]) -> list[Tensor]:
    return [empty(shape, dtype=dtype) for shape, dtype in outputs]


def returned(outputs: list[Tensor]) -> Any:
    """As an op returns them: nothing, one tensor, or a tuple."""
    if len(outputs) < 2:
        return outputs[0] if outputs else None
    return tuple(outputs)


def launcher(op: Op) -> Callable:
    """The CUDA kernel of an op."""
    plans: dict[tuple, tuple[Plan, Sequence[Output], tuple, Any]] = {}

    def call(*args, **kwargs):
        x = op.bind(*args, **kwargs)
        tensors, rest = op.split(x)
        pointers: list[int | None] = []
        metadata: list[Any] = [rest]
        for tensor in tensors:
            if tensor is None:
                pointers.append(None)
                metadata.append(None)
            else:
                pointer = tensor.data_ptr()
                pointers.append(pointer)
                # Alignment is part of what triton compiled for.
                metadata.append(
                    (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(),
                     pointer & 15 == 0)
                )  # fmt: skip
        key = tuple(metadata)
        known = plans.get(key)
        if known is None or _differentiable(tensors):
            op.check(x)
        index = tensors[0].get_device()
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return call(*args, **kwargs)
        if known is None:
            plan, shapes = op.plan(select.kernels(index), x), op.outputs(x)
            outputs = allocate(shapes, tensors[0].new_empty)
            compiled = plan.compile_and_launch(tensors, outputs)
            if len(plans) >= _MAX_PLANS:
                plans.clear()
            if compiled is not None:
                constants = (*plan.scalars, *plan.constants.values())
                plans[key] = plan, shapes, constants, compiled[plan.programs]
            return returned(outputs)
        plan, shapes, constants, launch = known
        outputs = allocate(shapes, tensors[0].new_empty)
        pointers = plan.arranged(pointers)
        pointers.extend(out.data_ptr() for out in outputs)
        launch(*pointers, *constants, stream=torch._C._cuda_getCurrentRawStream(index))
        return returned(outputs)

    return call


def _differentiable(tensors: Tensors) -> bool:
    return torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in tensors if tensor is not None
    )


def stride(tensor: Tensor | None, dim: int = 0) -> int:
    """A stride as kernels take it: 0 where the tensor or the dimension is absent."""
    return 0 if tensor is None or tensor.dim() <= dim else tensor.stride(dim)


def ceil_div(total: int, part: int) -> int:
    return -(-total // part)


def token_block(tokens: int) -> int:
    """Tokens that a program stages together, of requests of so many."""
    return min(MAX_BLOCK, 1 << max(tokens - 1, 0).bit_length())
