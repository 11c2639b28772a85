"""Whatever an engine does with its requests, each holds the state of plain decoding."""

import functools
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from plain import VOCAB
from serving import ROWS, SETUPS, Request
from stepping import BATCHES, GREEDY, MODES, WAYS, SpeculativeServer

# What depends on how fast the machine is fails nothing.
UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
# The same runs every time: nothing fails in CI by chance.
CHECKED = settings(**UNTIMED, derandomize=True, max_examples=60, stateful_step_count=50)
# Others every time, after those that failed last.
LONG = settings(**UNTIMED, derandomize=False, max_examples=2000, stateful_step_count=200)

a_seed = st.integers(0, 2**16)


class EngineMachine(RuleBasedStateMachine):
    """Random operations of a server; hypothesis draws who, how many, where and in what order."""

    def __init__(self, server: SpeculativeServer) -> None:
        super().__init__()
        self.server = server
        server.clear()

    def request(
        self, data: st.DataObject, length: int = 0, exact: Tensor | None = None
    ) -> Request:
        """A new request with a slot of its own, and one for its snapshots or not."""
        entry = data.draw(st.sampled_from(self.server.free_entries()))
        slot = self.slot(data)
        tracks = [-1, *(x for x in self.server.free_slots() if x != slot)]
        track = data.draw(st.sampled_from(tracks))
        anchor = data.draw(st.integers(0, VOCAB - 1))
        self.server.requests.append(Request(entry, slot, track, length, anchor, exact))
        return self.server.requests[-1]

    def some_running(self, data: st.DataObject) -> list[Request]:
        """As many as fit into a batch, or fewer, in any order."""
        running = data.draw(st.permutations(self.server.running()))
        most = min(len(running), max(BATCHES))
        return running[: data.draw(st.sampled_from(range(most, -1, -1)))]

    def slot(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(self.server.free_slots()))

    @precondition(lambda self: self.can_admit())
    @rule(data=st.data(), layout=st.sampled_from(["vk", "kv"]), channels_last=st.booleans())
    def prefill(self, data, layout, channels_last):
        prompts = []
        while self.can_admit() and len(prompts) < 3:
            length = data.draw(st.integers(1, 9))
            prompts.append(self.request(data, length=length))
        self.server.prefill(prompts, layout, channels_last)

    @precondition(lambda self: self.can_admit())
    @rule(data=st.data())
    def start_without_a_prompt(self, data):
        self.server.reset(self.request(data))

    def can_admit(self) -> bool:
        return bool(self.server.free_slots() and self.server.free_entries())

    @precondition(lambda self: self.can_admit() and self.server.running())
    @rule(data=st.data())
    def fork(self, data):
        """Copy-on-write, also between verify and commit (field case 60)."""
        source = data.draw(st.sampled_from(self.server.running()))
        self.server.share(source.slot, self.request(data, source.length, source.exact))

    @precondition(lambda self: self.can_admit() and self.server.snapshots)
    @rule(data=st.data())
    def reuse_a_prefix(self, data):
        source = data.draw(st.sampled_from(sorted(self.server.snapshots)))
        self.server.share(source, self.request(data, *self.server.snapshots[source]))

    @precondition(lambda self: self.server.snapshots)
    @rule(data=st.data())
    def evict_a_prefix(self, data):
        self.server.evict(data.draw(st.sampled_from(sorted(self.server.snapshots))))

    @precondition(lambda self: len(self.server.running()) > 2)
    @rule(data=st.data())
    def preempt(self, data):
        self.server.preempt(data.draw(st.sampled_from(self.server.running())))

    @precondition(lambda self: self.server.free_slots() and self.waiting())
    @rule(data=st.data())
    def resume(self, data):
        self.server.resume(data.draw(st.sampled_from(self.waiting())), self.slot(data))

    def waiting(self) -> list[Request]:
        return [r for r in self.server.requests if r.slot < 0]

    @precondition(lambda self: len(self.server.requests) > 2)
    @rule(data=st.data())
    def finish(self, data):
        self.server.finish(data.draw(st.sampled_from(self.server.requests)))

    @precondition(lambda self: self.server.running())
    @rule(data=st.data(), mode=st.sampled_from(MODES), seed=a_seed, shuffled=st.booleans())
    def verify(self, data, mode, seed, shuffled):
        requests, D = self.some_running(data), self.server.setup.D
        tokens = random.Random(seed)
        drafts = [[r.anchor, *tokens.choices(range(VOCAB), k=D - 1)] for r in requests]
        lens = st.just(D) if mode == "static" else st.sampled_from([D, 1, *range(D)])
        caps = [data.draw(lens) for _ in requests]
        rows = tokens.sample(range(ROWS), ROWS) if shuffled else None
        self.server.verify(mode, requests, drafts, caps, rows)
        self.ways = ["ops"] if shuffled else WAYS

    @precondition(lambda self: self.server.running())
    @rule(data=st.data(), mode=st.sampled_from(MODES), seed=a_seed)
    def verify_and_commit(self, data, mode, seed):
        self.verify(data, mode, seed, shuffled=False)
        self.commit(data, seed)

    @precondition(lambda self: self.server.step)
    @rule(data=st.data(), seed=a_seed)
    def commit(self, data, seed):
        step, tokens = self.server.step, random.Random(seed)
        way = data.draw(st.sampled_from(self.ways))
        accept_lens, bonus = [], []
        for row, cap in zip(step.drafts, step.caps, strict=True):
            least = min(cap, 1) if way in GREEDY else 0
            n = data.draw(st.sampled_from(range(cap, least - 1, -1)))
            accept_lens.append(n)
            choices = set(range(VOCAB)) - {row[n] if n < cap else None}
            bonus.append(tokens.choice(sorted(choices)) if n else -1)
        self.server.commit_step(way, accept_lens, bonus)

    @precondition(lambda self: self.server.running())
    @rule(data=st.data(), seed=a_seed, padding=st.integers(0, 2))
    def decode(self, data, seed, padding):
        tokens = random.Random(seed)
        rows = [*self.some_running(data), *[None] * padding]
        tokens.shuffle(rows)
        self.server.decode(rows, tokens.choices(range(VOCAB), k=len(rows)))

    @invariant()
    def all_memory_is_as_wanted(self):
        self.server.check()


@functools.cache
def server(device: str, name: str) -> SpeculativeServer:
    """One for all examples, because a GPU captures its graphs."""
    return SpeculativeServer(device, SETUPS[name])


@pytest.mark.parametrize("name", SETUPS)
def test_every_request_holds_the_state_of_plain_decoding(device, name):
    """And its outputs are those; bit for bit, and in fp64; nothing else is written."""
    run_state_machine_as_test(lambda: EngineMachine(server(device, name)), settings=CHECKED)


@pytest.mark.long
@pytest.mark.parametrize("name", SETUPS)
def test_it_holds_in_many_more_runs(device, name):
    run_state_machine_as_test(lambda: EngineMachine(server(device, name)), settings=LONG)
