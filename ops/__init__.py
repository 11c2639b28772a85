"""The ops: plain, documented functions over ``torch.ops.replayssm.*``."""

from .commit import fold, scatter
from .recurrence import decode, verify
from .select import Lowering, lowering
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
