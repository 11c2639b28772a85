"""field_cases.md keeps its word: every case is guarded by tests that say so."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROW = re.compile(r"\| (\d+) \| (.+) \| (.+) \|")
MENTION = re.compile(r"\bcases? (\d+(?:(?:, | and )\d+)*)")


def documented() -> dict[str, set[int]]:
    """Every test of the suite and the cases that its docstring names."""
    found = {}
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                text = " ".join((ast.get_docstring(node) or "").split())
                numbers = [
                    int(n) for m in MENTION.findall(text) for n in re.findall(r"\d+", m)
                ]
                found[f"{path.stem.removeprefix('test_')}::{node.name}"] = set(numbers)
    return found


def table() -> dict[int, str]:
    """The last column of each case."""
    rows = ROW.findall((TESTS / "field_cases.md").read_text())
    cases = {int(number): guards for number, _, guards in rows}
    assert len(cases) == len(rows), "a case stands in the table twice"
    return cases


def test_every_case_names_tests_that_exist_and_name_it_or_says_why_none_does():
    tests, wrong = documented(), []
    for case, guards in table().items():
        named = re.findall(r"`(\w+::\w+)`", guards)
        if not named and not guards.startswith("none: "):
            wrong.append(f"{case} has neither a test nor a reason")
        wrong += [
            f"{case}: {x} does not name it" for x in named if case not in tests.get(x, ())
        ]
    assert wrong == []


def test_every_case_that_a_test_names_lists_the_test():
    cases = table()
    wrong = [
        f"{test} names {case}"
        for test, numbers in documented().items()
        for case in numbers
        if f"`{test}`" not in cases.get(case, "")
    ]
    assert wrong == []
