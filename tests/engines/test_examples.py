"""The examples in the docstrings of the engines' modules run, and print what they say."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("engine", ["sglang", "transformers"])
def test_the_example_of_an_engine_runs(engine):
    if engine == "transformers":
        pytest.importorskip("transformers", "5.24", "needs transformers 5.24 or newer")
    module = importlib.import_module(f"replayssm.graph.engines.{engine}")
    found = doctest.testmod(module)
    assert found.attempted > 5 and found.failed == 0
