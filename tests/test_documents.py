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


def test_no_block_is_left_out():
    """Every fence that could be Python is one that the others find, with a known mark."""
    for page in PAGES:
        found = blocks(page)
        assert {block.mark for block in found} <= {"", "gpu", "fragment"}, page
        fences = re.findall(r"^[ \t]*(?:```|~~~)[ \t]*py", page.read_text(), re.MULTILINE)
        assert len(fences) == len(found), page


def test_fragments_are_the_readmes_equivalent_and_what_goes_into_sglangs_own_methods():
    fragments = {p for p in PAGES for block in blocks(p) if block.mark == "fragment"}
    assert fragments == {README, ROOT / "docs/sglang.md"}


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


def test_the_engine_page_commits_a_step():
    names = run(ROOT / "docs/engine.md", "")
    accept_lens, anchors = names["accept_lens"].tolist(), names["anchors"].tolist()
    assert all(1 <= n <= cap for n, cap in zip(accept_lens, (8, 4), strict=True))
    assert anchors == [names["targets"][i, n - 1] for i, n in enumerate(accept_lens)]
    assert names["seq_lens"].tolist() == [100 + accept_lens[0], 7 + accept_lens[1]]


def test_links_between_the_documents_lead_somewhere():
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_readme_links_every_page():
    links = re.findall(r"\]\((docs/[^)]+\.md)\)", README.read_text())
    assert sorted(set(links)) == [str(page.relative_to(ROOT)) for page in PAGES[1:]]


def test_ci_runs_the_test_command_of_the_readme():
    commands = re.findall(r"^tools/run \w+", README.read_text(), re.MULTILINE)
    assert commands == ["tools/run demo", "tools/run test"]
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "exec tools/run test"
    assert os.access(ROOT / "tools/run", os.X_OK)
