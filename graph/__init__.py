"""Verify-commit of speculative drafts, built on :mod:`replayssm.ops`."""

from .batch import Bucket, Mode, StaticBatch, buckets, live_rows, smallest
from .budget import choose_verify_lens
from .capture import Captured, CapturedCommit
from .commit import Commit, Committed
from .handoff import put_prefill
from .inspect import Node, describe, nodes
from .loop import DecodeLoop, Outputs
from .model import LinearAttention, Shard
from .pools import Memory, Pools, memory
from .routing import Route, decide
from .sampling import rejection_accept

__all__ = [
    "Bucket",
    "Captured",
    "CapturedCommit",
    "Commit",
    "Committed",
    "DecodeLoop",
    "LinearAttention",
    "Memory",
    "Mode",
    "Node",
    "Outputs",
    "Pools",
    "Route",
    "Shard",
    "StaticBatch",
    "buckets",
    "choose_verify_lens",
    "decide",
    "describe",
    "live_rows",
    "memory",
    "nodes",
    "put_prefill",
    "rejection_accept",
    "smallest",
]
