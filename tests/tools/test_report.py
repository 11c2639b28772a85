"""What the demo shows: its report, the prompts it is given, and its text on a terminal."""

import sys
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from expecttest import assert_expected_inline

import decode
from demo import WEIGHTS
from generate import Options, Run, plain
from model import Config, HybridLM
from replayssm import ops

PROMPTS = ["The end.", "Selah"]
GIVEN = ["--model", "gdn", "--algo", "dflash", "--device", "cpu", "--tokens", "20"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the command has it: tensors this small gain nothing from more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_report_of_a_run_is_what_its_numbers_say(capsys):
    """Accepted 1, 2 and 4 of 4 rows in 3, 1 and 6 steps: 29 tokens, after the first of each
    of two texts, where plain decoding took 16 passes over both."""
    base = Run([b"a" * 15, b"b" * 16], seconds=2.0, passes=16)
    run = Run(
        base.texts, 0.5, passes=6, accepted=Counter({1: 3, 2: 1, 4: 6}), setup=0.3,
        verified=31, computed=48, window_bytes=12_345, snapshot_bytes=98_760,
    )  # fmt: skip
    assert decode.report("gdn + dspark", run, base, 4, Options("compact", True, True))
    assert_expected_inline(
        capsys.readouterr().out,
        """\

== gdn + dspark: 2 prompts, 31 tokens, 10 steps
mode           compact, CUDA graphs, compiled
accepted length per step, anchor included: mean 2.90
   1     3 ####################
   2     1 #######
   3     0
   4     6 ########################################
target passes  10 instead of 32: 22 saved (69%)
as one batch   6 instead of 16
rows verified  31 of 40, padded to 48
output         byte-identical to plain decoding
window         12,345 bytes a request and layer
snapshots      98,760 bytes, 8.0 times as many
time           0.50 s after 0.3 s of setting up, plain decoding 2.00 s
""",
    )


def test_a_run_without_steps_or_setup_divides_by_nothing(capsys):
    """One token a prompt: the prefill alone gave it."""
    base = Run([b"a"], seconds=0.0, passes=0)
    run = Run([b"b"], seconds=0.0, passes=0, window_bytes=1, snapshot_bytes=1)
    assert not decode.report("gdn + dflash", run, base, 2, Options())
    assert_expected_inline(
        capsys.readouterr().out,
        """\

== gdn + dflash: 1 prompts, 1 tokens, 0 steps
mode           static, no graphs
accepted length per step, anchor included: mean 0.00
   1     0
   2     0
target passes  0 instead of 0: 0 saved (0%)
as one batch   0 instead of 0
rows verified  0 of 0, padded to 0
output         DIFFERS from plain decoding
window         1 bytes a request and layer
snapshots      1 bytes, 1.0 times as many
time           0.00 s, plain decoding 0.00 s
""",
    )


@torch.inference_mode()
def demo(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["decode.py", *GIVEN, *arguments])
    assert decode.run_model("gdn", decode.parse_arguments())


@torch.inference_mode()
def continuation(prompt: str) -> str:
    """What the target says after a prompt, alone in its batch."""
    path = WEIGHTS / "gdn.safetensors"
    target = decode.load_weights(path, lambda fields: HybridLM(Config(**fields)))
    tokens = [torch.tensor([*prompt.encode()])]
    (text,) = plain(target, tokens, int(GIVEN[-1]), 1, ops, id).texts
    return text.decode()


def assert_continues(out: str, *prompts: str) -> None:
    """Each prompt stands in its order before its own text, then comes the report."""
    texts = "\n\n".join(f"{prompt}\n{continuation(prompt)}" for prompt in prompts)
    total = f"{len(prompts)} prompts, {20 * len(prompts)} tokens, "
    assert out.startswith(f"\n== gdn + dflash\n{texts}\n\n== gdn + dflash: {total}")


def test_every_prompt_of_the_command_line_is_continued(monkeypatch, capsys):
    demo(monkeypatch, "--prompt", PROMPTS[0], "--prompt", PROMPTS[1])
    assert_continues(capsys.readouterr().out, *PROMPTS)


def test_every_line_of_a_file_that_is_not_blank_is_continued(monkeypatch, capsys, tmp_path):
    file, lines = tmp_path / "prompts.txt", ["Sélah", *PROMPTS]
    file.write_text("\n \n".join(lines), encoding="utf-8")
    demo(monkeypatch, "--file", str(file))
    assert_continues(capsys.readouterr().out, *lines)
