"""The documents stay short enough to be read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST = 40_000


def test_the_documents_are_short() -> None:
    """README, changelog and all of docs and results/README.md have no more words than this, by ``wc -w``."""
    pages = [*ROOT.glob("*.md"), ROOT / "results" / "README.md", *(ROOT / "docs").rglob("*.md")]
    words = {str(page.relative_to(ROOT)): len(page.read_text(encoding="utf-8").split()) for page in pages}
    assert sum(words.values()) <= MOST, sorted(words.items(), key=lambda item: -item[1])
