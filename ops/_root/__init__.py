"""ReplaySSM: exact, small, capturable state commits for speculative decoding.

``import replayssm`` registers ``torch.ops.replayssm.*``; the documented Python
functions of the same names live in :mod:`replayssm.ops`.
"""

from replayssm import ops

__version__ = "0.1.0"

__all__ = ["__version__", "ops"]
