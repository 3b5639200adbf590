"""What a field of a suite accepts, in words: pydantic's errors as the command line says them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pydantic_core import ErrorDetails

from harness.errors import suggestion


def allowed(errors: Sequence[ErrorDetails]) -> str:
    """The values that a field accepts, in words, from pydantic's errors about one value."""
    first, *others = dict.fromkeys(_one_allowed(error) for error in errors)
    return " or ".join([first, *(other.removeprefix("expected ") for other in others)])


def _one_allowed(error: ErrorDetails) -> str:
    if error["type"] == "literal_error":
        expected = error["ctx"]["expected"]  # as in 'a', 'b' or 'c'
        near = suggestion(str(error["input"]), expected.split("'")[1::2])
        return f"expected {expected}{near}"
    if words := _ALLOWED.get(error["type"]):
        return words.format(**error.get("ctx", {}))
    return error["msg"][0].lower() + error["msg"][1:]


_ALLOWED: Final = {  # by pydantic's type of error
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "int_parsing_size": "expected a number below 2^63",
    "float_type": "expected a number",
    "finite_number": "expected a finite number",
    "string_type": "expected text",
    "string_too_short": "expected text",
    "string_too_long": "expected at most {max_length} characters",
    "string_pattern_mismatch": "expected letters, digits, '_', '-' and '.'",
    "bool_type": "expected true or false",
    "dict_type": "expected a table",
    "model_type": "expected a table",
    "list_type": "expected a list",
    "tuple_type": "expected a list of two",
    "missing": "expected a list of two",
    "too_long": "expected a list of two",
    "value_error": "{error}",
    "greater_than_equal": "expected at least {ge}",
    "greater_than": "expected more than {gt}",
    "less_than_equal": "expected at most {le}",
    "less_than": "expected less than {lt}",
}
