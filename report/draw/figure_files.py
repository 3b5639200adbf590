"""Draws figures into files: SVG, PDF, PNG, and a CSV of the raw values."""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from report.data import footnotes
from report.data.contender import NAMES
from report.data.metrics import Derived
from report.draw import theme
from report.draw.figure_definition import Drawing, Plot, records_behind

# No dates and no versions: the same records give the same bytes.
_METADATA: Final[dict[str, dict[str, Any]]] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}
FORMS: Final = ("svg", "pdf", "png")
_MARGIN: Final = 0.05  # inches around what is drawn
_LETTERS: Final = 36  # of a line over or under a panel of a column's width
_LAYOUTS: Final = 4  # at most: labels beside the axes keep their widths, so the second or third fits


@dataclass(frozen=True)
class Drawn:
    """A figure that was drawn, with the raw values behind it."""

    plot: Drawing
    data: pd.DataFrame
    svg: bytes
    width: float = theme.WIDTH  # mm

    @property
    def image(self) -> str:
        """The drawing as a data URI."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.svg).decode('ascii')}"

    def records(self, marked: AbstractSet[str]) -> list[tuple[str, str]]:
        """Ids of the records behind it, each with its footnote mark if it is in ``marked``."""
        return [(name, footnotes.TAKEN if name in marked else "") for name in records_behind(self.data)]


def draw(
    plot: Plot, derived: Derived, folder: Path, width: float = theme.WIDTH, forms: Collection[str] = FORMS
) -> Drawn | None:
    """Draw a figure ``width`` mm wide into ``folder``; None if the records hold nothing to draw."""
    data = plot.data(derived)
    ran = derived.finished.sort_values("place", kind="stable")
    presets = [
        name != NAMES.get(strategy) for strategy, name in zip(ran["strategy"], ran["contender"], strict=True)
    ]
    ran = ran.assign(changed=presets).sort_values("changed", kind="stable")
    variants = theme.numbered(zip(ran["strategy"], ran["contender"], strict=True))
    return None if data.empty else write(plot, data, folder, variants, width=width, forms=forms)


def _laid_out(figure: Figure) -> Bbox:
    """Lay a figure out, once for all forms, so that it is as wide as asked, or as it must."""
    width = theme.inches()
    inner = width - 2 * _MARGIN
    for _ in range(_LAYOUTS):
        figure.draw_without_rendering()
        drawn = figure.get_tightbbox()
        if abs(drawn.width - inner) < _MARGIN / 2:
            break
        figure.set_figwidth(max(1.0, figure.get_figwidth() + inner - drawn.width))
    figure.set_layout_engine(None)  # "none" leaves a placeholder, for which each form is drawn twice
    middle, width = (drawn.x0 + drawn.x1) / 2, max(width, drawn.width)
    return Bbox.from_extents(middle - width / 2, drawn.y0 - _MARGIN, middle + width / 2, drawn.y1 + _MARGIN)


def _for_a_column(figure: Figure) -> None:
    """Name the y axis of a panel that stood beside the one whose axis it shares; break what is too wide."""
    axes = figure.get_axes()
    for above, ax in pairwise(axes):
        if not ax.get_ylabel() and ax.get_shared_y_axes().joined(above, ax):
            ax.set_ylabel(above.get_ylabel())
    for ax in axes:
        ax.set_title(textwrap.fill(ax.get_title(loc="left"), _LETTERS))
        ax.set_xlabel(textwrap.fill(ax.get_xlabel(), _LETTERS))


def write(
    plot: Drawing,
    data: pd.DataFrame,
    folder: Path,
    variants: Mapping[str, int] | None = None,
    *,
    width: float = theme.WIDTH,
    forms: Collection[str] = FORMS,
) -> Drawn:
    """Draw a table with rows, and write it as SVG, PDF, PNG and CSV of its raw values.

    Args:
        plot: the drawing.
        data: the table.
        folder: where the files go.
        variants: the page's contenders, numbered within their strategies.
        width: in mm.
        forms: which of SVG, PDF and PNG are written.
    """
    rendered = {}
    with theme.style(variants, width):
        figure = plot.draw(data)
        if theme.stacked():
            _for_a_column(figure)
        box = _laid_out(figure)
        for form, metadata in _METADATA.items():
            if form not in forms:
                continue
            buffer = io.BytesIO()
            figure.savefig(buffer, format=form, metadata=metadata, bbox_inches=box)
            rendered[form] = buffer.getvalue()
            (folder / f"{plot.name}.{form}").write_bytes(rendered[form])
    data.to_csv(folder / f"{plot.name}.csv", index=False, lineterminator="\n")
    return Drawn(plot, data, rendered["svg"], width)
