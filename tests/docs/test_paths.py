"""What the documents name is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`((?:impl|harness|report|tests|suites|docs)(?:/[\w.]+)+/?)`")


def test_paths_in_documents_exist() -> None:
    """Each file or folder of the repository that a page names in code is there."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    named = {(page.name, path) for page in pages for path in NAMED.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 20
    assert [(page, path) for page, path in sorted(named) if not (ROOT / path).exists()] == []
