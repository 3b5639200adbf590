"""The Pareto front has what nothing beats, and legends of many contenders fit the figure."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from report.draw import chart_parts, figure_files
from report.draw.figure_definition import Drawing
from report.figures.pareto import front

_NUMBERS = st.integers(0, 5).map(float)


@given(st.lists(st.tuples(_NUMBERS, _NUMBERS), min_size=1, max_size=12))
def test_the_front_has_what_nothing_beats(points: list[tuple[float, float]]) -> None:
    """Each row of it is beaten by none in both, and each row off it is beaten or equalled by one on it."""
    kept = front(pd.DataFrame(points))
    ahead = [points[place] for place in kept]
    assert ahead == sorted(set(ahead))
    for place, (sent, value) in enumerate(points):
        others = [one for one in points if one != (sent, value) and one[0] <= sent and one[1] <= value]
        assert (place in kept) <= (not others)
        assert place in kept or any(one <= sent and other <= value for one, other in ahead)


def _labelled(data: pd.DataFrame) -> Figure:
    figure, ((ax, _, _),) = chart_parts.panels(3, height=2.5)
    for name in data["name"]:
        ax.plot([0, 1], [0, 1], label=name)
    chart_parts.legend_above(figure, ax, columns=4)
    return figure


@pytest.mark.parametrize("width", [84.0, 178.0])
@pytest.mark.parametrize(("count", "name"), [(1, "ZeRO-3"), (11, "qgZ (g int2:128, feedback classic:all)")])
def test_a_legend_of_many_long_names_fits(count: int, name: str, width: float, tmp_path: Path) -> None:
    """The figure is as wide as asked; four columns of such names once left its panels no width at all."""
    data = pd.DataFrame({"name": [name] * count})
    figure_files.write(Drawing("many", "Many", _labelled, str, str), data, tmp_path, width=width)
    (wide,) = re.findall(rb"/MediaBox \[ 0 0 ([0-9.]+) ", (tmp_path / "many.pdf").read_bytes())
    assert float(wide) / 72 * 25.4 == pytest.approx(width, abs=0.01)
