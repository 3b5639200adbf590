"""A folder of benchmark records in, ``report.html`` out: the page of :mod:`report.page`, other contents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pandas as pd

from harness.records.bench_record import Bench, Subject, read_all
from report import page
from report.bench import codecs, collectives, engine, overlap
from report.build import PAGE, Folders, publish
from report.data.frames import ReportError
from report.data.text import listed
from report.draw.plot import Drawing
from report.figures import registry
from report.tables.table import Table

_HEADINGS: Final[dict[Subject, tuple[str, str]]] = {
    "codecs": ("Codecs against", "a copy"),
    "collectives": ("Collectives against", "gloo's own"),
    "engine": ("The engine against", "its peers"),
    "overlap": ("Communication behind", "computation"),
}
_QUESTIONS: Final[dict[Subject, str]] = {
    "codecs": "How fast does each codec encode and decode, beside a copy of the same elements?",
    "collectives": "How long does each collective take, and what does it send, beside gloo's own?",
    "engine": "How many tokens per second does each engine train, beside the same model stepping alone?",
    "overlap": "What of communication hides behind computation, and what of one hop behind the other?",
}
_MODULES: Final[dict[Subject, Any]] = {
    "codecs": codecs,
    "collectives": collectives,
    "engine": engine,
    "overlap": overlap,
}
_FOLDERS: Final[Folders] = {
    "figures": (
        tuple(name for module in _MODULES.values() for name in module.NAMES_OF_FIGURES),
        ("svg", "pdf", "png", "csv"),
    ),
    "tables": (tuple(_MODULES), ("csv", "md", "tex")),
}


def build(results: Path) -> Path:
    """Write the page of a folder of benchmark records into it; the same records give the same bytes.

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


def table_of(benches: Sequence[Bench]) -> Table:
    """The table of records of one subject."""
    module = _MODULES[benches[0].subject]
    found: Table = module.table(module.frame(benches))
    return found


def _write(folder: Path, benches: Sequence[Bench]) -> None:
    subject = benches[0].subject
    module = _MODULES[subject]
    data = module.frame(benches)
    drawings: list[tuple[Drawing, pd.DataFrame]] = module.drawings(data)
    drawn = [registry.write(drawing, rows, folder / "figures") for drawing, rows in drawings]
    table = module.table(data)
    text = page.fill(
        title=" ".join(_HEADINGS[subject]),
        kicker=f"Results of zeropp bench {subject}",
        heading=_HEADINGS[subject],
        questions=[_QUESTIONS[subject]],
        headline=module.headline(data),
        facts=_facts(benches),
        warnings=[f"Not here: {name}: {why}." for name, why in _missing(benches).items()],
        figures=[page.figure_on_page(found, folder) for found in drawn if found is not None],
        missing=[],
        summary=[],
        tables=[page.table_on_page(table, table.write(folder / "tables"), folder)],
        last=[],
        failures=None,
        pools=sorted({bench.pool for bench in benches}),
    )
    (folder / PAGE).write_text(text, encoding="utf-8", newline="\n")


def _missing(benches: Sequence[Bench]) -> dict[str, str]:
    """What no run had, and why."""
    last = benches[-1].missing
    return {name: why for name, why in last.items() if all(name in bench.missing for bench in benches)}


def _facts(benches: Sequence[Bench]) -> list[tuple[str, str]]:
    """Where and when it ran, in a few words."""
    machine, code = benches[-1].machine, benches[-1].code
    packages = {name: found for name, found in machine.get("packages", {}).items() if name == "torch"}
    settings = {
        name: listed(sorted({str(bench.setting[name]) for bench in benches if name in bench.setting}))
        for name in ("threads", "ranks", "rate")
    }
    found = [
        ("runs", str(len(benches))),
        ("ran", " to ".join(dict.fromkeys(bench.started[:16].replace("T", " ") for bench in _ends(benches)))),
        ("processor", machine.get("cpu")),
        ("cores", machine.get("cores")),
        ("GPUs", listed([str(gpu.get("name")) for gpu in machine.get("gpus") or []])),
        ("kernel", machine.get("kernel")),
        *packages.items(),
        *settings.items(),
        ("version", code.get("version")),
        ("commit", str(code.get("commit") or "")[:12]),
        ("checkout", "changed since its commit" if code.get("dirty") else ""),
    ]
    return [(name, str(value)) for name, value in found if value not in (None, "")]


def _ends(benches: Sequence[Bench]) -> tuple[Bench, Bench]:
    return benches[0], benches[-1]
