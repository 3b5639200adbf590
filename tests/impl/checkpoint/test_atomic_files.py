"""Folders go whole, also while somebody else removes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from impl.checkpoint.atomic_files import remove_folder


def test_a_file_that_somebody_else_removed_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are removed all the same."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for number in range(6):
        (folder / str(number)).write_bytes(b"x")
    unlink, raised = os.unlink, []

    def once(path: Any, **options: Any) -> None:
        unlink(path, **options)
        if not raised:
            raised.append(path)
            raise FileNotFoundError(path)

    monkeypatch.setattr(os, "unlink", once)
    remove_folder(folder)
    assert raised
    assert not folder.exists()
