"""Which cases of a test every change runs through."""

from collections.abc import Iterable

import pytest


def slow_but(quick: Iterable, cases: Iterable) -> list:
    """The cases of a test, all of them slow but those that are `quick`."""
    quick, cases = list(quick), list(cases)
    assert all(case in cases for case in quick), "a quick case is none of the test's"
    return [case if case in quick else pytest.param(*case if isinstance(case, tuple) else (case,),
            marks=pytest.mark.slow) for case in cases]  # fmt: skip
