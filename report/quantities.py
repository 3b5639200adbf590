"""Every reported quantity, its formula and unit: captions say it, docs/reference/metrics.md lists it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Final

_FILE: Final = Path(__file__).with_suffix(".csv")
with _FILE.open(encoding="utf-8", newline="") as _file:
    QUANTITIES: Final = {row["quantity"]: row for row in csv.DictReader(_file)}
"""By name, in the page's order: ``table`` of the page, ``formula`` as Markdown, ``unit``, and ``column`` of
:func:`report.data.metrics.trials` if it is one."""


def formula(*quantities: str) -> str:
    """Sentences of a caption: each quantity and its formula."""
    told = [f"{one[0].upper()}{one[1:]}: {QUANTITIES[one]['formula']}." for one in quantities]
    return " ".join(told).replace("`", "").replace("\\|", "|")
