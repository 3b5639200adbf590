"""Columns that several tables have, and the values of their rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pandas as pd

from report.data import footnotes, metrics
from report.data.frames import groups
from report.data.text import number
from report.draw.contenders import by_contender
from report.tables.table import Column

CONTENDER: Final = Column("contender", "Contender")
TRIALS: Final = Column("trials", "n", str, mark="_taken")
STEP: Final = Column(
    "step_seconds", "Step, s", number(3), "Step: geometric mean over repeats and seeds.", ends=False
)
RATIO: Final = "{:.2f}".format


def rows_of(table: pd.DataFrame, *keys: str) -> Iterator[tuple[dict[str, Any], str, pd.DataFrame]]:
    """Of each contender at each place (by ``keys``, else its cell): the columns above, strategy and rows."""
    for _, here in groups(table, list(keys or ("cell",))):
        for strategy, contender, mine in by_contender(here):
            yield {"where": mine["where"].iloc[0], "contender": contender, **counted(mine)}, strategy, mine


def counted(mine: pd.DataFrame) -> dict[str, Any]:
    """The number of trials, with that of those during which others had the processors."""
    taken = int(mine["taken_share"].gt(metrics.OTHERS_WITHIN).sum())
    return {"trials": len(mine), "_taken": f" ({taken} {footnotes.TAKEN})" if taken else ""}
