"""The torch.library namespace and the one way an op gets into it."""

from collections.abc import Callable

import torch

_LIBRARY = torch.library.Library("replayssm", "DEF")

# Inductor must hand our ops the very strides it saw while tracing: the kernels
# take pool and packed-projection strides at run time and never copy.
_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)


def register(
    schema: str, *, check: Callable, cpu: Callable, cuda: Callable, fake: Callable
) -> Callable:
    """Define one op and its kernels; return its ``torch.ops`` overload.

    ``check`` runs first on every path, CPU, CUDA and fake alike, so a mistake
    raises the same error eagerly and under torch.compile, before anything is
    written. ``Library.define`` + ``impl`` costs 3-5 us a call where
    ``custom_op`` and ``triton_op`` cost 20-100.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=_TAGS)

    def checked(kernel: Callable) -> Callable:
        def call(*args, **kwargs):
            check(*args, **kwargs)
            return kernel(*args, **kwargs)

        return call

    _LIBRARY.impl(name, checked(cpu), "CPU")
    _LIBRARY.impl(name, checked(cuda), "CUDA")
    torch.library.register_fake(f"replayssm::{name}", checked(fake), lib=_LIBRARY)
    return getattr(torch.ops.replayssm, name).default
