"""The documents: every block of Python in them runs, and does what its page says.

The blocks of a page run one after the other, in one namespace. One that needs a GPU is
fenced "python gpu"; a "python fragment" cannot run alone, and has a test elsewhere.
"""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from documents import PAGES, ROOT, blocks
from oracle import state_error
from replayssm.graph.engines import sglang
from samples import bits_equal
from sglang_state import Case, GDNAttnBackend, KDAAttnBackend, Shape

README = ROOT / "README.md"


def run(page: Path, *marks: str) -> dict:
    """What the names of a page are once its blocks with these marks have run."""
    torch.manual_seed(0)
    names: dict = {}
    for block in blocks(page):
        if block.mark in marks:
            exec(block.code, names)
    return names


def pages(mark: str) -> list:
    chosen = [page for page in PAGES if any(block.mark == mark for block in blocks(page))]
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in chosen]


@pytest.mark.parametrize("page", pages(""))
def test_every_block_of_a_page_runs(page):
    run(page, "")


@pytest.mark.gpu
@pytest.mark.parametrize("page", pages("gpu"))
def test_every_block_of_a_page_runs_on_a_gpu(page):
    run(page, "", "gpu")


def test_the_eight_lines_of_the_readme_compute_what_its_call_does():
    (equivalent,) = (block for block in blocks(README) if block.mark == "fragment")
    assert len(equivalent.text.splitlines()) == 8
    r = SimpleNamespace(**run(README, ""))
    heads = {"q": r.q, "k": r.k}
    heads = {n: x.repeat_interleave(r.HV // r.H, 1) for n, x in heads.items()}
    tokens = heads | {"v": r.v, "a": r.a, "b": r.b}
    for i, (slot, accept_len) in enumerate(zip((3, 7), (3, 8), strict=True)):
        span = slice(i * r.D, (i + 1) * r.D)
        mine = {n: x[span] for n, x in tokens.items()} | {
            "S": torch.zeros(r.HV, r.V, r.K), "state": torch.zeros_like(r.state),
            "o": torch.zeros(r.D, r.HV, r.V), "slot": slot, "accept_len": accept_len,
            "softplus": torch.nn.functional.softplus,
            "A_log": r.A_log, "dt_bias": r.dt_bias, "D": r.D, "K": r.K,
        }  # fmt: skip
        exec(equivalent.code, mine)
        torch.testing.assert_close(r.o[span], mine["o"])
        torch.testing.assert_close(r.state[slot], mine["state"][slot])


@pytest.mark.parametrize("commit", ["scatter", "gdn_fold", "kda_fold"])
def test_the_fragments_of_the_sglang_page_commit_its_state(commit):
    """Among the names that SGLang's methods have where they go, with its state."""
    asks, commits = blocks(ROOT / "docs/sglang.md")
    replay, kda = commit != "scatter", commit != "gdn_fold"
    calls, c = [], Case(Shape(kda=kda), "cpu")
    if not replay:
        c.add_snapshots()
    wanted = c.wanted(tracked=True)
    attention = KDAAttnBackend() if kda else GDNAttnBackend()
    attention.accept_lens_pool = None
    attention.req_to_token_pool = SimpleNamespace(
        mamba_v2p_table=None,
        mamba_pool=SimpleNamespace(
            mamba_cache=c.spec_state, enable_linear_replayssm=False,
            enable_linear_replayssm_spec=replay, replayssm_is_kda=replay and kda,
        ),
    )  # fmt: skip
    hybrid = SimpleNamespace(
        linear_attn_backend=attention,
        _update_ple_state_after_mtp_verify=lambda *args: calls.append(args),
    )
    tracks = c.track_indices, c.track_steps
    names = {
        "sglang": sglang, "self": hybrid, "D": c.shape.D, "topk": 1,
        "enable_linear_replayssm_spec": replay, "mamba_caches": c.spec_state,
        "state_indices_tensor": c.state_indices, "src_indices_raw": c.source_rows,
        "last_correct_step_indices": c.last_steps,
        "mamba_track_indices": tracks[0], "mamba_steps_to_track": tracks[1],
    }  # fmt: skip
    exec(asks.code, names)
    assert hybrid.route.commit == commit
    exec(commits.code, names)
    for slot, (state, conv) in wanted.items():
        assert state_error(c.spec_state.temporal[:, slot], state) <= 1e-6
        bits_equal(c.spec_state.conv[0][:, slot], conv)
    given = (c.state_indices, c.last_steps, *tracks, c.source_rows)
    (call,) = calls  # side states are rolled after a fold too
    assert all(x is y for x, y in zip(call, given, strict=True))
    hybrid.route, before = None, {n: x.clone() for n, x in c.tensors().items()}
    exec(commits.code, names)
    for name, after in c.tensors().items():
        bits_equal(after, before[name], name)


def test_the_engine_page_commits_a_step():
    names = run(ROOT / "docs/engine.md", "")
    accept_lens, anchors = names["accept_lens"].tolist(), names["anchors"].tolist()
    verified, caps = names["verified"].tolist(), names["caps"].tolist()
    assert sum(verified) == 12
    assert all(1 <= n <= cap for n, cap in zip(accept_lens, verified, strict=True))
    assert anchors == [names["targets"][i, n - 1] for i, n in enumerate(accept_lens)]
    lengths = [100 + accept_lens[0], 7 + accept_lens[1]]
    assert names["seq_lens"].tolist() == lengths
    # Draft and target agree in distribution, so all drafts are accepted up to the cap.
    assert names["lens"].tolist() == caps
    assert names["lengths"].tolist() == [sum(x) for x in zip(lengths, caps, strict=True)]
    counters = names["counters"].cpu()
    assert (counters - (torch.arange(32) << 32))[[3, 5]].tolist() == caps
    assert int(counters.sum()) == sum(range(32)) * 2**32 + sum(caps)


def test_the_performance_page_computes_outputs_without_walking_through_the_states():
    (one_pass,) = blocks(ROOT / "docs/performance.md")
    draw, D, K, V = torch.Generator().manual_seed(0), 8, 16, 24
    sizes = {"q": (D, K), "k": (D, K), "v": (D, V), "g": (D, K), "beta": (D,), "S": (V, K)}
    names = {
        name: torch.randn(size, generator=draw, dtype=torch.float64)
        for name, size in sizes.items()
    }
    names["g"], names["beta"] = -names["g"].abs(), names["beta"].sigmoid()
    names["k"] = torch.nn.functional.normalize(names["k"])
    S, want = names["S"], []
    tokens = (names[name] for name in ("q", "k", "v", "g", "beta"))
    for q, k, v, g, beta in zip(*tokens, strict=True):
        S = S * g.exp()
        S = S + torch.outer(beta * (v - S @ k), k)
        want.append(S @ q)
    names |= {"torch": torch, "D": D}
    exec(one_pass.code, names)
    torch.testing.assert_close(names["o"], torch.stack(want), rtol=1e-12, atol=1e-12)


def test_links_between_the_documents_lead_somewhere():
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_ci_runs_the_test_command_of_the_readme():
    commands = re.findall(r"^tools/run \w+", README.read_text(), re.MULTILINE)
    assert commands == ["tools/run demo", "tools/run test"]
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "exec tools/run test"
    assert os.access(ROOT / "tools/run", os.X_OK)
