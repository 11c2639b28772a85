"""Which implementation serves a device, and why."""

import functools
import importlib
import importlib.metadata
import importlib.util
from types import SimpleNamespace
from typing import NamedTuple

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


@functools.cache
def kernels(index: int) -> SimpleNamespace:
    """The kernels of a GPU, see ``launch``."""
    return load(_gpu_lowering(index).name)


def load(name: str) -> SimpleNamespace:
    """The kernels of a lowering: its own, and the copies and integer work of all."""
    own = ("gluon", "effective", "tiles") if name == "gluon" else (name,)
    modules = (
        importlib.import_module(f"replayssm.ops.kernels.{part}")
        for part in (*own, "copies", "batch")
    )
    return SimpleNamespace(
        **{key: value for module in modules for key, value in vars(module).items()}
    )
