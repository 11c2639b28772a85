"""transformers' own hybrid models (Qwen3-Next, Qwen3.5, Kimi-Linear) on the ops.

A recurrent state cannot take tokens back: ``generate`` of transformers 5.24 refuses to
speculate with these models, and that of 5.25 keeps a state for every draft token. With a
``ReplayCache``, while a ``Replay`` is open, it speculates with one state and a window of
inputs. transformers itself is imported when one of these names is first used.

Example (a tiny model with random weights; a real one comes by ``from_pretrained``):

>>> import torch
>>> from replayssm.graph.engines.transformers import speculate
>>> from replayssm.graph.engines.transformers.tiny import build, repeated
>>> model = build("qwen3.5")
>>> prompt = repeated(model)
>>> text, cache = speculate(model, prompt, tokens=16, draft=4)
>>> own = model.generate(prompt, do_sample=False, max_new_tokens=16)
>>> torch.equal(text, own)
True
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache import Replay, ReplayCache, ReplayLayer, speculate

__all__ = ["Replay", "ReplayCache", "ReplayLayer", "speculate"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(".cache", __name__), name)
    except ImportError as error:
        raise ImportError(
            f"{__name__}.{name} needs transformers 5.24 or newer "
            f"(pip install 'replayssm[transformers]'): {error}"
        ) from error
