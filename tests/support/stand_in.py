"""A stand-in for Gluon that runs the tuned kernels' own source in Triton's interpreter.

Call :func:`load` in a process with TRITON_INTERPRET=1, before the kernels are imported.
Layouts are ignored, shared memory is an array full of NaN, a product of the tensor core is
one of numpy's, and a copy is done at once. So the logic runs, and the sums, in another
order; races, barriers and registers are for a GPU to show.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, TensorHandle

from replayssm.ops import select
from replayssm.ops.select import Kernels

PACKAGE = "triton.experimental.gluon"
LAYOUTS = (
    "BlockedLayout", "DotOperandLayout", "NVMMADistributedLayout", "SliceLayout",
    "SwizzledSharedLayout",
)  # fmt: skip
# What is triton.language's own, but for a layout.
SAME = (
    "arange", "broadcast", "full", "join", "load", "maximum", "minimum", "program_id",
    "reshape", "split", "store", "where", "zeros_like",
)  # fmt: skip


def tensor(data: np.ndarray) -> tl.tensor:
    """fp32 numbers as what the interpreter computes with."""
    handle = TensorHandle(np.array(data, dtype=np.float32), tl.float32)
    return tl.tensor(handle, tl.block_type(tl.float32, list(data.shape)))


class Shared:
    """A buffer in shared memory, or a view of one."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @property
    def shape(self) -> list[int]:
        return list(self.array.shape)

    def index(self, i: Any) -> "Shared":
        i = int(i)
        assert 0 <= i < len(self.array), f"row {i} of {len(self.array)}"
        return Shared(self.array[i])

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        assert start + length <= self.array.shape[dim]
        places = (slice(None),) * dim + (slice(start, start + length),)
        return Shared(self.array[places])

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.array.transpose(order))

    def reinterpret(self, dtype: tl.dtype, shape: Any, layout: object) -> "Shared":
        view = self.array.reshape([int(size) for size in shape])
        assert np.shares_memory(view, self.array)
        return Shared(view)

    _reinterpret = reinterpret

    def load(self, layout: object) -> tl.tensor:
        return tensor(self.array)

    def store(self, value: tl.tensor) -> None:
        data = value.handle.data
        assert data.shape == self.array.shape, (data.shape, self.array.shape)
        self.array[...] = data


def allocate_shared_memory(dtype, shape, layout, value=None) -> Shared:
    assert dtype == tl.float32
    buffer = Shared(np.full([int(size) for size in shape], np.nan, dtype=np.float32))
    if value is not None:
        buffer.store(value)
    return buffer


def mma_v2(a: tl.tensor, b: tl.tensor, acc: tl.tensor, input_precision=None) -> tl.tensor:
    a, b, acc = (x.to(tl.float32).handle.data for x in (a, b, acc))
    return tensor(np.matmul(a, b) + acc)


def copy(target: Shared, source: tl.tensor) -> None:
    target.store(tl.load(source))


class Interpreted(InterpretedFunction):
    """A kernel or a function of one."""

    def rewrite(self):
        function = super().rewrite()
        # Its text is all that the interpreter knows a compile-time argument by.
        function.__annotations__ = {
            name: str(kind).replace("gl.constexpr", "constexpr")
            for name, kind in function.__annotations__.items()
        }
        return function


def jit(function=None, **options):
    return Interpreted(function) if function else Interpreted


class Count(int):
    """A loop's index: a kernel may cast it."""

    def to(self, dtype: tl.dtype) -> "Count":
        return self


def counted(*bounds: Any) -> list[Count]:
    return [Count(i) for i in range(*map(int, bounds))]


def _same(name: str):
    def call(*args, layout=None, **options):
        return getattr(tl, name)(*args, **options)  # as the interpreter has patched it

    return call


def _language() -> dict[str, Any]:
    names = {name: _same(name) for name in SAME}
    names |= dict.fromkeys(LAYOUTS, lambda *args: args)
    names |= {
        name: getattr(tl, name) for name in ("constexpr", "float32", "int32", "int64")
    }
    return names | {
        "allocate_shared_memory": allocate_shared_memory,
        "barrier": lambda: None,
        "convert_layout": lambda x, layout, assert_trivial=False: x,
        "shared_memory_descriptor": Shared,
        "static_range": range,
        "zeros": lambda shape, dtype, layout: tl.full(shape, 0, dtype),
    }


def load() -> Kernels:
    """The tuned kernels, imported with the stand-in where Gluon would be.

    It is there for the import alone: Triton itself asks for the real one at a launch.
    """
    ampere = {
        "mma_v2": mma_v2,
        "async_copy": SimpleNamespace(
            async_load=copy, commit_group=lambda: None, wait_group=lambda pending: None
        ),
    }
    own = {"jit": jit, "constexpr_function": lambda function: function}
    there = {name: module for name, module in sys.modules.items() if PACKAGE in name}
    made = {}
    for name, names in {
        "": own, ".language": _language(), ".language.nvidia": {},
        ".language.nvidia.ampere": ampere,
    }.items():  # fmt: skip
        module = made[PACKAGE + name] = ModuleType(PACKAGE + name)
        module.__dict__.update(names, __path__=[])
    made[PACKAGE].language = made[PACKAGE + ".language"]
    for name in there:
        del sys.modules[name]
    sys.modules.update(made)
    try:
        kernels = select.load("gluon")
    finally:
        for name in made:
            del sys.modules[name]
        sys.modules.update(there)
    for name in ("gluon", "chunks", "effective", "grams"):
        module = sys.modules[f"replayssm.ops.kernels.{name}"]
        # The interpreter looks for triton.language beside a function.
        module.tl, module.range = tl, counted
    return kernels
