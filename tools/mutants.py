"""The bugs that tools/mutate.py plants in the reference and in the graphs."""

from typing import NamedTuple

STATES = "tests/graph/test_engine_states.py"


class Mutation(NamedTuple):
    """A bug: in this file of the checkout the old text, found once, becomes the new.

    by: who must catch it on the CPU: a test file, or the interpreter with the kernels of a
        lowering and the cases that hold one of ``words``.
    gpu: for a bug in a tuned kernel, the test that catches it on a GPU as well.
    """

    bug: str
    file: str
    old: str
    new: str
    by: str = STATES
    words: tuple[str, ...] = ()
    gpu: str = ""


REFERENCE = "ops/reference.py"
MUTATIONS = [
    Mutation(
        "the decay comes after the write",
        REFERENCE,
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
        REFERENCE,
        "return g, sigmoid(_fp32(b))",
        "return g, sigmoid(b).float()",
    ),
    Mutation(
        "the safe gate is a clamped softplus",
        REFERENCE,
        "g = lower_bound * sigmoid(rate * x)",
        "g = (-rate * x.exp().log1p()).clamp(min=lower_bound)",
    ),
    Mutation(
        "ragged requests start one token early",
        REFERENCE,
        "return [range(*pair) for pair in itertools.pairwise(ends)]",
        "return [range(max(i - 1, 0), j) for i, j in itertools.pairwise(ends)]",
    ),
    Mutation(
        "windows are kept by slot",
        "ops/window_rule.py",
        "return (slots if rows is None else rows).long().masked_fill(slots < 0, -1)",
        "return slots.long().masked_fill(slots < 0, -1)",
    ),
    Mutation(
        "verify advances the state",
        REFERENCE,
        """\
                h, out[n] = _token(h, x, n, g, beta)
    return out""",
        """\
                h, out[n] = _token(h, x, n, g, beta)
            x.state[slot] = h
    return out""",
    ),
    Mutation(
        "decode takes padding for the last slot",
        REFERENCE,
        "        if 0 <= slot < len(x.state):\n            x.state[slot], out[n]",
        "        if slot < len(x.state):\n            x.state[slot], out[n]",
    ),
    Mutation(
        "fold leaves out the last accepted row",
        REFERENCE,
        "for t in range(n):",
        "for t in range(n - 1):",
    ),
    Mutation(
        "a commit never takes a whole window",
        "ops/window_rule.py",
        "return min(max(accept_len, 0), window)",
        "return min(max(accept_len, 0), window - 1)",
    ),
    Mutation(
        "window row 0 is taken for none",
        "ops/window_rule.py",
        "(named >= R) | (named < 0)",
        "(named >= R) | (named < 1)",
    ),
    Mutation(
        "the snapshot is of the last step, not of the boundary",
        REFERENCE,
        "if t == at and 0 <= track < S:",
        "if at >= 0 and t == n - 1 and 0 <= track < S:",
    ),
    Mutation(
        "the bonus is the token after the whole window",
        REFERENCE,
        "bonus.append(target[n - 1] if n else -1)",
        "bonus.append(target[-1] if n else -1)",
    ),
    Mutation(
        "acceptance goes past verify_lens",
        REFERENCE,
        "while n < cap and (n == 0 or draft[n] == target[n - 1]):",
        "while n < len(draft) and (n == 0 or draft[n] == target[n - 1]):",
    ),
    Mutation(
        "a boundary is looked for in the length before the step",
        REFERENCE,
        "boundary = (before + n) // x.track_interval * x.track_interval",
        "boundary = before // x.track_interval * x.track_interval",
    ),
    Mutation(
        "the snapshot's step is counted from 1",
        REFERENCE,
        "track, at = track_slots[request], boundary - before - 1",
        "track, at = track_slots[request], boundary - before",
    ),
    Mutation(
        "rows past live are not padding",
        REFERENCE,
        "if i < x.live.item() and 0 <= request < len(slots) and slots[request] >= 0:",
        "if 0 <= request < len(slots) and slots[request] >= 0:",
        "tests/ops/test_commit_indices.py",
    ),
    Mutation(
        "padding rows are slot 0",
        REFERENCE,
        "slot = last = track = at = -1",
        "slot, last, track, at = 0, -1, -1, -1",
    ),
    Mutation(
        "the conv state ends before the last accepted token",
        REFERENCE,
        "state[:, slot] = after[n - 1]",
        "state[:, slot] = after[max(n - 2, 0)]",
    ),
    Mutation(
        "the conv state has the newest input first",
        REFERENCE,
        "return tuple(window.narrow(columns, t, taps) for t in range(tokens))",
        "return tuple(window.narrow(columns, t, taps).flip(columns) for t in range(tokens))",
    ),
    Mutation(
        "a [K, V] state is taken for [V, K]",
        "graph/handoff.py",
        'state if layout == "vk" else state.transpose(-2, -1))]',
        'state if layout == "vk" else state.reshape(*state.shape[:3], *pools.state.shape[3:]))]',
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
]
