"""Tables of ``docs/reference/metrics.md``: every reported quantity, from ``report/quantities.csv``."""

from __future__ import annotations

import itertools
import re
from typing import Final

from report.quantities import QUANTITIES

_TABLE: Final = re.compile(r"(\| quantity.*\n\| ---.*\n)(?:\|.*\n)+")


def insert_rows(page: str) -> str:
    """Return ``page`` with the rows of its tables of quantities replaced, in order.

    A table without a column of units in its head gets no units.

    Raises:
        ValueError: If the page and ``report/quantities.csv`` do not have equally many tables.
    """
    tables = [list(rows) for _, rows in itertools.groupby(QUANTITIES.values(), lambda row: row["table"])]
    if len(heads := _TABLE.findall(page)) != len(tables):
        raise ValueError(
            f"the page has {len(heads)} tables of quantities, but report/quantities.csv has {len(tables)}: "
            "expected equally many"
        )
    left = iter(tables)

    def rows(match: re.Match[str]) -> str:
        keys = ("quantity", "formula", "unit")[: match[1].count("---")]
        lines = ["| " + " | ".join(row[key] for key in keys) + " |" for row in next(left)]
        return match[1] + "".join(f"{line}\n" for line in lines)

    return _TABLE.sub(rows, page)
