"""Parameters that are tried nightly, or by ``tox -e long``, beside representatives in the line."""

from __future__ import annotations

from typing import Any

import pytest


def nightly(*values: Any) -> list[Any]:
    """Parameters, a tuple for several names, that only ``tox -e nightly`` tries."""
    return _marked(pytest.mark.nightly, values)


def long(*values: Any) -> list[Any]:
    return _marked(pytest.mark.long, values)


def _marked(mark: pytest.MarkDecorator, values: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark) for value in values]
