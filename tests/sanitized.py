"""Every op once on the GPU, for a sanitizer to watch; run as a script.

With ``--planted``, one kernel that goes past the end of its tensors instead. Run it with
PYTORCH_NO_CUDA_MEMORY_CACHING=1: one allocation per tensor, so that a neighbour's memory
is nobody's.
"""

import functools
import sys

import torch

import calls
from replayssm.ops import launch, select

# The matrix's small heads are one tile of one warp group; these take several, the widest
# rows, more than one block of tokens, and the inexact kernel's both sizes.
WIDE = {"B": 2, "H": 1, "HV": 3, "K": 128, "V": 128}
MORE = {
    f"{build.__name__}-{variant}-{D}": functools.partial(build, variant=variant, D=D, **WIDE)
    for build in (calls.verify, calls.fold)
    for variant in ("gdn", "kda")
    for D in (8, 11)
} | {
    f"inexact-{variant}-{D}": functools.partial(
        calls.verify, variant=variant, D=D, exact=False, **WIDE
    )
    for variant in ("gdn", "kda")
    for D in (8, 11)
}  # fmt: skip


def planted() -> None:
    """gate, told of 64 KiB more than there is."""
    a, b = torch.zeros(2, 1, 4, device="cuda")
    vector = torch.zeros(4, device="cuda")
    tensors = (a, b, vector, vector)
    plan = launch.gate(select.kernels(0), tensors, (None,))
    lower_bound, elements, *strides = plan.scalars
    plan = plan._replace(
        programs=(65, 1, 1), scalars=(lower_bound, elements + 2**14, *strides)
    )
    plan.compile_and_launch(tensors, [torch.empty_like(a), torch.empty_like(b)])
    torch.cuda.synchronize()


def main() -> None:
    for label, build in (calls.CALLS | MORE).items():
        if label.startswith("fold-") and label in MORE:
            build = functools.partial(build, B=3)  # its three accept lengths
        op, args, kwargs = build("cuda")
        getattr(torch.ops.replayssm, op)(*args, **kwargs)
        torch.cuda.synchronize()
        print("ran", label, flush=True)


if __name__ == "__main__":
    planted() if "--planted" in sys.argv else main()
