"""Verify-commit of speculative drafts, built on :mod:`replayssm.ops`."""

from .acceptance import greedy_accept

__all__ = ["greedy_accept"]
