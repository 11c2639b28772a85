"""The stop of debug mode: says which row of which argument breaks a rule, and traps."""

import triton
import triton.language as tl


@triton.jit(debug=True, do_not_specialize=["n"])
def stop_unless(
    values, holds, n, NAME: tl.constexpr, TEXT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Print a block's values and fail where a row does not hold: a trap ends the
    context, and no kernel behind this one runs."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = o < n
    b_holds = tl.load(holds + o, mask=mask, other=1) != 0
    if tl.min(b_holds.to(tl.int32), axis=0) == 0:
        # A message cannot hold a value, so lines of "idx (row) name: value" go before it.
        tl.device_print(NAME, tl.load(values + o, mask=mask, other=-1))
        tl.device_assert(b_holds, TEXT)
