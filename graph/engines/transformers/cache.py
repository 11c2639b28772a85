"""transformers' hybrid models with their linear-attention layers run through the ops.

Letters: B prompts of one length, D rows of a draft window, C channels, W taps.
"""

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from .... import ops
from ...handoff import put_prefill
from ...model import LinearAttention
from ...pools import Pools
from .mixers import MIXERS, RULES, Mixer


class Replay:
    """While it is open (``with``), the model's linear layers run through the ops wherever
    the cache of a forward is a `ReplayCache`. With any other cache nothing changes.

    The layers' own forward stays: projections, convolution, norm and gate are the model's.
    Only the recurrence is replaced, where the modeling file names it, and forward hooks
    give it the projections a and b, whose gates the ops compute themselves.

    Args:
        model: of a class whose layers are in ``MIXERS``, in eval mode.

    Raises:
        ValueError: the model has no such layers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        found = {m: MIXERS.get(type(m).__name__) for m in model.modules()}
        self.model = model
        self.mixers = {
            m.layer_idx: describe(m) for m, describe in found.items() if describe
        }
        if not self.mixers:
            raise ValueError(
                f"model must have layers of {', '.join(MIXERS)}, got {type(model).__name__}"
            )
        self.outputs: dict[nn.Module, Tensor] = {}

    def __enter__(self) -> "Replay":
        with ExitStack() as undo:
            for mixer in self.mixers.values():
                for projection in mixer.projections:
                    hook = projection.register_forward_hook(self._keep)
                    undo.callback(hook.remove)
            mixer = next(iter(self.mixers.values()))
            modeling = sys.modules[type(mixer.module).__module__]
            for name in RULES[mixer.sizes["variant"]]:
                own = getattr(modeling, name)
                undo.callback(setattr, modeling, name, own)
                setattr(modeling, name, _rule(own))
            self.model.prepare_inputs_for_generation = _inputs(
                self.model.prepare_inputs_for_generation
            )
            undo.callback(delattr, self.model, "prepare_inputs_for_generation")
            # "Stateful" is transformers' word for: drafts cannot be taken back.
            self.model._is_stateful = False
            undo.callback(delattr, self.model, "_is_stateful")
            self.undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.undo.close()
        self.outputs.clear()

    def _keep(self, projection: nn.Module, _: tuple[Tensor, ...], output: Tensor) -> None:
        self.outputs[projection] = output


def _rule(own: Callable) -> Callable:
    """The recurrence: a `ReplayLayer` stands where its state would, anything else is own's."""

    @functools.wraps(own)
    def rule(query, key, value, *args, initial_state=None, **options):
        if isinstance(initial_state, ReplayLayer):
            return initial_state.recur(query, key, value)
        return own(query, key, value, *args, initial_state=initial_state, **options)

    return rule


def _inputs(own: Callable) -> Callable:
    """Assisted generation starts with the whole text: leave out what the cache has."""

    @functools.wraps(own)
    def prepare(input_ids, next_sequence_length=None, cache=None, **options):
        if isinstance(cache, ReplayCache):
            next_sequence_length = input_ids.shape[1] - cache.get_seq_length()
        return own(input_ids, next_sequence_length, cache=cache, **options)

    return prepare


class ReplayLayer(LinearAttentionLayer):
    """One linear layer of a `ReplayCache`: the model's own cache until the prompt is in it,
    then layer ``index`` of the pools."""

    def __init__(self, cache: "ReplayCache", mixer: Mixer, index: int) -> None:
        super().__init__()
        self.cache, self.mixer, self.index = cache, mixer, index

    @property
    def is_croppable(self) -> bool:
        return self.cache.croppable

    def activate_past_recording(self, **options: object) -> None:
        """Nothing to record: a window holds the inputs that `crop` commits."""

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, **options
    ) -> Tensor:
        """New inputs [B, C, D] -> the W-1 before them and they, [B, C, W-1+D]."""
        if not self.cache.live:
            return super().update_conv_state(conv_states, state_idx, **options)
        pools, rows = self.cache.pools, conv_states.shape[-1]
        if self.index == 0:
            self.cache.begin(rows)
        old = [state[self.index] for state in pools.conv_states]
        inputs = torch.cat((torch.cat(old, 1), conv_states), -1)
        groups = inputs[..., 1:].split(pools.model.conv_groups, 1)
        for state, window, group in zip(old, pools.conv_windows, groups, strict=True):
            # One token is committed at once; a window waits for `crop`.
            into = state if rows == 1 else window[self.index, ..., : group.shape[-1]]
            into.copy_(group)
        return inputs

    def recur(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """q, k [B, D, H, K], v [B, D, HV, V] -> o [B, D, HV, V], and the state."""
        mixer, pools, slots = self.mixer, self.cache.pools, self.cache.slots
        outputs = (self.cache.replay.outputs[module] for module in mixer.projections)
        inputs = (query, key, value, *mixer.split(*outputs))
        packed = [x.flatten(0, 1).contiguous() for x in inputs]
        state = pools.state[self.index]
        arguments = (*packed, mixer.A_log, mixer.dt_bias, state)
        if query.shape[1] == 1:
            o = ops.decode(*arguments, slots)
        else:
            windows = (window[self.index] for window in pools.windows)
            o = ops.verify(*arguments, *windows, slots)
        return o.unflatten(0, query.shape[:2]), state

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **options
    ) -> Tensor:
        if self.cache.live:  # the ops have written what is to be written
            return recurrent_states
        super().update_recurrent_state(recurrent_states, state_idx, **options)
        if self.index == self.cache.pools.model.layers - 1:
            self.cache.hand_off()
        return recurrent_states

    def crop(self, tokens_to_remove: int) -> None:
        """`ReplayCache.crop` commits all linear layers at once."""


class ReplayCache(DynamicCache):
    """A cache of B prompts whose recurrent states can take back rejected drafts.

    The first forward is the prompt, by the model's own path; its state and conv inputs
    then go into the pools. After it a forward of one token decodes, and one of 2 to D
    tokens verifies: the state stays as it was until ``crop`` says how many are rejected.
    ``generate`` calls crop itself when it speculates. The full-attention layers are
    transformers' own, so all B prompts keep the same number of tokens.

    Args:
        replay: the open adapter of the model.
        batch: B.
        window: the most tokens of one draft window, the anchor included.

    Attributes:
        pools: what ``replayssm.graph.Pools`` holds; slot i is prompt i's.
        commits: (rows, kept) of each verified window.
    """

    def __init__(self, replay: Replay, batch: int, window: int) -> None:
        super().__init__(config=replay.model.config)
        module, sizes = next(iter(replay.mixers.values()))[:2]
        device, dtype = replay.model.device, replay.model.dtype
        layers = LinearAttention(
            len(replay.mixers), **sizes, conv_width=module.conv_kernel_size,
            activation_dtype=dtype,
        )  # fmt: skip
        self.replay = replay
        self.pools = Pools(
            layers, slots=batch, requests=batch, window=window, device=device
        )
        self.slots = torch.arange(batch, dtype=torch.int32, device=device)
        for index, (place, mixer) in enumerate(sorted(replay.mixers.items())):
            self.layers[place] = ReplayLayer(self, mixer, index)
        self.live, self.croppable, self.drafted = False, False, 0
        self.commits: list[tuple[int, int]] = []

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of each prompt; the linear layers do not count them (transformers 5.25's do)."""
        attention = (x for x in self.layers if not isinstance(x, ReplayLayer))
        return next(attention).get_seq_length()

    def hand_off(self) -> None:
        """The prompt's final states, [B, HV, K, V] a layer, and conv inputs into the pools."""
        linear = [layer for layer in self.layers if isinstance(layer, ReplayLayer)]
        state = torch.stack([layer.recurrent_states[0] for layer in linear])
        # transformers keeps the last W inputs; the convolution reads W-1 of them.
        conv = torch.stack([layer.conv_states[0][..., 1:] for layer in linear])
        groups = conv.split(self.pools.model.conv_groups, 2)
        put_prefill(self.pools, self.slots, state, groups, layout="kv")
        for layer in linear:
            # No conv state: the layer then asks `update_conv_state` for single tokens too.
            layer.conv_states[0], layer.recurrent_states[0] = None, layer
        self.live = True

    def begin(self, rows: int) -> None:
        """A forward of ``rows`` tokens a prompt starts; refuses what could not be undone."""
        if self.drafted:
            raise ValueError(f"crop must follow the window of {self.drafted} tokens first")
        if rows > self.pools.window:
            raise ValueError(f"forward: want 1 to {self.pools.window} tokens, got {rows}")
        self.drafted, self.croppable = rows if rows > 1 else 0, True

    def crop(self, tokens_to_remove: int) -> None:
        """Commits the last forward's window but for its last tokens.

        Args:
            tokens_to_remove: minus the number of rejected tokens, the anchor never among
                them.

        Raises:
            ValueError: more would go than the last forward drafted.
        """
        rows, kept = self.drafted, self.drafted + tokens_to_remove
        if tokens_to_remove and not 1 <= kept < rows:
            raise ValueError(f"crop: want {min(1 - rows, 0)} to 0, got {tokens_to_remove}")
        if rows:
            pools, accept_lens = self.pools, torch.full_like(self.slots, kept)
            ops.fold(pools.state, *pools.windows, self.slots, accept_lens)
            ops.conv_commit(pools.conv_states, pools.conv_windows, self.slots, accept_lens)
            self.commits.append((rows, kept))
        self.drafted = 0
        super().crop(tokens_to_remove)


@torch.no_grad()
def speculate(
    model: PreTrainedModel, prompt: Tensor, tokens: int, draft: int
) -> tuple[Tensor, ReplayCache]:
    """Greedy `generate` with drafts looked up in the text so far.

    Args:
        model: in eval mode, without sampling settings.
        prompt: [1, P] int64, P at least 2: `generate` speculates for one prompt only.
        tokens: new tokens.
        draft: D, rows of a window: the anchor and up to D-1 drafts; at least 2.

    Returns:
        [1, P + tokens] int64, and the cache, in which all but the last token are.
    """
    with Replay(model) as replay:
        cache = ReplayCache(replay, batch=1, window=draft)
        # The first forward of an assisted generation has drafts in it, the prompt must not.
        model(prompt[:, :-1], cache=cache, use_cache=True, logits_to_keep=1)
        text = model.generate(
            prompt, cache=cache, do_sample=False, max_new_tokens=tokens,
            prompt_lookup_num_tokens=draft - 1,
        )  # fmt: skip
    return text, cache
