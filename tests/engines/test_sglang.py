"""engines.sglang: SGLang's speculative state committed by the ops, without SGLang."""

import json

import pytest
import torch
from expecttest import assert_expected_inline
from torch.utils._python_dispatch import TorchDispatchMode

import install_peers
from oracle import state_error
from process import SUPPORT, python, skip_where_triton_cannot_interpret
from replayssm import ops
from replayssm.graph import Route
from replayssm.graph.engines import sglang
from samples import bits_equal
from sglang_state import RINGS, Case, Shape

SCATTER = Route("scatter", "a test's")
FOLDS = {False: Route("gdn_fold", "a test's"), True: Route("kda_fold", "a test's")}
SOURCE_ROWS = (3, 0, 5, 1, 2)
variants = pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
tracking = pytest.mark.parametrize("tracked", [False, True], ids=["untracked", "tracked"])
keyed = pytest.mark.parametrize(
    "source_rows", [None, SOURCE_ROWS], ids=["by position", "by request"]
)


def case(kda, device="cpu", **changes) -> Case:
    return Case(Shape(kda=kda, **changes), device)


def commit(c: Case, route: Route, tracked: bool = True, **options) -> None:
    sglang.commit(
        route, c.spec_state, c.state_indices, c.last_steps,
        **(c.tracks if tracked else {}), **{"source_rows": c.source_rows} | options,
    )  # fmt: skip


def fold_or_scatter(c: Case, route: Route, tracked: bool) -> None:
    if route.commit == "scatter":
        c.add_snapshots()
    commit(c, route, tracked)


@pytest.mark.parametrize("route", ["fold", "scatter"])
@keyed
@tracking
@variants
def test_a_commit_leaves_the_accepted_prefix_in_each_slot(
    kda, tracked, source_rows, route, device
):
    c = case(kda, device, source_rows=source_rows)
    wanted = c.wanted(tracked)
    assert len(wanted) == (5 if tracked else 3)
    fold_or_scatter(c, FOLDS[kda] if route == "fold" else SCATTER, tracked)
    state, (conv,) = c.spec_state.temporal, c.spec_state.conv
    for slot, (after, window) in wanted.items():
        # Exactly what the oracle's snapshots were rounded to, or an fp32 sum's error.
        if route == "scatter":
            bits_equal(state[:, slot].cpu(), after.float(), f"state of slot {slot}")
        assert state_error(state[:, slot], after) <= 1e-6, slot
        bits_equal(conv[:, slot], window, f"conv state of slot {slot}")


@pytest.mark.parametrize("route", ["fold", "scatter"])
@keyed
@tracking
@variants
def test_a_commit_leaves_all_else_as_it_was(kda, tracked, source_rows, route, device):
    c = case(kda, device, source_rows=source_rows)
    slots = list(c.wanted(tracked))
    fold_or_scatter(c, FOLDS[kda] if route == "fold" else SCATTER, tracked)
    for name, after in c.tensors().items():
        before = c.before[name].clone()
        if name in ("temporal[0]", "conv[0]"):
            before[:, slots, 1] = after[:, slots, 1]
        bits_equal(after, before, name)


@tracking
@variants
def test_a_fold_is_ops_fold_of_the_same_tensors(kda, tracked, device):
    c, direct = case(kda, device), case(kda, device)
    commit(c, FOLDS[kda], tracked)
    state = direct.spec_state
    ops.fold(
        state.temporal, *(getattr(state, name) for name in RINGS), direct.state_indices,
        direct.accept_lens, **(direct.tracks if tracked else {}),
    )  # fmt: skip
    bits_equal(c.tensors()["temporal[0]"], direct.tensors()["temporal[0]"], "temporal")


@variants
def test_rings_may_be_keyed_by_request(kda):
    c, moved = case(kda), case(kda)
    rows = torch.tensor([4, 0, 1, 3, 2])
    for name in RINGS:
        ring = getattr(moved.spec_state, name)
        by_request = torch.full_like(ring[:, :5], float("nan"))
        by_request[:, rows] = ring[:, moved.state_indices]
        setattr(moved.spec_state, name, by_request)
    commit(c, FOLDS[kda])
    commit(moved, FOLDS[kda], window_rows=rows)
    bits_equal(moved.spec_state.temporal, c.spec_state.temporal, "temporal")


@variants
def test_slots_up_to_the_null_slot_are_padding(kda, device):
    c, null = case(kda, device), case(kda, device)
    null.state_indices[null.state_indices < 0] = 0
    # A request whose tracked slot is the null one tracks nothing.
    null.track_indices[0] = 0
    c.track_indices[0] = -1
    commit(c, FOLDS[kda])
    commit(null, FOLDS[kda], null_slot=0)
    for name, after in null.tensors().items():
        bits_equal(after, c.tensors()[name], name)


class Fresh(TorchDispatchMode):
    """The largest tensor, in elements, whose memory is in no argument of its call."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if torch.is_tensor(x)}
        if torch.is_tensor(out) and out.untyped_storage().data_ptr() not in given:
            self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.parametrize("route", ["fold", "scatter"])
@variants
def test_every_pool_goes_to_an_op_as_it_lies_in_memory(kda, route, monkeypatch):
    c = case(kda)
    c.add_snapshots()
    calls = []
    for name in ("fold", "scatter", "conv_commit"):
        monkeypatch.setattr(
            sglang, name, lambda *args, name=name, **_: calls.append((name, args))
        )
    with Fresh() as fresh:
        commit(c, FOLDS[kda] if route == "fold" else SCATTER, null_slot=0)
    assert fresh.largest <= c.shape.B
    state = c.spec_state
    (first, pools), (second, convs) = calls
    wanted = [state.temporal, *(getattr(state, name) for name in RINGS)]
    if route == "scatter":
        wanted = [state.temporal, state.intermediate_ssm]
    assert first == route and all(
        x is y for x, y in zip(wanted, pools[: len(wanted)], strict=True)
    )
    assert second == ("scatter" if kda else "conv_commit")
    ((conv, window),) = zip(*convs[:2], strict=True) if not kda else [convs[:2]]
    assert conv is state.conv[0]
    assert window.data_ptr() == state.intermediate_conv_window[0].data_ptr()
    assert window.untyped_storage().data_ptr() == (
        state.intermediate_conv_window[0].untyped_storage().data_ptr()
    )


def test_an_empty_batch_and_a_state_of_convolutions_alone_commit():
    for kda, route in ((False, FOLDS[False]), (True, FOLDS[True])):
        c = case(kda)
        c.state_indices = c.state_indices[:0]
        c.last_steps = c.last_steps[:0]
        commit(c, route, tracked=False)
    c = case(False)
    wanted = c.wanted(False)
    c.spec_state.temporal = torch.empty(2, 11, 0)
    commit(c, SCATTER, tracked=False)
    for slot, (_, window) in wanted.items():
        bits_equal(c.spec_state.conv[0][:, slot], window, f"conv state of slot {slot}")


def test_a_state_that_has_not_what_its_route_needs_is_refused_unwritten():
    c = case(False)
    c.spec_state.replayssm_beta = None  # SGLang's circular ring of GDN
    texts = []
    for route in (FOLDS[False], SCATTER):
        with pytest.raises(ValueError) as raised:
            commit(c, route)
        texts.append(str(raised.value))
    for name, after in c.tensors().items():
        bits_equal(after, c.before[name], name)
    assert_expected_inline(
        "\n".join(texts),
        """\
sglang: spec_state.replayssm_beta must be a window to fold, got None: the pool keeps no raw inputs, or a ring of updates; allocate raw rows (docs/sglang.md), or leave this commit to SGLang
sglang: spec_state.intermediate_ssm must hold snapshots to scatter, got None: its pool was made for replay""",
    )


@pytest.mark.gpu
@pytest.mark.parametrize("route", ["fold", "scatter"])
@variants
def test_a_captured_commit_follows_the_lengths_in_device_memory(kda, route):
    eager, captured = (case(kda, "cuda", source_rows=SOURCE_ROWS) for _ in range(2))
    chosen = FOLDS[kda] if route == "fold" else SCATTER
    for c in (eager, captured):
        c.add_snapshots()
    last_steps = captured.last_steps.clone()
    commit(case(kda, "cuda"), FOLDS[kda])  # compiles
    captured.last_steps.fill_(-1)
    commit(captured, chosen)  # nothing is accepted
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        commit(captured, chosen)
    captured.last_steps.copy_(last_steps)
    graph.replay()
    commit(eager, chosen)
    for name, after in captured.tensors().items():
        bits_equal(after, eager.tensors()[name], name)


def test_commits_agree_with_the_kernels_of_sglang_and_fla(device):
    """Scatter's bits equal SGLang's; which other states' did, pytest -rP shows."""
    missing = install_peers.pins().keys() - install_peers.installed(install_peers.FOLDER)
    if missing:
        pytest.skip(
            f"no {', '.join(sorted(missing))}: tools/bench/install_peers.py installs them"
        )
    pytest.importorskip("triton", reason="needs triton")
    if device == "cpu":
        skip_where_triton_cannot_interpret()
    run = python(SUPPORT / "beside_sglang.py", device)
    assert run.returncode == 0, run.stderr
    outcomes = [json.loads(line) for line in run.stdout.splitlines()]
    assert [outcome for outcome in outcomes if outcome[2]] == []
    assert len(outcomes) == {"cpu": 8, "cuda": 12}[device]
    for check, shape, _, equal in outcomes:
        assert equal or check != "scatter_like_sglang", shape
        print(f"{check}, {shape}: {'equal bits' if equal else 'within the bound'}")
