"""Reads a suite file in TOML; :mod:`harness.suites.expand_suite` makes trials of its tables.  No torch."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from harness.errors import suggestion
from harness.suites import folder
from harness.suites.expand_suite import expand, expected_text
from harness.suites.labels import value_text
from harness.suites.suite import Suite, SuiteError, SuiteTables

MOST_BYTES: Final = 1 << 20  # of its file
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and ends of lines


def load(path: Path) -> Suite:
    """Read a suite file and expand it; raises a SuiteError for the first mistake."""
    try:
        text, tables = _parse(path)
        folder.find_from(path.parent)
        return expand(_validated(tables)).model_copy(update={"file": path.name, "text": text})
    except SuiteError as error:
        raise SuiteError(f"{path}: {error}") from None


def name_of(path: Path) -> str:
    """The name in a suite file, without expanding it or importing anything; raises as :func:`load`."""
    try:
        return _validated(_parse(path)[1]).name
    except SuiteError as error:
        raise SuiteError(f"{path}: {error}") from None


def _parse(path: Path) -> tuple[str, dict[str, Any]]:
    """A file's text, and its tables."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise SuiteError(f"cannot read: {error.strerror or error}") from None
    if len(content) > MOST_BYTES:
        raise SuiteError(f"more than {MOST_BYTES >> 20} MiB; expected a suite in TOML")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"byte {content[error.start]:#04x} in line {content.count(10, 0, error.start) + 1}"
        raise SuiteError(f"not TOML: {where} is not UTF-8; save it as UTF-8") from None
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers or nesting beyond Python's limits
        raise SuiteError(f"not TOML: {error}") from None
    _check_values(tables)
    return text, tables


def _check_values(value: Any, where: str = "") -> None:
    """Refuse characters that a terminal would act on, and integers that are not TOML's."""
    if isinstance(value, str) and (match := _CONTROL.search(value)):
        raise SuiteError(f"{value_text(value)}: has the control character {match[0]!r}; expected text")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise SuiteError(f"{where} = {value_text(value)}: expected a number below 2^63")
    for key, part in value.items() if isinstance(value, dict) else ():
        _check_values(key)
        _check_values(part, f"{where}.{key}" if where else key)
    for part in value if isinstance(value, list) else ():
        _check_values(part, where)


def _validated(tables: dict[str, Any]) -> SuiteTables:
    try:
        return SuiteTables.model_validate(tables, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where, known = ".".join(map(str, first["loc"])), SuiteTables.model_fields
        unknown = f"unknown key {where!r}: expected one of {', '.join(known)}{suggestion(where, known)}"
        reasons = {"missing": f"key {where!r} is missing", "extra_forbidden": unknown}
        other = f"{where} = {value_text(first['input'])}: {expected_text([first])}"
        raise SuiteError(reasons.get(first["type"], other)) from None
