"""What every op's arguments must be, said once.

Only metadata is looked at: shapes, dtypes, devices, strides. Values on a device
are never read. Everything here also runs on fake tensors with symbolic sizes.
``__all__`` is for packages that are built on the ops, as replayssm.graph is.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from .window_rule import Windows, fits

__all__ = ["ACTIVATION", "INDEX", "MAX_K", "Check"]

ACTIVATION = (torch.bfloat16, torch.float16, torch.float32)
GATE = (torch.float32,)
SNAPSHOT = (*ACTIVATION, torch.float64, torch.int8, torch.uint8)
INDEX = (torch.int32, torch.int64)
MAX_K = 256


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


class Check:
    """Checks one op's tensors, binding each letter of their shapes to one size."""

    def __init__(self, op: str, like: Tensor, name: str) -> None:
        self.op, self.device, self.name = op, like.device, name
        self.sizes: dict[str, int] = {}
        self.sources: dict[str, str] = {}

    def fail(self, text: str, error: type[Exception] = ValueError) -> NoReturn:
        raise error(f"{self.op}: {text}")

    def require(self, condition: bool | torch.SymBool, text: Callable[[], str]) -> None:
        """Fail when ``condition`` is false; record it when it is symbolic."""
        if isinstance(condition, torch.SymBool):
            torch._check(condition, lambda: f"{self.op}: {text()}")
        elif not condition:
            self.fail(text())

    def tensor(
        self,
        name: str,
        value: Tensor,
        dims: str,
        dtypes: tuple[torch.dtype, ...],
        *,
        dense: int = 0,
        of: str = "",
        variant: str = "",
        written: bool = False,
    ) -> None:
        """Check one tensor.

        ``dims``: letters of spec shapes ("N H K"). ``dense``: how many innermost
        dimensions must be contiguous. ``of`` and ``variant``: whose dtype and what
        shape is asked for, for the error texts. ``written``: the op mutates it.
        """
        letters = dims.split()
        if value.dim() != len(letters):
            self.fail(
                f"{name} must be [{', '.join(letters)}]{variant}, got {value.dim()} "
                f"dimensions: {list(value.shape)}"
            )
        for letter, size in zip(letters, value.shape, strict=True):
            known = self.sizes.setdefault(letter, size)
            self.sources.setdefault(letter, name)
            self.require(
                known == size,
                lambda letter=letter: (  # type: ignore[misc]  # mypy knows no default here
                    f"{name} must be [{', '.join(letters)}] with {letter} = "
                    f"{self.sizes[letter]} as in {self.sources[letter]}{variant}, "
                    f"got {list(value.shape)}"
                ),
            )
            # Before the strides, of which an empty tensor's say nothing.
            if letter in ("K", "V", "T"):
                self.require(
                    known > 0,
                    lambda letter=letter: (  # type: ignore[misc]
                        f"{letter} must be at least 1, got 0 ({self.sources[letter]})"
                    ),
                )
        if value.dtype not in dtypes:
            self.fail(
                f"{name} must be {_names(dtypes)}{of}, got {_names((value.dtype,))}",
                TypeError,
            )
        if value.device != self.device:
            self.fail(
                f"{name} must be on {self.device} like {self.name}, got {value.device}"
            )
        if value.requires_grad and torch.is_grad_enabled():
            self.fail(
                f"{name} requires grad: the ops are inference only, call them under "
                "torch.no_grad() or torch.inference_mode()"
            )
        if dense:
            self._dense(name, value, dense)
        if written:
            self._no_overlap(name, value, dense)

    def _dense(self, name: str, value: Tensor, dense: int) -> None:
        want = 1
        for dim in range(value.dim() - 1, value.dim() - 1 - dense, -1):
            if value.shape[dim] != 1 and value.stride(dim) != want:
                what = "dimension" if dense == 1 else f"{dense} dimensions"
                self.fail(
                    f"{name}'s innermost {what} must be contiguous, got shape "
                    f"{list(value.shape)} with strides {list(value.stride())}"
                )
            want = want * value.shape[dim]

    def _no_overlap(self, name: str, value: Tensor, dense: int) -> None:
        inner = 1
        for size in value.shape[value.dim() - dense :]:
            inner = inner * size
        outer = zip(value.stride(), value.shape[: value.dim() - dense], strict=False)
        # From the smallest stride up, each must step over all that came before.
        for stride, size in sorted(outer, key=lambda dim: dim[0]):
            # The size second: an unbacked one, as a batch may be, is not asked about.
            if stride < inner and size > 1:
                self.fail(
                    f"{name} is written and must not overlap itself, got shape "
                    f"{list(value.shape)} with strides {list(value.stride())}"
                )
            inner = inner + (size - 1) * stride

    def index(self, name: str, value: Tensor | None, dims: str) -> None:
        if value is not None:
            self.tensor(name, value, dims, INDEX)

    def tracks(self, track_indices: Tensor | None, track_steps: Tensor | None) -> None:
        """The snapshots of a commit: both arguments or neither."""
        if (track_indices is None) != (track_steps is None):
            names = "track_indices", "track_steps"
            given, missing = names[::-1] if track_indices is None else names
            self.fail(f"{given} needs {missing} beside it, got None")
        self.index("track_indices", track_indices, "B")
        self.index("track_steps", track_steps, "B")

    def heads(self) -> None:
        value_heads, key_heads = self.sizes["HV"], self.sizes["H"]
        self.require(
            key_heads > 0 and value_heads % key_heads == 0,
            lambda: (
                f"HV must be a multiple of H, got HV = {value_heads} "
                f"({self.sources['HV']}) and H = {key_heads} ({self.sources['H']})"
            ),
        )
        self.key_dim()

    def key_dim(self) -> None:
        self.require(
            0 < self.sizes["K"] <= MAX_K,
            lambda: f"K must be 1 to {MAX_K}, got {self.sizes['K']} ({self.sources['K']})",
        )

    def lower_bound(self, value: float | None, kda: bool) -> None:
        if value is None:
            return
        if not kda:
            self.fail(
                "lower_bound is KDA's safe gate and must be None for GDN "
                f"(a is [N, HV]), got {value}"
            )
        if not (value < 0 and value != float("-inf")):
            self.fail(f"lower_bound must be a finite number below 0, got {value}")

    def rows(self, cu_seqlens: Tensor | None) -> None:
        """The batch's shape: uniform rows of N / B tokens, or cu_seqlens."""
        tokens, batch = self.sizes["N"], self.sizes["B"]
        if cu_seqlens is not None:
            self.tensor("cu_seqlens", cu_seqlens, "B+1", INDEX)
            self.require(
                cu_seqlens.shape[0] == batch + 1,
                lambda: (
                    f"cu_seqlens must be [B + 1] with B = {batch} "
                    f"({self.sources['B']}), got {list(cu_seqlens.shape)}"
                ),
            )
            return
        capacity = self.sizes.get("T")
        if isinstance(batch, int) and batch == 0:
            self.require(
                tokens == 0,
                lambda: (
                    f"N must be 0 when B is 0 ({self.sources['B']}), got N = {tokens} "
                    f"({self.sources['N']})"
                ),
            )
            return
        self.require(
            tokens % batch == 0,
            lambda: (
                "without cu_seqlens N must be a multiple of B, got "
                f"N = {tokens} ({self.sources['N']}) and B = {batch} ({self.sources['B']})"
            ),
        )
        if capacity is not None:
            self.require(
                fits(tokens, capacity * batch),
                lambda: (
                    f"D = N / B = {tokens // batch} tokens a row ({self.sources['N']}, "
                    f"{self.sources['B']}) do not fit the window's T = {capacity} rows "
                    f"({self.sources['T']})"
                ),
            )


def is_kda(
    check: Check, name: str, value: Tensor, gdn: str, kda: str, beside: str = ""
) -> bool:
    """The variant, read from the rank of ``a`` or a gate window."""
    ranks = {len(gdn.split()): False, len(kda.split()): True}
    if value.dim() not in ranks:
        gdn_dims, kda_dims = (", ".join(dims.split()) for dims in (gdn, kda))
        check.fail(
            f"{name} must be [{gdn_dims}] (GDN) or [{kda_dims}] (KDA){beside}, got "
            f"{value.dim()} dimensions: {list(value.shape)}"
        )
    return ranks[value.dim()]


def gates(check: Check, x: Any, tokens: str) -> bool:
    """a, b, A_log and dt_bias of a call; returns whether they are KDA's."""
    kda = is_kda(check, "a", x.a, f"{tokens} HV", f"{tokens} HV K")
    variant = " (KDA, from a)" if kda else " (GDN, from a)"
    a_dims, bias_dims = (f"{tokens} HV K", "HV K") if kda else (f"{tokens} HV", "HV")
    check.tensor("a", x.a, a_dims, ACTIVATION, dense=int(kda))
    check.tensor("b", x.b, f"{tokens} HV", ACTIVATION)
    check.tensor("A_log", x.A_log, "HV", ACTIVATION)
    check.tensor("dt_bias", x.dt_bias, bias_dims, ACTIVATION, variant=variant)
    return kda


def projections(check: Check, q: Tensor | None, k: Tensor, v: Tensor, tokens: str) -> None:
    """q, k and v: one dtype, the innermost dimension dense."""
    if q is not None:
        check.tensor("q", q, f"{tokens} H K", ACTIVATION, dense=1)
        check.tensor("k", k, f"{tokens} H K", (q.dtype,), dense=1, of=" like q")
        check.tensor("v", v, f"{tokens} HV V", (q.dtype,), dense=1, of=" like q")
    else:
        check.tensor("k", k, f"{tokens} H K", ACTIVATION, dense=1)
        check.tensor("v", v, f"{tokens} HV V", (k.dtype,), dense=1, of=" like k")
    check.heads()


def windows(
    check: Check,
    given: Windows,
    *,
    kda: bool,
    dtype: tuple[torch.dtype, ...],
    of: str = "",
    outer: str = "",
    written: bool = False,
) -> None:
    """The four windows of one layer, or with ``outer`` = "L " of all layers."""
    gate_dims, variant = ("R HV T K", " (KDA)") if kda else ("R HV T", " (GDN)")
    options: dict[str, Any] = {"written": written}
    check.tensor("k_window", given.k, f"{outer}R H T K", dtype, dense=3, of=of, **options)
    same = (given.k.dtype,)
    check.tensor(
        "v_window", given.v, f"{outer}R HV T V", same,
        dense=3, of=" like k_window", **options,
    )  # fmt: skip
    check.tensor(
        "g_window", given.g, outer + gate_dims, GATE,
        dense=3 if kda else 2, variant=variant, **options,
    )  # fmt: skip
    check.tensor("beta_window", given.beta, f"{outer}R HV T", GATE, dense=2, **options)
