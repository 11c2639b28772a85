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
from torch.utils._pytree import tree_leaves

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

    bind makes a call's arguments x; places and defaults are what it knows, by name and by
    place. tensors: how many arguments, the first ones, are tensors or lists of tensors.
    """

    bind: Callable[..., Any]
    places: dict[str, int]
    defaults: tuple
    check: Callable[[Any], object]
    plan: Callable[[Any, Any], Plan]
    outputs: Callable[[Any], Sequence[Output]]
    tensors: int
    lists: bool

    def flat(self, values: Sequence, lengths: list) -> Sequence[Tensor | None]:
        """The tensors among the first arguments; of lists the length is added to lengths."""
        if not self.lists:
            return values
        tensors: list[Tensor | None] = []
        for value in values:
            if isinstance(value, list):
                tensors.extend(value)
                lengths.append(len(value))
            else:
                tensors.append(value)
        return tensors


def allocate(outputs: Sequence[Output], empty: Callable[..., Tensor]) -> list[Tensor]:
    return [empty(shape, dtype=dtype) for shape, dtype in outputs]


def returned(outputs: list[Tensor]) -> Any:
    """As an op returns them: nothing, one tensor, or a tuple."""
    if len(outputs) < 2:
        return outputs[0] if outputs else None
    return tuple(outputs)


def launcher(op: Op) -> Callable:
    """The CUDA kernel of an op: every microsecond here is one of the host's, per call."""
    plans: dict[tuple, tuple[Sequence[Output], tuple | None, tuple, Any]] = {}
    count, places, defaults = op.tensors, op.places, op.defaults

    def call(*args, **kwargs):
        # What op.bind does, without a named tuple.
        values = [*args, *defaults[len(args) :]]
        for name in kwargs:
            values[places[name]] = kwargs[name]
        pointers: list[int | None] = []
        metadata: list[Any] = values[count:]
        first = None
        for tensor in op.flat(values[:count], metadata):
            if tensor is None:
                pointers.append(None)
                metadata.append(None)
                continue
            first = tensor if first is None else first
            pointer = tensor.data_ptr()
            pointers.append(pointer)
            # Alignment is part of what triton compiled for.
            metadata.append(
                (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(),
                 pointer & 15 == 0)
            )  # fmt: skip
        key = tuple(metadata)
        known = plans.get(key)
        if known is None or (torch.is_grad_enabled() and _differentiable(values[:count])):
            op.check(op.bind(*args, **kwargs))
        index = first.get_device()
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return call(*args, **kwargs)
        if known is None:
            return _first_call(op, plans, key, op.bind(*args, **kwargs), index)
        shapes, order, constants, launch = known
        if order is not None:
            pointers.append(None)  # ABSENT is the last place
            pointers = [pointers[i] for i in order]
        if not shapes:
            launch(*pointers, *constants, stream=torch._C._cuda_getCurrentRawStream(index))
            return None
        outputs = [torch.empty(x, dtype=dtype, device=first.device) for x, dtype in shapes]
        launch(
            *pointers, *[out.data_ptr() for out in outputs], *constants,
            stream=torch._C._cuda_getCurrentRawStream(index),
        )  # fmt: skip
        return returned(outputs)

    return call


def _first_call(op: Op, plans: dict, key: tuple, x: Any, index: int) -> Any:
    """Plan, compile and launch; remember the plan for the metadata of the key."""
    plan, shapes = op.plan(select.kernels(index), x), op.outputs(x)
    tensors = list(op.flat(x[: op.tensors], []))
    like = next(tensor for tensor in tensors if tensor is not None)
    outputs = allocate(shapes, like.new_empty)
    compiled = plan.compile_and_launch(tensors, outputs)
    if len(plans) >= _MAX_PLANS:
        plans.clear()
    if compiled is not None:
        constants = (*plan.scalars, *plan.constants.values())
        plans[key] = shapes, plan.order, constants, compiled[plan.programs]
    return returned(outputs)


def _differentiable(values: Sequence) -> bool:
    return any(x.requires_grad for x in tree_leaves(values) if x is not None)


def stride(tensor: Tensor | None, dim: int = 0) -> int:
    """A stride as kernels take it: 0 where the tensor or the dimension is absent."""
    return 0 if tensor is None or tensor.dim() <= dim else tensor.stride(dim)


def ceil_div(total: int, part: int) -> int:
    return -(-total // part)


def token_block(tokens: int) -> int:
    """Tokens that a program stages together, of requests of so many."""
    return min(MAX_BLOCK, 1 << max(tokens - 1, 0).bit_length())
