"""Writes the page of ``zeropp audit``, which records the collectives that the ranks of any program call.

The page shows what the ranks sent, which known scheme (such as ZeRO-3) the bytes fit, and which of the user's
expectations about the messages are broken.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from harness.audit import tables
from harness.audit.calls import CSV, PAGE, spans
from harness.audit.tables import Report
from harness.errors import visible
from harness.records.trial_record import write_whole
from harness.terminal_table import Column, filled
from report.page import render_template

_STEPS_SHOWN: Final = 4  # the page has tables of at most so many classes of steps with equal calls


def write(report: Report, folder: Path, command: Sequence[str]) -> Path:
    """Write the page of an audit into ``folder``, and return the page's path.

    ``report`` is the audit's result, and ``command`` the command line of the audited program, as a list of words.
    """
    path = folder / PAGE
    write_whole(path, page(report, command))
    return path


def page(report: Report, command: Sequence[str]) -> str:
    """Return the page of an audit as HTML; text that comes from the audited program is escaped.

    ``report`` is the audit's result, and ``command`` the command line of the audited program, as a list of words.
    """
    shown = [
        _table(f"Calls of steps {spans(steps)}", tables.call_rows(report, steps[0]), tables.COLUMNS)
        for steps in report.classes[:_STEPS_SHOWN]
    ]
    scheme = report.scheme
    if scheme is not None:
        title = tables.scheme_sentence(scheme)
        shown.insert(0, _table(title, tables.scheme_rows(scheme), tables.SCHEME_COLUMNS))
    if rows := tables.counter_rows(report):
        shown.append(
            _table(
                "Bytes that the nodes' interfaces sent in all these steps together, without headers of packets",
                rows,
                tables.COUNTER_COLUMNS,
            )
        )
    return render_template("audit.html", {
        "command": visible(shlex.join(command)), "sentences": [*map(visible, tables.sentences(report))],
        "broken": [*map(visible, report.broken)], "kept": report.kept, "notes": [*map(visible, report.calls.notes)],
        "tables": shown, "csv": CSV, "steps_left": max(0, len(report.classes) - _STEPS_SHOWN),
    })  # fmt: skip


def _table(title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> dict[str, Any]:
    """Return a table as the dict that the template ``audit.html`` prints.

    The keys are:

    - ``title``: the argument ``title``;
    - ``heads``: a list of the columns' headings;
    - ``lines``: for each of the ``rows``, a list of its cells.

    Each heading and each cell is a pair: its text, and whether its column holds numbers.  Optional columns without any
    value are left out.
    """
    known = [column for column in columns if column.always or any(row.get(column.key) for row in rows)]
    shown = list(filled(rows, known))
    lines = zip(*(column.cells for column in shown), strict=True)
    return {
        "title": title,
        "heads": [(column.heading, bool(column.form)) for column in shown],
        "lines": [
            [(visible(cell), bool(column.form)) for cell, column in zip(line, shown, strict=True)]
            for line in lines
        ],
    }
