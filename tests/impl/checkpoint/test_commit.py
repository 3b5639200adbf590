"""Which folders are checkpoints, how one becomes complete, and what is left of those that do not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from unittest import mock

import pytest

from impl.checkpoint.commit import begin, checkpoints, commit, latest, thin
from impl.checkpoint.manifest import read_manifest
from tests.impl.checkpoint.checkpointed import EMPTY


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    """A partial one is none; numbers go on; what broken saves left is removed; others' folders are left."""
    (tmp_path / "notes").mkdir()
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nowhere") is None
    begin(tmp_path)  # and its process is gone
    assert checkpoints(tmp_path) == []
    path = commit(begin(tmp_path), EMPTY.text())
    assert checkpoints(tmp_path) == [path] == [tmp_path / "checkpoint-000001"]
    shutil.copytree(path, tmp_path / "checkpoint-1000000")  # by number, not by name
    assert latest(tmp_path) == tmp_path / "checkpoint-1000000"
    (tmp_path / "checkpoint-1000004").mkdir()  # without a manifest
    assert latest(tmp_path) == tmp_path / "checkpoint-1000000"
    assert commit(begin(tmp_path), EMPTY.text()).name == "checkpoint-1000005"
    thin(tmp_path, 1)
    names = ["checkpoint-1000004", "checkpoint-1000005", "notes"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names


def test_thinning_takes_links_and_what_cannot_be_removed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a link the name goes and its target stays; a disk that refuses is a warning, not an error."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    commit(begin(run), EMPTY.text()).rename(elsewhere)
    (run / "checkpoint-000001").symlink_to(elsewhere)
    commit(begin(run), EMPTY.text())
    thin(run, 1)
    assert [path.name for path in run.iterdir()] == ["checkpoint-000002"]
    assert read_manifest(elsewhere) == EMPTY
    commit(begin(run), EMPTY.text())
    monkeypatch.setattr(os, "rename", mock.Mock(side_effect=PermissionError(13, "Permission denied")))
    thin(run, 1)
    assert "checkpoint-000002: older than the 1 to be kept, and stays: Permission denied" in caplog.text
