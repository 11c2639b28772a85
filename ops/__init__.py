"""The ops: plain, documented functions over ``torch.ops.replayssm.*``."""

from .commit import fold, scatter
from .select import Lowering, lowering
from .recurrence import decode, verify
from .windows import gate, store

__all__ = [
    "Lowering",
    "decode",
    "fold",
    "gate",
    "lowering",
    "scatter",
    "store",
    "verify",
]
