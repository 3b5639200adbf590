"""Reads a suite file in TOML, and has :mod:`harness.suites.expand_suite` expand it into trials.  No torch."""

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

MOST_BYTES: Final = 1 << 20  # of a suite file
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and line feeds


def load(path: Path, align: int | None = None) -> Suite:
    """Read a suite file and expand it into trials; ``align`` is as in :func:`harness.suites.expand_suite.expand`.

    The file's folder becomes this process's folder of inputs (:mod:`harness.suites.folder`).

    Raises:
        SuiteError: For the first mistake, with one line that begins with the file.
    """
    try:
        text, tables = _parse(path)
        folder.find_from(path.parent)
        return expand(_validated(tables), align).model_copy(update={"file": path.name, "text": text})
    except SuiteError as error:
        raise SuiteError(f"{path}: {error}") from None


def name_of(path: Path) -> str:
    """Return the name in a suite file without expanding it, so that no module of the user's is imported.

    Raises:
        SuiteError: As :func:`load` does.
    """
    try:
        return _validated(_parse(path)[1]).name
    except SuiteError as error:
        raise SuiteError(f"{path}: {error}") from None


def _parse(path: Path) -> tuple[str, dict[str, Any]]:
    """Return a file's text and its parsed tables."""
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
    except (ValueError, RecursionError) as error:  # numbers and nesting may exceed Python's limits
        raise SuiteError(f"not TOML: {error}") from None
    _check_values(tables)
    return text, tables


def _check_values(value: Any, where: str = "") -> None:
    """Refuse control characters, which a terminal would act on, and integers beyond TOML's 64 bits."""
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
    """Validate the tables; pydantic's first error becomes a SuiteError."""
    try:
        return SuiteTables.model_validate(tables, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where, known = ".".join(map(str, first["loc"])), SuiteTables.model_fields
        unknown = f"unknown key {where!r}: expected one of {', '.join(known)}{suggestion(where, known)}"
        reasons = {"missing": f"key {where!r} is missing", "extra_forbidden": unknown}
        other = f"{where} = {value_text(first['input'])}: {expected_text([first])}"
        raise SuiteError(reasons.get(first["type"], other)) from None
