"""A prompt's prefill, then speculative decoding, against decoding token by token."""

import torch

from prefills import LIVE, MODELS, ROWS, SLOTS, D, pools_of, put, random
from replayssm import ops
from replayssm.ops import reference
from samples import bits_equal, make_tokens

PROMPT, CHUNK = 24, 8


def tokens_of(model, device, layer, N, seed):
    """q, k, v, a, b of N tokens, and their layer's A_log and dt_bias."""
    kda = model.variant == "kda"
    tokens = make_tokens(
        device, 10 * layer + seed, N=N, H=model.H, HV=model.HV, K=model.K, V=model.V,
        kda=kda, dtype=model.activation_dtype,
    )  # fmt: skip
    gates = (model.HV, model.K) if kda else (model.HV,)
    A_log = random(model.HV, device=device, seed=layer)
    return (*tokens.values(), A_log, random(*gates, device=device, seed=layer) - 3)


def chunked(S, k, v, g, beta):
    """The state [HV, K, V] after a chunk of C tokens, by one triangular system a chunk.

    All [HV, C, ...], k normalised, g as [HV, C, 1 or K]; the chunk-parallel form of the
    gated delta rule that prefill kernels compute.
    """
    g = g.cumsum(1)
    decay = (g.unsqueeze(2) - g.unsqueeze(1)).clamp(max=0).exp()  # [HV, C, C, 1 or K]
    keys = (decay * k.unsqueeze(2) * k.unsqueeze(1)).sum(-1)
    system = (beta * keys).tril(-1)
    right = beta * (v - (k * g.exp()) @ S)
    u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    last = g[:, -1:]
    return last.exp().mT * S + (k * (last - g).exp()).mT @ u


def prefill(model, device, row, chunk):
    """The final state of one prompt, [L, HV, K, V]: in chunks, or by the token loop."""
    states = []
    for layer in range(model.layers):
        _, k, v, a, b, *gates = tokens_of(model, device, layer, PROMPT, seed=100 + row)
        g, beta = ops.gate(a, b, *gates)
        k = reference.l2norm(k).repeat_interleave(model.HV // model.H, 1)
        if chunk:
            S = v.new_zeros(model.HV, model.K, model.V)
            g = g.reshape(PROMPT, model.HV, -1)
            heads = [x.transpose(0, 1) for x in (k, v, g, beta.unsqueeze(-1))]
            for part in zip(*(x.split(CHUNK, 1) for x in heads), strict=True):
                S = chunked(S, *part)
            states.append(S)
        else:
            S = v.new_zeros(model.HV, model.V, model.K)
            for t in range(PROMPT):
                S = reference.step(S, k[t], v[t], g[t], beta[t])
            states.append(S.mT)
    return torch.stack(states)


def prefills(model, device, chunk=True):
    rows = [prefill(model, device, row, chunk) for row in range(3)]
    return torch.stack(rows, 1)


def inputs(model, device, N, seed):
    """What N tokens of 3 requests feed each convolution: [L, 3, C, N]."""
    return [
        random(model.layers, 3, C, N, device=device, seed=10 * seed + i)
        for i, C in enumerate(model.conv_groups)
    ]


def rolled(conv_state, inputs):
    """A conv state [.., W-1] after inputs [.., N], token by token."""
    for x in inputs.unbind(-1):
        conv_state = torch.cat([conv_state[..., 1:], x[..., None]], -1)
    return conv_state


def steps(model, device, start):
    """The tokens of one verify of a batch of 3, by layer."""
    return [tokens_of(model, device, i, 3 * D, seed=start) for i in range(model.layers)]


def speculate(pools, device, accept, start):
    """One verify and commit of the batch; its outputs [L, 3, D, HV, V]."""
    slots = torch.tensor(SLOTS, device=device)
    rows = torch.tensor([2, 0, 1], device=device)
    outputs = [
        ops.verify(
            *tokens, pools.state[i], *(w[i] for w in pools.windows), slots,
            window_indices=rows,
        ).unflatten(0, (3, D))
        for i, tokens in enumerate(steps(pools.model, device, start))
    ]  # fmt: skip
    for state, window, new in zip(
        pools.conv_states, pools.conv_windows, inputs(pools.model, device, D, start),
        strict=True,
    ):  # fmt: skip
        window[:, rows] = torch.cat([state[:, slots, :, 1:], new], -1)
    lens = torch.tensor(accept, device=device)
    ops.fold(pools.state, *pools.windows, slots, lens, window_indices=rows)
    ops.conv_commit(
        pools.conv_states, pools.conv_windows, slots, lens, window_indices=rows
    )  # fmt: skip
    return torch.stack(outputs)


def decode(state, model, device, accept, start):
    """The same tokens one by one on state [L, 3, HV, V, K], each row's slot its own."""
    outputs = torch.zeros(model.layers, 3, D, model.HV, model.V, device=device)
    for i, (*tokens, A_log, dt_bias) in enumerate(steps(model, device, start)):
        tokens = [x.unflatten(0, (3, D)) for x in tokens]
        for t in range(D):
            slots = [r if t < accept[r] and r in ROWS else -1 for r in range(3)]
            outputs[i, :, t] = ops.decode(
                *(x[:, t] for x in tokens), A_log, dt_bias, state[i],
                torch.tensor(slots, device=device),
            )  # fmt: skip
    return outputs


@MODELS
def test_speculation_goes_on_from_a_prefill_as_decoding_does(device, model):
    """Bitwise, from the state that a chunked prefill left as [K, V]."""
    states = prefills(model, device)
    convs = [x[..., 1 - model.conv_width :] for x in inputs(model, device, PROMPT, 100)]
    pools = pools_of(model, device)
    put(pools, SLOTS, states, convs, layout="kv")
    plain = states.mT.contiguous()
    for start, accept in ((1, [1, 4, 4]), (2, [4, 1, 2]), (3, [3, 0, 0])):
        got = speculate(pools, device, accept, start)
        want = decode(plain, model, device, accept, start)
        for row in ROWS:
            n = accept[row]
            bits_equal(got[:, row, :n], want[:, row, :n], f"outputs of row {row}")
            for conv, new in zip(convs, inputs(model, device, D, start), strict=True):
                conv[:, row] = rolled(conv[:, row], new[:, row, :, :n])
        bits_equal(pools.state[:, LIVE], plain[:, ROWS], "state")
        for pool, conv in zip(pools.conv_states, convs, strict=True):
            bits_equal(pool[:, LIVE], conv[:, ROWS], "conv state")


@MODELS
def test_a_chunked_prefill_then_speculation_equals_a_token_loop_from_the_start(
    device, model
):
    """Field case 48: with K = V too, a transposed state would be far away."""
    pools, accept = pools_of(model, device), [2, 4, 3]
    convs = inputs(model, device, PROMPT, 100)
    ended = [x[..., 1 - model.conv_width :] for x in convs]
    put(pools, SLOTS, prefills(model, device), ended, layout="kv")
    loop = prefills(model, device, chunk=False).mT.contiguous()
    speculate(pools, device, accept, start=1)
    decode(loop, model, device, accept, start=1)
    torch.testing.assert_close(pools.state[:, LIVE], loop[:, ROWS], rtol=1e-4, atol=1e-5)
    drafts = inputs(model, device, D, 1)
    for pool, prompt, draft in zip(pools.conv_states, convs, drafts, strict=True):
        for slot, row in zip(LIVE, ROWS, strict=True):
            start = torch.zeros_like(pool[:, slot])
            said = torch.cat([prompt[:, row], draft[:, row, :, : accept[row]]], -1)
            bits_equal(pool[:, slot], rolled(start, said), "conv state")
