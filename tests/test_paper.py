"""docs/paper.md gives every item a verdict, and names nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "paper.md"
VERDICTS = {"measured", "measured in part", "tested", "modelled", "not available"}


def test_every_item_has_a_verdict() -> None:
    """One of the four that the page explains."""
    text = PAGE.read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")
    ]
    items = rows[2:]
    assert len(items) >= 20
    assert all(len(row) == 4 and row[1] in VERDICTS and row[2] and row[3] for row in items)
    assert all(f"`{verdict}`: " in text for verdict in VERDICTS)


def test_what_is_named_is_there() -> None:
    """Suites, tests, sources and published numbers."""
    text = PAGE.read_text(encoding="utf-8")
    linked = re.findall(r"\]\((\.\./[^)#]+)\)", text)
    named = re.findall(r"`((?:tests|impl|report|suites)/[\w./]+)`", text)
    assert linked
    assert named
    for path in linked:
        assert (PAGE.parent / path).is_file(), path
    for path in named:
        assert (ROOT / path).is_file(), path
