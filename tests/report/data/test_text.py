"""Words of captions and tables, by the values that they describe."""

from __future__ import annotations

import math

import pytest

from report.data.text import sweeps_in_words


@pytest.mark.parametrize("sweeps", [[], [0], [0, 0, math.nan, math.nan], [math.nan, float("nan")]])
def test_published_values_are_no_runs_of_the_suite(sweeps: list[float]) -> None:
    """One sweep beside published values, whose sweeps are NaN, is one run, and a caption says nothing on several."""
    assert sweeps_in_words(sweeps) == ""


def test_two_sweeps_are_two_runs() -> None:
    """Equal numbers of a sweep count once."""
    assert sweeps_in_words([0, 1, 1, math.nan]).startswith(" The suite ran 2 times: ")
