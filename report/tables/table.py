"""Defines a table by its raw values and columns, and prints it as CSV, as Markdown, in a terminal and on a page."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final

import pandas as pd
import rich.table
from rich import box
from rich.console import Console, JustifyMethod
from rich.markup import escape

from harness.csv_cells import safe_cells
from harness.errors import Refusal, suggestion
from harness.records.confidence_intervals import CONFIDENCE, FEWEST, Interval
from report.data import caveats, published
from report.data.frames import groups
from report.data.text import (
    NOTHING,
    left_out_in_words,
    none_in_words,
    number,
    occasions_in_words,
    parts_of,
    text,
    with_interval,
)
from report.draw.names_of_rows import by_configuration
from report.quantities import formula

_MARKDOWN: Final = re.compile(  # what GitHub's Markdown would take for markup
    r"""
    [`|$~]                                              # code, cells, formulas, strikethrough
    | \\(?=[!-/:-@\[-`{-~])                            # a backslash that escapes
    | \*(?=\S) | (?<=\S)\*                             # emphasis: a star that touches a word
    | (?<![^\W_])_(?=\S) | (?<=\S)_(?![^\W_])          # emphasis: an underscore at a word's edge
    | (?<=[\])])\[ | \[(?=[^\]]*\](?:[(\[:]|$))        # links and their targets
    | ^[#+>*-](?=\s|\#) | (?<=^\d)[.)](?=\s)            # headings, lists, quotations
    | (?<!\w)@(?=\w) | (?<!\w):(?=[a-z][\w+-]*:)       # mentions and emoji
    | (?<=:)/(?=/) | (?<=www)\.                         # addresses
    """,
    re.VERBOSE,
)
_MOST_NAMED: Final = 12  # rows in a message
_PRINTED: Final = "_"  # prefix of columns that are printed and not in the CSV


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table as it is printed: its title, where its values are, and how they are formatted."""

    key: str  # column of the table's data; its values are numbers, words or :class:`Interval`
    title: str  # title of the column, with the unit
    form: Callable[[Any], str] = text  # formats a value; if it is not ``text``, the column holds numbers
    says: str = ""  # definition of the column, one or more sentences; may be empty
    mark: str = ""  # another column of the data, whose text is printed after each value; empty: none
    place: bool = False  # whether the column names a part of the setting
    ends: bool = True  # whether the ends of intervals are printed
    names_row: bool = True  # whether the words of this column are part of the row's name in numbers.tex
    of_trials: bool = False  # whether its intervals are computed from trials; else from pairs of trials

    @property
    def name(self) -> str:
        """Name of the column in the CSV; :meth:`Table.column` accepts this name, too."""
        return self.key.removeprefix(_PRINTED)

    @property
    def numeric(self) -> bool:
        """Whether the column holds numbers, which are right-aligned."""
        return self.form is not text

    def cell(self, value: Any) -> str:
        """Return the text that is printed for a value: a dash for NaN, and the mark ‡ after values of disturbed trials.

        Intervals are printed in parentheses after their estimates.  A trial is disturbed if other programs took much
        processor time during it.
        """
        if isinstance(value, Interval):
            taken = f" {caveats.TAKEN}" if value.disturbed else ""
            ends = value if self.ends else replace(value, low=math.nan, high=math.nan)
            return NOTHING if math.isnan(value.estimate) else with_interval(ends, self.form) + taken
        estimate = value
        return NOTHING if isinstance(estimate, float) and math.isnan(estimate) else self.form(estimate)


@dataclass(frozen=True)
class Table:
    """One table of a page: its raw values, and the columns and texts that are printed."""

    name: str  # name of the table's files, and of its anchor on the page
    title: str
    caption: str  # at most two sentences
    data: pd.DataFrame  # the raw values, one row per printed row
    columns: tuple[Column, ...]  # the printed columns
    footnotes: str = ""  # sentences on intervals, marks, and what the settings of all rows have in common

    @property
    def definitions(self) -> list[str]:
        """The definitions of the columns; a definition that several columns share is listed once."""
        return list(dict.fromkeys(column.says for column in self.columns if column.says))

    @property
    def description(self) -> str:
        """All sentences about the table, as one text: caption, footnotes and definitions."""
        return " ".join(filter(None, (self.caption, self.footnotes, *self.definitions)))

    @property
    def places(self) -> int:
        """Number of the columns that name a part of the setting (cluster, model, batch and so on), from the left."""
        return sum(column.place for column in self.columns)

    def rows(self) -> list[list[str]]:
        """Return the printed cells of each row, with their marks; nothing is escaped for HTML, Markdown or LaTeX."""
        return [
            [column.cell(row[column.key]) + str(row.get(column.mark, "")) for column in self.columns]
            for row in self.data.astype(object).to_dict("records")
        ]

    def by_place(self) -> tuple[tuple[Column, ...], list[tuple[str, list[list[str]]]]]:
        """Return the table divided into groups of neighbouring rows with the same setting (cluster, model, batch).

        The first result is the columns that do not name a part of the setting.  The second result has a pair for each
        group: the setting as text, and the cells of these columns, row by row.
        The table is not divided if no column names a part of the setting, or if no two neighbouring rows have the same
        setting.  Then the first result is all columns, and the second has one group with all rows, whose setting is "".
        """
        places, rows = self.places, self.rows()
        grouped = [
            (place, [row[places:] for row in group])
            for place, group in groupby(rows, lambda row: ", ".join(filter(None, row[:places])))
        ]
        if not places or len(grouped) == len(rows):
            return self.columns, [("", rows)]
        return self.columns[places:], grouped

    def column(self, name: str) -> Column:
        """Return the printed column that ``name`` selects: a title, a name in the CSV, or a part of a title.

        The first of these rules that finds a column decides:

        * The title, or the name in the CSV, equals ``name``.
        * The title begins with ``name``: ``Speed-up`` selects ``Speed-up over the hierarchical ZeRO-3``.
        * The title has all words of ``name``: ``Speed-up over ZeRO-3`` selects ``Speed-up over the hierarchical
          ZeRO-3``.

        Raises a Refusal that lists titles if no column is found, or if the second or third rule finds several.
        """
        if columns := [column for column in self.columns if name in (column.title, column.key, column.name)]:
            return columns[0]
        titled = [column for column in self.columns if column.title]
        begins = [column for column in titled if name and column.title.startswith(name)]
        words = {*name.replace(",", " ").split()}
        found = begins or [c for c in titled if words and words <= {*c.title.replace(",", " ").split()}]
        if len(found) == 1:
            return found[0]
        titles = "; ".join(column.title for column in found or titled)
        if found:
            raise Refusal(
                f"{len(found)} columns of table {self.name} match {name!r}: expected one of {titles}"
            )
        raise Refusal(f"no column {name!r} in table {self.name}: expected one of {titles}")

    def row(self, query: str) -> int:
        """Return the index of the row that ``query`` selects; commas separate the parts of a query.

        A row is found if each part of the query equals one of the row's cells.  If there is no such row, a row is found
        if each part occurs in one of its cells.  The parts of a row's setting, such as ``50 Mbit/s``, count as cells,
        even if they are not printed.
        Raises a Refusal that lists the names of rows if no row, or more than one, is found.
        """
        rows, parts = self.rows(), parts_of(query)
        places = self.data["where"].astype(str) if "where" in self.data else [""] * len(rows)
        texts = [[*cells, *place.split(", ")] for cells, place in zip(rows, places, strict=True)]
        matches = [number for number, cells in enumerate(texts) if {*parts} <= {*cells}] or [
            number for number, cells in enumerate(texts) if all(part in "\n".join(cells) for part in parts)
        ]
        if len(matches) == 1:
            return matches[0]
        names = list(dict.fromkeys(", ".join(cells[: self.places + 1]) for cells in rows))
        rest = f"; and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        raise Refusal(
            f"{len(matches)} rows of table {self.name} hold {', '.join(parts)!r}: expected words that only one of "
            f"these rows has: {'; '.join(names[:_MOST_NAMED])}{rest}"
        )

    def csv(self) -> str:
        """Return the raw values as CSV.

        A column ``KEY`` of intervals becomes three columns: the estimates ``KEY``, and the ends ``KEY_low`` and
        ``KEY_high``.  Up to three more columns follow; each is left out if it has no value in any row:

        * ``KEY_over``: the occasions (starts of the machine, or runs more than an hour apart) that the interval covers,
          such as ``3 occasions``;
        * ``KEY_left_out``: the number of values that were left out because other programs disturbed the trials;
        * ``KEY_disturbed``: whether all values are from disturbed trials.

        Columns ``_KEY``, which are printed and hold no raw values, are left out.
        """
        columns: dict[str, Any] = {}
        for key in (str(key) for key in self.data if not str(key).startswith(_PRINTED)):
            values = columns[key] = self.data[key]
            if values.map(lambda value: isinstance(value, Interval)).any():
                for suffix, field in (("", "estimate"), ("_low", "low"), ("_high", "high")):
                    columns[f"{key}{suffix}"] = [getattr(value, field, value) for value in values]
                for field in ("over", "left_out", "disturbed"):  # left out if no interval has a value
                    found = [getattr(value, field, "") for value in values]
                    if any(found):
                        columns[f"{key}_{field}"] = found
        return safe_cells(pd.DataFrame(columns)).to_csv(index=False, lineterminator="\n")

    def markdown(self) -> str:
        """Return the table in GitHub's Markdown: title, caption and rows, then a list of footnotes and definitions."""
        below = [text for text in (self.footnotes, *self.definitions) if text]
        notes = "".join(f"- {markdown(text)}\n" for text in below)
        head = f"**{markdown(self.title)}.** {markdown(self.caption)}".rstrip()
        return f"{head}\n\n{self.markdown_rows()}" + (f"\n{notes}" if notes else "")

    def markdown_rows(self) -> str:
        """Return the rows in GitHub's Markdown, without title and notes.

        Of neighbouring rows with the same setting, only the first row names the setting.
        """
        rows, places = self.rows(), self.places
        lines = [
            [markdown(column.title) for column in self.columns],
            ["---:" if column.numeric else ":---" for column in self.columns],
        ]
        for above, row in zip([[], *rows], rows, strict=False):
            shared = places if row[:places] == above[:places] else 0
            lines.append([*[""] * shared, *map(markdown, row[shared:])])
        return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)

    def show(self, out: Console) -> None:
        """Print the table in a terminal: one table for each group of rows with the same setting (:meth:`by_place`)."""
        columns, places = self.by_place()
        for place, rows in places:
            title = escape(f"{self.title}: {place}" if place else self.title)
            printed = rich.table.Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
            printed.padding = (0, 1, 0, 0)
            for column in columns:
                side: JustifyMethod = "right" if column.numeric else "left"
                printed.add_column(column.title, justify=side, overflow="fold")
            for row in rows:
                printed.add_row(*map(escape, row))
            out.print(printed)


def find_table(tables: Sequence[Table], name: str) -> Table:
    """Return the table that is named ``name``.

    Raises a Refusal that lists the names of all tables if none has this name.
    """
    by_name = {table.name: table for table in tables}
    if name not in by_name:
        raise Refusal(f"no table {name!r}: expected one of {', '.join(by_name)}{suggestion(name, by_name)}")
    return by_name[name]


def markdown(value: str) -> str:
    """Return text in which the characters that Markdown or HTML would interpret are escaped."""
    escaped = _MARKDOWN.sub(r"\\\g<0>", text(value))
    escaped = re.sub(r"&(?=#?\w+;)", "&amp;", escaped)
    return escaped.replace("<", "&lt;").replace(">", "&gt;")


def has_value(cell: Any) -> bool:
    """Return whether a cell holds a number, text, or an :class:`Interval` whose estimate is known."""
    return not pd.isna(getattr(cell, "estimate", cell))


def table_of(
    name: str,
    title: str,
    rows: list[dict[str, Any]] | pd.DataFrame,
    *columns: Column,
    caption: str = "",
    notes: str = "",
) -> Table:
    """Return a table of ``rows`` with those ``columns`` that have a value in any row.

    ``caption`` has at most two sentences.  ``notes`` are the first footnotes.  Other footnotes are added: on intervals,
    on marks that occur in cells, and on what the settings of all rows have in common.
    Column ``where`` of the rows describes the setting, such as ``2x2 ranks, 50 Mbit/s``.  Parts of the description in
    which rows differ, such as the rate, become columns on the left; parts that all rows share are named in a footnote.
    """
    data = pd.DataFrame(rows)
    shown = [column for column in columns if column.key in data and data[column.key].map(has_value).any()]
    footnotes = [notes]
    if any(getattr(value, "known", False) for column in shown if column.ends for value in data[column.key]):
        footnotes.append(
            f"Parentheses: {CONFIDENCE:.0%} confidence intervals, given where at least {FEWEST} pairs or values were "
            "measured."
        )
    footnotes += interval_notes(data, shown)
    if "where" in data and len(data):
        parts = data["where"].astype(str).str.split(", ", expand=True).fillna("").add_prefix("_where_")
        measured = parts[data["where"].ne(published.PUBLISHED)]
        places = [str(place) for place in parts if len(set(measured[place])) > 1]
        if common := [parts[place].iloc[0] for place in parts if place not in places]:
            footnotes.append(f"Setting of all rows: {', '.join(common)}.")
        data = data.join(parts[places])
        heads = [Column(place, "Setting" if place == places[0] else "", place=True) for place in places]
        shown = [*heads, *shown]
    table = Table(name, title, caption, data, tuple(shown))
    cells = (cell for row in table.rows() for column, cell in zip(shown, row, strict=True) if column.numeric)
    footnotes.append(caveats.footnotes(cells))
    return replace(table, footnotes=" ".join(part.strip() for part in footnotes if part.strip()))


def interval_notes(
    data: pd.DataFrame, columns: Sequence[Column], behind: Sequence[Interval] = ()
) -> list[str]:
    """Return three footnotes on the intervals in these columns, each of which may be empty.

    * The first says at how many occasions (starts of the machine, or runs over an hour apart) values were measured.
    * The second says why some values have no interval.
    * The third says how many disturbed trials or pairs were left out, for the column that leaves out the most.  A trial
      is disturbed if other programs took much processor time during it.

    ``data`` are the table's values.  ``behind`` are intervals that the table does not show, but from which a shown
    column was computed.  The third footnote treats them as one more column.
    """
    configurations = data.get("configuration", pd.Series("", data.index))
    named: list[tuple[str, Interval]] = []  # of printed intervals: the row's name, and the value
    left_out = [("pair", [*behind])]  # for each column: what its values are computed from, and its values
    for column in columns:
        values = [
            (str(name), value)
            for name, value in zip(configurations, data[column.key], strict=True)
            if isinstance(value, Interval)
        ]
        named += values if column.ends else []
        left_out.append(("trial" if column.of_trials else "pair", [value for _, value in values]))
    occasions = max((value.occasions for _, value in named if value.known), default=0)
    noun, most = max(left_out, key=lambda each: sum(value.left_out for value in each[1]))
    return [occasions_in_words(occasions), none_in_words(named), left_out_in_words(most, noun)]


CONFIGURATION: Final = Column("configuration", "Configuration")
TRIALS: Final = Column("trials", "n", str, mark="_taken")
STEP: Final = Column("step_seconds", "Step, s", number(3), formula("step"), ends=False, of_trials=True)
RATIO: Final = "{:.2f}".format


def rows_of(table: pd.DataFrame, *keys: str) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """Yield a pair for each row of a printed table: the row's first cells, and the trials that belong to the row.

    ``table`` has one row per trial.  There is one printed row for each configuration in each setting (cluster, model,
    batch and so on).  With ``keys``, there is one printed row for each configuration and each combination of values in
    these columns.  The first cells are the setting, the configuration, and the number of trials.
    """
    for _, setting in groups(table, list(keys or ("setting",))):
        for configuration, trials in by_configuration(setting):
            yield (
                {"where": trials["where"].iloc[0], "configuration": configuration, **trial_count(trials)},
                trials,
            )


def trial_count(trials: pd.DataFrame) -> dict[str, Any]:
    """Return the cells that count trials: ``trials`` is their number, and ``_taken`` a text on the disturbed trials.

    A trial is disturbed if other programs took much processor time during it.  With 2 disturbed trials, ``_taken`` is
    `` (2 ‡)``; without any, it is empty.
    """
    taken = int(trials["disturbed"].astype(bool).sum())
    return {"trials": len(trials), "_taken": f" ({taken} {caveats.TAKEN})" if taken else ""}
