"""Whatever the shapes, layouts and lengths, three things hold."""

import dataclasses
import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import oracle
from replayssm import ops
from samples import VARIANTS, WINDOWS, Problem, bits_equal, make

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = list(itertools.product((BF16, FP16, FP32), (FP32, FP32, BF16, FP16)))
DIMS = [(32, 32), (32, 64), (64, 32), (128, 128), (80, 80), (48, 40), (5, 3)]
HEADS = [(1, 1), (2, 2), (1, 2), (2, 4), (1, 3)]
KINDS = {
    "cpu": list(itertools.product(DIMS, HEADS, VARIANTS, DTYPES)),
    "cuda": [
        ((128, 128), (1, 2), "gdn", (BF16, FP32)), ((80, 48), (1, 2), "gdn", (BF16, BF16)),
        ((128, 128), (2, 2), "kda", (BF16, FP32)), ((32, 64), (2, 4), "kda", (FP16, FP16)),
        ((64, 128), (1, 3), "gdn", (FP16, FP32)), ((192, 128), (1, 1), "kda-safe", (FP32, FP32)),
    ],
}  # fmt: skip


@dataclasses.dataclass
class Case:
    """Of each request: rows stored, rows asked for, and a snapshot's slot and rows."""

    problem: Problem = dataclasses.field(repr=False)
    shape: dict
    stored: list[int]
    accept: list[int]
    track: list[tuple[int, int]]

    def fold(self) -> None:
        tracks = {}
        if self.track:
            slots, rows = self.problem.indices(self.track).unbind(1)
            tracks = {"track_indices": slots, "track_steps": rows - 1}
        self.problem.fold(self.accept, **tracks)

    def written(self) -> dict[int, tuple[int, int]]:
        """Slot -> the request and the number of rows whose state a commit puts there."""
        written, tracks = {}, self.track or [(-1, 0)] * len(self.stored)
        for i, slot in enumerate(self.problem.state_indices.tolist()):
            if rows := min(max(self.accept[i], 0), self.stored[i]):
                written[slot] = (i, rows)
                if tracks[i][0] >= 0 and 0 < tracks[i][1] <= rows:
                    written[tracks[i][0]] = (i, tracks[i][1])
        return written


@st.composite
def cases(draw: st.DrawFn, device: str) -> Case:
    def pick(*values):
        return draw(st.sampled_from(values))

    def between(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    # A GPU compiles a kernel, for seconds, for each kind of argument: there only lengths,
    # slots and rows vary, and each kind below has its three kernels.
    few = device == "cuda"
    (K, V), (H, HV), variant, (dtype, state_dtype) = pick(*KINDS[device])
    B, ragged = between(0, 4), few or pick(False, True)
    lengths = [between(0, 6) for _ in range(B)] if ragged else [between(1, 6)] * B
    # A ragged request may be longer than the window: the rest is verified and not stored.
    longest = max(lengths, default=1)
    T = 5 if few else between(1 if ragged else longest, longest + 2)
    R = pick(B + 1, B + 3) if few else pick(None, B + 1, B + 3)
    rows = {"lengths": lengths, "tail": between(0, 2)} if ragged else {"B": B, "D": longest}
    shape = {
        **rows, "variant": variant, "H": H, "HV": HV, "K": K, "V": V, "T": T,
        "S": 2 * B + 1, "R": R, "dtype": dtype, "state_dtype": state_dtype,
        "index": torch.int32 if few else pick(torch.int32, torch.int64), "seed": between(0, 9),
    }  # fmt: skip
    p = make(device, **shape)
    free = sorted(set(range(2 * B + 1)) - set(p.state_indices.tolist()))
    stored, accept = [], []
    for i, length in enumerate(lengths):
        fate = pick(*["served"] * 3, "padded", "served" if R is None else "lost")
        if fate == "padded":
            p.state_indices[i] = -between(1, 3)
        elif fate == "lost":  # its window row lies outside the pool
            p.window_indices[i] = pick(-1, R, 2**31 - 1)
        stored.append(min(length, T) if fate == "served" else 0)
        # All that lies past the window is clamped off; what was never stored is not asked for.
        accept.append(between(-1, length if fate == "served" and length < T else T + 2))
    track = [(pick(-1, slot), between(0, T + 1)) for slot in free[:B]]
    return Case(p, shape, stored, accept, track if few else pick([], track))


def fuzz(holds):
    def test(device: str) -> None:
        count = {"cpu": 200, "cuda": 40}[device]
        fixed = settings(derandomize=True, deadline=None, max_examples=count)
        fixed(given(cases(device))(holds))()

    return test


def decoded(p: Problem) -> tuple[Tensor, list[list[Tensor]]]:
    """Outputs and per request the states after 0, 1, ... tokens, by `decode` in fp32."""
    state, slots, spans = p.copy().state.float(), p.state_indices.tolist(), p.spans()
    out = torch.zeros_like(p.v, memory_format=torch.contiguous_format)
    states = [[state[slot].clone()] if slot >= 0 else [] for slot in slots]
    for t in range(max(map(len, spans), default=0)):
        who = [i for i, span in enumerate(spans) if t < len(span) and slots[i] >= 0]
        index = p.indices([spans[i][t] for i in who]).long()
        inputs = (*(x[index] for x in p.tokens), p.A_log, p.dt_bias, state)
        out[index] = ops.decode(*inputs, p.state_indices[who], lower_bound=p.lower_bound)
        for i in who:
            states[i].append(state[slots[i]].clone())
    return out, states


@fuzz
def test_verify_and_fold_equal_decoding_token_by_token(case):
    """All outputs, and what is committed or tracked: rounded once for a 16-bit state."""
    p, (outputs, states) = case.problem, decoded(case.problem)
    bits_equal(p.verify(), outputs, "outputs")
    case.fold()
    for slot, (i, rows) in case.written().items():
        want = states[i][rows].to(p.state.dtype)
        bits_equal(p.state[slot], want, f"slot {slot}, {rows} rows of request {i}")


@fuzz
def test_what_no_request_names_is_left_untouched(case):
    """Other slots, window rows and pages, and rows that were not drafted."""
    p, before = case.problem, case.problem.memory()
    named = p.state_indices if p.window_indices is None else p.window_indices
    p.verify()
    for name, got in p.memory(*WINDOWS).items():
        for row, n in zip(named.tolist(), case.stored, strict=True):
            if n:
                assert not got[row, 1, :, :n].isnan().any(), f"{name}: row {row}"
                before[name][row, 1, :, :n] = got[row, 1, :, :n]
    p.assert_untouched(before)
    case.fold()
    for slot in case.written():
        before["state"][slot, 1] = p.state[slot]
    p.assert_untouched(before)


@fuzz
def test_outputs_follow_fp64(case):
    want, _ = oracle.run(case.problem)
    oracle.assert_outputs(case.problem.verify(), want)
