"""The page of the compiled CUDA kernels follows from their cubins."""

from __future__ import annotations

import pytest

from docs.tables import COMPILED, DOCS, insert


@pytest.mark.xdist_group("cubins")
@pytest.mark.needs("CUDA compiler")
@pytest.mark.parametrize("name", COMPILED)
def test_no_page_is_stale(name: str) -> None:
    """The page is as ``python -m docs.tables`` writes it with CuPy, NVRTC and nvdisasm."""
    page = (DOCS / name).read_text(encoding="utf-8")
    assert insert(page, COMPILED[name]()) == page
