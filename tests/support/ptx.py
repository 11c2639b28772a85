"""Show that a refactoring changed no kernel: hashes of the PTX of every configuration.

    python tests/support/ptx.py FILE             records them as JSON
    python tests/support/ptx.py FILE --compare   compares with a record; exit code 1 where
                                                 one differs, or is in one of both only

Line info, comments and the names of kernels are left out, so that renaming and moving
change nothing. Compiles for sm_80, sm_90 and sm_100; needs no GPU, but the same triton.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"

TARGETS = ("80", "90", "100")


def plain(ptx: str, name: str) -> str:
    """PTX without what a name or a place in a file leaves in it."""
    ptx = re.sub(r"//.*", "", ptx)
    ptx = re.sub(r"^\s*\.(loc|file)\b.*", "", ptx, flags=re.MULTILINE)
    ptx = re.sub(
        rf"\b{re.escape(name)}\b|(?<=\b){re.escape(name)}(?=_param_)", "kernel", ptx
    )
    return "\n".join(line.strip() for line in ptx.splitlines() if line.strip())


def hashes(chosen: tuple[int, int]) -> dict[str, str]:
    """Of every ``step``-th configuration from ``first`` on."""
    first, step = chosen
    from triton.backends.nvidia.compiler import CUDABackend

    import compiling
    from configurations import call_of, configurations
    from replayssm.ops import select

    CUDABackend.make_cubin = lambda *args, **kwargs: b""  # ptxas takes most of the time
    kernels, found = {x: select.load(x) for x in ("gluon", "portable")}, {}
    for configuration in list(configurations())[first::step]:
        lowering, op, options = configuration
        name, args, kwargs = call_of(op, **options)
        for target in TARGETS:
            made = compiling.plan_of(kernels[lowering], name, *args, **kwargs)
            kernel = compiling.compiled(*made, target)
            text = plain(kernel.asm["ptx"], kernel.metadata.name)
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            found[f"sm_{target} {configuration}"] = digest
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--compare", action="store_true")
    options = parser.parse_args()
    processes = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # whose kernels have no machine code
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            parts = pool.map(hashes, [(i, processes) for i in range(processes)])
    found = dict(sorted(item for part in parts for item in part.items()))
    if not options.compare:
        options.file.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{len(found)} kernels, {len(set(found.values()))} of them different")
        return 0
    before = json.loads(options.file.read_text())
    differ = [x for x in found if found[x] != before.get(x)] + [*(before.keys() - found)]
    print("\n".join(sorted(differ)))
    print(f"{len(differ)} of {len(found)} kernels differ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
