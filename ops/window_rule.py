"""The window rule: which row of which window a step may write, and a commit may read.

A *window row* holds what one verify caches of one request: up to T tokens. Request i's
is ``window_indices[i]``, by default its slot. It has none when it is padding (its slot is
negative or outside the state pool), or when that row lies outside the window pool.
verify and store write its first T tokens and no others; fold reads its first accept_lens
tokens, and never more than T. So a draft window of D tokens needs T >= D.

Everything here is arithmetic on metadata or, without a read on the host, on tensors.
"""

from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["Windows", "fits"]  # what replayssm.graph builds on


class Windows(NamedTuple):
    """The four windows of one layer, or with a leading axis L of all layers.

    k [R, H, T, K] and v [R, HV, T, V] in the activation dtype, k before l2norm;
    g [R, HV, T] (GDN) or [R, HV, T, K] (KDA) and beta [R, HV, T] fp32.
    """

    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @classmethod
    def of(cls, x: Any) -> "Windows":
        """Those among an op's arguments."""
        return cls(x.k_window, x.v_window, x.g_window, x.beta_window)

    @property
    def rows(self) -> int:
        """R, window rows."""
        return self.k.shape[-4]

    @property
    def capacity(self) -> int:
        """T, the tokens that one row holds."""
        return self.k.shape[-2]

    @property
    def kda(self) -> bool:
        """One decay per head and key dimension, not one per head."""
        return self.g.dim() == self.v.dim()


def fits(draft: int, window: int) -> bool:
    """Whether windows of T = ``window`` rows hold drafts of D = ``draft`` tokens."""
    return draft <= window


def named_rows(slots: Tensor, rows: Tensor | None) -> Tensor:
    """[B] int64: the row that each request names; -1 for padding, whatever it names.

    Args:
        slots: [B] int, the slot of each request.
        rows: [B] int, or None: a request's row is its slot.
    """
    return (slots if rows is None else rows).long().masked_fill(slots < 0, -1)


def rows_of(slots: Tensor, rows: Tensor | None, S: int, R: int) -> Tensor:
    """[B] int64: the row that each request has; -1 where it has none.

    Args:
        slots, rows: as for ``named_rows``.
        S: slots of the state pool. R: rows of the window pool.
    """
    named = named_rows(slots, rows)
    return named.masked_fill((slots >= S) | (named >= R) | (named < 0), -1)


def rows_read(accept_len: int, window: int) -> int:
    """How many tokens of its row a commit of ``accept_len`` reads."""
    return min(max(accept_len, 0), window)
