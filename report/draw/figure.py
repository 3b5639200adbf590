"""Defines what a figure is: a question, its data as a tidy table, a way to draw them, a caption, and files."""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import matplotlib.figure
import pandas as pd
from matplotlib.transforms import Bbox

from harness.csv_cells import safe_cells
from report.data import caveats
from report.data.configuration import NAMES
from report.data.metrics import Derived
from report.data.text import occasions_in_words
from report.draw.marks import Front, Lanes, Lines, Rows, Stacked
from report.draw.names_of_rows import common_to, peers_note
from report.draw.theme import COLUMN, WIDTH, Style, fonts, looks_of

# No dates and no versions: the same records give the same bytes.
_METADATA: Final[dict[str, dict[str, Any]]] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}
FORMS: Final = tuple(_METADATA)
_MARGIN: Final = 0.05  # inches around what is drawn
_LETTERS: Final = 36  # most characters in a line of the title or the x label of a narrow panel
_PANEL: Final = 1.0  # inches: the least width of a panel, with the space around it
_LAYOUTS: Final = 4  # a figure is laid out at most so many times


def _has_seconds(data: pd.DataFrame) -> bool:
    """Return whether a figure's table has step times of trials, or tokens per second, and the occasions of the trials.

    An occasion is a start of the machine, or a run more than an hour apart from others.  If the table has both, the
    caption says at how many occasions the times were measured.
    """
    return "occasion" in data and not {"step_seconds", "tokens_per_second"}.isdisjoint(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a page: which raw values it shows, how they are drawn, and what its caption says."""

    name: str  # name of the figure's files, and of its anchor on the page
    title: str
    question: str  # the question that the figure answers; the caption begins with it
    mark: Rows | Lines | Stacked | Front | Lanes  # draws the table
    # Returns the figure's data from a suite's records: a tidy table, whose column ``id`` names the records.  The table
    # has no rows if there is nothing to draw.
    table: Callable[[Derived], pd.DataFrame] = lambda derived: derived.trials
    note: str = ""  # sentences of the caption that do not depend on the data
    # Each function returns sentences of the caption from the figure's data; empty if there is nothing to say.
    notes: tuple[Callable[[pd.DataFrame], str], ...] = ()
    # Returns the whole caption from the figure's data, in at most two sentences.  If it is None, the caption is put
    # together from the question, the mark's sentences and the notes.
    whole_caption: Callable[[pd.DataFrame], str] | None = None

    @property
    def alt(self) -> str:
        """The figure's alternative text: its title and its question, without numbers.

        If the figure has no :attr:`whole_caption`, the text also says that tables on the page have the numbers.
        """
        short = f"{self.title}. {self.question}"
        return short if self.whole_caption is not None else f"{short} Tables on this page have the numbers."

    def caption(self, data: pd.DataFrame) -> str:
        """Return the caption as one text: the parts of :meth:`caption_parts`, joined by spaces."""
        return " ".join(self.caption_parts(data))

    def caption_parts(self, data: pd.DataFrame) -> list[str]:
        """Return the caption as a list of parts, each of one or more sentences.

        The parts are the question, what is drawn and how, notes, and what all rows of the table have in common.  A page
        shows the first part as a sentence, and the other parts as a list below this sentence.  If the figure has a
        :attr:`whole_caption`, this caption is the only part.
        """
        if self.whole_caption is not None:
            return [self.whole_caption(data)]
        parts = [self.question, self.mark.says(data), self.note, *(note(data) for note in self.notes)]
        parts += [caveats.FOOTNOTES[caveats.RATES]] if caveats.rates(data) else []
        parts += [peers_note(data)] if "strategy" in data else []
        parts += [common_to(data)] if "where" in data else []
        parts += [occasions_in_words(data["occasion"].nunique())] if _has_seconds(data) else []
        return [part.strip() for part in parts if part.strip()]

    def draw(self, derived: Derived, folder: Path, style: Style, forms: Collection[str] = ()) -> Drawn | None:
        """Draw the figure from the records ``derived``, and write its files into ``folder``.

        The files are an SVG, a CSV of the raw values, and one file for each of ``forms``, which may have "pdf" and
        "png".  Returns the drawn figure.  Returns None, and writes nothing, if there is no data to draw.
        """
        if (data := self.table(derived)).empty:
            return None
        rendered = self.render(data, style, ("svg", *forms))
        for form, content in rendered.items():
            (folder / f"{self.name}.{form}").write_bytes(content)
        safe_cells(data).to_csv(folder / f"{self.name}.csv", index=False, lineterminator="\n")
        return Drawn(self, data, rendered["svg"], style, (*rendered, "csv"))

    def render(self, data: pd.DataFrame, style: Style, forms: Collection[str] = ("svg",)) -> dict[str, bytes]:
        """Draw a table, which must have rows, and return the content of the figure's file for each of ``forms``."""
        rendered = {}
        with fonts():
            drawn = self.mark.draw(data, style)
            if style.narrow:
                for ax in drawn.get_axes():
                    ax.set_title(textwrap.fill(ax.get_title(loc="left"), _LETTERS))
                    ax.set_xlabel(textwrap.fill(ax.get_xlabel(), _LETTERS))
            box = laid_out(drawn, style)
            for form in (form for form in FORMS if form in forms):
                buffer = io.BytesIO()
                drawn.savefig(buffer, format=form, metadata=_METADATA[form], bbox_inches=box)
                rendered[form] = buffer.getvalue()
        return rendered


@dataclass(frozen=True)
class Drawn:
    """A figure that was drawn, with the raw values that it shows."""

    figure: Figure
    data: pd.DataFrame  # the raw values
    svg: bytes  # the drawing
    style: Style
    files: tuple[str, ...]  # suffixes of the files that were written, such as ``svg`` and ``csv``

    def image(self, *, narrow: bool = False) -> str:
        """Return the drawing as a data URI of SVG; with ``narrow``, it is drawn anew for a narrow screen."""
        svg = self.figure.render(self.data, replace(self.style, width=COLUMN))["svg"] if narrow else self.svg
        return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode('ascii')}"

    def records(self, marked: AbstractSet[str]) -> list[tuple[str, str]]:
        """Return a pair (id, mark) for each record whose values the figure shows.

        The mark is ‡ for records of disturbed trials (other programs took much processor time), and otherwise empty.
        ``marked`` are the ids of these trials.
        """
        return [(name, caveats.TAKEN if name in marked else "") for name in records_behind(self.data)]


def records_behind(data: pd.DataFrame) -> tuple[str, ...]:
    """Return the sorted ids of the records behind a figure's data: all ids in its columns ``id`` and ``baseline``."""
    ids = data.filter(["id", "baseline"]).melt()["value"].dropna()
    return tuple(sorted({identity for cell in ids for identity in str(cell).split()}))


def style_of(derived: Derived, width: float = WIDTH) -> Style:
    """Return the style of a page's figures: their width (``width`` mm), and a look for each configuration.

    A look is a colour, a marker and dashes.  A strategy without changes has the strategy's plain colour and marker; the
    strategy's other configurations have variants of the two.
    """
    ran = derived.finished.sort_values("place", kind="stable")
    ran = ran.assign(changed=ran["configuration"] != ran["strategy"].map(NAMES))
    ran = ran.sort_values("changed", kind="stable")
    return Style(width, looks_of(zip(ran["strategy"], ran["configuration"], strict=True)))


def laid_out(figure: matplotlib.figure.Figure, style: Style) -> Bbox:
    """Place the panels and labels of a figure, and return the part of it that is saved, as a box in inches.

    The box is as wide as the style says, or wider if labels need more width.  All forms (SVG, PDF, PNG) share this
    layout.
    """
    inner, layout = style.inches - 2 * _MARGIN, figure.get_layout_engine()
    assert layout is not None  # noqa: S101  # axes.grid sets one
    least = _least_inches(figure) if style.narrow else 1.0
    figure.set_figwidth(max(figure.get_figwidth(), least))
    for attempt in range(1, _LAYOUTS + 1):
        layout.execute(figure)  # without drawing, which takes as long again
        drawn, before = figure.get_tightbbox(), figure.get_figwidth()
        width = max(least, before + inner - drawn.width)
        # A wider figure may have more ticks, and so need less width: the widths then alternate.  The box must be that
        # of the last layout, or it would cut off the last tick's label.
        if abs(width - before) < _MARGIN / 2 or attempt == _LAYOUTS:
            break
        figure.set_figwidth(width)
    figure.set_layout_engine(None)  # "none" leaves a placeholder, for which each form is drawn twice
    middle, width = (drawn.x0 + drawn.x1) / 2, max(style.inches, drawn.width)
    return Bbox.from_extents(middle - width / 2, drawn.y0 - _MARGIN, middle + width / 2, drawn.y1 + _MARGIN)


def _least_inches(figure: matplotlib.figure.Figure) -> float:
    """Return the smallest width in inches of a figure whose panels are in one column.

    This is the width that the longest row names take beside a panel, plus 1 inch for the panel.
    """
    boxes = [(ax, ax.get_tightbbox()) for ax in figure.axes]
    beside = [box.width - ax.bbox.width for ax, box in boxes if box is not None]
    return max(beside, default=0.0) / figure.dpi + _PANEL
