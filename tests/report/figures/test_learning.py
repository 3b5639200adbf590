"""Captions of the figures on losses."""

from __future__ import annotations

import pandas as pd
import pytest

from report.figures import learning


@pytest.mark.parametrize(
    ("seeds", "beginning"), [([0, 0], "There is 1 seed;"), ([0, 1, 1], "There are 2 seeds;")]
)
def test_the_number_of_seeds_agrees_with_its_verb(seeds: list[int], beginning: str) -> None:
    """One seed "is", several "are"."""
    assert learning._seeds_in_words(pd.DataFrame({"seed": seeds})).startswith(beginning)
