"""The list of planted bugs does not rot: each can be planted, and changes the code."""

import ast
from pathlib import Path

import pytest

import kernel_mutants
import mutants

ROOT = Path(__file__).parents[2]
BUGS = [*mutants.MUTATIONS, *kernel_mutants.BUGS]


@pytest.mark.parametrize("mutation", BUGS, ids=lambda m: m.bug)
def test_every_bug_can_be_planted_and_is_one(mutation):
    text = (ROOT / mutation.file).read_text()
    assert text.count(mutation.old) == 1
    planted = ast.parse(text.replace(mutation.old, mutation.new))
    assert ast.dump(planted) != ast.dump(ast.parse(text))
