"""Defines the style of figures: fonts, and a colour, marker and dashes for each configuration of a page.

A configuration looks the same in all figures of a page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
import seaborn as sns
from matplotlib.colors import to_hex, to_rgb

from report.data.configuration import STRATEGIES

WIDTH: Final = 178.0  # mm: a journal's two columns, and a text column of the page
COLUMN: Final = 84.0  # mm: one column of a journal, and a telephone's screen
INK: Final = "#222222"
FAINT: Final = "#8a8a8a"
PUBLISHED: Final = "#c00000"  # colour of published numbers
_NARROW_BELOW: Final = 130.0  # mm; in a narrower figure, panels stand above one another
# Shades of a strategy's colour, which its configurations take in turn: the colour that is mixed in, and its share.
_SHADES: Final = (("black", 0.0), ("black", 0.45), ("white", 0.5), ("black", 0.7), ("white", 0.3))
_MARKERS: Final = "DosPXv^p<h>*dH8"
_FONTS: Final = mpl.rc_params_from_file(
    Path(__file__).parents[1] / "figures.mplstyle", use_default_template=False
)
_DASHES: Final[tuple[Any, ...]] = ("", (4, 1.5), (1, 1), (3, 1, 1, 1))


@dataclass(frozen=True, slots=True)
class Look:
    """How a configuration looks in figures: its colour, its marker, and the dashes of its line."""

    colour: str = "#bbbbbb"
    marker: str = "o"  # as matplotlib names it
    dashes: Any = ""  # as seaborn's ``dashes`` takes them


@dataclass(frozen=True, slots=True)
class Style:
    """The style that all figures of a page share: their width, and the looks of configurations."""

    width: float = WIDTH  # in mm
    looks: Mapping[str, Look] = field(default_factory=dict)  # by the name of the configuration

    @property
    def inches(self) -> float:
        """Width of a figure in inches."""
        return self.width / 25.4

    @property
    def narrow(self) -> bool:
        """Whether a figure is too narrow for panels side by side."""
        return self.width < _NARROW_BELOW

    def look(self, configuration: str) -> Look:
        """Return the look of a configuration; a grey look if the style has none for it."""
        return self.looks.get(configuration, Look())


def looks_of(configurations: Iterable[tuple[str, str]]) -> dict[str, Look]:
    """Return a look (colour, marker and dashes) for each configuration, by name, from pairs (strategy, configuration).

    The first configuration of a strategy has the strategy's colour and marker.  The strategy's other configurations
    take other shades of the colour, other markers and other dashes in turn.  Shades and dashes repeat after a few
    configurations.
    """
    looks: dict[str, Look] = {}
    seen: Counter[str] = Counter()
    for strategy, configuration in dict.fromkeys(configurations):
        usual = STRATEGIES.get(strategy) or Look()
        markers = [usual.marker, *(marker for marker in _MARKERS if marker != usual.marker)]
        shade, marker, dashes = (cycle[seen[strategy] % len(cycle)] for cycle in (_SHADES, markers, _DASHES))
        looks[configuration] = Look(_mixed(usual.colour, *shade), marker, dashes)
        seen[strategy] += 1
    return looks


def _mixed(colour: str, other: str, share: float) -> str:
    red, green, blue = (1 - share) * np.array(to_rgb(colour)) + share * np.array(to_rgb(other))
    return to_hex((red, green, blue))


def of_parts(parts: Sequence[str]) -> dict[str, str]:
    """Return a colour for each part of a stacked bar, by the part's name; full and pale colours alternate."""
    full = sns.color_palette("colorblind", -(-len(parts) // 2))
    colours = [shade for rgb in full for shade in (to_hex(rgb), _mixed(to_hex(rgb), "white", 0.55))]
    return dict(zip(parts, colours, strict=False))


def shades(names: Sequence[str]) -> dict[str, Look]:
    """Return a look (colour, marker and dashes) for each name, for lines that are not configurations.

    The colours go from dark for the first name to light for the last; marker and dashes are the same for all lines.
    """
    colours = sns.color_palette("viridis", len(names) + 1).as_hex()  # the last is too pale
    return {name: Look(colour) for name, colour in zip(names, colours, strict=False)}


@contextmanager
def fonts() -> Iterator[None]:
    """Return a context in which matplotlib draws with the fonts and lines of this module.

    In this context, equal figures are saved as equal bytes.
    """
    with mpl.rc_context({**sns.axes_style("ticks"), **sns.plotting_context("paper"), **_FONTS}):
        yield
