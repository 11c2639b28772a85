"""Verify lengths from confidences: best for their budget, and causal where they must be."""

import heapq
import itertools
from fractions import Fraction

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from replayssm.graph import choose_verify_lens
from samples import bits_equal, unsynced

# Halves make equal survivals common, 1 and 0 make drafts that cost nothing or give none.
CONFIDENCES = st.sampled_from([0.0, 0.25, 0.5, 0.5, 0.75, 0.875, 1.0])


@st.composite
def problems(draw, causal: bool | None = None) -> dict:
    """Arguments of choose_verify_lens whose products and sums are exact in fp32."""
    B, D = draw(st.sampled_from([3, 2, 1, 4])), draw(st.sampled_from([3, 4, 2, 1]))
    row = st.lists(CONFIDENCES, min_size=D - 1, max_size=D - 1)
    rows = draw(st.lists(row, min_size=B, max_size=B))
    live = draw(st.none() | st.lists(st.booleans(), min_size=B, max_size=B))
    size = B * D + draw(st.sampled_from([0, 0, 1, -1, -B]))
    step = st.sampled_from([0, 0, 1, 2, 5, 9])
    steps = draw(st.lists(step, min_size=size, max_size=size))
    cost = torch.tensor([8, *steps]).cumsum(0).float() / 8
    return {
        "confidences": torch.tensor(rows).view(B, D - 1),
        "budget": draw(st.none() | st.integers(0, B * D + 1)),
        "cost": draw(st.sampled_from([cost, None])),
        "live": None if live is None else torch.tensor(live),
        "min_len": draw(st.integers(1, D)),
        "causal": draw(st.booleans()) if causal is None else causal,
    }


def rate(lens: list[int], p: dict) -> Fraction:
    """Expected tokens per time."""
    tokens = Fraction(0)
    for row, length in zip(p["confidences"].tolist(), lens, strict=True):
        survival = Fraction(1)
        for confidence in [1.0, *row][:length]:
            survival *= Fraction(confidence)
            tokens += survival
    return tokens if p["cost"] is None else tokens / Fraction(p["cost"][sum(lens)].item())


def limit(p: dict) -> int:
    """The most rows that may be verified in all, were none forced."""
    limits = [p["confidences"].numel() + len(p["confidences"])]
    limits += [] if p["budget"] is None else [p["budget"]]
    limits += [] if p["cost"] is None else [len(p["cost"]) - 1]
    return min(limits)


def greedy(p: dict) -> list[int]:
    """One draft at a time; reads a row's confidences only up to the first not admitted."""
    B, drafts = p["confidences"].shape
    live = [True] * B if p["live"] is None else p["live"].tolist()
    if p["budget"] is None and p["cost"] is None:
        return [(drafts + 1) * x for x in live]
    lens, front = [0] * B, []

    def push(row: int, survival: Fraction) -> None:
        column = lens[row]
        if column <= drafts:
            survival *= Fraction(p["confidences"][row, column - 1].item())
            heapq.heappush(front, (-survival, column, row))

    for row in (row for row in range(B) if live[row]):
        lens[row], survival = p["min_len"], Fraction(1)
        for confidence in p["confidences"][row, : p["min_len"] - 1].tolist():
            survival *= Fraction(confidence)
        push(row, survival)
    chosen, best = list(lens), None
    while True:
        n, tokens = sum(lens), rate(lens, p | {"cost": None})
        if p["cost"] is not None:
            cost = [Fraction(x) for x in p["cost"].tolist()]
            now = tokens / cost[min(n, len(cost) - 1)]
            if best is None or now > best:
                chosen, best = list(lens), now
        left = sum((drafts + 1 - x) for x in lens if x)
        if not front or n >= limit(p):
            break
        survival, _, row = heapq.heappop(front)
        if p["cost"] is not None and p["causal"]:
            more = range(1, min(limit(p) - n, left) + 1)
            if not any((tokens - m * survival) / cost[n + m] > now for m in more):
                return lens
        lens[row] += 1
        push(row, -survival)
    return lens if p["cost"] is None or p["causal"] else chosen


@settings(max_examples=400, deadline=None, derandomize=True)
@given(problems())
def test_it_equals_admitting_drafts_one_at_a_time(p):
    lens = choose_verify_lens(**p)
    assert lens.dtype == torch.int32
    assert lens.tolist() == greedy(p)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(problems(causal=False))
def test_no_other_lengths_promise_more(p):
    """Every way of cutting every row is tried."""
    (B, drafts), low = p["confidences"].shape, p["min_len"]
    live = [True] * B if p["live"] is None else p["live"].tolist()
    choices = [range(low, drafts + 2) if x else [0] for x in live]
    most = max(limit(p), low * sum(live))
    lens = choose_verify_lens(**p).tolist()
    if p["cost"] is not None and sum(lens) >= len(p["cost"]):
        return  # forced past the table: there is no rate
    allowed = [x for x in itertools.product(*choices) if sum(x) <= most]
    assert tuple(lens) in allowed
    if p["cost"] is not None:
        allowed = [x for x in allowed if sum(x) < len(p["cost"])]
    assert rate(lens, p) == max(rate(list(x), p) for x in allowed)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(problems(causal=True), st.data())
def test_causal_lengths_ignore_all_confidences_after_a_cut(p, data):
    """Drafts after the first that is cut off depend on its token; so would the cut."""
    lens = choose_verify_lens(**p)
    changed = p["confidences"].clone()
    for row, length in enumerate(lens.tolist()):
        for column in range(length, changed.shape[1]):
            changed[row, column] = data.draw(CONFIDENCES)
    bits_equal(choose_verify_lens(**p | {"confidences": changed}), lens)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(problems(causal=True), st.data())
def test_whether_a_draft_is_admitted_ignores_the_confidences_after_it(p, data):
    B, drafts = p["confidences"].shape
    lens = choose_verify_lens(**p)
    row, t = data.draw(st.integers(0, B - 1)), data.draw(st.integers(0, drafts))
    changed = p["confidences"].clone()
    for column in range(t, drafts):
        changed[row, column] = data.draw(CONFIDENCES)
    got = choose_verify_lens(**p | {"confidences": changed})
    assert (got[row] > t) == (lens[row] > t)
    assert min(got[row], t) == min(lens[row], t)


def test_the_best_number_of_rows_for_a_cost_is_not_causal():
    """Without this the two tests above would prove nothing."""
    cost = torch.tensor([1, 1, 1.5, 1.5])
    for last, length in ((0.9, 3), (0.1, 1)):
        confidences = torch.tensor([[0.45, last]])
        assert choose_verify_lens(confidences, cost=cost).tolist() == [length]
        assert choose_verify_lens(confidences, cost=cost, causal=True).tolist() == [3]


def arguments(device: str, *, B: int = 6, D: int = 5, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "confidences": torch.rand(B, D - 1, generator=generator).to(device),
        "budget": torch.tensor([B * D // 2 + seed], device=device),
        "cost": (torch.arange(B * D + 1) // 8 + 4.0 + seed).to(device),
        "live": (torch.rand(B, generator=generator) < 0.8).to(device),
    }


VARIANTS = pytest.mark.parametrize(
    ("names", "causal"),
    [
        ("budget", False),
        ("cost", False),
        ("cost", True),
        ("budget cost live", True),
        ("live", False),
    ],
)


def pick(everything: dict[str, Tensor], names: str) -> dict[str, Tensor]:
    return {name: everything[name] for name in ["confidences", *names.split()]}


@VARIANTS
def test_both_devices_give_the_same_lengths(device, names, causal):
    """Of many random numbers, whose products do round."""
    for seed in range(8):
        on_device, on_cpu = (arguments(d, B=64, D=9, seed=seed) for d in (device, "cpu"))
        got = choose_verify_lens(**pick(on_device, names), causal=causal)
        bits_equal(got.cpu(), choose_verify_lens(**pick(on_cpu, names), causal=causal))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64]
)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_narrow_confidences_and_budgets_are_read_as_they_are(device, dtype, index):
    confidences = torch.tensor([[0.5, 0.75], [0.25, 1.0]], dtype=dtype, device=device)
    budget = torch.tensor(4, dtype=index, device=device)
    assert choose_verify_lens(confidences, budget=budget).tolist() == [3, 1]


def test_numbers_that_are_no_probabilities_still_give_lengths_in_range(device):
    nan, inf = float("nan"), float("inf")
    wild = torch.tensor([[0.5, nan, 1.0], [-1.0, 2.0, inf], [nan, 0.5, 0.5]], device=device)
    assert choose_verify_lens(wild, budget=5).tolist() == [2, 2, 1]
    assert choose_verify_lens(wild, budget=12).tolist() == [4, 4, 4]


def test_no_drafts_or_no_requests_give_anchors_or_nothing(device):
    for B, drafts in ((3, 0), (0, 3), (0, 0)):
        confidences = torch.empty(B, drafts, device=device)
        cost = torch.ones(5, device=device)
        for more in ({}, {"budget": 1}, {"cost": cost}, {"cost": cost, "causal": True}):
            assert choose_verify_lens(confidences, **more).tolist() == [1] * B


@VARIANTS
def test_it_compiles_as_one_graph_with_equal_results(device, names, causal):
    compiled = torch.compile(
        choose_verify_lens, fullgraph=True, backend="aot_eager", dynamic=True
    )
    for B in (2, 6, 7):
        inputs = pick(arguments(device, B=B), names)
        bits_equal(
            compiled(**inputs, causal=causal), choose_verify_lens(**inputs, causal=causal)
        )


@pytest.mark.gpu
@VARIANTS
def test_a_captured_call_follows_its_inputs_and_waits_for_nothing(names, causal):
    inputs = pick(arguments("cuda"), names)
    choose_verify_lens(**inputs, causal=causal)
    graph = torch.cuda.CUDAGraph()
    with unsynced():
        choose_verify_lens(**inputs, causal=causal)
        with torch.cuda.graph(graph):
            got = choose_verify_lens(**inputs, causal=causal)
    for seed in range(1, 6):
        for name, value in pick(arguments("cuda", seed=seed), names).items():
            inputs[name].copy_(value)
        graph.replay()
        bits_equal(got, choose_verify_lens(**inputs, causal=causal))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"confidences": torch.ones(3)}, ValueError),
        ({"confidences": torch.ones(3, 2, dtype=torch.int32)}, TypeError),
        ({"budget": -1}, ValueError),
        ({"budget": torch.ones(2, dtype=torch.int32)}, ValueError),
        ({"budget": torch.tensor(1.0)}, TypeError),
        ({"cost": torch.ones(2, 2)}, ValueError),
        ({"cost": torch.ones(0)}, ValueError),
        ({"cost": torch.ones(4, dtype=torch.int64)}, TypeError),
        ({"live": torch.ones(2, dtype=torch.bool)}, ValueError),
        ({"live": torch.ones(3, dtype=torch.int32)}, TypeError),
        ({"min_len": 0}, ValueError),
        ({"min_len": 4}, ValueError),
        ({"live": torch.ones(3, dtype=torch.bool, device="meta")}, ValueError),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_with_its_argument_named(change, error):
    with pytest.raises(error, match=f"choose_verify_lens: {next(iter(change))} must"):
        choose_verify_lens(**{"confidences": torch.ones(3, 2), "budget": 5} | change)


def test_a_refusal_reads_so():
    with pytest.raises(ValueError) as caught:
        choose_verify_lens(torch.ones(3, 2), budget=5, min_len=4)
    assert_expected_inline(
        str(caught.value), """choose_verify_lens: min_len must be 1 to D = 3, got 4"""
    )
