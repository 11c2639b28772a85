"""The plain Triton kernels do what the contract says, as Triton's interpreter runs them."""

import pytest

from interpreting import cases, outcomes_of

pytest.importorskip("triton", reason="needs triton")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return outcomes_of("portable")


@pytest.mark.parametrize("case", cases("portable"))
def test_the_plain_triton_kernels_agree_with_the_reference(outcomes, case):
    assert outcomes[case] == ""
