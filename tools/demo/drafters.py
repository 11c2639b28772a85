"""Two block drafters that read the target's hidden states: DFlash style and DSpark style.

Both predict the D - 1 drafts after the anchor from a small bidirectional transformer over the
block [anchor, blank, ..., blank], which also attends to the target's fused features at the last
W committed positions. DFlash takes all drafts from it at once. DSpark corrects each draft for
those drafted before it and adds a confidence: the probability that the draft is accepted,
given that all earlier ones are.

Letters: B requests (or blocks of a training batch), D block rows, anchor included, W context
positions, R texts of P positions.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import SwiGLU


@dataclass(frozen=True)
class DrafterConfig:
    """`target` is the kind of model it was trained for, `target_dim` its width, `features` that
    times its taps. `context` is W, `block` D, `prefix` the width of DSpark's sequential head."""

    style: str
    target: str
    target_dim: int
    features: int
    dim: int = 80
    heads: int = 4
    layers: int = 2
    mlp: int = 128
    context: int = 16
    block: int = 8
    prefix: int = 48

    def __post_init__(self) -> None:
        if (
            self.style not in ("dflash", "dspark")
            or self.dim % self.heads
            or self.block < 2
        ):
            raise ValueError(f"config does not fit together: {self}")


def gather_context(
    features: Tensor, request: Tensor, length: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """The last `width` of the first length[i] positions of text request[i] of features
    [R, P, F]. Returns context [B, W, F] and known [B, W], False before the text's start."""
    position = length[:, None] + torch.arange(-width, 0, device=length.device)
    return features[request[:, None], position.clamp(min=0)], position >= 0


class CrossBlock(nn.Module):
    """Block rows attend to the context and to each other, in both directions."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.norm, self.mlp_norm = nn.RMSNorm(c.dim, 1e-6), nn.RMSNorm(c.dim, 1e-6)
        self.query = nn.Linear(c.dim, c.dim, bias=False)
        self.key_value = nn.Linear(c.dim, 2 * c.dim, bias=False)
        self.output = nn.Linear(c.dim, c.dim, bias=False)
        self.mlp = SwiGLU(c.dim, c.mlp)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        """x [B, D, dim], context [B, W, dim], mask [B, 1, 1, W + D] bool -> [B, D, dim]."""
        y = self.norm(x)
        q = self.query(y).unflatten(2, (self.heads, -1)).transpose(1, 2)
        both = self.key_value(torch.cat((context, y), 1))
        k, v = both.unflatten(2, (2, self.heads, -1)).movedim(2, 0).transpose(2, 3)
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask.expand(-1, -1, q.shape[2], -1)
        )
        x = x + self.output(o.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class DFlash(nn.Module):
    """All drafts at once. Embedding and head are the target's: `embed` [256, target_dim]."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.config = c
        self.fuse = nn.Linear(c.features, c.dim, bias=False)
        self.fuse_norm, self.norm = nn.RMSNorm(c.dim, 1e-6), nn.RMSNorm(c.dim, 1e-6)
        self.embed_in = nn.Linear(c.target_dim, c.dim, bias=False)
        self.blank = nn.Parameter(torch.randn(c.block, c.dim) * 0.5)
        self.age = nn.Parameter(torch.randn(c.context, c.dim) * 0.5)
        self.blocks = nn.ModuleList(CrossBlock(c) for _ in range(c.layers))
        self.head_out = nn.Linear(c.dim, c.target_dim, bias=False)

    def backbone(
        self, context: Tensor, known: Tensor, anchor: Tensor, embed: Tensor
    ) -> Tensor:
        """context [B, W, features], known [B, W], anchor [B] -> drafts' rows [B, D - 1, dim]."""
        context = self.fuse_norm(self.fuse(context)) + self.age
        start = F.pad(
            self.embed_in(embed[anchor])[:, None], (0, 0, 0, self.config.block - 1)
        )
        x = self.blank + start
        mask = F.pad(known, (0, self.config.block), value=True)[:, None, None]
        for block in self.blocks:
            x = block(x, context, mask)
        return self.norm(x[:, 1:])

    def forward(
        self, context: Tensor, known: Tensor, tokens: Tensor, embed: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Training: tokens [B, D], the anchor and what the target said after it -> logits
        [B, D - 1, 256], and DSpark's confidence logits [B, D - 1] or None."""
        return self.logits(self.backbone(context, known, tokens[:, 0], embed), embed), None

    def logits(self, hidden: Tensor, embed: Tensor) -> Tensor:
        return F.linear(self.head_out(hidden), embed).float()

    def draft(
        self, context: Tensor, known: Tensor, anchor: Tensor, embed: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Greedy drafts [B, D - 1] and, from DSpark, confidences [B, D - 1] in (0, 1)."""
        return self.logits(self.backbone(context, known, anchor, embed), embed).argmax(
            -1
        ), None


class Prefix(nn.Module):
    """nn.GRU, batch first, of one layer, by name and parameters. torch.compile refuses nn.GRU
    itself, even for its parameters."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        for name, parameter in nn.GRU(dim, width).named_parameters():
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor) -> Tensor:
        """All steps: x [B, T, dim] -> [B, T, width]."""
        state, flags = self.start(x)[None], (True, 1, 0.0, self.training, False, True)
        return torch.gru(x, state, list(self.parameters()), *flags)[0]

    def start(self, x: Tensor) -> Tensor:
        """The state [B, width] before x [B, ...]."""
        return x.new_zeros(len(x), self.weight_hh_l0.shape[1])

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        """One step: x [B, dim] -> the state after it."""
        weights = (self.weight_ih_l0, self.weight_hh_l0, self.bias_ih_l0, self.bias_hh_l0)
        return torch.gru_cell(x, state, *weights)


class DSpark(DFlash):
    """The same backbone, then a GRU over the tokens drafted so far, from left to right."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__(c)
        self.prefix = Prefix(c.dim, c.prefix)
        self.prefix_out = nn.Linear(c.prefix, c.dim, bias=False)
        self.confidence = nn.Linear(c.dim + 2, 1)

    def forward(
        self, context: Tensor, known: Tensor, tokens: Tensor, embed: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        hidden = self.backbone(context, known, tokens[:, 0], embed)
        prefix = self.prefix(self.embed_in(embed[tokens[:, :-1]]))
        hidden = hidden + self.prefix_out(prefix)
        logits = self.logits(hidden, embed)
        return logits, self.trust(hidden, logits)

    def trust(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """Confidence logits; what it reads is detached, so it never bends the drafts."""
        best = logits.detach().float().log_softmax(-1).topk(2).values
        return self.confidence(torch.cat((hidden.detach().float(), best), -1)).squeeze(-1)

    def draft(
        self, context: Tensor, known: Tensor, anchor: Tensor, embed: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        rows = self.backbone(context, known, anchor, embed)
        token, drafts, trust = anchor, [], []
        state = self.prefix.start(rows)
        for i in range(rows.shape[1]):
            state = self.prefix.step(self.embed_in(embed[token]), state)
            hidden = rows[:, i] + self.prefix_out(state)
            logits = self.logits(hidden, embed)
            token = logits.argmax(-1)
            drafts.append(token)
            trust.append(self.trust(hidden, logits).sigmoid())
        return torch.stack(drafts, 1), torch.stack(trust, 1)


STYLES = {"dflash": DFlash, "dspark": DSpark}


def draft_loss(
    drafter: DFlash, context: Tensor, known: Tensor, tokens: Tensor, embed: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Loss of blocks tokens [B, D] taken from the target's own greedy text.

    Returns the loss, matches [B, D - 1] bool (the draft equals the target's token, earlier ones
    being right) and the confidences or None. Early drafts weigh more: a late one counts only if
    all before it were accepted."""
    logits, confidence = drafter(context, known, tokens, embed)
    targets = tokens[:, 1:]
    weight = 0.85 ** torch.arange(targets.shape[1], device=targets.device)
    cross = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    ).view_as(targets)
    loss = (cross * weight).mean() / weight.mean()
    matches = logits.argmax(-1) == targets
    if confidence is not None:
        # Only rows a verifier would reach teach the confidence: all earlier drafts matched.
        reached = F.pad(matches[:, :-1].float().cumprod(1), (1, 0), value=1.0)
        wrong = F.binary_cross_entropy_with_logits(
            confidence, matches.float(), reduction="none"
        )
        loss = loss + (wrong * reached).sum() / reached.sum()
        confidence = confidence.detach().sigmoid()
    return loss, matches, confidence


def take_blocks(
    c: DrafterConfig, tokens: Tensor, features: Tensor, request: Tensor, anchor: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """context, known and tokens [B, D] of the blocks that start at anchor[i] of request[i]."""
    context, known = gather_context(features, request, anchor, c.context)
    place = anchor[:, None] + torch.arange(c.block, device=anchor.device)
    return context, known, tokens[request[:, None], place]


@torch.no_grad()
def check(
    drafter: DFlash, tokens: Tensor, features: Tensor, first: int, embed: Tensor
) -> str:
    """Walks through greedy texts [R, P] from position `first` as a verifier would."""
    places = tokens.shape[1] - drafter.config.block + 1 - first
    anchor = torch.arange(first, first + places, device=tokens.device)
    matches, trust = [], []
    for i in range(len(tokens)):
        blocks = take_blocks(
            drafter.config, tokens, features, torch.full_like(anchor, i), anchor
        )
        _, match, confidence = draft_loss(drafter, *blocks, embed)
        matches.append(match)
        trust.append(match if confidence is None else confidence)
    accepted = [(1 + match.cumprod(1).sum(1)).tolist() for match in matches]
    rows = steps = 0
    for lens in accepted:
        place = 0
        while place < places:
            rows, steps, place = rows + lens[place], steps + 1, place + lens[place]
    result = f"mean accepted length {rows / steps:.2f} over {steps} steps"
    if confidence is not None:
        match, said = torch.cat(matches), torch.cat(trust)
        reached = F.pad(match[:, :-1], (1, 0), value=True).cumprod(1).bool()
        right, said = match[reached].float().mean(), said[reached].mean()
        result += f", confidence {said:.3f} where {right:.3f} matched"
    return result
