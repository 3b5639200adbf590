"""Fixtures of the report's tests."""

from __future__ import annotations

import pytest

from report.draw.figure import FORMS


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures have their data and their files, with nothing drawn: for tests of what stands around them."""
    svg = b'<svg xmlns="http://www.w3.org/2000/svg"/>'
    monkeypatch.setattr("report.draw.figure.Figure.render", lambda *_: dict.fromkeys(FORMS, svg))
