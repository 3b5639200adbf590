"""Every reported quantity with its formula and unit, for captions and docs/reference/metrics.md."""

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
    sentences = [f"{name[0].upper()}{name[1:]}: {QUANTITIES[name]['formula']}." for name in quantities]
    return " ".join(sentences).replace("`", "").replace("\\|", "|")
