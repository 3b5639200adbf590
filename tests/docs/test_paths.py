"""What the documents name is there, docs/paper.md gives every item a verdict, and they stay short."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERDICTS = {"measured", "measured in part", "tested", "modelled", "not available"}
NAMED = re.compile(r"`((?:impl|harness|report|tests|suites|docs)(?:/[\w.]+)+/?)`")


def test_paths_in_documents_exist() -> None:
    """Each file or folder of the repository that a page names in code is there."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    named = {(page.name, path) for page in pages for path in NAMED.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 20
    assert [(page, path) for page, path in sorted(named) if not (ROOT / path).exists()] == []


def test_every_item_has_a_verdict() -> None:
    """One of those that the page explains."""
    text = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")
    ]
    items = rows[2:]
    assert len(items) >= 20
    assert all(len(row) == 4 and row[1] in VERDICTS and row[2] and row[3] for row in items)
    assert all(f"`{verdict}`: " in text for verdict in VERDICTS)


def test_the_documents_are_short() -> None:
    """README, changelog and all of docs and results/README.md have no more words than this, by ``wc -w``."""
    pages = [*ROOT.glob("*.md"), ROOT / "results" / "README.md", *(ROOT / "docs").rglob("*.md")]
    words = {str(page.relative_to(ROOT)): len(page.read_text(encoding="utf-8").split()) for page in pages}
    assert sum(words.values()) <= 40_000, sorted(words.items(), key=lambda item: -item[1])
