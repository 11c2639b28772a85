"""Work on several streams at once."""

import pytest
import torch

from samples import WINDOWS, bits_equal, make

pytestmark = pytest.mark.gpu

HELD = 10**9  # cycles, half a second: the host queues all work behind them


def on_pools_of(problem, texts):
    pools = {name: getattr(problem, name) for name in ("state", *WINDOWS)}
    return [text.with_(**pools) for text in texts]


@pytest.mark.parametrize("variant", ["gdn", "kda"])
def test_two_streams_on_disjoint_slots_do_not_disturb_each_other(variant):
    """One pool, two halves of a batch, both queues full before either stream starts."""
    p = make("cuda", variant, B=8, D=4, HV=3, K=64, V=64)
    serial, accept = p.copy(), p.indices([4, 0, 2, 3])
    texts = [p.next_tokens(seed) for seed in range(200)]
    halves = [[text.take(rows) for text in texts] for rows in ([0, 1, 2, 3], [4, 5, 6, 7])]

    def run(steps, outputs):
        for step in steps:
            outputs.append(step.verify())
            step.fold(accept)

    want, got = [[], []], [[], []]
    for half, outputs in zip(halves, want, strict=True):
        run(on_pools_of(serial, half), outputs)
    streams = [torch.cuda.Stream() for _ in halves]
    torch.cuda._sleep(HELD)
    for stream, half, outputs in zip(streams, halves, got, strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(on_pools_of(p, half), outputs)
    torch.cuda.synchronize()
    for ours, theirs in zip(got, want, strict=True):
        bits_equal(torch.stack(ours), torch.stack(theirs), "outputs")
    bits_equal(p.state, serial.state, "state")


def test_a_fold_may_run_beside_other_work_if_the_next_verify_waits_for_it():
    """The order that docs/limits.md asks for, by an event."""
    p = make("cuda", "gdn", B=4, D=4, HV=3, K=64, V=64)
    serial, side, main = p.copy(), torch.cuda.Stream(), torch.cuda.current_stream()
    accept, texts = p.indices([4, 0, 2, 3]), [p.next_tokens(seed) for seed in range(100)]
    want, got = [], []
    for step in on_pools_of(serial, texts):
        want.append(step.verify())
        step.fold(accept)
    torch.cuda._sleep(HELD)
    for step in texts:
        got.append(step.verify())
        side.wait_stream(main)
        with torch.cuda.stream(side):
            step.fold(accept)
        main.wait_stream(side)
    bits_equal(torch.stack(got), torch.stack(want), "outputs")
    bits_equal(p.state, serial.state, "state")
