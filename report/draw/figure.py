"""A figure as a declaration: a name, a question, the columns of one tidy table, and a mark."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import matplotlib.figure
import pandas as pd

from harness.records.confidence_intervals import Interval
from report.data.metrics import Derived
from report.data.text import number, sweeps_in_words
from report.draw.names_of_rows import common_to, peers_note
from report.draw.theme import Style

THREE_DIGITS: Final = number(3)


@dataclass(frozen=True, slots=True)
class Measure:
    """A column of raw values, and how it is drawn."""

    column: str
    label: str  # of its axis, with the unit
    says: str  # what it is, as a part of a sentence, for the caption
    # of the rows of one contender in one cell; their median by default
    estimate: Callable[[pd.DataFrame], Interval] | None = None
    form: Callable[[float], str] = THREE_DIGITS  # prints an estimate
    bar: bool = True  # whether it is a length from 0; else a position, on an axis that need not begin there
    log: bool = False  # whether its axis is logarithmic
    line: float | None = None  # at which value a line is drawn
    stroke: str = ""  # column whose median is drawn as a stroke across

    def of(self, group: pd.DataFrame) -> Interval:
        """The estimate of a contender's rows."""
        if self.estimate is not None:
            return self.estimate(group)
        return Interval(float(group[self.column].median()), math.nan, math.nan, len(group))


class Mark(Protocol):
    """How a table is drawn."""

    def draw(self, data: pd.DataFrame, style: Style) -> matplotlib.figure.Figure:
        """Draw a table that has rows."""

    def says(self, data: pd.DataFrame) -> str:
        """Caption text: what is drawn how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure: how a tidy table of raw values with a column ``id`` (records) is drawn."""

    name: str  # of its files, and of its anchor on the page
    title: str
    question: str  # that it answers, with which its caption begins
    mark: Mark
    # its data of a suite's records; without rows if they hold nothing to draw
    table: Callable[[Derived], pd.DataFrame] = lambda derived: derived.trials
    note: str = ""  # a further sentence of its caption
    notes: tuple[Callable[[pd.DataFrame], str], ...] = ()  # sentences after that, of its data

    @property
    def alt(self) -> str:
        """Alternative text, without numbers: tables of the same page have them."""
        return f"{self.title}. {self.question} Tables on this page have the numbers."

    def caption(self, data: pd.DataFrame) -> str:
        """The question, what is drawn how, and what all rows have in common."""
        parts = [self.question, self.mark.says(data), self.note, *(note(data) for note in self.notes)]
        parts += [peers_note(data)] if "strategy" in data else []
        parts += [common_to(data)] if "where" in data else []
        parts += [sweeps_in_words(data["sweep"])] if "sweep" in data else []
        return " ".join(part.strip() for part in parts if part.strip())


def records_behind(data: pd.DataFrame) -> tuple[str, ...]:
    """Sorted ids of the records behind a figure's data, those of column ``baseline`` among them."""
    ids = data.filter(["id", "baseline"]).melt()["value"].dropna()
    return tuple(sorted({one for identity in ids for one in str(identity).split()}))
