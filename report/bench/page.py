"""Builds the page of a folder of benchmark records: ``report.html``, as :mod:`report.page` does.

Beside its tables stand dot plots of ratios to the reference, which is the line at 1, in named rows.
"""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

import matplotlib.figure
import numpy as np
import pandas as pd
from rich.console import Console
from rich.markup import escape

from harness.fitted_table import console
from harness.records.bench_record import Bench, read_all
from harness.records.confidence_intervals import Interval, median_interval
from report import page
from report.bench.boards import BOARDS, Board
from report.build import PAGE, publish
from report.data import emulation
from report.data.frames import ReportError, groups
from report.data.text import NOTHING, listed, number
from report.draw import axes, files
from report.draw.figure import Figure
from report.draw.theme import Style
from report.tables import latex
from report.tables.table import Table

_MOST_FINDINGS: Final = 3  # in the lead
_MOST_SCATTERED: Final = 3  # that a line names
SCATTER: Final = 0.2  # of the median: beyond, a page says so
_TEXT_COLUMNS: Final = 98  # of text below a table
_ONE_COLOUR: Final = "#0072b2"


def build(results: Path) -> Path:
    """Build the page of a folder of benchmark records, inside it; equal records give equal bytes.

    Raises:
        ReportError: if records are of several machines, codes or subjects, or the folder cannot be
            written; the page that was there before is then still there.
        RecordError: for a file that is not a record of this schema, or if there is none.
    """
    benches = read_all(results)
    for of, name in (("pool", "machines or codes"), ("subject", "subjects")):
        if len(found := sorted({getattr(bench, of) for bench in benches})) > 1:
            kinds = f"{len(found)} {name} ({', '.join(found)}), which are not put together"
            raise ReportError(f"{results}: holds records of {kinds}; move some aside")
    return publish(results, lambda folder: _write(folder, benches))


def boards_of(benches: Sequence[Bench]) -> Iterator[tuple[Board, pd.DataFrame]]:
    """The board of every kind of sample, with one row per round of each; ``id`` names the record."""
    for kind, board in BOARDS.items():
        rows: list[dict[str, Any]] = []
        for bench in benches:
            for sample in (one for one in bench.samples if one.kind == kind):
                fixed = {"id": bench.id, **sample.names, **board.labels(sample)}
                by_round = sample.timed | board.rounds(sample)
                for index, values in enumerate(zip(*by_round.values(), strict=True)):
                    known = {"round": index} | sample.sizes | dict(zip(by_round, values, strict=True))
                    rows.append(fixed | known)
        if rows:
            data = pd.DataFrame(rows)
            for name, formula in board.measures.items():
                data[name] = data.eval(formula)
            yield board, data


def derived(board: Board, data: pd.DataFrame) -> pd.DataFrame:
    """One row per contender over all its runs: medians over rounds, with their intervals."""
    fixed = list(data.columns[1 : list(data.columns).index("round")])
    rows = [
        {
            **group[fixed].iloc[-1].to_dict(),
            "id": " ".join(sorted(set(group["id"]))),
            **{name: _median(tuple(group[name])) for name in board.measures},
            "rounds": len(group),
        }
        for _, group in groups(data, fixed)
    ]
    return pd.DataFrame(rows)


def table_of(board: Board, data: pd.DataFrame, *, wide: bool) -> Table:
    """The table of all medians; ``wide`` has the columns that only a page prints, but no empty ones."""
    found = derived(board, data)
    shown = [
        column
        for column in board.columns
        if (wide or not column.wide) and {column.told(value) for value in found[column.key]} != {NOTHING}
    ]
    return Table(board.name, board.title, board.caption, found, tuple(shown))


@functools.cache
def _median(values: tuple[float, ...]) -> Interval:
    """Median with its interval; cached, since figures and tables of a page all use it."""
    if any(math.isnan(value) for value in values):
        return Interval(math.nan, math.nan, math.nan, len(values))
    return median_interval(values)


def scattering(board: Board, data: pd.DataFrame) -> str | None:
    """Whose rounds scatter by more than :data:`SCATTER`, the range of the middle half of their seconds over
    their median; None if nobody's do.
    """
    found = []
    for names, group in groups(data, _telling(board, data)):
        low, middle, high = group["seconds"].quantile([0.25, 0.5, 0.75])
        if (spread := (high - low) / middle) > SCATTER:
            found.append((spread, " / ".join(map(str, names))))
    if not found:
        return None
    worst = [f"{name} by {of:.0%}" for of, name in sorted(found, reverse=True)[:_MOST_SCATTERED]]
    rest = f" and {len(found) - len(worst)} more" if len(found) > len(worst) else ""
    return (
        f"Rounds scatter by more than {SCATTER:.0%} (the middle half of their seconds, over the median): "
        f"{'; '.join(worst)}{rest}. Something else had the machine: read the intervals, or run again."
    )


def _telling(board: Board, rows: pd.DataFrame) -> list[str]:
    """Columns that tell the dots of the plot apart."""
    keys = [board.panel, board.below, board.colours[0] if board.colours else ""]
    return list(dict.fromkeys([board.row, *(key for key in keys if key and len(rows[key].unique()) > 1)]))


def _finding(board: Board, rows: pd.DataFrame) -> str:
    """One sentence: the highest and the lowest of the plotted ratio, and whose they are."""
    plotted, keys = board.plotted, _telling(board, rows)
    rows = rows.assign(middle=[one.estimate for one in rows[plotted.key]]).dropna(subset=["middle"])
    others = rows[rows["middle"] != 1.0]  # the reference itself is no finding
    ordered = (rows if others.empty else others).sort_values("middle", ascending=False)
    ends = ordered.iloc[[0, -1]].to_dict("records")
    names = [" / ".join(str(row[key]) for key in keys) for row in ends]
    most, least = (f"{number(3)(row['middle'])} ({name})" for row, name in zip(ends, names, strict=True))
    told = most if most == least else f"highest {most}, lowest {least}"
    return f"{plotted.title.capitalize()}: {told}."


def _write(folder: Path, benches: Sequence[Bench]) -> None:
    headline, drawn = [], []
    boards = list(boards_of(benches))
    for board, data in boards:
        for figure, rows in _drawings(board, data):
            headline.append(_finding(board, rows))
            drawn.append(files.write(figure, rows, folder / "figures", Style()))
    tables = [table_of(board, data, wide=True) for board, data in boards]
    for table in tables:
        latex.write(table, folder / "tables")
    scattered = filter(None, (scattering(board, data) for board, data in boards))
    missing = [f"Not in the last run: {name}: {why}." for name, why in benches[-1].missing.items()]
    text = page.fill(
        title=f"zeropp bench {benches[0].subject}",
        kicker="Results of a benchmark",
        heading=("zeropp bench", benches[0].subject),
        answer=headline[:_MOST_FINDINGS],
        emulated=emulation.of_benches(data for _, data in boards),
        facts=_facts(benches),
        warnings=[*scattered, *missing],
        figures=drawn,
        tables=tables,
        pools=sorted({bench.pool for bench in benches}),
    )
    (folder / PAGE).write_text(text, encoding="utf-8", newline="\n")


def _facts(benches: Sequence[Bench]) -> list[tuple[str, str]]:
    """Facts for the page's head: where and when the benchmark ran."""
    machine, code = benches[-1].machine, benches[-1].code
    ran = (bench.started[:16].replace("T", " ") for bench in (benches[0], benches[-1]))
    found = {
        "runs": len(benches),
        "ran": " to ".join(dict.fromkeys(ran)),
        **{name: machine.get(name) for name in ("cpu", "cores", "kernel")},
        "GPUs": listed([str(gpu.get("name")) for gpu in machine.get("gpus") or []]),
        "torch": machine.get("packages", {}).get("torch"),
        "version": code.get("version"),
        "commit": str(code.get("commit") or "")[:12] + (", changed since" if code.get("dirty") else ""),
    }
    return [(name, str(value)) for name, value in found.items() if value not in (None, "")]


def _drawings(board: Board, data: pd.DataFrame) -> Iterator[tuple[Figure, pd.DataFrame]]:
    """One figure per value of ``board.split``, with its rows."""
    for values in product(*board.split.values()):
        mine = data[(data[list(board.split)] == list(values)).all(axis=1)]
        if len(mine):
            title = ", ".join((board.title, *(value.replace("_", "-") for value in values)))
            name, says = "-".join((board.name, *values)), board.plotted.says
            yield Figure(name=name, title=title, question=says, mark=Dots(board)), derived(board, mine)


@dataclass(frozen=True, slots=True)
class Dots:
    """A dot with its interval for each row of a board, in named rows, beside a line at 1."""

    board: Board

    def draw(self, data: pd.DataFrame, style: Style) -> matplotlib.figure.Figure:
        """A panel for each value of the board's panels."""
        board, plotted = self.board, self.board.plotted
        ends = pd.DataFrame([(one.estimate, one.low, one.high) for one in data[plotted.key]]).to_numpy()
        least, most = min(1.0, float(np.nanmin(ends))), max(1.0, float(np.nanmax(ends)))
        limits = (least / 1.4, most * 1.4) if board.log else (least - 0.1, most + 0.1)
        below = groups(data, [board.below]) if board.below else [(("",), data)]
        titles = list(data[board.panel].unique())
        heights = [axes.rows_inches(here[board.row].nunique()) for _, here in below]
        figure, panels = axes.grid(style, len(below), len(titles), heights)
        column, colours = board.colours or (board.row, dict.fromkeys(data[board.row], _ONE_COLOUR))
        for row, ((place,), here) in zip(panels, below, strict=True):
            names = list(here[board.row].unique())
            for ax, title in zip(row, titles, strict=True):
                mine = here[here[board.panel] == title]
                places = [names.index(name) for name in mine[board.row]]
                shades = [colours[name] for name in mine[column]]
                of = list(mine[plotted.key])
                ax.hlines(places, [one.low for one in of], [one.high for one in of], colors=shades)
                ax.scatter([one.estimate for one in of], places, c=shades, s=22, ec="white", lw=0.5, zorder=4)
                ax.set_xlim(*limits)
                if board.log:
                    axes.log_ticks(ax, "x")
                axes.line_at(ax, 1, across=False)
                axes.name_rows(ax, [str(name) for name in names], first=ax is row[0] or style.narrow)
                ax.set_title(axes.wrapped(f"{place}, {title}" if place else str(title), 20))
        figure.supxlabel(plotted.title, fontsize=9)
        if board.colours is not None:
            there = {name: colours[name] for name in colours if (data[column] == name).any()}
            axes.legend(figure, axes.patches(there), style)
        return figure

    def says(self, data: pd.DataFrame) -> str:
        """What a dot is."""
        return f"Medians over rounds with 95 % intervals. {self.board.line}"


def show(benches: Sequence[Bench], out: Console) -> None:
    """Print the tables of records of one benchmark."""
    for board, data in boards_of(benches):
        table_of(board, data, wide=False).show(out)
        for words in filter(None, (board.caption, scattering(board, data))):
            out.print(textwrap.fill(words, _TEXT_COLUMNS), markup=False, highlight=False)


def show_run(record: Path) -> None:
    """Print the tables of a run's record, what was not there, and the path of its folder's page."""
    (bench,) = [one for one in read_all(record.parent) if one.id == record.stem]
    out = console()
    show([bench], out)
    for name, why in bench.missing.items():
        out.print(f"not here: {escape(name)}: {escape(why)}")
    print(build(record.parent))
