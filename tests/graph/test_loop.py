"""Queued decode steps say what one token at a time says."""

import gc
import weakref

import pytest
import torch

from engine import D, Engine
from replayssm.graph import CapturedCommit, DecodeLoop, buckets, live_rows
from samples import unsynced

VOCAB, END = 50, 13


def follows(token, position, request):
    """The toy target: the greedy token after ``token`` at ``position``."""
    return (7 * token + 3 * position + 11 * request) % VOCAB


def verify(batch, cu_seqlens):
    tokens = batch.draft_tokens
    position = batch.seq_lens[:, None] + torch.arange(D, device=tokens.device)
    said = follows(tokens, position, batch.req_indices[:, None])
    if cu_seqlens is None:
        return said
    row, column, covered = batch.places(cu_seqlens)
    return torch.where(covered, said[row, column], -7)


def propose(batch, committed):
    """Right unless the position is a multiple of 3; lengths vary with the position."""
    token, drafts = batch.draft_tokens[:, 0], []
    for t in range(D - 1):
        position = batch.seq_lens + t
        token = follows(token, position, batch.req_indices)
        token = torch.where(position % 3 == 0, (token + 1) % VOCAB, token)
        drafts.append(token)
    return torch.stack(drafts, dim=1), 1 + batch.seq_lens % D


def propose_all(batch, committed):
    return propose(batch, committed)[0], None


def plain(anchor, position, request, limit, end):
    said = []
    while len(said) < limit:
        anchor = follows(anchor, position, request)
        position += 1
        said.append(anchor)
        if anchor == end:
            break
    return said


def loop_of(device, mode, graphs, end=None, B=4):
    engine = Engine(device, "gdn", B)
    budgets = [B * D] if mode == "compact" else None
    choices = buckets([1, B], D, mode, budgets and [4, *budgets])
    loop = DecodeLoop(
        engine.commit, verify, propose_all if mode == "static" else propose, choices,
        draft=D, max_tokens=40, end_token=end, mode=mode, graphs=graphs,
    )  # fmt: skip
    loop.warmup()
    loop.capture()
    return loop


def start(loop, device, requests, limits):
    index = torch.tensor(requests, device=device)
    tokens = (index[:, None] * 5 + torch.zeros(D, device=device).long()) % VOCAB
    lens = torch.ones_like(index)  # first step: the anchor alone
    rows = live_rows(index, index * 2, tokens, lens)
    mode = next(iter(loop.batches.values())).mode
    budget = len(requests) * D if mode == "compact" else None
    return loop.start(rows, torch.tensor(limits, device=device), budget)


def check(loop, requests, limits, end):
    out = loop.read()
    for i, (request, limit) in enumerate(zip(requests, limits, strict=True)):
        want = plain(request * 5 % VOCAB, request * 2, request, limit, end)
        assert out.tokens[i, : int(out.lens[i])].tolist() == want
    assert out.done.all()


RUNS = [
    pytest.param("cpu", False),
    pytest.param("cuda", False, marks=pytest.mark.gpu),
    pytest.param("cuda", True, marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("device, graphs", RUNS)
@pytest.mark.parametrize("mode", ["static", "cap-accept", "compact"])
@pytest.mark.parametrize("end", [None, END])
def test_queued_steps_give_the_greedy_tokens(device, graphs, mode, end):
    loop = loop_of(device, mode, graphs, end)
    for requests, limits in (
        ([3, 0, 5], [30, 1, 17]),
        ([2], [40]),
        ([5, 4, 3, 1], [9, 8, 7, 6]),
    ):
        start(loop, device, requests, limits)
        loop.run(40)
        check(loop, requests, limits, end)


@pytest.mark.parametrize("device, graphs", RUNS)
def test_a_request_that_is_done_is_padding_from_then_on(device, graphs):
    """Its slot is free for another request at once."""
    loop = loop_of(device, "static", graphs)
    choice = start(loop, device, [3, 0], [4, 40])
    loop.run(5)
    assert loop.read().done.tolist() == [True, False]
    assert loop.batches[choice].req_indices.tolist()[:2] == [-1, 0]
    state = loop.commit.pools.state[:, 3].clone()
    loop.run(3)
    assert torch.equal(loop.commit.pools.state[:, 3], state)


def test_a_row_that_was_not_verified_keeps_its_anchor():
    """A budget may leave a live row out of a step: it waits, and goes on as before."""
    loop = loop_of("cpu", "cap-accept", False)

    def stalling(batch, committed):
        tokens, lens = propose(batch, committed)
        return tokens, torch.where(batch.seq_lens % 2 == 0, 0, lens)

    steps = 0
    loop.step.propose = stalling
    start(loop, "cpu", [3, 0], [9, 9])
    while not loop.read().done.all() and steps < 60:
        loop.run(1)
        # The stalled rows are let go on by hand: the drafts in the batch are still theirs.
        for batch in loop.batches.values():
            batch.verify_lens.copy_(torch.where(batch.req_indices >= 0, 1, 0))
            if steps % 2:
                batch.verify_lens.zero_()
        steps += 1
    check(loop, [3, 0], [9, 9], None)


@pytest.mark.parametrize("device, graphs", RUNS)
def test_accepted_lengths_are_counted(device, graphs):
    loop = loop_of(device, "static", graphs)
    start(loop, device, [3, 1], [20, 20])
    loop.run(20)
    out = loop.read()
    lengths = torch.arange(D + 1, device=device)
    # The last step of a request may say more than its limit keeps.
    assert ((out.steps * lengths).sum(1) >= out.lens).all()
    assert out.steps[:, 0].tolist() == [0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["static", "cap-accept", "compact"])
def test_queued_replays_do_not_wait_for_the_device(mode):
    loop = loop_of("cuda", mode, True)
    start(loop, "cuda", [3, 0, 5], [30, 20, 17])
    with unsynced():
        loop.run(30)
    check(loop, [3, 0, 5], [30, 20, 17], None)


def test_running_before_starting_is_refused():
    loop = loop_of("cpu", "static", False)
    for call in (lambda: loop.run(1), loop.read):
        with pytest.raises(RuntimeError, match=r"start\(\) a batch before"):
            call()


def test_a_batch_larger_than_every_bucket_is_refused():
    loop = loop_of("cpu", "static", False)
    with pytest.raises(ValueError, match="no bucket holds 5 requests"):
        start(loop, "cpu", [0, 1, 2, 3, 4], [1] * 5)


def commit_of(device, graphs):
    choices = buckets([1, 2], D, "static")
    engine = Engine(device, "gdn", 2)
    captured = CapturedCommit(engine.commit, choices, draft=D, graphs=graphs)
    captured.warmup()
    captured.capture()
    return captured


@pytest.mark.parametrize("device, graphs", RUNS)
@pytest.mark.parametrize(
    "make",
    [commit_of, lambda device, graphs: loop_of(device, "static", graphs)],
    ids=["commit", "loop"],
)
def test_graphs_are_freed_with_their_owner_and_not_by_the_garbage_collector(
    make, device, graphs
):
    """Which might come while another graph is being captured, and end that."""
    gc.disable()
    try:
        captured = make(device, graphs)
        left = weakref.ref(captured)
        del captured
        assert left() is None
    finally:
        gc.enable()
