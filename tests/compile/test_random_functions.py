"""Random functions and environments return the same numbers compiled and eager.

The tolerances are in `support.random_functions`, whose command repeats one seed. Most graphs run operation by
operation. A few are built as C++.
"""

import pytest
from support.graphs import traced_only
from support.random_functions import FLOAT_OPERATIONS, INTEGER_OPERATIONS, drawn_case, mistakes

CPP = 3, 5, 8, 11, 20
"""Seeds of the tests that build C++."""
SLOW, LONG = pytest.mark.slow, pytest.mark.long


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=SLOW if first in (0, 50) else LONG) for first in range(0, 100, 10)]
)
def test_random_functions_are_equal_op_by_op(first):
    with traced_only():
        assert [text for seed in range(first, first + 10) if seed not in CPP for text in mistakes(seed)] == []


@pytest.mark.parametrize("limit", [4096, 2])
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=SLOW if seed in (3, 11) else LONG) for seed in CPP])
def test_random_functions_are_equal_in_cpp(seed, limit, monkeypatch):
    """With a limit of 2, almost every tensor of a loop has a buffer of its own, as large tensors have."""
    monkeypatch.setattr("ecrl.compile.scan._SMALL", limit)
    assert mistakes(seed) == []


@pytest.mark.long
@pytest.mark.parametrize("first", range(100, 2100, 100))
def test_many_random_functions_are_equal(first):
    with traced_only():
        assert [text for seed in range(first, first + 95) for text in mistakes(seed)] == []
    assert [text for seed in range(first + 95, first + 100) for text in mistakes(seed)] == []


def test_the_random_functions_use_every_operation():
    cases = [drawn_case(seed) for seed in range(100)]
    used = {one.name for case in cases if isinstance(case.static[0], tuple) for one in case.static[0]}
    assert used == {*FLOAT_OPERATIONS, *(f"integer {name}" for name in INTEGER_OPERATIONS)}
