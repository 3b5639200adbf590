"""The map of speed-ups: each measured cell, and the line at which ZeRO++ and ZeRO-3 are equally fast."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from report.data.frames import frames_of
from report.data.metrics import Derived, derive
from report.draw import theme
from report.figures.break_even import PLOTS
from tests.report.records import records_of

(PLOT,) = PLOTS


def _crossing(fast: float) -> Derived:
    """Records whose speed-up is 2 below 100 Mbit/s, and ``fast`` above."""
    derived = derive(frames_of(records_of("bandwidth")))
    pairs = derived.pairs.copy()
    ratio = np.where(pairs["achieved_mbit"] < 100, 2.0, fast)
    pairs["baseline_seconds"], pairs["speedup"] = pairs["step_seconds"] * ratio, ratio
    return replace(derived, pairs=pairs)


def test_each_measured_rate_and_batch_is_a_square_with_its_speed_up() -> None:
    """Nothing lies between what was measured; the numbers are those of the pairs."""
    data = PLOT.data(_crossing(0.5))
    with theme.style():
        figure = PLOT.draw(data)
    squares = sum(len(ax.collections) for ax in figure.axes)
    assert squares == data["cell"].nunique()
    told = {one.get_text() for ax in figure.axes for one in ax.texts}
    assert told == {"2.00", "0.50"}


def test_the_line_is_drawn_where_it_is_crossed_alone() -> None:
    """With speed-ups on both sides of 1; with all above there is none, and the words say so."""
    for fast, crossed in ((0.5, True), (1.5, False)):
        data = PLOT.data(_crossing(fast))
        with theme.style():
            figure = PLOT.draw(data)
        assert any(ax.lines for ax in figure.axes) == crossed
        assert ("not crossed" in PLOT.alt(data)) != crossed
