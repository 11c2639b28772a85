"""The ops: plain, documented functions over ``torch.ops.replayssm.*``."""

from .acceptance import accept, commit_indices
from .commit import fold, scatter
from .conv import conv_commit
from .recurrence import decode, verify
from .select import Lowering, lowering
from .windows import gate, store

__all__ = [
    "Lowering",
    "accept",
    "commit_indices",
    "conv_commit",
    "decode",
    "fold",
    "gate",
    "lowering",
    "scatter",
    "store",
    "verify",
]
