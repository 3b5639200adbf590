"""Parity has a verdict, which its interval says."""

from __future__ import annotations

import math

import pytest

from harness.records.confidence_intervals import Interval
from report.data.text import NOTHING
from report.tables.rates import _verdict


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [
        ((1.0, 1.2), "held"),
        ((0.8, 0.99), "missed"),
        ((0.9, 1.1), "cannot tell"),
        ((0.8, 1.0), "cannot tell"),
        ((math.nan, math.nan), NOTHING),
    ],
)
def test_parity_is_held_missed_or_cannot_be_told(ends: tuple[float, float], verdict: str) -> None:
    """By where 1 lies: it is held if ZeRO++ was shown to be as fast, so 1 at the upper end is none."""
    low, high = ends
    assert _verdict(Interval((low * high) ** 0.5, low, high, 6)) == verdict
