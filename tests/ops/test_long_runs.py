"""What many thousands of tokens add up to."""

import pytest
import torch

from samples import bits_equal, make

D, BLOCK = 8, 512


@pytest.mark.parametrize(
    ("device", "tokens"), [("cpu", 300), pytest.param("cuda", 32768, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("variant", ["gdn", "kda", "kda-safe"])
def test_speculation_ends_where_plain_decoding_does(device, variant, tokens):
    """Random accepted lengths, 0 and D among them; outputs and states bit for bit."""
    draw = torch.Generator().manual_seed(0)
    spoken = make(device, variant, B=2, D=D, HV=3, K=64, V=32)
    decoded = spoken.copy()
    count = -(-tokens // BLOCK) * BLOCK if device == "cuda" else tokens
    text = spoken.next_tokens(1, N=2 * (count + D))  # request 0's tokens, then request 1's
    rows = torch.arange(2, device=device)[:, None] * (count + D)
    ahead = torch.arange(D, device=device)
    at = torch.zeros(2, dtype=torch.long, device=device)
    want = torch.empty(2 * (count + D), 3, 32, dtype=spoken.q.dtype, device=device)
    got = torch.full_like(want, float("nan"))

    for t in range(count):
        step = pick(decoded, text, rows + t)
        want[(rows + t).flatten()] = step.decode(0)

    while int(at.min()) < count:
        for _ in range(64):  # the host looks rarely
            window = pick(spoken, text, rows + at[:, None] + ahead)
            outputs = window.verify().unflatten(0, (2, D))
            accept = torch.randint(0, D + 1, (2,), generator=draw).to(device)
            accept = accept.minimum(count - at)
            window.fold(accept.int())
            places = (rows + at[:, None] + ahead).where(ahead < accept[:, None], -1)
            got[places.flatten()] = outputs.flatten(0, 1)
            at += accept
    live = torch.cat([r + torch.arange(count, device=device) for r in rows])
    bits_equal(got[live], want[live], "outputs")
    bits_equal(spoken.state, decoded.state, "state")


def pick(problem, text, places):
    """problem's requests with the tokens of text at places [B, tokens]."""
    index = places.flatten()
    return problem.with_(
        **{name: getattr(text, name)[index] for name in ("q", "k", "v", "a", "b")}
    )
