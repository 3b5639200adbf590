"""Registry of all figures of the report, in page order, and the writing of their files.

Each is a :class:`report.draw.plot.Plot`: records to a tidy table, the table to a figure (or None, and
then the page names the suite to run).
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pandas as pd
from matplotlib.figure import Figure

from report.data.metrics import Derived
from report.draw import theme
from report.draw.plot import Drawing, Plot
from report.figures import bytes as bytes_figures
from report.figures import codecs, generation, loss, memory, scaling, speed, step

_BY_NAME: Final = {
    plot.name: plot
    for module in (
        speed,
        step,
        scaling,
        generation,
        bytes_figures,
        loss,
        memory,
        codecs,
    )
    for plot in module.PLOTS
}
_ORDER: Final = (
    "speedup", "ablation", "throughput", "beside_published", "parity", "generation", "scaling", "step_split",
    "volume", "loss", "final_loss", "memory", "largest_model", "error", "block_sweep", "bits_sweep", "link",
)  # fmt: skip
PLOTS: Final = tuple(_BY_NAME[name] for name in _ORDER)

# No dates and no versions: the same records give the same bytes.
_METADATA: Final[dict[str, dict[str, Any]]] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}


@dataclass(frozen=True)
class Drawn:
    """A figure that was drawn.

    Attributes:
        plot: its definition.
        data: raw values behind it.
        svg: the drawing.
        files: written paths by suffix.
    """

    plot: Drawing
    data: pd.DataFrame
    svg: str
    files: dict[str, Path]


def draw(plot: Plot, derived: Derived, folder: Path) -> Drawn | None:
    """Draw a figure and write it as SVG, PDF, PNG and CSV of its raw values.

    Args:
        plot: its definition.
        derived: the records.
        folder: where its files go.

    Returns:
        None if the records hold nothing to draw.
    """
    return write(plot, plot.data(derived), folder)


def write(plot: Drawing, data: pd.DataFrame, folder: Path) -> Drawn | None:
    """Draw a table and write the figure and the table to ``folder``; None if there is nothing to draw."""
    with theme.style():
        figure = plot.draw(data)
        if figure is None:
            return None
        files = {suffix: folder / f"{plot.name}.{suffix}" for suffix in (*_METADATA, "csv")}
        for suffix in _METADATA:
            files[suffix].write_bytes(_rendered(figure, suffix))
    data.to_csv(files["csv"], index=False, lineterminator="\n")
    return Drawn(plot, data, files["svg"].read_text(encoding="utf-8"), files)


def _rendered(figure: Figure, suffix: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix, metadata=_METADATA[suffix], bbox_inches="tight", pad_inches=0.05)
    return buffer.getvalue()
