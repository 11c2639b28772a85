"""What the benchmark times: its floors, its inputs, and the gate before any figure."""

import sys

import pytest
import torch
from test_bench import TINY, TINY_KDA, Turns

import correct
import layers
import problem
from floors import Traffic, traffic
from problem import Problem

models = pytest.mark.parametrize("model", [TINY, TINY_KDA], ids=["gdn", "kda"])


@pytest.mark.parametrize(
    ("op", "state", "fused"),
    [("verify", 3, None), ("decode", 6, None), ("fold", 4, None), ("commit", 4, None),
     ("step", 7, 5)],
)  # fmt: skip
def test_a_floor_counts_the_passes_over_each_requests_state_that_an_op_needs(
    op, state, fused
):
    """Three requests of which one accepts nothing; a pass is 2 x 2 x 32 x 32 fp32."""
    one = 2 * 2 * 32 * 32 * 4
    got = traffic(TINY, op, [2, 0, 4])
    assert (got.state, got.fused) == (state * one, fused and fused * one)


def test_the_other_bytes_are_those_of_the_tensors_an_op_reads_and_writes():
    """q, k, v, o, a and b, the window rows, and twice the conv state of live requests."""
    for model in (TINY, TINY_KDA):
        p, lens = Problem(model, 3, "cpu"), [2, 0, 3]
        tokens = sum(x.nbytes for x in p.tokens)
        tokens += model.layers * p.verify(0).nbytes
        windows = sum(x.nbytes for x in p.windows)
        rows = windows * 5 // (3 * model.D)
        conv = 2 * sum(x.nbytes for x in p.pools.conv_states) * 2 // 3
        io = {op: traffic(model, op, lens).io for op in problem.OPS}
        assert io == {
            "verify": tokens + windows, "decode": tokens // model.D, "fold": rows,
            "step": tokens + windows + rows, "commit": rows + conv,
        }  # fmt: skip


def test_a_fold_of_eight_requests_of_qwen_moves_what_was_computed_by_hand():
    """State 30 x 8 x 32 x 128 x 128 x 4 bytes, twice; a row is 12,288 of k, v and 256."""
    model = problem.MODELS["qwen3.5-35b"]
    assert traffic(model, "fold", [8] * 8) == Traffic(2 * 503_316_480, 64 * 30 * 12_544)


@models
@pytest.mark.parametrize("B", [1, 5])
def test_a_problem_allocates_what_it_says_it_needs(model, B):
    p = Problem(model, B, "cpu")
    tensors = [*p.pools.buffers(), *p.tokens, p.verify(0)]
    assert sum(x.nbytes for x in tensors) == problem.needed_bytes(model, B)


def test_accept_lengths_are_a_number_all_rows_or_spread_from_one_to_all():
    p = Problem(TINY, 64, "cpu")
    p.accept(3)
    assert p.accept_lens.tolist() == [3] * 64
    p.accept("all")
    assert p.accept_lens.tolist() == [4] * 64
    p.accept("uniform")
    assert set(p.accept_lens.tolist()) == {1, 2, 3, 4}


@models
def test_the_gate_lets_right_ops_pass(model):
    assert correct.mistake(model, "cpu") is None


def worse(verify):
    def call(*args, exact=True, **options):
        out = verify(*args, exact=exact, **options)
        return out if exact else out * 1.02

    return call


def shifted(op):
    return lambda *args, **options: op(*args, **options) + 1


def touching(i, inexact=False):
    """Makes an op that also changes its argument i; verify with exact=False alone."""

    def change(op):
        def call(*args, **options):
            out = op(*args, **options)
            if not inexact or not options["exact"]:
                args[i].view(-1)[0] += 1
            return out

        return call

    return change


@pytest.mark.parametrize(
    ("op", "change", "reason"),
    [
        ("ops.verify", worse, "layer 0: an output is"),
        ("ops.verify", touching(8, inexact=True), "exact=False, writes other windows"),
        ("ops.verify", touching(7, inexact=True), "verify changes the state"),
        ("ops.decode", shifted, "outputs of layer 0, token 0 are not decode's"),
        ("ops.decode", touching(7), "outputs of layer 0, token 1 are not decode's"),
        ("ops.fold", touching(0), "the folded state is not decode's"),
        ("graph.commit.fold", touching(0), "the commit's state is not fold's"),
        ("graph.commit.conv_commit", lambda op: lambda *_, **__: None, "the conv state"),
    ],
)
def test_the_gate_names_what_is_wrong(monkeypatch, op, change, reason):
    function = getattr(sys.modules["replayssm." + op.rpartition(".")[0]], op.split(".")[-1])
    monkeypatch.setattr(f"replayssm.{op}", change(function))
    assert reason in correct.mistake(TINY, "cpu")


def outputs() -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(200, 4, 128, generator=draw, dtype=torch.float64)


def test_outputs_may_differ_by_roundings_of_numbers_2e_5_apart():
    exact = outputs()
    other = exact + 2e-5 * exact.abs().amax(-1, keepdim=True)
    assert not torch.equal(exact.bfloat16(), other.bfloat16())
    assert correct.apart(exact.bfloat16(), other.bfloat16()) is None


def test_a_token_that_cancels_is_held_to_the_heads_other_tokens():
    """k and q orthogonal, the state forgotten: 4 % off, as fp32 sums are there."""
    exact = outputs()
    exact[5, 1] *= 1e-6
    other = exact.clone()
    other[5, 1] *= 1.04
    assert correct.apart(exact.bfloat16(), other.bfloat16()) is None
    assert "further off" in correct.apart(exact[5:6].bfloat16(), other[5:6].bfloat16())


def test_outputs_of_plain_tf32_products_are_too_far_off():
    """10 bits of the state and of the query, where two such parts would pass."""
    draw = torch.Generator().manual_seed(0)
    S = torch.randn(64, 128, 128, generator=draw)
    q = torch.randn(64, 128, 1, generator=draw)

    def tf32(x):
        return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).double()

    exact = (S.double() @ q.double())[None, ..., 0]
    rounded = (tf32(S) @ tf32(q))[None, ..., 0]
    split = rounded + (tf32(S - tf32(S).float()) @ tf32(q))[..., 0]
    split += (tf32(S) @ tf32(q - tf32(q).float()))[..., 0]
    assert correct.apart(exact.bfloat16(), split.bfloat16()) is None
    assert "further off" in correct.apart(exact.bfloat16(), rounded.bfloat16())


@pytest.mark.parametrize("value", [1.02, float("nan")])
def test_a_single_output_that_is_off_is_found(value):
    exact = outputs().bfloat16()
    other = exact.clone()
    other[7, 1, exact[7, 1].abs().argmax()] *= value
    assert "further off than roundings allow" in correct.apart(exact, other)


def test_among_other_kernels_their_own_time_is_taken_off(monkeypatch):
    monkeypatch.setitem(problem.MODELS, "tiny", TINY)
    row = layers.figures("tiny", 2, Turns(), "cpu")
    assert row["others_us"] == 1
    assert list(row["us"].values()) == [
        {"alone": 2.0, "between": 2.0}, {"alone": 4.0, "between": 4.0},
        {"alone": 6.0, "between": 6.0},
    ]  # fmt: skip


def test_every_layer_has_its_op_and_three_other_kernels(monkeypatch):
    calls = []
    for name in ("mm", "add"):
        monkeypatch.setattr(torch, name, lambda *args, name=name, out: calls.append(name))
    engine = layers.Layers(Problem(TINY, 2, "cpu"))
    engine.between(lambda p, layer: calls.append(layer))
    assert calls == ["mm", "add", 0, "add", "mm", "add", 1, "add"]
    calls.clear()
    engine.alone(lambda p, layer: calls.append(layer))
    assert calls == [0, 1]
