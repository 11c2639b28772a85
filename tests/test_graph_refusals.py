"""What the graphs of a commit refuse at construction, and at a call."""

import pytest
import torch
from expecttest import assert_expected_inline

from replayssm.graph import (
    Bucket,
    CapturedCommit,
    Commit,
    DecodeLoop,
    LinearAttention,
    Pools,
    decide,
    live_rows,
)

T, R = 4, 2


def committer() -> Commit:
    model = LinearAttention(1, H=1, HV=1, K=4, V=4, variant="gdn")
    pools = Pools(model, slots=4, requests=R, window=T, device="cpu")
    return Commit(pools, torch.arange(4))


def captured(mode: str, draft: int = T, batch: int = R) -> CapturedCommit:
    choices = [Bucket(batch, batch * draft)]
    return CapturedCommit(committer(), choices, draft=draft, mode=mode, graphs=False)


def loop(draft: int) -> DecodeLoop:
    return DecodeLoop(
        committer(), None, None, [Bucket(R, R * draft)], draft=draft, max_tokens=8,
        graphs=False,
    )  # fmt: skip


def rows(lens: list[int]) -> torch.Tensor:
    """Two requests whose drafts are 0, 1, 2, 3."""
    drafts = torch.arange(T).repeat(2, 1)
    return live_rows(torch.arange(2), torch.full((2,), 5), drafts, torch.tensor(lens))


def text(function, *args) -> str:
    with pytest.raises(ValueError) as raised:
        function(*args)
    return str(raised.value)


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


@pytest.mark.parametrize(
    ("route", "want"),
    [
        (decide("gdn", replay=False, window=T, draft=T), "got scatter: replay is off"),
        (decide("kda", replay=True, window=T, draft=T), "got kda_fold: replay is on and"),
    ],
)
def test_pools_of_a_backend_that_does_not_fold_them_are_refused(route, want):
    model = LinearAttention(1, H=1, HV=1, K=4, V=4, variant="gdn")
    says = text(
        lambda: Pools(model, slots=4, requests=R, window=T, device="cpu", route=route)
    )
    assert says.startswith(f"Pools: route must be gdn_fold for a 'gdn' model, {want}")
