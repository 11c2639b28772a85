"""An op by the kernels of a lowering that is named, unchecked and with nothing cached."""

import torch
from torch import Tensor

from replayssm.ops import registration
from replayssm.ops.select import Kernels, load


def tiled(name: str, tile: tuple[int, int]) -> Kernels:
    """The kernels of a lowering, all with one tile."""

    def chosen(*shape) -> tuple[int, int]:
        return tile

    tables = dict.fromkeys(("recur_tile", "fold_tile", "effective_tile"), chosen)
    return load(name)._replace(**tables)


def run(kernels: Kernels, name: str, *args, **kwargs) -> tuple[Tensor, ...]:
    """The outputs, which come filled with NaN, or the least integer, where a kernel does
    not write them."""
    op = registration.REGISTERED[name]
    x = op.bind(*args, **kwargs)
    tensors = list(op.flat(x[: op.tensors], []))
    outputs = tuple(
        torch.full(shape, unwritten(dtype), dtype=dtype, device=tensors[0].device)
        for shape, dtype in op.outputs(x)
    )
    op.plan(kernels, x).compile_and_launch(tensors, outputs)
    return outputs


def unwritten(dtype: torch.dtype) -> float | int:
    return torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min
