"""A results folder in, ``report.html`` out, with ``figures/`` and ``tables/`` beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from report import figures, page, tables
from report.frame import ReportError, load
from report.metrics import Derived, derive

PAGE: Final = "report.html"
_FIGURE_FORMS: Final = ("svg", "pdf", "png", "csv")
_TABLE_FORMS: Final = ("csv", "md", "tex")


def build(results: Path, *, across_pools: bool = False) -> Path:
    """Write the report of a results folder into it; the same records give the same bytes.

    Args:
        results: the folder that holds ``<id>.json``.
        across_pools: draw records of different machines or code together.

    Returns:
        The page.

    Raises:
        ReportError: if there are no records, several pools, or the folder cannot be written.
        RecordError: for a file that is not a record of this schema.
    """
    derived = derive(load(results, across_pools=across_pools))
    try:
        return _write(results, derived)
    except OSError as error:
        raise ReportError(f"{results}: cannot write the report: {error.strerror or error}") from error


def _write(results: Path, derived: Derived) -> Path:
    figure_folder, table_folder = results / "figures", results / "tables"
    for folder in (figure_folder, table_folder):
        folder.mkdir(exist_ok=True)
    _clear(figure_folder, tuple(plot.name for plot in figures.PLOTS), _FIGURE_FORMS)
    _clear(table_folder, tables.NAMES_OF_FILES, _TABLE_FORMS)
    found = {plot.name: figures.draw(plot, derived, figure_folder) for plot in figures.PLOTS}
    failed = tables.failures(derived)
    content = page.Content(
        derived=derived,
        drawn=[drawn for drawn in found.values() if drawn is not None],
        missing=[plot for plot in figures.PLOTS if found[plot.name] is None],
        tables=[(table, table.write(table_folder)) for table in tables.all_tables(derived)],
        failures=None if failed.data.empty else (failed, failed.write(table_folder)),
        folder=results,
    )
    target = results / PAGE
    target.write_text(page.render(content), encoding="utf-8", newline="\n")
    return target


def _clear(folder: Path, names: tuple[str, ...], forms: tuple[str, ...]) -> None:
    """Remove what an earlier build left, and nothing else."""
    for name in names:
        for form in forms:
            (folder / f"{name}.{form}").unlink(missing_ok=True)
