"""Which implementation serves a device, and why."""

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch

# The kernels carry tuples of tensors through loops in Gluon: triton 3.6 and newer.
_GLUON_SINCE = (3, 6)


class Lowering(NamedTuple):
    """name: ``reference``, ``gluon`` or ``portable``; reason: why, in one sentence."""

    name: str
    reason: str


def lowering(device: torch.device | str = "cuda") -> Lowering:
    """Tell which lowering serves ``device``.

    Args:
        device: any torch device; ``cuda`` without an index is the current one.

    Returns:
        The lowering's name and the reason for it. The choice is by capability
        and never changes in a process, least of all after a failure.

    Raises:
        ValueError: the ops have no kernels for this device type.
        RuntimeError: a CUDA or ROCm device without triton installed.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return Lowering("reference", "CPU tensors run the torch token loop.")
    if device.type != "cuda":
        raise ValueError(f"device must be a CPU, CUDA or ROCm device, got {device.type!r}")
    index = torch.cuda.current_device() if device.index is None else device.index
    return _gpu_lowering(index)


@functools.cache
def _gpu_lowering(index: int) -> Lowering:
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError("replayssm needs triton to run on a GPU; it is not installed")
    if torch.version.hip is not None:
        return Lowering("portable", "ROCm devices run plain Triton.")
    major, minor = torch.cuda.get_device_capability(index)
    if major < 8:
        return Lowering("portable", f"sm_{major}{minor} is older than sm_80.")
    version = importlib.metadata.version("triton")
    if tuple(int(part) for part in version.split(".")[:2]) < _GLUON_SINCE:
        return Lowering("portable", f"triton {version} is older than 3.6's Gluon.")
    return Lowering("gluon", f"sm_{major}{minor} with triton {version}.")


class Kernels(NamedTuple):
    """The kernels of a lowering, and the tables that choose their launch parameters.

    What only the tuned lowering has is None in the portable one: ``effective``, verify
    with exact=False, its table, and ``streams``.
    """

    recur: Any  # verify, and without windows decode
    fold: Any
    recur_tile: Callable[..., tuple[int, int]]
    fold_tile: Callable[..., tuple[int, int]]
    gate: Any
    store: Any
    scatter: Any
    conv_commit: Any
    accept: Any
    commit_indices: Any
    effective: Any | None = None
    effective_tile: Callable[..., tuple[int, int]] | None = None
    streams: Callable[..., bool] | None = None


@functools.cache
def kernels(index: int) -> Kernels:
    """The kernels that serve a GPU."""
    return load(_gpu_lowering(index).name)


def load(name: str) -> Kernels:
    """The kernels of the lowering of this name, ``gluon`` or ``portable``."""
    batch, copies, gates = (_file(x) for x in ("batch", "copies", "gates"))
    every = {
        "gate": gates.gate, "store": copies.store, "scatter": copies.scatter,
        "conv_commit": copies.conv_commit, "accept": batch.accept,
        "commit_indices": batch.commit_indices,
    }  # fmt: skip
    if name == "portable":
        own = _file("portable")
        return Kernels(own.recur, own.fold, own.recur_tile, own.fold_tile, **every)
    own, effective, tiles = (_file(x) for x in ("gluon", "effective", "tiles"))
    return Kernels(
        own.recur, own.fold, tiles.recur_tile, tiles.fold_tile, **every,
        effective=effective.effective, effective_tile=tiles.effective_tile,
        streams=tiles.streams,
    )  # fmt: skip


def _file(name: str) -> ModuleType:
    return importlib.import_module(f"replayssm.ops.kernels.{name}")
