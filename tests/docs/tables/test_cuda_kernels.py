"""The page of the compiled CUDA kernels is what their cubins say."""

from __future__ import annotations

import pytest

from docs.tables import COMPILED, DOCS, insert


@pytest.mark.xdist_group("cubins")
@pytest.mark.needs("CUDA compiler")
@pytest.mark.parametrize("name", COMPILED)
def test_no_page_is_stale(name: str) -> None:
    """The page holds what ``python -m docs.tables`` writes where CuPy, NVRTC and nvdisasm are."""
    page = (DOCS / name).read_text(encoding="utf-8")
    assert insert(page, COMPILED[name]()) == page
