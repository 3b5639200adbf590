"""Builds the page of a folder of benchmark records: ``report.html``, as :mod:`report.page` does."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pandas as pd

from harness.records.bench_record import Bench, Subject, read_all
from harness.records.statistics import Interval, median_interval
from report import page
from report.bench.boards import BOARDS, Board
from report.build import PAGE, Folders, publish
from report.data.frames import ReportError, groups
from report.data.text import NOTHING, listed, number
from report.figures import registry
from report.tables.table import Table

_HEADINGS: Final[dict[Subject, tuple[str, str]]] = {
    "codecs": ("Codecs against", "a copy"),
    "collectives": ("Collectives against", "gloo's own"),
    "engine": ("The engine against", "its peers"),
    "overlap": ("Communication behind", "computation"),
}
_FOLDERS: Final[Folders] = {
    "figures": (
        tuple(name for board in BOARDS.values() for name in board.figure.names),
        ("svg", "pdf", "png", "csv"),
    ),
    "tables": (tuple(board.name for board in BOARDS.values()), ("csv", "md", "tex")),
}


def build(results: Path) -> Path:
    """Build the page of a folder of benchmark records, inside it; equal records give equal bytes.

    Returns:
        The page.

    Raises:
        ReportError: if records are of several machines, codes or subjects, or the folder cannot be
            written; the page that was there before is then still there.
        RecordError: for a file that is not a record of this schema, or if there is none.
    """
    benches = read_all(results)
    for name, found in (
        ("machines or codes (pools", {bench.pool for bench in benches}),
        ("subjects (", {bench.subject for bench in benches}),
    ):
        if len(found) > 1:
            raise ReportError(
                f"{results}: holds records of {len(found)} {name} {', '.join(sorted(found))}), which are not "
                "put together; move some aside"
            )
    return publish(results, _FOLDERS, lambda folder: _write(folder, benches))


def tables_of(benches: Sequence[Bench], *, wide: bool = True) -> list[Table]:
    """The tables of records of one subject; ``wide`` adds the columns that only a page prints."""
    found = []
    for board, data in boards_of(benches):
        whole = table(board, data)
        kept = tuple(column for column in whole.columns if wide or column.key not in board.wide)
        found.append(replace(whole, columns=kept))
    return found


def boards_of(benches: Sequence[Bench]) -> Iterator[tuple[Board, pd.DataFrame]]:
    """The board of every kind of sample, with one row per round of each; ``id`` names the record."""
    for kind, board in BOARDS.items():
        rows: list[dict[str, Any]] = []
        for bench in benches:
            for sample in (one for one in bench.samples if one.kind == kind):
                fixed = {"id": bench.id, **sample.names, **board.labels(sample)}
                measured = {name: of(sample, bench.samples) for name, of in board.measures.items()}
                by_round = sample.timed | measured
                for index, values in enumerate(zip(*by_round.values(), strict=True)):
                    rows.append(fixed | {"round": index} | dict(zip(by_round, values, strict=True)))
        if rows:
            yield board, pd.DataFrame(rows)


def derived(board: Board, data: pd.DataFrame) -> pd.DataFrame:
    """One row per contender over all its runs: medians over rounds, intervals, and both as text."""
    after = list(data.columns).index("round")
    names = [name for name in data.columns[1:after] if name != "last_loss"]  # two runs end with two losses
    rows = []
    for key, group in groups(data, names):
        row = dict(zip(names, key, strict=True)) | {"id": ", ".join(sorted(set(group["id"])))}
        if "last_loss" in data.columns:
            row["last_loss"] = group["last_loss"].iloc[-1]
        for name in board.measures:
            found = _median(tuple(group[name]))
            row |= {name: found.estimate, f"{name}_low": found.low, f"{name}_high": found.high}
            row |= {f"{name}_told": _told(found)}
        rows.append(row | {"rounds": len(group)})
    return pd.DataFrame(rows)


def table(board: Board, data: pd.DataFrame) -> Table:
    """The table of all medians with their intervals; empty columns are left out."""
    found = derived(board, data)
    shown = [column for column in board.columns if not set(found[column.key]) <= {NOTHING, None}]
    return Table(board.name, board.title, board.caption, found, tuple(shown))


@functools.cache
def _median(values: tuple[float, ...]) -> Interval:
    """Median with its interval; cached, since figures and tables of a page all use it."""
    if any(math.isnan(value) for value in values):
        return Interval(math.nan, math.nan, math.nan, len(values))
    return median_interval(values)


def _told(found: Interval) -> str:
    """Format an interval as ``1.23 [1.20, 1.31]``."""
    digits = number(3)
    if math.isnan(found.low):
        return digits(found.estimate)
    return f"{digits(found.estimate)} [{digits(found.low)}, {digits(found.high)}]"


def _write(folder: Path, benches: Sequence[Bench]) -> None:
    heading = _HEADINGS[benches[0].subject]
    headline, drawn, tables = [], [], []
    for board, data in boards_of(benches):
        derive = functools.partial(derived, board)
        for drawing, rounds in board.figure.drawings(data, derive):
            headline.append(drawing.alt(rounds))
            drawn.append(registry.write(drawing, rounds, folder / "figures"))
        found = table(board, data)
        found.write(folder / "tables")
        tables.append(found)
    text = page.fill(
        title=" ".join(heading),
        kicker=f"Results of zeropp bench {benches[0].subject}",
        heading=heading,
        questions=[],
        headline=headline,
        facts=_facts(benches),
        warnings=[f"Not here: {name}: {why}." for name, why in _missing(benches).items()],
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


def _missing(benches: Sequence[Bench]) -> dict[str, str]:
    """Warnings about contenders that no run had, and why."""
    last = benches[-1].missing
    return {name: why for name, why in last.items() if all(name in bench.missing for bench in benches)}


def _facts(benches: Sequence[Bench]) -> list[tuple[str, str]]:
    """Facts for the page's head: where and when the benchmark ran."""
    machine, code = benches[-1].machine, benches[-1].code
    ran = (bench.started[:16].replace("T", " ") for bench in (benches[0], benches[-1]))
    found = [
        ("runs", len(benches)),
        ("ran", " to ".join(dict.fromkeys(ran))),
        ("processor", machine.get("cpu")),
        ("cores", machine.get("cores")),
        ("GPUs", listed([str(gpu.get("name")) for gpu in machine.get("gpus") or []])),
        ("kernel", machine.get("kernel")),
        ("torch", machine.get("packages", {}).get("torch")),
        ("version", code.get("version")),
        ("commit", str(code.get("commit") or "")[:12]),
        ("checkout", "changed since its commit" if code.get("dirty") else ""),
    ]
    return [(name, str(value)) for name, value in found if value not in (None, "")]
