"""Plant bugs in a copy of the package; tests/test_engine_states.py must catch each.

    python tools/mutate.py [WORDS]   only the bugs whose description holds WORDS

The checkout is only read: a run that is interrupted leaves nothing behind. The CPU runs the
reference, so that is where the bugs are, and in what is common to all devices.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
# Folders of the checkout and their places in the package, see pyproject.toml.
LAYOUT = {"ops/_root": "replayssm", "ops": "replayssm/ops", "graph": "replayssm/graph"}
TEST = "tests/test_engine_states.py"
FIND = "import importlib.util as u; print(u.find_spec('replayssm').origin)"


class Mutation(NamedTuple):
    """A bug: in this file of the checkout the old text, found once, becomes the new."""

    bug: str
    file: str
    old: str
    new: str


MUTATIONS = [
    Mutation(
        "the decay comes after the write",
        "ops/reference.py",
        """\
    S = S * decay
    u = beta[:, None] * (v - (S * k[:, None, :]).sum(-1))
    return S + u[:, :, None] * k[:, None, :]""",
        """\
    u = beta[:, None] * (v - (S * k[:, None, :]).sum(-1))
    return (S + u[:, :, None] * k[:, None, :]) * decay""",
    ),
    Mutation(
        "beta is rounded to the dtype of b",
        "ops/reference.py",
        "return g, sigmoid(_fp32(b))",
        "return g, sigmoid(b).float()",
    ),
    Mutation(
        "the safe gate is a clamped softplus",
        "ops/reference.py",
        "g = lower_bound * sigmoid(rate * x)",
        "g = (-rate * x.exp().log1p()).clamp(min=lower_bound)",
    ),
    Mutation(
        "ragged requests start one token early",
        "ops/reference.py",
        "return [range(*pair) for pair in itertools.pairwise(ends)]",
        "return [range(max(i - 1, 0), j) for i, j in itertools.pairwise(ends)]",
    ),
    Mutation(
        "verify stores windows by slot",
        "ops/reference.py",
        "window_rows = torch.where(live, window_indices.long(), -1)",
        "window_rows = torch.where(live, state_indices.long(), -1)",
    ),
    Mutation(
        "verify advances the state",
        "ops/reference.py",
        """\
                S, out[n] = _token(S, q[n], k[n], v[n], g[n], beta[n], scale, use_qk_l2norm)
    return out


def decode(""",
        """\
                S, out[n] = _token(S, q[n], k[n], v[n], g[n], beta[n], scale, use_qk_l2norm)
            state[slot] = S
    return out


def decode(""",
    ),
    Mutation(
        "decode takes padding for the last slot",
        "ops/reference.py",
        """\
    for n, slot in enumerate(state_indices.tolist()):
        if 0 <= slot < state.shape[0]:""",
        """\
    for n, slot in enumerate(state_indices.tolist()):
        if slot < state.shape[0]:""",
    ),
    Mutation(
        "fold reads windows by slot",
        "ops/reference.py",
        "window_rows = slots if window_indices is None else window_indices.tolist()",
        "window_rows = slots",
    ),
    Mutation(
        "fold leaves out the last accepted row",
        "ops/reference.py",
        "for t in range(accept):",
        "for t in range(accept - 1):",
    ),
    Mutation(
        "fold never takes a whole window",
        "ops/reference.py",
        "accept = min(accept, capacity)",
        "accept = min(accept, capacity - 1)",
    ),
    Mutation(
        "fold takes slot 0 for padding",
        "ops/reference.py",
        "if not (0 <= slot < state.shape[0] and 0 <= row < k_window.shape[0] and accept > 0):",
        "if not (0 < slot < state.shape[0] and 0 <= row < k_window.shape[0] and accept > 0):",
    ),
    Mutation(
        "the snapshot is of the last step, not of the boundary",
        "ops/reference.py",
        "if t == last and 0 <= track < state.shape[0]:",
        "if last >= 0 and t == accept - 1 and 0 <= track < state.shape[0]:",
    ),
    Mutation(
        "the bonus is the token after the whole window",
        "ops/reference_commit.py",
        "bonus.append(target[n - 1] if n else -1)",
        "bonus.append(target[-1] if n else -1)",
    ),
    Mutation(
        "acceptance goes past verify_lens",
        "ops/reference_commit.py",
        "while n < cap and (n == 0 or draft[n] == target[n - 1]):",
        "while n < len(draft) and (n == 0 or draft[n] == target[n - 1]):",
    ),
    Mutation(
        "a boundary is looked for in the length before the step",
        "ops/reference_commit.py",
        "boundary = (before + n) // track_interval * track_interval",
        "boundary = before // track_interval * track_interval",
    ),
    Mutation(
        "the snapshot's step is counted from 1",
        "ops/reference_commit.py",
        "track, step = track_slots[request], boundary - before - 1",
        "track, step = track_slots[request], boundary - before",
    ),
    Mutation(
        "rows past live are not padding",
        "ops/reference_commit.py",
        "if i < live.item() and 0 <= request < len(slots) and slots[request] >= 0:",
        "if 0 <= request < len(slots) and slots[request] >= 0:",
    ),
    Mutation(
        "padding rows are slot 0",
        "ops/reference_commit.py",
        "slot = last = track = step = -1",
        "slot, last, track, step = 0, -1, -1, -1",
    ),
    Mutation(
        "the conv state ends before the last accepted token",
        "ops/reference_commit.py",
        "state[:, slot] = after[n - 1]",
        "state[:, slot] = after[max(n - 2, 0)]",
    ),
    Mutation(
        "the conv state has the newest input first",
        "ops/reference_commit.py",
        "return tuple(window.narrow(columns, t, taps) for t in range(tokens))",
        "return tuple(window.narrow(columns, t, taps).flip(columns) for t in range(tokens))",
    ),
    Mutation(
        "a [K, V] state is taken for [V, K]",
        "graph/handoff.py",
        "state if layout == \"vk\" else state.transpose(-2, -1))]",
        "state if layout == \"vk\" else state.reshape(*state.shape[:3], *pools.state.shape[3:]))]",
    ),
    Mutation(
        "a reset slot keeps its conv state",
        "graph/pools.py",
        "for pool in (self.state, *self.conv_states):",
        "for pool in (self.state,):",
    ),
    Mutation(
        "a smaller batch leaves the rows of a larger one live",
        "graph/batch.py",
        "torch.cat([rows, self._padding[b:]], out=self.rows)",
        "self.rows[:b].copy_(rows)",
    ),
    Mutation(
        "packed tokens are looked up one row early",
        "graph/batch.py",
        "row = torch.searchsorted(cu_seqlens, n, right=True) - 1",
        "row = (torch.searchsorted(cu_seqlens, n) - 1).clamp(min=0)",
    ),
    Mutation(
        "the bonus counts as a token in the state",
        "graph/commit.py",
        "return Committed(accept_lens, bonus, seq_lens + accept_lens)",
        "return Committed(accept_lens, bonus, seq_lens + accept_lens + 1)",
    ),
    Mutation(
        "snapshots have no conv state",
        "graph/commit.py",
        """\
channels_last=self.pools.channels_last,
                **tracks,""",
        """\
channels_last=self.pools.channels_last,""",
    ),
]  # fmt: skip


def copy_package(folder: Path) -> None:
    """The package as PYTHONPATH=folder imports it."""
    for source, place in LAYOUT.items():
        skip = shutil.ignore_patterns("_root", "__pycache__")
        shutil.copytree(ROOT / source, folder / place, ignore=skip, dirs_exist_ok=True)


def plant(mutation: Mutation, folder: Path) -> None:
    """Edit a copy of the package.

    Raises:
        ValueError: the old text is not there exactly once.
    """
    path = folder / "replayssm" / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"{mutation.file} must hold the old text of {mutation.bug!r} once, "
            f"got {text.count(mutation.old)} times"
        )
    path.write_text(text.replace(mutation.old, mutation.new))


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with a copy of the package in place of the installed one."""
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )  # fmt: skip


def failure(folder: Path) -> str | None:
    """What the state machine says of a copy of the package; None: it passes.

    Raises:
        RuntimeError: it could not run, or ran with another package.
    """
    imported = Path(run(folder, "-c", FIND).stdout.strip())
    if imported != folder / "replayssm/__init__.py":
        raise RuntimeError(f"Python imports {imported}, not the copy in {folder}")
    done = run(
        folder, "-m", "pytest", TEST, "-x", "-q", "-m", "not gpu and not long",
        "-p", "no:cacheprovider", "--hypothesis-profile=unshrunk",
    )  # fmt: skip
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{TEST} did not run:\n{done.stdout}{done.stderr}")
    if done.returncode == 0:
        return None
    return re.search(r"^E +(.*)", done.stdout, re.MULTILINE)[1]


def attempt(mutation: Mutation | None) -> str | None:
    """``failure`` of a fresh copy with a bug or, with None, without one."""
    with tempfile.TemporaryDirectory(prefix="replayssm-") as name:
        folder = Path(name)
        copy_package(folder)
        if mutation:
            plant(mutation, folder)
        return failure(folder)


def main(words: str) -> int:
    start = time.perf_counter()
    if text := attempt(None):
        print(f"{TEST} fails without any bug: {text}")
        return 1
    print(f"{TEST} passes without any bug")
    chosen = [m for m in MUTATIONS if words in m.bug]
    missed = 0
    print(f"{'caught':<8}{'file':<26}{'bug':<58}first failure")
    for mutation in chosen:
        text = attempt(mutation)
        missed += text is None
        caught, said = ("no", "") if text is None else ("yes", text[:80])
        print(f"{caught:<8}{mutation.file:<26}{mutation.bug:<58}{said}", flush=True)
    seconds = time.perf_counter() - start
    print(f"{len(chosen) - missed} of {len(chosen)} bugs caught in {seconds:.0f} s")
    return 1 if missed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
