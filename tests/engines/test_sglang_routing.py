"""tools/sglang.py: the commit that each situation in SGLang gets."""

from types import SimpleNamespace

import pytest
import torch
from expecttest import assert_expected_inline

from replayssm.graph.engines import sglang
from sglang_state import (
    Case,
    GDNAttnBackend,
    KDAAttnBackend,
    Mamba2AttnBackend,
    Shape,
    XpuGDNAttnBackend,
)


def backend(
    cls, *, spec=False, ring=False, raw=False, unified=False, fused=False, device="cpu"
):
    """A backend with the pool that SGLang 0.5.23 makes for these flags.

    ``raw``: a GDN pool's ring holds raw rows, as an engine must make it for a fold.
    ``fused``: the next verify picks the accepted state up itself.
    """
    kda = cls is KDAAttnBackend
    on = spec or ring
    made = Case(Shape(kda), "cpu").spec_state
    if not spec:
        made.replayssm_rawv = made.replayssm_rawk = made.replayssm_beta = None
    elif not kda and not raw:
        made.replayssm_beta = None
    if not on:
        made.replayssm_g = None
    made.temporal = SimpleNamespace(device=torch.device(device))
    instance = cls()
    instance.accept_lens_pool = torch.ones(11) if fused else None
    instance.req_to_token_pool = SimpleNamespace(
        mamba_v2p_table=torch.arange(11) if unified else None,
        mamba_pool=SimpleNamespace(
            mamba_cache=made, enable_linear_replayssm=ring,
            enable_linear_replayssm_spec=spec, replayssm_is_kda=kda and on,
        ),
    )  # fmt: skip
    return instance


GDN, KDA, MAMBA = GDNAttnBackend, KDAAttnBackend, Mamba2AttnBackend
# What SGLang 0.5.23 does in each situation, backend, its pool's flags, and the call's.
SITUATIONS = [
    ("scatter", GDN, {}, {}),
    ("scatter, a tree", GDN, {}, {"topk": 4}),
    ("scatter, on virtual slots", GDN, {"unified": True}, {}),
    ("scatter, beside the decode ring", GDN, {"ring": True}, {}),
    ("circular ring under MTP, refused under DFlash", GDN, {"spec": True}, {}),
    ("fold of raw rows", GDN, {"spec": True, "raw": True}, {}),
    ("refused, a tree", GDN, {"spec": True, "raw": True}, {"topk": 4}),
    ("draft worker, no commit", GDN, {"spec": True}, {"draft_worker": True, "topk": 4}),
    ("scatter", KDA, {}, {}),
    ("conv states only, the next verify seeds itself", KDA, {"fused": True}, {}),
    ("fold, and finds no rows", KDA, {"ring": True}, {}),
    ("fold", KDA, {"spec": True}, {"topk": 1}),
    ("refused, a short ring", KDA, {"spec": True}, {"draft": 9}),
    ("flag dropped, scatter", KDA, {"unified": True}, {"spec_replay": True}),
    ("scatter", MAMBA, {}, {}),
    ("flag dropped, scatter", MAMBA, {}, {"spec_replay": True}),
    ("scatter", XpuGDNAttnBackend, {"device": "xpu:0"}, {}),
    ("as on CUDA", XpuGDNAttnBackend, {"device": "xpu:0", "spec": True, "raw": True}, {}),
]


def test_every_situation_that_sglang_distinguishes_has_its_commit():
    lines = []
    for theirs, cls, flags, call in SITUATIONS:
        options = {"spec_replay": flags.get("spec", False), "draft": 4} | call
        try:
            got = sglang.route(backend(cls, **flags), **options)
            ours = "left to SGLang" if got is None else f"{got.commit}: {got.reason}"
        except ValueError as error:
            ours = f"ValueError: {error}"
        given = ", ".join([*flags, *call])
        lines.append(f"{cls.__name__}({given}) {theirs} -> {ours}")
    assert_expected_inline(
        "\n".join(lines),
        """\
GDNAttnBackend() scatter -> scatter: replay is off
GDNAttnBackend(topk) scatter, a tree -> scatter: replay is off
GDNAttnBackend(unified) scatter, on virtual slots -> scatter: replay is off
GDNAttnBackend(ring) scatter, beside the decode ring -> scatter: replay is off
GDNAttnBackend(spec) circular ring under MTP, refused under DFlash -> ValueError: sglang: spec_state.replayssm_beta must be a window to fold, got None: the pool keeps no raw inputs, or a ring of updates; allocate raw rows (docs/sglang.md), or leave this commit to SGLang
GDNAttnBackend(spec, raw) fold of raw rows -> gdn_fold: replay is on and the backend is GDN
GDNAttnBackend(spec, raw, topk) refused, a tree -> ValueError: decide: topk must be 1 with replay on, got 4: a window is one chain of tokens, and a tree's accepted path need not be a prefix of it; set topk=1, or replay=False
GDNAttnBackend(spec, draft_worker, topk) draft worker, no commit -> gdn_fold: replay is on and the backend is GDN
KDAAttnBackend() scatter -> scatter: replay is off
KDAAttnBackend(fused) conv states only, the next verify seeds itself -> left to SGLang
KDAAttnBackend(ring) fold, and finds no rows -> scatter: replay is on for KDA's decode ring only, not for folding
KDAAttnBackend(spec, topk) fold -> kda_fold: replay is on and the backend is KDA
KDAAttnBackend(spec, draft) refused, a short ring -> ValueError: decide: window must be at least draft = 9, got 8: rows past the window are verified but not stored, and could not be folded; set window=9, or draft=8
KDAAttnBackend(unified, spec_replay) flag dropped, scatter -> ValueError: decide: unified_memory must be False with replay on, got True: its slots are virtual, in one arena with the KV cache, and the fold takes slots of a pool of its own; set unified_memory=False, or replay=False
Mamba2AttnBackend() scatter -> scatter: replay is off
Mamba2AttnBackend(spec_replay) flag dropped, scatter -> ValueError: decide: target must be 'gdn' or 'kda' with replay on, got 'Mamba2AttnBackend': no other backend's inputs can be replayed into its state; set replay=False to commit by scatter
XpuGDNAttnBackend(device) scatter -> left to SGLang
XpuGDNAttnBackend(device, spec, raw) as on CUDA -> ValueError: decide: device must be 'cuda' (ROCm too) or 'cpu' (the reference), got 'xpu:0': the fold has no kernel for others; set device, or replay=False""",
    )


def test_a_pool_marked_for_the_other_gate_is_refused():
    for cls in (GDN, KDA):
        wrong = backend(cls, spec=True, raw=True)
        pool = wrong.req_to_token_pool.mamba_pool
        pool.replayssm_is_kda = not pool.replayssm_is_kda
        with pytest.raises(ValueError, match="pool_kda must be"):
            sglang.route(wrong, spec_replay=True, draft=4)
