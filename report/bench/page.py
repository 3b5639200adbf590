"""Prints benchmark records in a terminal, and builds their folder's page, ``report.html``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import pandas as pd
from rich.console import Console
from rich.markup import escape

from harness.fitted_table import console
from harness.records.bench_record import Bench, read_all
from harness.records.confidence_intervals import median_interval
from report import page
from report.bench.tables import PAGE_ALONE, Measured, rounds_of, table_of
from report.build import PAGE, publish
from report.data import emulation
from report.data.frames import ReportError, groups
from report.data.text import listed
from report.draw import files
from report.draw.figure import Figure, Measure
from report.draw.marks import Rows
from report.draw.theme import Look, Style
from report.tables import latex

_COLOUR: Final = "#0072b2"
_TEXT_COLUMNS: Final = 98  # of text below a table


def build(results: Path) -> Path:
    """Build the page of a folder of benchmark records, inside it; equal records give equal bytes.

    Raises:
        ReportError: if records are of several machines, codes or subjects, or the folder cannot be written.
    """
    benches = read_all(results)
    for of, name in (("pool", "machines or codes"), ("subject", "subjects")):
        if len(found := sorted({getattr(bench, of) for bench in benches})) > 1:
            kinds = f"{len(found)} {name} ({', '.join(found)}), which are not put together"
            raise ReportError(f"{results}: holds records of {kinds}; move some aside")
    return publish(results, lambda folder: _write(folder, benches))


def _write(folder: Path, benches: Sequence[Bench]) -> None:
    measured = list(rounds_of(benches))
    tables = [table_of(kind, data) for kind, data in measured]
    for table in tables:
        latex.write(table, folder / "tables")
    last = benches[-1]
    text = page.fill(
        title=f"zeropp bench {last.subject}",
        kicker="Results of a benchmark",
        heading=("zeropp bench", last.subject),
        answer=(),
        emulated=emulation.of_benches(benches),
        facts=_facts(benches),
        warnings=[f"Not in the last run: {name}: {why}." for name, why in last.missing.items()],
        figures=[
            files.write(figure, data, folder / "figures", style)
            for kind, rounds in measured
            for figure, data, style in figures_of(kind, rounds)
        ],
        tables=tables,
        pools=[last.pool],
    )
    (folder / PAGE).write_text(text, encoding="utf-8", newline="\n")


def figures_of(kind: Measured, data: pd.DataFrame) -> Iterator[tuple[Figure, pd.DataFrame, Style]]:
    """A figure of the main ratio for each place where it was measured."""
    key = kind.drawn.key
    measure = Measure(
        key, kind.drawn.title, kind.drawn.says.rstrip("."), lambda mine: median_interval(list(mine[key])),
        bar=False, log=kind.log, line=1,
    )  # fmt: skip
    for number, ((where,), mine) in enumerate(groups(data, ["where"]), 1):
        order = pd.factorize(mine["contender"])[0]
        tidy = mine.assign(strategy="", cell=where, place=order, first=order)
        yield (
            Figure(
                name=f"{kind.name}-{number}",
                title=f"{kind.title}: {where}",
                question="Medians over rounds, with 95 % intervals.",
                mark=Rows((measure,)),
            ),
            tidy,
            Style(looks=dict.fromkeys(mine["contender"], Look(_COLOUR))),
        )


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


def show(benches: Sequence[Bench], out: Console) -> None:
    """Print the tables of records of one benchmark."""
    for kind, data in rounds_of(benches):
        table = table_of(kind, data)
        replace(table, columns=tuple(one for one in table.columns if one.key not in PAGE_ALONE)).show(out)
        out.print(textwrap.fill(table.caption, _TEXT_COLUMNS), markup=False, highlight=False)


def show_run(record: Path) -> None:
    """Print the tables of a run's record, what was not there, and the path of its folder's page."""
    (bench,) = [one for one in read_all(record.parent) if one.id == record.stem]
    out = console()
    show([bench], out)
    for name, why in bench.missing.items():
        out.print(f"not here: {escape(name)}: {escape(why)}")
    print(build(record.parent))
