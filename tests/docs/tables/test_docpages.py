"""What the documentation says that the program knows is what the program says."""

from __future__ import annotations

import pytest

from docs.tables import BEGIN, DOCS, END, METRICS, PAGES, fresh, refreshed


@pytest.mark.parametrize("name", [*PAGES, METRICS])
def test_no_page_is_stale(name: str) -> None:
    """Every page holds what ``python -m docs.tables`` would write."""
    page = (DOCS / name).read_text(encoding="utf-8")
    assert fresh(name, page) == page


def test_only_what_stands_between_the_marks_is_written() -> None:
    """Words around the marks stay, what stood between them goes, and a page without marks is refused."""
    assert refreshed(f"a {BEGIN} old {END} b", "new\n") == f"a {BEGIN}\n\nnew\n\n{END} b"
    for page in ("a", f"a {BEGIN}", f"a {END}"):
        with pytest.raises(ValueError, match="without the marks"):
            refreshed(page, "new")
