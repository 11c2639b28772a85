"""The demo: its training math, its sessions, and the command as a user runs it."""

import re
import subprocess

import pytest
import torch
import torch.nn.functional as F

import decode
import train
from demo import TOOLS, run
from drafters import STYLES
from model import TARGETS, HybridLM
from replayssm import ops
from replayssm.graph import Bucket, StaticBatch, live_rows
from samples import bits_equal
from session import Session

kinds = pytest.mark.parametrize("kind", TARGETS)
PAIRS = [(kind, style) for kind in TARGETS for style in STYLES]
TOKENS = 32


def token_loop(q, k, v, g, beta):
    """The recurrence from its formulas, all [B, T, HV, ...]."""
    S, outputs = q.new_zeros(*q.shape[::2], v.shape[3], q.shape[3]), []
    for t in range(q.shape[1]):
        decay = g[:, t].exp()
        S = S * (decay[..., None, None] if g.ndim == 3 else decay.unsqueeze(2))
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhvk,bhk->bhv", S, k[:, t]))
        S = S + u.unsqueeze(3) * k[:, t].unsqueeze(2)
        outputs.append(torch.einsum("bhvk,bhk->bhv", S, q[:, t]))
    return torch.stack(outputs, 1)


@kinds
@pytest.mark.parametrize("strength", [0.05, 1, 30, 300])
def test_the_chunked_delta_rule_equals_the_token_loop(kind, strength):
    """Values and gradients in fp64, with decays from almost none to all at once."""
    draw = torch.Generator().manual_seed(0)
    B, T, HV, K, V = 2, 96, 3, 8, 12

    def normal(*shape):
        return torch.randn(B, T, HV, *shape, generator=draw, dtype=torch.float64)

    q, k = (F.normalize(normal(K), dim=-1) for _ in range(2))
    g = -strength * (normal(K) if kind == "kda" else normal()).sigmoid()
    inputs = [x.requires_grad_() for x in (q, k, normal(V), g, normal().sigmoid())]
    weight, results = normal(V), []
    for recurrence in (train.delta_rule, token_loop):
        o = recurrence(*inputs)
        results.append((o, *torch.autograd.grad((o * weight).sum(), inputs)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@kinds
@torch.inference_mode()
def test_what_is_trained_is_what_is_served(kind):
    """The whole-sequence forward in fp64 and the ops token by token, on the same text."""
    torch.manual_seed(0)
    model, tokens = HybridLM(TARGETS[kind]), torch.randint(256, (2, 64))
    session = Session(model, 2, 64, 1, ops)
    got = torch.stack([session.decode(token) for token in tokens.unbind(1)], 1)
    want = model.double()(tokens, train.delta_rule).float()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@kinds
@pytest.mark.parametrize("mode", ["static", "compact"])
@torch.inference_mode()
def test_verify_and_commit_in_a_session_equal_decode(kind, mode):
    """Logits and features, bitwise: whole and ragged windows, empty ones, any prefix."""
    torch.manual_seed(1)
    B, D, length = 4, 8, 40
    model, tokens = HybridLM(TARGETS[kind]), torch.randint(256, (B, length))
    plain, spoken = (Session(model, B, length + D, D, ops) for _ in range(2))
    want = torch.stack([plain.decode(token) for token in tokens.unbind(1)], 1)
    want, tokens = (F.pad(x.mT, (0, D)).mT for x in (want, tokens[..., None]))
    batch = StaticBatch(Bucket(B, B * D), D, "cpu", mode)
    draw, done, empty = torch.Generator().manual_seed(2), torch.zeros(B).long(), False
    while done.min() < length:
        asked = torch.randint(D + 1, (B,), generator=draw)
        lens = torch.minimum(asked, length - done)
        empty = empty or 0 in lens
        at = done[:, None] + torch.arange(D)
        rows = tokens[torch.arange(B)[:, None], at, 0]
        batch.fill(live_rows(spoken.requests, done, rows, lens))
        ends = batch.cu_seqlens()
        got, known = spoken.logits(batch, ends), torch.arange(D) < lens[:, None]
        got = got[: lens.sum()] if ends is not None else got.view(B, D, -1)[known]
        bits_equal(got, want[torch.arange(B)[:, None], at][known])
        accept = (torch.rand(B, generator=draw) * (lens + 1)).int()
        done = spoken.commit.commit(spoken.requests, done, accept, accept).seq_lens
    got, want = (x.features[x.requests, :length] for x in (spoken, plain))
    bits_equal(got, want, "features")
    assert empty


@kinds
@pytest.mark.parametrize("mode", ["static", "compact"])
@torch.inference_mode()
def test_padding_rows_write_to_no_live_request(kind, mode):
    torch.manual_seed(1)
    B, D, session = 3, 4, Session(HybridLM(TARGETS[kind]), 3, 40, 4, ops)
    session.prefill([torch.randint(256, (n,)) for n in (9, 1, 20)])
    batch = StaticBatch(Bucket(B, B * D), D, "cpu", mode)
    rows = live_rows(session.requests, session.length, torch.full((B, D), 7), None)
    rows[[0, 2], 0] = -1  # finished inside the bucket, however long they were
    batch.fill(rows)
    pools = (session.pools.state, *session.pools.conv_states)
    held = [session.cache[:, :, :B], session.features[:B], *pools]
    before = [x.clone() for x in held]
    said = session.verify(batch, batch.cu_seqlens()).flatten()[: B * D]
    session.commit(batch.req_indices, batch.seq_lens, batch.draft_tokens, said.view(B, D))
    live, slot = int(session.requests[1]), int(session.slots[1])
    places = [(2, live), (0, live), *[(1, slot)] * len(pools)]
    for now, was, (axis, own) in zip(held, before, places, strict=True):
        others = (torch.arange(now.shape[axis]) != own).nonzero()[:, 0]
        bits_equal(now.index_select(axis, others), was.index_select(axis, others))
        assert not torch.equal(now, was)


@pytest.fixture(scope="module")
def shown() -> subprocess.CompletedProcess:
    """The committed weights on the default prompts."""
    return run("--tokens", TOKENS)


def test_the_command_succeeds_and_writes_no_control_codes_to_a_pipe(shown):
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert not re.findall(rb"[^\n\x20-\xff]", shown.stdout)


@pytest.mark.parametrize(("kind", "style"), PAIRS)
def test_the_command_is_byte_identical_and_accepts_over_two_and_a_half(shown, kind, style):
    """Accepted lengths alone prove nothing: repetition raises them (field case 86)."""
    report = shown.stdout.decode().split(f"\n== {kind} + {style}: ")[1].split("\n== ")[0]
    prompts = len((TOOLS / "prompts.txt").read_text().splitlines())
    assert report.startswith(f"{prompts} prompts, {prompts * TOKENS} tokens, ")
    assert "\noutput         byte-identical to plain decoding\n" in report
    assert float(re.search(r"mean (\d+\.\d+)\n", report)[1]) > 2.5


WAYS = [("gdn", "static"), ("kda", "compact")]


def says(done: subprocess.CompletedProcess, line: str) -> None:
    assert done.returncode == 0, done.stderr.decode()
    if "compiled" not in line:  # torch.compile has its own warnings to give
        assert done.stderr == b""
    for wanted in (line, "output         byte-identical to plain decoding"):
        assert f"\n{wanted}\n" in done.stdout.decode()


@pytest.mark.parametrize(("kind", "mode"), WAYS)
def test_dspark_is_byte_identical_in_its_other_modes(kind, mode):
    done = run("--model", kind, "--algo", "dspark", "--mode", mode, "--tokens", 24)
    says(done, f"mode           {mode}, no graphs")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("algo", "mode"),
    [(algo, mode) for algo, modes in decode.MODES.items() for mode in modes],
)
def test_cuda_graphs_are_byte_identical(algo, mode):
    done = run("--graphs", "--algo", algo, "--mode", mode, device="cuda")
    says(done, f"mode           {mode}, CUDA graphs")


ON_A_GPU = [
    ("static, no graphs", "--algo dflash --tokens 24"),
    ("cap-accept, no graphs", "--algo dspark"),
    ("compact, no graphs, compiled", "--model gdn --algo dspark --mode compact"),
    ("static, CUDA graphs, compiled", "--model kda --algo dflash"),
    ("static, CUDA graphs, compiled", "--model gdn --algo dspark --mode static --tokens 24"),
    ("cap-accept, CUDA graphs, compiled", "--model gdn --algo dspark --tokens 24"),
    ("compact, CUDA graphs, compiled", "--model gdn --algo dspark --mode compact"),
    ("compact, CUDA graphs, compiled", "--model kda --algo dspark --mode compact --tokens 24"),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("way", "arguments"), ON_A_GPU)
def test_with_inductor_or_without_graphs_it_is_byte_identical(way, arguments):
    graphs = "--no-graphs" if "no graphs" in way else "--graphs"
    compile = ["--compile"] if "compiled" in way else []
    done = run(graphs, *compile, *arguments.split(), device="cuda")
    says(done, f"mode           {way}")


def test_the_whole_step_compiles_and_is_byte_identical():
    done = run("--model", "gdn", "--algo", "dflash", "--compile", "--tokens", 16)
    says(done, "mode           static, no graphs, compiled")


def test_the_step_with_confidences_is_one_graph_of_torch_compile():
    """With a backend that makes no code: a C++ compiler would take another half a minute."""
    code = """
import sys, torch
import decode
compile = torch.compile
torch.compile = lambda f, options, **rest: compile(f, backend="aot_eager", **rest)
sys.exit(decode.main())
"""
    way = ("--algo", "dspark", "--mode", "compact", "--compile", "--tokens", 16)
    done = run("--model", "kda", *way, code=code)
    says(done, "mode           compact, no graphs, compiled")


REFUSED = [("--mode", "compact"), ("--mode", "cap-accept"), ("--graphs",), ("--budget", 2)]


@pytest.mark.parametrize("argument", REFUSED)
def test_what_cannot_be_is_refused_with_exit_code_2(argument):
    """DFlash in a mode that needs confidences, graphs on the CPU, more rows than there are."""
    done = run("--algo", "dflash", *argument)
    assert (done.returncode, done.stdout) == (2, b"")
    assert f"\ndecode.py: error: {argument[0]}: want " in done.stderr.decode()


CHANGES = {
    "a decode that differs for KDA": "ops.decode = lambda *a: decode(*a) * (-1) ** a[3].ndim",
    "a commit that does nothing": "commit.fold = lambda *a, **options: None",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_result_that_differs_is_reported_with_exit_code_1(change):
    """However fast it came (field case 86)."""
    code = f"""
import sys
from decode import main
from replayssm import ops
from replayssm.graph import Bucket, StaticBatch, live_rows
from replayssm.graph import commit
decode = ops.decode
{CHANGES[change]}
sys.exit(main())
"""
    done = run("--algo", "dflash", "--tokens", 24, code=code)
    assert (done.returncode, done.stderr) == (1, b"")
    assert b"\noutput         DIFFERS from plain decoding\n" in done.stdout
