"""Builds the page of a folder of benchmark records: ``report.html``, as :mod:`report.page` does."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pandas as pd

from harness.records.bench_record import Bench, read_all
from harness.records.statistics import Interval, median_interval
from report import page
from report.bench.boards import BOARDS, Board
from report.bench.dots import drawings
from report.build import PAGE, Folders, publish
from report.data.frames import ReportError, groups
from report.data.text import NOTHING, listed, number
from report.figures import registry
from report.tables.table import Table

_FOLDERS: Final[Folders] = {
    "figures": ([name for board in BOARDS.values() for name in board.figures], ("svg", "pdf", "png", "csv")),
    "tables": ([board.name for board in BOARDS.values()], ("csv", "md", "tex")),
}


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
    return middle if math.isnan(found.low) else f"{middle} [{low}, {high}]"


def _write(folder: Path, benches: Sequence[Bench]) -> None:
    heading = ("zeropp bench", benches[0].subject)
    headline, drawn, tables = [], [], []
    for board, data in boards_of(benches):
        for drawing, rounds in drawings(board, data, functools.partial(derived, board)):
            headline.append(drawing.alt(rounds))
            drawn.append(registry.write(drawing, rounds, folder / "figures"))
        found = table_of(board, data, wide=True)
        tables.append(page.table_on_page(found, found.write(folder / "tables"), folder))
    text = page.fill(
        title=" ".join(heading),
        kicker="Results of a benchmark",
        heading=heading,
        questions=[],
        headline=headline,
        facts=_facts(benches),
        warnings=[f"Not in the last run: {name}: {why}." for name, why in benches[-1].missing.items()],
        figures=[page.figure_on_page(found, folder) for found in drawn if found is not None],
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
