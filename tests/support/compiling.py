"""Compile a plan's kernel for a GPU that is not there, and read what it uses."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from replayssm.ops import launch, registration

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


class Usage(NamedTuple):
    registers: int
    spilled_bytes: int


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def plan_of(kernels: Any, name: str, *args, **kwargs) -> tuple[launch.Plan, list]:
    """The plan of a call on meta tensors, and the kernel's run-time arguments."""
    op = registration.REGISTERED[name]
    x = op.bind(*args, **kwargs)
    made = op.plan(kernels, x)
    outputs = [meta(*shape, dtype=dtype) for shape, dtype in op.outputs(x)]
    return made, [
        *made.arranged(list(op.flat(x[: op.tensors], []))),
        *outputs,
        *made.scalars,
    ]


def compiled(made: launch.Plan, arguments: list, target: str) -> Any:
    """The kernel as a launch of these arguments would compile it for ``target``.

    Sizes divisible by 16 and 16-byte aligned pointers are declared as a launch does:
    without them the compiler picks other layouts.
    """
    kernel = made.kernel
    signature, constants, attributes = {}, {}, {}
    names = kernel.arg_names
    fixed = {param.name for param in kernel.params if param.do_not_specialize}
    aligned = [["tt.divisibility", 16]]
    for i, (name, value) in enumerate(zip(names, arguments, strict=False)):
        if value is None or (isinstance(value, int) and value == 1 and name not in fixed):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(i,)] = POINTERS[value.dtype], aligned
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and name not in fixed:
                attributes[(i,)] = aligned
    for name, value in made.constants.items():
        signature[name], constants[name] = "constexpr", value
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel, signature, constants, attributes
    )
    backend, arch, warp = (
        ("hip", target, 64) if target.startswith("gfx") else ("cuda", int(target), 32)
    )
    options = {"num_warps": made.warps, "debug": bool(kernel.debug), **launch.PINNED}
    return triton.compile(source, target=GPUTarget(backend, arch, warp), options=options)


def usage(kernel: Any, target: str = "90") -> Usage:
    """Registers and spilled bytes of a kernel for sm_<target>, from triton's own ptxas."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    # Newer tritons emit PTX that only their second, newer ptxas reads.
    newer = tools / "ptxas-blackwell"
    ptxas = newer if newer.exists() else tools / "ptxas"
    name = f"sm_{target}" if target == "80" else f"sm_{target}a"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(kernel.asm["ptx"])
        report = subprocess.run(
            [ptxas, "-v", f"--gpu-name={name}", source, "-o", Path(folder, "out")],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
    registers = re.search(r"Used (\d+) registers", report)
    spills = re.findall(r"(\d+) bytes spill", report)
    assert registers and spills, report
    return Usage(int(registers[1]), sum(map(int, spills)))
