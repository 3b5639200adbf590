"""Writes tables for LaTeX: each as a ``tabular`` with the rules of booktabs, and each number as a macro."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from report.data.metrics import Derived, records_of
from report.data.text import text
from report.tables.table import Table

SPECIAL: Final = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{",
    "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}", "`": r"\textasciigrave{}",
    "†": r"\dag{}", "‡": r"\ddag{}", "§": r"\S{}", "¶": r"\P{}",
    "±": r"\ensuremath{\pm}", "▲": r"\ensuremath{\bigtriangleup}", "▼": r"\ensuremath{\bigtriangledown}",
    "▽": r"\ensuremath{(\bigtriangledown)}",
    "○": r"\ensuremath{\circ}", "–": "--", "…": r"\ldots{}", "-": "{-}", "[": "{[}", "]": "{]}",  # noqa: RUF001 - as above
}  # fmt: skip
_COMMANDS: Final = r"""% \zp{TABLE/ROW/COLUMN} is that number, as the page prints it.
\providecommand{\zp}[1]{\ifcsname zp:#1\endcsname\csname zp:#1\endcsname\else
  \errmessage{no number #1 in this report}\fi}
\providecommand{\zpset}[2]{\expandafter\def\csname zp:#1\endcsname{#2}}
"""


def write(table: Table, folder: Path) -> None:
    """Write a table into ``folder`` as CSV, Markdown and LaTeX; the files have the table's name."""
    forms = {"csv": table.csv(), "md": table.markdown(), "tex": tabular(table)}
    for suffix, written in forms.items():
        (folder / f"{table.name}.{suffix}").write_text(written, encoding="utf-8", newline="\n")


def escaped(value: str) -> str:
    """Return text as one line with LaTeX's special characters escaped."""
    return "".join(SPECIAL.get(character, character) for character in text(value))


def tabular(table: Table) -> str:
    """Return a table as LaTeX's ``tabular`` environment, without a float or a caption.

    A line that names a setting precedes the rows of this setting.  The title of a column is broken into lines that are
    no wider than the column's widest cell, or than the longest word of the title if this is wider.
    """
    columns, groups = table.by_place()
    sides, heads = "".join("r" if column.numeric else "l" for column in columns), []
    for number, (column, side) in enumerate(zip(columns, sides, strict=True)):
        cells = [row[number] for _, rows in groups for row in rows]
        width = max(map(len, [*cells, *column.title.split(), " "]))
        head = r"\\".join(map(escaped, textwrap.wrap(column.title, width)))
        heads.append(rf"\shortstack[{side}]{{{head}}}" if r"\\" in head else head)
    lines = [
        f"% {escaped(table.title)}. Needs booktabs.",
        rf"\begin{{tabular}}{{@{{}}{sides}@{{}}}}",
        r"\toprule",
        " & ".join(heads) + r" \\",
        r"\midrule",
    ]
    for number, (place, rows) in enumerate(groups):
        if place:
            lines += [r"\addlinespace"] * (number > 0)
            lines.append(rf"\multicolumn{{{len(columns)}}}{{@{{}}l}}{{\emph{{{escaped(place)}}}}} \\")
        lines += [" & ".join(map(escaped, row)) + r" \\" for row in rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def numbers(tables: Sequence[Table], derived: Derived) -> str:
    r"""Return LaTeX code that defines every number of the tables, so that a paper can print it by its name.

    A name consists of table, row and column: ``\zp{summary/ZeRO++/speedup}``.  A comment before the numbers of a row
    lists the records from which the row was computed.  Rows without records, such as rows of published numbers, are
    left out.
    """
    lines, taken = [_COMMANDS.rstrip()], Counter[str]()
    for table in tables:
        for number, (cells, (_, raw)) in enumerate(zip(table.rows(), table.data.iterrows(), strict=True)):
            if not (ids := records_of(derived, raw)):
                continue
            lines.append(f"% {table.name}, row {number + 1}: {' '.join(ids)}")
            pairs = list(zip(table.columns, cells, strict=True))
            labels = [
                cell for column, cell in pairs if column.names_row and not column.numeric and not column.place
            ]
            row = f"{table.name}/{_key(', '.join(filter(None, [*labels, str(raw.get('where', ''))])))}"
            taken[row] += 1
            row += f", {taken[row]}" if taken[row] > 1 else ""
            lines += [
                rf"\zpset{{{row}/{_key(column.name)}}}{{{escaped(cell)}}}"
                for column, cell in pairs
                if column.numeric
            ]
    return "\n".join([*lines, ""])


def _key(label: str) -> str:
    """Return a label without the characters that the name of a LaTeX macro cannot hold."""
    return re.sub(r"[^A-Za-z0-9 .,:+/()_-]", "", label)
