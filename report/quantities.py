"""Reads every reported quantity with its formula and unit, for captions and docs/reference/metrics.md."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Final

_FILE: Final = Path(__file__).with_suffix(".csv")
with _FILE.open(encoding="utf-8", newline="") as _file:
    QUANTITIES: Final = {row["quantity"]: row for row in csv.DictReader(_file)}
"""The fields of each quantity, by its name and in the order of docs/reference/metrics.md: ``table`` (the heading under
which that page has the quantity), ``formula`` in Markdown, ``unit``, and ``column`` (the quantity's column in
:func:`report.data.metrics.trials`; empty if it has none)."""


def formula(*quantities: str) -> str:
    """Return the sentences of a caption that define these quantities by their formulas."""
    sentences = [f"{name[0].upper()}{name[1:]}: {QUANTITIES[name]['formula']}." for name in quantities]
    return " ".join(sentences).replace("`", "").replace("\\|", "|")
