"""SGLang's speculative state, committed by replayssm.

Reads SGLang's objects (of release 0.5.23) by their attributes and imports nothing of it;
docs/sglang.md says where the two calls go. SGLang's rings of raw inputs are windows as they
lie: [V, K] states, one row a token, so every pool goes to an op as it is or as a view.

Example (two requests of one layer; three tokens were verified, and one and three accepted):

>>> import torch
>>> from types import SimpleNamespace
>>> from replayssm.graph import decide
>>> from replayssm.graph.engines import sglang
>>> L, S, H, HV, K, V, D, C = 1, 4, 1, 2, 8, 8, 3, 12
>>> spec_state = SimpleNamespace(
...     temporal=torch.zeros(L, S, HV, V, K), intermediate_ssm=None,
...     replayssm_rawk=torch.randn(L, S, H, D, K), replayssm_rawv=torch.randn(L, S, HV, D, V),
...     replayssm_g=torch.full((L, S, HV, D), -0.1), replayssm_beta=torch.ones(L, S, HV, D),
...     conv=[torch.zeros(L, S, C, 3)],
...     intermediate_conv_window=[torch.randn(L, 2, C, D + 2).unfold(3, 3, 1).movedim(3, 2)],
... )
>>> route = decide("gdn", replay=True, window=D, draft=D, device="cpu")
>>> slots, last_correct_step = torch.tensor([2, 0]), torch.tensor([0, 2])
>>> sglang.commit(route, spec_state, slots, last_correct_step)
>>> spec_state.temporal[0].flatten(1).any(1).tolist()
[True, False, True, False]
"""

from typing import Any

import torch
from torch import Tensor

from ...ops import conv_commit, fold, scatter
from ...ops.window_rule import Windows
from ..routing import Route, decide

# The backends whose inputs can be replayed, and what decide calls them.
KINDS = {"GDNAttnBackend": "gdn", "KDAAttnBackend": "kda"}


def route(
    backend: Any,
    *,
    spec_replay: bool,
    draft: int,
    topk: int | None = None,
    draft_worker: bool = False,
) -> Route | None:
    """The commit of one linear-attention backend, asked for once its pool exists.

    Args:
        backend: a MambaAttnBackendBase. Its class says what it is, its pool's marks are
            checked against that.
        spec_replay: --enable-linear-replayssm-spec, as the user gave it: pools that cannot
            replay drop the flag, and this must not go unseen.
        draft: D, tokens of one verify, the anchor included.
        topk: --speculative-eagle-topk.
        draft_worker: the backend is the draft model's.

    Returns:
        What :func:`commit` takes. None: leave the commit to SGLang, because its next
        verify picks the accepted state up itself (KDA with accept_lens_pool), or it
        scatters on a device that the ops have no kernels for.

    Raises:
        ValueError: this backend cannot fold, see :func:`replayssm.graph.decide`, or its
            pool has no raw rows to fold.
    """
    requests = backend.req_to_token_pool
    pool = requests.mamba_pool
    target = _kind(backend)
    ring = target == "kda" and pool.enable_linear_replayssm
    rows, device = pool.mamba_cache.replayssm_rawv, pool.mamba_cache.temporal.device
    marked = pool.enable_linear_replayssm or pool.enable_linear_replayssm_spec
    if ring and not spec_replay:
        reason = "replay is on for KDA's decode ring only, not for folding"
        chosen = Route("scatter", reason)
    else:
        chosen = decide(
            target,
            replay=spec_replay,
            window=draft if rows is None else rows.shape[-2],
            draft=draft,
            pool_kda=pool.replayssm_is_kda if marked else None,
            device=device,
            unified_memory=requests.mamba_v2p_table is not None,
            topk=topk or 1,
            draft_worker=draft_worker,
        )
    if chosen.commit != "scatter":
        if not draft_worker:
            _raw_rows(pool.mamba_cache)
    elif backend.accept_lens_pool is not None or device.type not in ("cuda", "cpu"):
        return None
    return chosen


def commit(
    route: Route,
    spec_state: Any,
    state_indices: Tensor,
    last_steps: Tensor,
    track_indices: Tensor | None = None,
    track_steps: Tensor | None = None,
    *,
    source_rows: Tensor | None = None,
    window_rows: Tensor | None = None,
    null_slot: int = -1,
) -> None:
    """Commit what one verify of B requests accepted, for all layers: two launches or three.

    Nothing is read on the host and no pool is copied, so a CUDA graph can hold the call.

    Args:
        route: from :func:`route`.
        spec_state: MambaPool.SpeculativeState of all layers. ``temporal`` [L, S, HV, V, K]
            and each ``conv`` [L, S, C, W-1], or [L, S, W-1, C], are written; nothing else
            is, so the rings, their cursors and the snapshots stay as they were.
        state_indices: [B] int32 or int64, the physical slot of each request.
        last_steps: [B] int32 or int64, SGLang's last_correct_step_indices: the last
            accepted row, 0-based, so the anchor alone is 0; -1 = nothing.
        track_indices: [B] int, mamba_track_indices after their translation: the slot that
            receives the state after row ``track_steps[i]``.
        track_steps: [B] int, mamba_steps_to_track; below 0 = none.
        source_rows: [B] int, src_indices_raw: the rows of the conv windows and of the
            snapshots. None: the position in the batch.
        window_rows: [B] int, the rows of replayssm_rawv and the others. None: the slot,
            which is where SGLang's fold kernels look.
        null_slot: SGLang's null_block_id; slots up to it are padding.

    Raises:
        ValueError, TypeError: the state has not what the route needs, or from the ops,
            naming the argument. Whichever refuses has written nothing.
    """
    if null_slot >= 0:  # -1 and below are the ops' padding too
        state_indices = torch.where(state_indices > null_slot, state_indices, -1)
        if track_indices is not None:
            track_indices = torch.where(track_indices > null_slot, track_indices, -1)
    accept_lens = last_steps + 1
    tracks: dict[str, Any] = {"track_indices": track_indices, "track_steps": track_steps}
    state, snapshots = spec_state.temporal, spec_state.intermediate_ssm
    if route.commit != "scatter":
        fold(
            state, *_raw_rows(spec_state), state_indices, accept_lens,
            window_indices=window_rows, **tracks,
        )  # fmt: skip
    elif state.numel():  # a short convolution has no other state
        if snapshots is None:
            raise ValueError(
                "sglang: spec_state.intermediate_ssm must hold snapshots to scatter, got "
                "None: its pool was made for replay"
            )
        scatter(
            state, snapshots, state_indices, last_steps,
            source_indices=source_rows, **tracks,
        )  # fmt: skip
    sliding = []
    for conv, window in zip(
        spec_state.conv, spec_state.intermediate_conv_window, strict=True
    ):
        if _overlaps(window):
            sliding.append((conv, _shared(window)))
        else:
            scatter(
                conv, window, state_indices, last_steps,
                source_indices=source_rows, **tracks,
            )  # fmt: skip
    if sliding:
        if source_rows is None:
            source_rows = torch.arange(len(last_steps), device=last_steps.device)
        states, windows = map(list, zip(*sliding, strict=True))
        conv_commit(
            states, windows, state_indices, accept_lens,
            window_indices=source_rows, **tracks,
        )  # fmt: skip


def _kind(backend: Any) -> str:
    """What decide calls the backend; a class that it does not know goes by its own name."""
    names = [cls.__name__ for cls in type(backend).__mro__]
    return next((KINDS[name] for name in names if name in KINDS), names[0])


def _raw_rows(spec_state: Any) -> Windows:
    """fold's four windows. GDN's circular ring uses the same fields, with beta None."""
    windows = []
    for name in ("replayssm_rawk", "replayssm_rawv", "replayssm_g", "replayssm_beta"):
        window = getattr(spec_state, name)
        if window is None:
            raise ValueError(
                f"sglang: spec_state.{name} must be a window to fold, got None: the "
                "pool keeps no raw inputs, or a ring of updates; allocate raw rows "
                "(docs/sglang.md), or leave this commit to SGLang"
            )
        windows.append(window)
    return Windows(*windows)


def _overlaps(window: Tensor) -> bool:
    """Whether [L, R, D, C, W-1] shows one buffer [L, R, C, D+W-2] through a sliding frame.

    A buffer [L, R, D+W-2, C] needs no care: each of its frames is dense.
    """
    channels, taps = window.shape[3:]
    return channels > 1 and taps > 0 and window.stride(3) != taps


def _shared(window: Tensor) -> Tensor:
    """The buffer behind an overlapping window."""
    L, R, D, C, taps = window.shape
    strides = (*window.stride()[:2], window.stride(3), window.stride(4))
    return window.as_strided((L, R, C, D + taps - 1), strides, window.storage_offset())
