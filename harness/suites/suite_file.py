"""Reads a suite file in TOML, and expands it into trials with :mod:`harness.suites.expand_suite`.

This module does not import torch.
"""

from __future__ import annotations

import errno
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
from impl import regular_file

MOST_BYTES: Final = 1 << 20  # largest size of a suite file
MOST_KEYS: Final = 1000  # largest number of keys of all tables together; more are taken for a mistake
_DEEPEST: Final = 40  # largest depth of nested tables and lists
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and line feeds


def load(path: Path, align: int | None = None) -> Suite:
    """Read a suite file and expand it into trials.

    After this call, the process looks in the file's folder for the files and modules that the suite names
    (:mod:`harness.suites.folder`).

    Args:
        path: The suite file.
        align: The alignment of all policies, in elements: every parameter and every shard starts on a multiple of it.
            With None, the alignment is the least common multiple of the block sizes of all codecs in the suite.

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
    """Return the value of the key ``name`` in a suite file.

    The suite is not expanded, so that no module of the user's is imported.

    Raises:
        SuiteError: If the file cannot be read, or one of its keys is unknown, missing or invalid.
    """
    try:
        return _validated(_parse(path)[1]).name
    except SuiteError as error:
        raise SuiteError(f"{path}: {error}") from None


def _parse(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the text of a suite file and its parsed tables.

    Raises:
        SuiteError: If the file cannot be read or is not TOML, or if it has too many keys or a forbidden value.
    """
    try:
        content = regular_file.read_bytes(path, MOST_BYTES)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise SuiteError(
                f"has more than {MOST_BYTES >> 20} MiB, the largest size of a suite file; name a suite's TOML file"
            ) from None
        raise SuiteError(f"cannot read: {error.strerror or error}") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"byte {content[error.start]:#04x} in line {content.count(10, 0, error.start) + 1}"
        raise SuiteError(f"is not TOML: {where} is not UTF-8; save the file as UTF-8") from None
    try:
        tables = tomllib.loads(text)
        count = _count_keys(tables)
    except (ValueError, RecursionError) as error:  # numbers and nesting may exceed Python's limits
        raise SuiteError(f"is not TOML: {error}") from None
    if count > MOST_KEYS:
        raise SuiteError(f"{count} keys, but a suite has at most {MOST_KEYS}: write several suites")
    _check_values(tables)
    return text, tables


def _count_keys(value: Any, depth: int = 0) -> int:
    """Return the number of keys in ``value`` and in all tables inside it.

    Raises a ValueError if tables and lists are nested more than 40 deep.
    """
    if depth > _DEEPEST:
        raise ValueError(f"tables and lists are nested more than {_DEEPEST} deep: nest them less")
    own = len(value) if isinstance(value, dict) else 0
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return own + sum(_count_keys(part, depth + 1) for part in parts)


def _check_values(value: Any, where: str = "") -> None:
    """Refuse control characters in texts and keys, and integers of more than 64 bits.

    A terminal would act on control characters in an error message.  TOML's integers have 64 bits.  ``where`` is the
    dotted path of ``value`` in the file.
    """
    if isinstance(value, str) and (match := _CONTROL.search(value)):
        raise SuiteError(f"{value_text(value)}: has the control character {match[0]!r}; remove it")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise SuiteError(f"{where} = {value_text(value)}: expected a number from -2^63 to 2^63 - 1")
    for key, part in value.items() if isinstance(value, dict) else ():
        _check_values(key)
        _check_values(part, f"{where}.{key}" if where else key)
    for part in value if isinstance(value, list) else ():
        _check_values(part, where)


def _validated(tables: dict[str, Any]) -> SuiteTables:
    """Validate the tables of a suite file.

    Raises:
        SuiteError: With pydantic's first error, if a key or a value is invalid.
    """
    try:
        return SuiteTables.model_validate(tables, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where, known = ".".join(map(str, first["loc"])), SuiteTables.model_fields
        unknown = f"unknown key {where!r}: expected one of {', '.join(known)}{suggestion(where, known)}"
        reasons = {"missing": f"key {where!r} is missing", "extra_forbidden": unknown}
        other = f"{where} = {value_text(first['input'])}: {expected_text([first])}"
        raise SuiteError(reasons.get(first["type"], other)) from None
