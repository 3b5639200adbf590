"""Makes texts safe as cells of a CSV file: no spreadsheet that opens the file takes such a text for a formula."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from harness.errors import visible

if TYPE_CHECKING:
    import pandas as pd

_BEGINS_A_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


def safe_cell(value: Any) -> Any:
    """Return ``value`` as a cell of a CSV file that no spreadsheet takes for a formula.

    In a text, control characters except tabs and line feeds are escaped.  A text that begins like a formula also gets
    an apostrophe before it, as OWASP recommends, unless the text is a number or a single dash.  Values other than texts
    are returned as they are.  Source: https://owasp.org/www-community/attacks/CSV_Injection
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
