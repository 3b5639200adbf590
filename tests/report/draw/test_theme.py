"""Figures look alike wherever they are drawn."""

from __future__ import annotations

import io

import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt

from report.draw import theme


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("svg.fonttype", "none"),
        ("axes.formatter.use_mathtext", True),
        ("figure.dpi", 50),
        ("font.family", ["monospace"]),
        ("axes.axisbelow", False),
        ("figure.constrained_layout.use", False),
    ],
)
def test_settings_of_the_user_change_no_figure(name: str, value: object) -> None:
    """A matplotlibrc of one's own changes no byte: equal records give equal files."""

    def drawn() -> bytes:
        buffer = io.BytesIO()
        with theme.style():
            figure, ax = plt.subplots()
            ax.plot([1, 2], [1e5, 3e5])
            ax.set_title("words")
            figure.savefig(buffer, format="svg", metadata={"Date": None})
            plt.close(figure)
        return buffer.getvalue()

    with mpl.rc_context({name: value}):
        changed = drawn()
    assert changed == drawn()
