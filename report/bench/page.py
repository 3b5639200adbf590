"""Builds the page of a folder of benchmark records: ``report.html``, as :mod:`report.page` does.

Beside its tables stand dot plots of ratios to the reference, which is the line at 1, in named rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.records.bench_record import Bench, read_all
from harness.records.confidence_intervals import Interval, median_interval
from report import page
from report.bench import roofline
from report.bench.boards import BOARDS, Board
from report.build import PAGE, Folders, publish
from report.data import emulation
from report.data.frames import ReportError, groups
from report.data.text import NOTHING, listed, number
from report.draw import chart_parts, figure_files, theme
from report.draw.figure_definition import Drawing
from report.tables.table import Table

_FOLDERS: Final[Folders] = {
    "figures": (
        [*(name for board in BOARDS.values() for name in board.figures), *roofline.NAMES],
        ("svg", "pdf", "png", "csv"),
    ),
    "tables": ([board.name for board in BOARDS.values()], ("csv", "md", "tex")),
}
_WIDE: Final = 300.0  # an axis whose ends have a larger ratio is labelled at decades only
_MOST_TOLD: Final = 24  # dots that a description names one by one
_MOST_FINDINGS: Final = 3  # in the lead
_MOST_SCATTERED: Final = 3  # that a line names
SCATTER: Final = 0.2  # of the median: beyond, a page says so
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
            raise ReportError(
                f"{results}: holds records of {len(found)} {name} ({', '.join(found)}), which are not put "
                "together; move some aside"
            )
    return publish(results, _FOLDERS, lambda folder: _write(folder, benches))


def boards_of(benches: Sequence[Bench]) -> Iterator[tuple[Board, pd.DataFrame]]:
    """The board of every kind of sample, with one row per round of each; ``id`` names the record."""
    for kind, board in BOARDS.items():
        rows: list[dict[str, Any]] = []
        for bench in benches:
            for sample in (one for one in bench.samples if one.kind == kind):
                fixed = {"id": bench.id, **sample.names, **board.labels(sample)}
                by_round = sample.timed | board.rounds(sample, bench.samples)
                for index, values in enumerate(zip(*by_round.values(), strict=True)):
                    known = {"round": index} | sample.sizes | dict(zip(by_round, values, strict=True))
                    rows.append(fixed | known)
        if rows:
            data = pd.DataFrame(rows)
            for name, formula in board.measures.items():
                data[name] = data.eval(formula)
            yield board, data


def derived(board: Board, data: pd.DataFrame) -> pd.DataFrame:
    """One row per contender over all its runs: medians over rounds, intervals, and both as text."""
    fixed = list(data.columns[1 : list(data.columns).index("round")])
    rows = []
    for _, group in groups(data, [name for name in fixed if name != "last_loss"]):  # two runs end with two
        row = group[fixed].iloc[-1].to_dict() | {"id": ", ".join(sorted(set(group["id"])))}
        for name in board.measures:
            found = _median(tuple(group[name]))
            row |= {name: found.estimate, f"{name}_low": found.low, f"{name}_high": found.high}
            row |= {f"{name}_told": _told(found)}
        rows.append(row | {"rounds": len(group)})
    return pd.DataFrame(rows)


def table_of(board: Board, data: pd.DataFrame, *, wide: bool) -> Table:
    """The table of all medians; ``wide`` has the columns that only a page prints, but no empty ones."""
    found = derived(board, data)
    shown = [
        column
        for column in board.columns
        if (wide or not column.wide) and not set(found[column.key]) <= {NOTHING, None}
    ]
    return Table(board.name, board.title, board.caption, found, tuple(shown))


@functools.cache
def _median(values: tuple[float, ...]) -> Interval:
    """Median with its interval; cached, since figures and tables of a page all use it."""
    if any(math.isnan(value) for value in values):
        return Interval(math.nan, math.nan, math.nan, len(values))
    return median_interval(values)


def _told(found: Interval) -> str:
    """Format an interval as ``1.23 [1.20, 1.31]``."""
    middle, low, high = map(number(3), (found.estimate, found.low, found.high))
    return middle if not found.known else f"{middle} [{low}, {high}]"


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
    worst = [f"{name} by {spread:.0%}" for spread, name in sorted(found, reverse=True)[:_MOST_SCATTERED]]
    rest = f" and {len(found) - len(worst)} more" if len(found) > len(worst) else ""
    return (
        f"Rounds scatter by more than {SCATTER:.0%} (the middle half of their seconds, over the median): "
        f"{'; '.join(worst)}{rest}. Something else had the machine: read the intervals, or run again."
    )


def _telling(board: Board, rows: pd.DataFrame) -> list[str]:
    """Columns that tell the dots of the plot apart."""
    colour = None if board.colours is None else board.colours[0]
    keys = [key for key in (board.panel, board.below, colour) if key and len(rows[key].unique()) > 1]
    return list(dict.fromkeys([board.row, *keys]))


def _finding(board: Board, rows: pd.DataFrame) -> str:
    """One sentence: the highest and the lowest of the plotted ratio, and whose they are."""
    measure, title = board.plotted
    known = rows.dropna(subset=[measure])
    others = known[known[measure] != 1.0]  # the reference itself is no finding
    known = known if others.empty else others
    ordered = known.sort_values(measure, ascending=False).to_dict("records")
    told = [
        f"{number(3)(row[measure])} ({' / '.join(str(row[key]) for key in _telling(board, rows))})"
        for row in (ordered[0], ordered[-1])
    ]
    if len(set(told)) == 1:
        return f"{title.capitalize()}: {told[0]}."
    return f"{title.capitalize()}: highest {told[0]}, lowest {told[1]}."


def _write(folder: Path, benches: Sequence[Bench]) -> None:
    heading = ("zeropp bench", benches[0].subject)
    headline, drawn, tables = [], [], []
    scattered: list[str] = []
    boards = list(boards_of(benches))
    for board, data in boards:
        for figure, rounds in _drawings(board, data):
            headline.append(_finding(board, derived(board, rounds)))
            drawn.append(figure_files.write(figure, rounds, folder / "figures"))
        if board is BOARDS["codec"]:
            roofs = roofline.rooflines(data)
            drawn += [figure_files.write(figure, rounds, folder / "figures") for figure, rounds in roofs]
        scattered += [said] if (said := scattering(board, data)) else []
        found = table_of(board, data, wide=True)
        found.write(folder / "tables")
        tables.append(found)
    text = page.fill(
        note="",
        title=" ".join(heading),
        kicker="Results of a benchmark",
        heading=heading,
        questions=[],
        answer=headline[:_MOST_FINDINGS],
        shows=None,
        emulated=emulation.of_benches(data for _, data in boards),
        facts=_facts(benches),
        warnings=[
            *scattered,
            *(f"Not in the last run: {name}: {why}." for name, why in benches[-1].missing.items()),
        ],
        figures=drawn,
        marked=frozenset(),
        missing=[],
        summary=[],
        tables=tables,
        last=[],
        failures=None,
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


def _drawings(board: Board, data: pd.DataFrame) -> Iterator[tuple[Drawing, pd.DataFrame]]:
    """One figure per value of ``board.split``, with its rounds."""
    _, title = board.plotted
    for name, values in zip(board.figures, product(*board.split.values()), strict=True):
        mine = data
        for column, value in zip(board.split, values, strict=True):
            mine = mine[mine[column] == value]
        if len(mine):
            drawn = Drawing(
                name=name,
                title=", ".join((board.title, *(value.replace("_", "-") for value in values))),
                draw=lambda rounds: _draw(board, derived(board, rounds)),
                caption=lambda _: (
                    f"{title.capitalize()}: {board.ratio}; medians over rounds with 95 % intervals. "
                    f"{board.line}"
                ),
                alt=lambda rounds: _described(board, derived(board, rounds)),
            )
            yield drawn, mine


def _described(board: Board, rows: pd.DataFrame) -> str:
    """Alternative text: every dot, or the ranges of many."""
    measure, title = board.plotted
    keys = [board.below, board.panel, board.row if len(rows) <= _MOST_TOLD else None]
    keys += [None if board.colours is None else board.colours[0]]
    told = []
    for names, group in groups(rows, [key for key in keys if key]):
        low, high = group[measure].min(), group[measure].max()
        found = f"{low:.3g}" if len(group) == 1 else f"{low:.3g} to {high:.3g}"
        told.append(f"{', '.join(map(str, names))}: {found}")
    return f"{title.capitalize()}, by the median. {'; '.join(told)}."


def _draw(board: Board, rows: pd.DataFrame) -> Figure:
    """Draw rows, with a dashed line at 1."""
    measure, label = board.plotted
    lines = [(("",), rows)] if board.below is None else groups(rows, [board.below])
    titles = list(dict.fromkeys(rows[board.panel]))
    most = max(here[board.row].nunique() for _, here in lines)
    height = chart_parts.bars_height(most, room=1.0, row=0.22) * len(lines) + 0.2
    figure, grid = chart_parts.panels(len(titles), len(lines), height=height, width=8.4)
    column, colours = board.colours or (board.row, dict.fromkeys(rows[board.row], _ONE_COLOUR))
    ends = rows[[measure, f"{measure}_low", f"{measure}_high"]].to_numpy(float)
    limits = min(1.0, float(np.nanmin(ends))), max(1.0, float(np.nanmax(ends)))
    for axes, ((place,), here) in zip(grid, lines, strict=True):
        names = list(dict.fromkeys(here[board.row]))
        for ax, title in zip(axes, titles, strict=True):
            for row in here[here[board.panel] == title].to_dict("records"):
                at, colour = names.index(row[board.row]), colours[row[column]]
                found = Interval(row[measure], row[f"{measure}_low"], row[f"{measure}_high"], row["rounds"])
                chart_parts.error_bar(ax, at, found, colour)
                ax.plot(found.estimate, at, "o", color=colour, ms=5, mec="white", mew=0.5, zorder=4)
            _axis(ax, limits, log=board.log)
            chart_parts.row_names(ax, [str(name) for name in names])
            ax.grid(visible=True, axis="y")
            head = chart_parts.wrapped(str(title), 20)
            ax.set_title(f"{place if ax is axes[0] else ''}\n{head}" if place else head)
            ax.tick_params(axis="y", labelleft=ax is axes[0])
    figure.supxlabel(label, fontsize=9)
    if board.colours is not None:
        there = [name for name in colours if (rows[column] == name).any()]
        for name in there:
            grid[0][0].plot([], [], "o", ms=6, color=colours[name], label=name)
        chart_parts.legend_above(figure, grid[0][0], columns=len(there))
    return figure


def _axis(ax: Axes, ends: tuple[float, float], *, log: bool) -> None:
    """Limits with some air around all intervals and the line at 1, ticks, and that line."""
    low, high = ends
    air = 0.1 * (high - low or 1.0)
    low, high = (low / 1.4, high * 1.4) if log else (low - air, high + air)
    ax.set_xscale("log" if log else "linear")
    ax.set_xlim(low, high)
    ax.axvline(1, color=theme.INK, lw=1.1, ls=(0, (4, 3)), zorder=1)
    if log and high / low < _WIDE:
        ticks = [step * 10.0**power for power in range(-3, 4) for step in (1, 2, 5)]
        chart_parts.log_ticks(ax, [tick for tick in ticks if low <= tick <= high])
    elif log:
        chart_parts.decades(ax, "x")
