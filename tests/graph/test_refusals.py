"""What the graphs of a commit refuse at construction, and at a call."""

import pytest
import torch
from expecttest import assert_expected_inline

from replayssm.graph import (
    Bucket,
    Captured,
    CapturedCommit,
    Commit,
    DecodeLoop,
    LinearAttention,
    Pools,
    StaticBatch,
    decide,
    live_rows,
)

T, R = 4, 2


def committer(**options) -> Commit:
    model = LinearAttention(1, H=1, HV=1, K=4, V=4, variant="gdn")
    pools = Pools(model, slots=4, requests=R, window=T, device="cpu")
    return Commit(pools, torch.arange(4), **options)


def captured(mode: str, draft: int = T, batch: int = R) -> CapturedCommit:
    choices = [Bucket(batch, batch * draft)]
    return CapturedCommit(committer(), choices, draft=draft, mode=mode, graphs=False)


def loop(draft: int, max_tokens: int = 8) -> DecodeLoop:
    return DecodeLoop(
        committer(), None, None, [Bucket(R, R * draft)], draft=draft,
        max_tokens=max_tokens, graphs=False,
    )  # fmt: skip


def rows(lens: list[int]) -> torch.Tensor:
    """Two requests whose drafts are 0, 1, 2, 3."""
    drafts = torch.arange(T).repeat(2, 1)
    return live_rows(torch.arange(2), torch.full((2,), 5), drafts, torch.tensor(lens))


def text(function, *args, **options) -> str:
    with pytest.raises(ValueError) as raised:
        function(*args, **options)
    return str(raised.value)


def test_a_commit_a_loop_and_graphs_that_cannot_be_are_refused():
    bucket, options = Bucket(R, R * T), {"draft": T, "device": "cpu", "graphs": False}
    assert_expected_inline(
        "\n".join(
            [
                text(committer, track_interval=-1), text(committer, track_interval=4),
                text(loop, T, 0), text(Captured, print, [], **options),
                text(CapturedCommit, committer(), [], draft=T, graphs=False),
                text(Captured, print, [bucket], draft=T, device="cpu"),
            ]
        ),
        """\
track_interval must be 0 or more, got -1
track_slot_map must be given with track_interval = 4, got None
max_tokens must be at least 1, got 0
choices must hold at least one bucket, got none
choices must hold at least one bucket, got none
device must be a CUDA device to capture on, got cpu: pass graphs=False to run eagerly""",
    )  # fmt: skip


def test_batches_of_other_shapes_than_the_buckets_are_refused():
    """By what makes rows, by what takes them, and by a commit of more than have windows."""
    index, tokens = torch.arange(R), torch.zeros(R, T, dtype=torch.int64)
    batch, three = StaticBatch(Bucket(R, R * T), T, "cpu"), torch.ones(R + 1).int()
    assert_expected_inline(
        "\n".join(
            [
                text(live_rows, index[:1], index, tokens, None),
                text(live_rows, index, index[:, None], tokens, None),
                text(live_rows, index, index, tokens, index[:1]),
                text(live_rows, index, index, tokens[0], None),
                text(batch.fill, torch.zeros(R + 1, 3 + T)),
                text(batch.fill, torch.zeros(R, 2 + T)),
                text(batch.fill, torch.zeros(3 + T)),
                text(committer().commit, three, three, three, three),
            ]
        ),
        """\
req_indices must be [b] beside draft_tokens [b, D], got [1] and [2, 4]
seq_lens must be [b] beside draft_tokens [b, D], got [2, 1] and [2, 4]
verify_lens must be [b] beside draft_tokens [b, D], got [1] and [2, 4]
draft_tokens must be [b, D], got [4]
rows must be [b <= 2, 7], got [3, 7]
rows must be [b <= 2, 7], got [2, 6]
rows must be [b <= 2, 7], got [7]
accept_lens must be [B] with B <= 2, the requests that the pools hold windows for, got B = 3""",
    )  # fmt: skip


def test_drafts_and_batches_without_window_rows_are_refused_before_any_graph():
    tokens = torch.zeros(1, T + 1, dtype=torch.int64)
    one = torch.zeros(1, dtype=torch.int64)
    assert_expected_inline(
        "\n".join(
            [
                text(captured, "static", T + 1), text(captured, "compact", T, R + 1),
                text(loop, T + 1), text(committer(), one, one, tokens, tokens),
            ]
        ),
        """\
CapturedCommit: draft must be at most 4, the window of the pools, got 5
CapturedCommit: choices must hold at most 2 requests, as many as the pools have windows for, got 3
DecodeLoop: draft must be at most 4, the window of the pools, got 5
draft_tokens must be [B, D] with D <= 4, the window of the pools, got [1, 5]""",
    )  # fmt: skip


def test_target_tokens_of_another_shape_than_the_modes_are_refused():
    ones = torch.ones(2, T, dtype=torch.int64)
    dense, compact = captured("cap-accept"), captured("compact")
    assert_expected_inline(
        "\n".join(
            [
                text(dense, rows([4, 4]), ones[:, :-1]), text(dense, rows([4, 4]), ones[:1]),
                text(dense, rows([4, 4]), ones.flatten()), text(compact, rows([4, 4]), ones),
            ]
        ),
        """\
CapturedCommit: target_tokens must be [2, 4] as rows has requests in mode 'cap-accept', got [2, 3]
CapturedCommit: target_tokens must be [2, 4] as rows has requests in mode 'cap-accept', got [1, 4]
CapturedCommit: target_tokens must be [2, 4] as rows has requests in mode 'cap-accept', got [8]
CapturedCommit: target_tokens must be packed [n] in mode 'compact', got [2, 4]""",
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["cap-accept", "compact"])
def test_tokens_of_an_earlier_step_accept_nothing(mode):
    """A smaller batch, or fewer packed tokens than its lengths ask for."""
    commit, agreed = captured(mode), torch.arange(1, T + 1).repeat(2, 1)
    commit(rows([4, 4]), agreed if mode == "cap-accept" else agreed.flatten())
    if mode == "cap-accept":
        commit(rows([4, 4])[:1], agreed[:1])
        assert commit.target_tokens[R, R * T].tolist() == [1, 2, 3, 4, -1, -1, -1, -1]
    else:
        got = commit(rows([4, 4]), agreed.flatten()[:6])
        assert got.accept_lens.tolist() == [4, 3] and got.bonus.tolist() == [4, -1]


def routed(target: str, window: int = T, **options: bool) -> Pools:
    route = decide(target, **{"replay": True} | options, window=window, draft=T)
    model = LinearAttention(1, H=1, HV=1, K=4, V=4, variant="gdn")
    return Pools(model, slots=4, requests=R, window=T, device="cpu", route=route)


def test_pools_that_their_route_was_not_decided_for_are_refused():
    assert_expected_inline(
        "\n".join(
            [
                text(lambda: routed("gdn", replay=False)), text(routed, "kda"),
                text(routed, "gdn", T + 1),
            ]
        ),
        """\
Pools: route must be gdn_fold for a 'gdn' model, got scatter: replay is off
Pools: route must be gdn_fold for a 'gdn' model, got kda_fold: replay is on and the backend is KDA
Pools: window must be 5, which route was decided for, got 4: decide with the window that the pools will have""",
    )  # fmt: skip
    routed("gdn")
    routed("gdn", 1, draft_worker=True)
