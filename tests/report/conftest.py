"""Fixtures of the report's tests."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from report.draw.figure import Drawn, Figure


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures have their data and their files, with nothing drawn: for tests of what stands around them."""

    def write(plot: Figure, data: pd.DataFrame, folder: Path, *_: object, **__: object) -> Drawn:
        svg = b'<svg xmlns="http://www.w3.org/2000/svg"/>'
        for form in ("svg", "pdf", "png"):
            (folder / f"{plot.name}.{form}").write_bytes(svg)
        data.to_csv(folder / f"{plot.name}.csv", index=False, lineterminator="\n")
        return Drawn(plot, data, svg)

    monkeypatch.setattr("report.draw.figure.Figure.write", write)
