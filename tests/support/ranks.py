"""Whole speculative steps of a model whose heads are shared by ranks, a process each.

The model is its linear-attention layers, an output projection after each, and a greedy
head on their sum. What it is given is drawn on the CPU from seeds, so every rank and the
one process that has all heads draw the same and take their shares.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from engine import D, L
from replayssm import ops
from replayssm.graph import (
    Bucket,
    Captured,
    Commit,
    Committed,
    LinearAttention,
    Pools,
    StaticBatch,
    live_rows,
    nodes,
    put_prefill,
)

B, SLOTS, HIDDEN = 4, 6, 16
VOCAB = 2  # few tokens: drafts agree with the target about as often as not
BUCKET = Bucket(B, B * D)


class Case(NamedTuple):
    """One run: of which model, over how many ranks, for how many steps."""

    model: LinearAttention
    ranks: int
    steps: int
    device: str


class Step(NamedTuple):
    """What one step said, per layer where it has L.

    heads [L, N, HV, V]: this rank's outputs of verify. partials and sums [L, N, HIDDEN]:
    their projection, before and after the all-reduce.
    """

    heads: Tensor
    partials: Tensor
    sums: Tensor
    committed: Committed


class Record(NamedTuple):
    """All steps of a rank, what its pools held at the end, and its graph's node names."""

    steps: list[Step]
    pools: dict[str, Tensor]
    nodes: list[str]


class Rank:
    """One rank's pools, weights and step; ranks = 1 has every head."""

    def __init__(
        self, case: Case, rank: int, ranks: int, all_reduce: Callable[[Tensor], Tensor]
    ) -> None:
        model, device = case.model, case.device
        self.model, self.device, self.all_reduce = model, device, all_reduce
        self.shard = model.shard(rank, ranks)
        self.pools = Pools(
            model, slots=SLOTS, requests=B, window=D, tensor_parallel=ranks, device=device
        )
        slot_map = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))
        self.commit = Commit(self.pools, slot_map.to(device))
        draw = torch.Generator().manual_seed(0)
        gate = (model.K,) if model.variant == "kda" else ()
        keys, values = self.shard.key_heads, self.shard.value_heads

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw)

        self.A_log = normal(L, model.HV)[:, values].to(device)
        self.dt_bias = (normal(L, model.HV, *gate) - 3)[:, values].to(device)
        rows = normal(L, model.HV, model.V, HIDDEN)[:, values]
        self.projection = rows.flatten(1, 2).double().to(device)
        self.head = normal(HIDDEN, VOCAB).to(device)
        state = normal(L, SLOTS, model.HV, model.V, model.K)[:, :, values]
        conv_states = [
            normal(L, SLOTS, channels, model.conv_width - 1)[:, :, mine].to(device)
            for channels, mine in zip(model.conv_groups, self.shard.channels, strict=True)
        ]
        slots = torch.arange(SLOTS, device=device)
        put_prefill(self.pools, slots, state.to(device), conv_states, layout="vk")
        shapes = {
            "q": (model.H, model.K), "k": (model.H, model.K), "v": (model.HV, model.V),
            "a": (model.HV, *gate), "b": (model.HV,),
        }  # fmt: skip
        self.shapes = {
            name: (shape, keys if name in "qk" else values)
            for name, shape in shapes.items()
        }
        self.inputs = {
            name: torch.zeros(L, B * D, *shape, dtype=torch.bfloat16)[:, :, heads].to(
                device
            )
            for name, (shape, heads) in self.shapes.items()
        }

    def load(self, seed: int) -> Tensor:
        """New inputs at the same addresses; returns the live rows [b, 3 + D], b <= B."""
        draw = torch.Generator().manual_seed(seed)
        for name, (shape, heads) in self.shapes.items():
            whole = torch.randn(L, B * D, *shape, generator=draw)
            self.inputs[name].copy_(whole[:, :, heads])
        # As the forward's convolutions would leave them.
        for window, channels, mine in zip(
            self.pools.conv_windows,
            self.model.conv_groups,
            self.shard.channels,
            strict=True,
        ):
            whole = torch.randn(L, B, channels, window.shape[-1], generator=draw)
            window.copy_(whole[:, :, mine])
        b = int(torch.randint(0, B + 1, (), generator=draw))
        return live_rows(
            torch.randperm(SLOTS, generator=draw)[:b],
            torch.randint(0, 40, (b,), generator=draw),
            torch.randint(0, VOCAB, (b, D), generator=draw),
            torch.randint(0, 2 * D, (b,), generator=draw).clamp(max=D),
        ).to(self.device)

    def step(self, batch: StaticBatch) -> Step:
        slots, seen = batch.slots(self.commit.slot_map), []
        for layer in range(L):
            windows = (window[layer] for window in self.pools.windows)
            heads = ops.verify(
                *(x[layer] for x in self.inputs.values()), self.A_log[layer],
                self.dt_bias[layer], self.pools.state[layer], *windows, slots,
                window_indices=batch.window_indices, lower_bound=self.model.lower_bound,
            )  # fmt: skip
            # A product in fp64, rounded once: the tests then know how far it may be off.
            partial = heads.flatten(1).double() @ self.projection[layer]
            partial = partial.to(heads.dtype)
            seen.append((heads, partial, self.all_reduce(partial.clone())))
        heads, partials, sums = (torch.stack(x) for x in zip(*seen, strict=True))
        # Not a matrix product, whose order of addition is the library's own choice.
        logits = (sums.float().sum(0)[:, :, None] * self.head).sum(1)
        targets = logits.argmax(-1).view(B, D)
        committed = self.commit(
            batch.req_indices, batch.seq_lens, batch.draft_tokens, targets,
            batch.verify_lens,
        )  # fmt: skip
        return Step(heads, partials, sums, committed)

    def run(self, steps: int, graphs: bool) -> Record:
        """So many steps; with graphs each is one replay of one captured graph."""
        captured = Captured(
            self.step, [BUCKET], draft=D, device=self.device, mode="cap-accept",
            graphs=graphs,
        )  # fmt: skip
        names = []
        if graphs:
            captured.warmup()  # makes the communicator too
            captured.capture()
            names = [node.name for node in nodes(captured.graphs[BUCKET])]
        said = []
        for seed in range(steps):
            captured.batches[BUCKET].fill(self.load(seed))
            *layers, committed = captured.replay(BUCKET)
            committed = Committed(*(x.to("cpu", copy=True) for x in committed))
            said.append(Step(*(x.to("cpu", copy=True) for x in layers), committed))
        pools = {name: x.cpu() for name, x in self.pools.named_buffers()}
        return Record(said, pools, names)


def run_ranks(case: Case, folder: Path) -> list[Record]:
    """Run a case over its ranks, a process each, and give each rank's record."""
    # Forked from a process that has imported torch: 8 ranks start in 0.2 s, not in 20.
    multiprocessing.set_forkserver_preload(["replayssm.graph"])
    mp.start_processes(_rank, (case, folder), nprocs=case.ranks, start_method="forkserver")
    return [
        torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(case.ranks)
    ]


def run_alone(case: Case, sums: list[Tensor]) -> Record:
    """Run a case in this process with every head.

    Its projections are recorded, but it goes on with the given sums [L, N, HIDDEN] of
    each step: those of ranks differ from its own by rounding, which may turn a token.
    """
    given = (layer.to(case.device) for step in sums for layer in step)
    return Rank(case, 0, 1, lambda _: next(given)).run(case.steps, graphs=False)


def _rank(rank: int, case: Case, folder: Path) -> None:
    torch.set_num_threads(1)  # ranks share the cores
    cuda = case.device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's name may not resolve
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=dist.FileStore(str(folder / "store"), case.ranks),
        rank=rank, world_size=case.ranks, timeout=datetime.timedelta(seconds=120),
    )  # fmt: skip

    def all_reduce(partial: Tensor) -> Tensor:
        dist.all_reduce(partial)
        return partial

    record = Rank(case, rank, case.ranks, all_reduce).run(case.steps, graphs=cuda)
    torch.save(record, folder / f"{rank}.pt")
    # The graphs are gone with run(): a communicator must outlive graphs of its kernels.
    dist.destroy_process_group()
