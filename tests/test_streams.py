"""Work on several streams at once."""

import pytest
import torch

from samples import WINDOWS, bits_equal, make

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("variant", ["gdn", "kda"])
def test_two_streams_on_disjoint_slots_do_not_disturb_each_other(variant):
    """One pool, two halves of a batch; neither stream ever waits for the other."""
    p = make("cuda", variant, B=8, D=4, HV=3, K=64, V=64)
    serial, steps = p.copy(), 200
    halves = [list(range(4)), list(range(4, 8))]
    texts = [p.next_tokens(seed) for seed in range(steps)]
    accept = p.indices([4, 0, 2, 3])

    def run(problem, rows, outputs):
        for text in texts:
            half = text.with_(
                **{name: getattr(problem, name) for name in ("state", *WINDOWS)}
            ).take(rows)
            outputs.append(half.verify())
            half.fold(accept)

    want, got = [[], []], [[], []]
    for rows, outputs in zip(halves, want, strict=True):
        run(serial, rows, outputs)
    streams = [torch.cuda.Stream() for _ in halves]
    torch.cuda.synchronize()
    for stream, rows, outputs in zip(streams, halves, got, strict=True):
        with torch.cuda.stream(stream):
            run(p, rows, outputs)
    torch.cuda.synchronize()
    for ours, theirs in zip(got, want, strict=True):
        bits_equal(torch.stack(ours), torch.stack(theirs), "outputs")
    bits_equal(p.state, serial.state, "state")


def test_a_fold_may_run_beside_other_work_if_the_next_verify_waits_for_it():
    """The order that docs/limits.md asks for, by an event."""
    p = make("cuda", "gdn", B=4, D=4, HV=3, K=64, V=64)
    serial, side = p.copy(), torch.cuda.Stream()
    accept, texts = p.indices([4, 0, 2, 3]), [p.next_tokens(seed) for seed in range(100)]
    outputs = [[], []]
    for text in texts:
        mine = text.with_(**{name: getattr(serial, name) for name in ("state", *WINDOWS)})
        outputs[0].append(mine.verify())
        mine.fold(accept)
    torch.cuda.synchronize()
    for text in texts:
        outputs[1].append(text.verify())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            text.fold(accept)
        torch.cuda.current_stream().wait_stream(side)
    bits_equal(torch.stack(outputs[1]), torch.stack(outputs[0]), "outputs")
    bits_equal(p.state, serial.state, "state")
