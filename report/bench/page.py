"""Prints benchmark records in a terminal, and builds their folder's page, ``report.html``."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape

from harness.records.bench_record import Bench, read_all
from harness.terminal_table import console
from report import page
from report.bench.tables import PAGE_ALONE, tables_of
from report.build import publish
from report.data import caveats
from report.data.frames import ReportError
from report.data.text import listed

_TEXT_COLUMNS: Final = 98  # of text below a table


def build(results: Path) -> Path:
    """Build the page of a folder of benchmark records, inside it; equal records give equal bytes.

    Raises a ReportError if they are of several machines, codes or subjects, or it cannot be written.
    """
    benches = read_all(results)
    for of, name in (("pool", "machines or codes"), ("subject", "subjects")):
        if len(found := sorted({getattr(bench, of) for bench in benches})) > 1:
            kinds = f"{len(found)} {name} ({', '.join(found)}), which are not put together"
            raise ReportError(f"{results}: holds records of {kinds}; move some aside")
    tables, last = tables_of(benches), benches[-1]
    text = page.fill(
        title=f"zeropp bench {last.subject}",
        kicker="Results of a benchmark",
        heading=("zeropp bench", last.subject),
        emulated=caveats.emulated_by_benches(benches),
        facts=_facts(benches),
        warnings=[f"Not in the last run: {name}: {why}." for name, why in last.missing.items()],
        tables=tables,
        pools=[last.pool],
    )
    return publish(results, tables, lambda _: text)


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
    for table in tables_of(benches):
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
