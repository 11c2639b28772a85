"""The tuned kernels' own source does what the contract says, on a stand-in for Gluon.

Their sums, races and barriers are for a GPU to show: see support/stand_in.py.
"""

import pytest

from interpreting import cases, outcomes_of

pytest.importorskip("triton", reason="needs triton")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return outcomes_of("gluon")


@pytest.mark.parametrize("case", cases("gluon"))
def test_the_tuned_kernels_agree_with_the_reference(outcomes, case):
    assert outcomes[case] == ""
