"""Layers whose inputs depend on the token alone, decoded plainly: by `decode`, and in fp64."""

import itertools

import torch
from torch import Tensor

import oracle
from replayssm import ops
from replayssm.graph import LinearAttention
from samples import TOKENS, Problem, make_tokens

VOCAB = 16


class Layers:
    """Every token's inputs to every layer.

    ``table``: each of q, k, v, a, b, and the gates g and beta as [L, VOCAB, ...];
    ``conv``: of each convolution, [L, VOCAB, C].
    """

    def __init__(self, model: LinearAttention, device: str) -> None:
        self.model = model
        sizes = {name: getattr(model, name) for name in ("H", "HV", "K", "V")}
        kda, dtype = model.variant == "kda", model.activation_dtype
        layers = [
            make_tokens(device, seed, N=VOCAB, kda=kda, dtype=dtype, **sizes)
            for seed in range(model.layers)
        ]
        self.table = {name: torch.stack([x[name] for x in layers]) for name in TOKENS}
        draw = torch.Generator().manual_seed(0)
        # Decays from almost none to a few e-folds a token, as in samples.make.
        heads = (model.layers, model.HV)
        self.A_log = (torch.rand(heads, generator=draw) * 3 - 1).to(device)
        bias = torch.rand(*heads, *([model.K] if kda else []), generator=draw)
        self.dt_bias = (bias * 5 - 6).to(device)
        self.conv = [
            torch.randn(model.layers, VOCAB, C, generator=draw).to(dtype).to(device)
            for C in model.conv_groups
        ]
        gates = [
            ops.gate(
                self.table["a"][layer], self.table["b"][layer], self.A_log[layer],
                self.dt_bias[layer], lower_bound=model.lower_bound,
            )
            for layer in range(model.layers)
        ]  # fmt: skip
        self.table["g"], self.table["beta"] = map(torch.stack, zip(*gates, strict=True))

    def arguments(self, layer: int, tokens: Tensor) -> tuple[Tensor, ...]:
        """q, k, v, a, b of tokens [N], A_log and dt_bias: how every op's arguments begin."""
        inputs = (self.table[name][layer, tokens] for name in TOKENS)
        return (*inputs, self.A_log[layer], self.dt_bias[layer])

    def decode(
        self, states: Tensor, tokens: list[list[int]]
    ) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """One token after the other through ``decode``, from states [L, b, HV, V, K].

        Returns:
            Of each request the output [L, HV, V] of each token, and its state
            [L, HV, V, K] before and after each.
        """
        states, device = states.clone(), states.device
        outputs: list[list[Tensor]] = [[] for _ in tokens]
        trajectories = [[states[:, i].clone()] for i in range(len(tokens))]
        for t in range(max(map(len, tokens), default=0)):
            who = [i for i, row in enumerate(tokens) if t < len(row)]
            slots = torch.tensor(who, device=device)
            column = torch.tensor([tokens[i][t] for i in who], device=device)
            out = torch.stack([
                ops.decode(
                    *self.arguments(layer, column), states[layer], slots,
                    lower_bound=self.model.lower_bound,
                )
                for layer in range(self.model.layers)
            ])  # fmt: skip
            for row, i in enumerate(who):
                outputs[i].append(out[:, row])
                trajectories[i].append(states[:, i].clone())
        return outputs, trajectories

    def exact(
        self, states: list[Tensor], tokens: list[list[int]]
    ) -> tuple[list[Tensor], list[list[Tensor]]]:
        """The same in fp64 from states [L * HV, V, K]: the layers are heads of one problem.

        Returns:
            Of each request the outputs [n, L * HV, V], and its states.
        """
        flat = [token for row in tokens for token in row]
        inputs = (
            self.table[name][:, flat].transpose(0, 1).flatten(1, 2) for name in TOKENS
        )
        lengths = [len(row) for row in tokens]
        problem = Problem(
            *inputs, self.A_log.flatten(0, 1), self.dt_bias.flatten(0, 1),
            *[torch.empty(0)] * 5,  # pools: the states are given
            torch.arange(len(tokens)),
            torch.tensor([0, *itertools.accumulate(lengths)]),
            lower_bound=self.model.lower_bound,
        )  # fmt: skip
        outputs, trajectories = oracle.run(problem, states)
        return list(outputs.split(lengths)), trajectories
