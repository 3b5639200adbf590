"""Makes texts safe as cells of a CSV file: a spreadsheet that opens the file must not run a text as a formula."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from harness.errors import visible

if TYPE_CHECKING:
    import pandas as pd

_BEGINS_A_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


def safe_cell(value: Any) -> Any:
    """Return ``value`` in a form that no spreadsheet takes for a formula; numbers and other values stay as they are.

    In a text, control characters except tabs and line feeds are escaped.  If the text begins like a formula, such as
    ``=SUM(A1)``, an apostrophe is put before it, as OWASP recommends.  Texts that are numbers (``-1``) or a single dash
    get no apostrophe.  Source: https://owasp.org/www-community/attacks/CSV_Injection
    """
    if not isinstance(value, str):
        return value
    begins = value.startswith(_BEGINS_A_FORMULA) and value != "-" and not _is_number(value)
    return f"{chr(39) if begins else ''}{visible(value)}"


def safe_cells(table: pd.DataFrame) -> pd.DataFrame:
    """Return a copy of ``table`` in which each text is replaced by its :func:`safe_cell`.

    Columns of numbers and of booleans stay as they are.
    """
    texts = table.select_dtypes(exclude=["number", "bool"])
    return table.assign(**{str(name): column.map(safe_cell) for name, column in texts.items()})


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
