"""Which commit a backend gets: every row of the table, and every refusal's text."""

import pytest
import torch
from expecttest import assert_expected_inline

from replayssm.graph import Route, decide

KINDS = ("gdn", "kda", "mamba2")
# Each of these stops a fold, one at a time.
OBSTACLES = {
    "the other's pool": lambda target: {"pool_kda": target == "gdn"},
    "another device": lambda target: {"device": "xpu:0"},
    "unified memory": lambda target: {"unified_memory": True},
    "tree drafts": lambda target: {"topk": 4},
    "no anchor": lambda target: {"draft": 0},
    "short window": lambda target: {"window": 7},
}


def route(target, replay=True, **options):
    return decide(target, **{"replay": replay, "window": 8, "draft": 8} | options)


def refusal(target, **options):
    with pytest.raises(ValueError) as raised:
        route(target, **options)
    return str(raised.value)


def test_the_table_gives_every_backend_its_commit():
    rows = []
    for target in KINDS:
        for replay in (False, True):
            try:
                got = route(target, replay)
                rows.append(f"{target:6} {replay!s:5} {got.commit}: {got.reason}")
            except ValueError as error:
                rows.append(f"{target:6} {replay!s:5} {error}")
    assert_expected_inline(
        "\n".join(rows),
        """\
gdn    False scatter: replay is off
gdn    True  gdn_fold: replay is on and the backend is GDN
kda    False scatter: replay is off
kda    True  kda_fold: replay is on and the backend is KDA
mamba2 False scatter: replay is off
mamba2 True  decide: target must be 'gdn' or 'kda' with replay on, got 'mamba2': no other backend's inputs can be replayed into its state; set replay=False to commit by scatter""",
    )


def test_every_refusal_says_what_and_why_and_what_to_change():
    lines = []
    for case in OBSTACLES.values():
        texts = [refusal(target, **case(target)) for target in ("gdn", "kda")]
        lines += dict.fromkeys(texts)
    assert_expected_inline(
        "\n".join(lines),
        """\
decide: pool_kda must be False for target 'gdn', got True: a KDA pool has one gate per head and key dimension, a GDN pool one per head; set pool_kda=False, or the target to the backend that runs
decide: pool_kda must be True for target 'kda', got False: a KDA pool has one gate per head and key dimension, a GDN pool one per head; set pool_kda=True, or the target to the backend that runs
decide: device must be 'cuda' (ROCm too) or 'cpu' (the reference), got 'xpu:0': the fold has no kernel for others; set device, or replay=False
decide: unified_memory must be False with replay on, got True: its slots are virtual, in one arena with the KV cache, and the fold takes slots of a pool of its own; set unified_memory=False, or replay=False
decide: topk must be 1 with replay on, got 4: a window is one chain of tokens, and a tree's accepted path need not be a prefix of it; set topk=1, or replay=False
decide: draft must be at least 1, got 0: the anchor is row 0 of every verify; set draft to the drafts of a step plus 1
decide: window must be at least draft = 8, got 7: rows past the window are verified but not stored, and could not be folded; set window=8, or draft=7""",
    )


@pytest.mark.parametrize("name", OBSTACLES)
@pytest.mark.parametrize("target", KINDS)
def test_what_stops_a_fold_does_not_concern_a_backend_that_keeps_snapshots(target, name):
    obstacle = OBSTACLES[name](target)
    assert route(target, replay=False, **obstacle).commit == "scatter"


@pytest.mark.parametrize("name", OBSTACLES)
@pytest.mark.parametrize("target", KINDS)
def test_a_draft_workers_pool_is_never_refused(target, name):
    got = route(target, draft_worker=True, **OBSTACLES[name](target))
    assert got.commit == {"gdn": "gdn_fold", "kda": "kda_fold"}.get(target, "scatter")
    assert got.window is None


@pytest.mark.parametrize("name", ("GDN", "gdn2", "kda-safe", "lightning", ""))
def test_only_a_backend_that_really_is_gdn_or_kda_folds(name):
    assert route(name, replay=False).commit == "scatter"
    assert "target must be 'gdn' or 'kda'" in refusal(name)


@pytest.mark.parametrize(
    "device", ("cpu", "cuda", "cuda:3", torch.device("cuda", 7), "hip")
)
def test_a_device_is_judged_by_its_kind_and_never_touched(device, monkeypatch):
    def touched():
        raise AssertionError("CUDA was initialised")

    monkeypatch.setattr(torch.cuda, "_lazy_init", touched)
    assert route("gdn", device=device).commit == "gdn_fold"


@pytest.mark.parametrize("target, mark", [("gdn", False), ("kda", True)])
def test_a_pool_with_the_right_mark_a_chain_and_room_for_the_draft_fold(target, mark):
    got = route(target, pool_kda=mark, topk=1, window=9)
    reason = f"replay is on and the backend is {target.upper()}"
    assert got == Route(f"{target}_fold", reason, window=9)
