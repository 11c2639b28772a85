"""The list of planted bugs does not rot, and planting never touches the checkout."""

import ast
from pathlib import Path

import pytest

import kernel_mutants
import mutants
import mutate

ROOT = Path(__file__).parents[2]
BUGS = [*mutants.MUTATIONS, *kernel_mutants.BUGS]


@pytest.mark.parametrize("mutation", BUGS, ids=lambda m: m.bug)
def test_every_bug_can_be_planted_and_is_one(mutation):
    text = (ROOT / mutation.file).read_text()
    assert text.count(mutation.old) == 1
    planted = ast.parse(text.replace(mutation.old, mutation.new))
    assert ast.dump(planted) != ast.dump(ast.parse(text))


def test_a_bug_is_planted_in_the_copy_that_python_imports(tmp_path):
    mutation = mutants.MUTATIONS[0]
    before = (ROOT / mutation.file).read_text()
    mutate.copy_package(tmp_path)
    mutate.plant(mutation, tmp_path)
    done = mutate.run(
        tmp_path, "-c",
        "import replayssm.graph, replayssm.ops.reference as r; print(open(r.__file__).read())",
    )  # fmt: skip
    assert done.stdout.strip() == before.replace(mutation.old, mutation.new).strip()
    assert (ROOT / mutation.file).read_text() == before


@pytest.mark.parametrize(("old", "times"), [("no such text", 0), ("len(x.state)", 3)])
def test_a_text_that_does_not_occur_once_is_refused(tmp_path, old, times):
    mutate.copy_package(tmp_path)
    mutation = mutants.Mutation("a bug", "ops/reference.py", old, "")
    with pytest.raises(
        ValueError, match=f"the old text of 'a bug' once, got {times} times"
    ):
        mutate.plant(mutation, tmp_path)
