"""Adapters for engines: each imports its engine only when it is used, and none is imported
by :mod:`replayssm.graph`.

``replayssm.graph.engines.transformers``: transformers' own hybrid models.
``replayssm.graph.engines.sglang``: SGLang's speculative state, committed as it lies.
"""
