"""The demo: its training math, its sessions, and the command as a user runs it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from replayssm import ops
from samples import bits_equal

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import decode
import train
from drafters import STYLES
from model import TARGETS, Config, HybridLM
from session import Session

TOOLS = Path(train.__file__).parent
WEIGHTS = TOOLS / "weights"
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
@torch.inference_mode()
def test_verify_and_commit_in_a_session_equal_decode(kind):
    """Logits and features, bitwise: uniform and ragged windows, empty ones, any prefix."""
    torch.manual_seed(1)
    B, D, length = 4, 8, 40
    model, tokens = HybridLM(TARGETS[kind]), torch.randint(256, (B, length))
    plain, spoken = (Session(model, B, length, D, ops) for _ in range(2))
    want = torch.stack([plain.decode(token) for token in tokens.unbind(1)], 1)
    draw, done, uniform, empty = torch.Generator().manual_seed(2), [0] * B, False, False

    def random(low, high):
        return int(torch.randint(low, high + 1, (), generator=draw))

    while min(done) < length:
        ragged = random(0, 2)
        lens = [min(random(0, D) if ragged else D, length - n) for n in done]
        if not sum(lens):
            continue
        uniform, empty = uniform or len(set(lens)) == 1, empty or 0 in lens
        at = torch.cat([length * i + n + torch.arange(lens[i]) for i, n in enumerate(done)])
        bits_equal(spoken.verify(tokens.flatten()[at], lens), want.flatten(0, 1)[at])
        accept = [random(0, n) for n in lens]
        spoken.commit(torch.tensor(accept))
        done = [n + more for n, more in zip(done, accept, strict=True)]
    bits_equal(spoken.features, plain.features, "features")
    assert uniform and empty


def run(*arguments, code: str | None = None) -> subprocess.CompletedProcess:
    """The command with its output piped, or Python code that stands in for it."""
    head = [str(TOOLS / "decode.py")] if code is None else ["-c", code]
    command = [sys.executable, *head, "--device", "cpu", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, timeout=120)


@pytest.fixture(scope="module")
def shown() -> subprocess.CompletedProcess:
    """The committed weights on the default prompts."""
    return run("--tokens", TOKENS)


def test_the_command_succeeds_and_writes_no_control_codes_to_a_pipe(shown):
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert not re.findall(rb"[^\n\x20-\xff]", shown.stdout)


@pytest.mark.parametrize(("kind", "style"), PAIRS)
def test_the_command_is_byte_identical_and_accepts_over_two_and_a_half(shown, kind, style):
    report = shown.stdout.decode().split(f"\n== {kind} + {style}: ")[1].split("\n== ")[0]
    prompts = len((TOOLS / "prompts.txt").read_text().splitlines())
    assert report.startswith(f"{prompts} prompts, {prompts * TOKENS} tokens, ")
    assert "\noutput         byte-identical to plain decoding\n" in report
    assert float(re.search(r"mean (\d+\.\d+)\n", report)[1]) > 2.5


CHANGES = {
    "a decode that differs for KDA": "decode=lambda *a: ops.decode(*a) * (-1) ** a[3].ndim",
    "a commit that does nothing": "fold=lambda *a, **options: None",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_result_that_differs_is_reported_with_exit_code_1(change):
    code = f"""
import sys, types
sys.path.insert(0, {str(TOOLS)!r})
import decode
from replayssm import ops
decode.ops = types.SimpleNamespace(**vars(ops) | dict({CHANGES[change]}))
sys.exit(decode.main())
"""
    done = run("--drafter", "dflash", "--tokens", 24, code=code)
    assert (done.returncode, done.stderr) == (1, b"")
    assert b"\noutput         DIFFERS from plain decoding\n" in done.stdout


def damage(folder: Path, name: str, how: str) -> None:
    """Replaces a file of the folder by a bad one."""
    path = folder / f"{name}.safetensors"
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "text":
        path.write_text("version https://git-lfs.github.com/spec/v1\n" * 3)
    elif how == "foreign":
        save_file(load_file(path), path)  # no configuration, as another program writes it
    else:
        shutil.copy(folder / f"{how}.safetensors", path)


CASES = [("gdn", how) for how in ("missing", "truncated", "text", "foreign", "gdn-dspark")]


@pytest.mark.parametrize(("name", "how"), [*CASES, ("gdn-dflash", "gdn-dspark")])
def test_bad_weights_give_one_line_and_exit_code_2(tmp_path, name, how):
    folder = shutil.copytree(WEIGHTS, tmp_path / "weights")
    damage(folder, name, how)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    done = run("--model", "gdn", "--drafter", "dflash", "--weights", folder)
    assert (done.returncode, done.stdout) == (2, b"")
    line = f"error: weights: {folder / name}.safetensors: .+\n"
    assert re.fullmatch(line, done.stderr.decode()), done.stderr
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@kinds
def test_saved_weights_are_rounded_to_fp16_and_everyone_may_read_them(tmp_path, kind):
    path, model = tmp_path / "new" / "model.safetensors", HybridLM(TARGETS[kind])
    train.save_weights(path, model)
    assert path.stat().st_mode & 0o777 == 0o644
    loaded = decode.load_weights(path, lambda fields: HybridLM(Config(**fields)))
    for name, value in loaded.state_dict().items():
        bits_equal(value, value.half().float(), name)
        bits_equal(model.state_dict()[name], value, name)  # rounded as well


def test_the_committed_weights_are_small():
    files = {path.stem: path.stat().st_size for path in WEIGHTS.glob("*.safetensors")}
    assert files.keys() == {*TARGETS} | {f"{kind}-{style}" for kind, style in PAIRS}
    assert sum(files.values()) <= 4_000_000
