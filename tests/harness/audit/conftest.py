"""An audit that has been made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.audit import events


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An audit of ZeRO-3 on 2x2 ranks, with counters of an interface."""
    return events.zero_3(tmp_path)
