"""Figures look alike wherever they are drawn."""

from __future__ import annotations

import io

import matplotlib as mpl
from matplotlib import pyplot as plt

from report.data.contender import STRATEGIES
from report.draw import theme


def test_settings_of_the_user_change_no_figure() -> None:
    """A matplotlibrc of one's own changes no byte: equal records give equal files."""

    def drawn() -> bytes:
        buffer = io.BytesIO()
        with theme.fonts():
            figure, ax = plt.subplots()
            ax.plot([1, 2], [1e5, 3e5])
            ax.set_title("words")
            figure.savefig(buffer, format="svg", metadata={"Date": None})
            plt.close(figure)
        return buffer.getvalue()

    own = {"svg.fonttype": "none", "font.family": ["monospace"], "axes.axisbelow": False}
    with mpl.rc_context(own | {"figure.constrained_layout.use": False}):
        changed = drawn()
    assert changed == drawn()


def test_contenders_of_one_strategy_look_different_and_the_first_like_the_strategy() -> None:
    """Ten codecs of one policy are ten pairs of colour and marker."""
    named = [("zeropp", f"ZeRO++ ({number})") for number in range(10)] + [("qwz", "qwZ")]
    looks = theme.looks_of(named)
    assert len({(look.colour, look.marker) for look in looks.values()}) == len(named)
    assert looks["ZeRO++ (0)"].colour == STRATEGIES["zeropp"].colour
    assert looks["qwZ"].colour == STRATEGIES["qwz"].colour
