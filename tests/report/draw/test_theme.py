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


def test_contenders_of_one_strategy_look_different_and_the_first_like_the_strategy() -> None:
    """Ten codecs of one policy are ten pairs of colour and marker; the same on every figure of a page."""
    named = [("zeropp", f"ZeRO++ ({number})") for number in range(10)] + [("qwz", "qwZ")]
    with theme.style(theme.numbered(named)):
        looks = {(theme.colour(*one), theme.marker(*one)) for one in named}
        assert len(looks) == len(named)
        assert theme.colour(*named[0]) == theme.colour("zeropp") == theme.COLOURS["zeropp"]
        assert theme.colour(*named[-1]) == theme.COLOURS["qwz"]
    assert theme.marker(*named[3]) == theme.MARKERS["zeropp"]  # outside of a page there is one of each
