"""Reads every reported quantity with its formula and unit, for captions and docs/reference/metrics.md."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Final

_FILE: Final = Path(__file__).with_suffix(".csv")
with _FILE.open(encoding="utf-8", newline="") as _file:
    QUANTITIES: Final = {row["quantity"]: row for row in csv.DictReader(_file)}
"""The fields of each quantity, by the quantity's name, in the order of docs/reference/metrics.md.

``table`` is the heading under which that page lists the quantity, ``formula`` its formula in Markdown, and ``unit`` its
unit.  ``column`` is the column of :func:`report.data.metrics.trials` that holds it; empty if no column does."""


def formula(*quantities: str) -> str:
    """Return text for a caption that defines each named quantity: ``Speed: seconds of the copy / seconds.``"""
    sentences = [f"{name[0].upper()}{name[1:]}: {QUANTITIES[name]['formula']}." for name in quantities]
    return " ".join(sentences).replace("`", "").replace("\\|", "|")
