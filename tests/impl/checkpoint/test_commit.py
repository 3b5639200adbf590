"""Which folders are checkpoints, how one becomes complete, and what is left of those that do not."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path

import pytest

from impl.checkpoint import atomic_files as disk
from impl.checkpoint.atomic_files import CheckpointError
from impl.checkpoint.commit import begin, checkpoints, commit, latest, thin, verify
from impl.checkpoint.manifest import SavedFile, read_manifest
from tests.impl.checkpoint.checkpointed import EMPTY


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    """A partial one is none; numbers go on; what broken saves left is removed; others' folders are left."""
    (tmp_path / "notes").mkdir()
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nowhere") is None
    broken = begin(tmp_path)
    broken.release()  # its process is gone
    assert checkpoints(tmp_path) == []
    path = commit(begin(tmp_path).partial, EMPTY)
    assert checkpoints(tmp_path) == [path] == [tmp_path / "checkpoint-000001"]
    shutil.copytree(path, tmp_path / "checkpoint-1000000")  # by number, not by name
    assert latest(tmp_path) == tmp_path / "checkpoint-1000000"
    (tmp_path / "checkpoint-1000004").mkdir()  # without a manifest
    assert latest(tmp_path) == tmp_path / "checkpoint-1000000"
    assert commit(begin(tmp_path).partial, EMPTY).name == "checkpoint-1000005"
    thin(tmp_path, 1)
    names = ["checkpoint-1000004", "checkpoint-1000005", "notes"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names


def test_what_others_save_now_is_left_alone(tmp_path: Path) -> None:
    """Two saves under way in one folder have numbers of their own, and each is completed, in any order."""
    first, second = begin(tmp_path), begin(tmp_path)
    assert first.partial.is_dir()
    assert commit(second.partial, EMPTY).name == "checkpoint-000002"
    assert begin(tmp_path).partial.name.startswith(".checkpoint-000003.")
    assert commit(first.partial, EMPTY).name == "checkpoint-000001"
    assert len(checkpoints(tmp_path)) == 2


def test_a_checkpoint_is_completed_of_the_files_that_were_written(tmp_path: Path) -> None:
    """A file that has gone, or changed its size, is an error; nothing is complete then."""
    begun = begin(tmp_path)
    held = EMPTY.model_copy(update={"files": [SavedFile(name="rank-00000.safetensors", nbytes=3, sha256="")]})
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors: No such file"):
        commit(begun.partial, held)
    (begun.partial / "rank-00000.safetensors").write_bytes(b"four")
    with pytest.raises(CheckpointError, match="4 bytes, the manifest says 3"):
        commit(begun.partial, held)
    assert checkpoints(tmp_path) == []


def test_where_folders_have_no_locks_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A partial checkpoint that may be of another save stays, and a line says so."""

    def unknown(*_: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", unknown)
    first = begin(tmp_path)
    second = begin(tmp_path)
    assert first.partial.is_dir()
    assert second.partial != first.partial
    assert "may be of a save under way" in caplog.text


def test_thinning_takes_links_and_what_cannot_be_removed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a link the name goes and its target stays; a disk that refuses is a warning, not an error."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    commit(begin(run).partial, EMPTY).rename(elsewhere)
    (run / "checkpoint-000001").symlink_to(elsewhere)
    commit(begin(run).partial, EMPTY)
    thin(run, 1)
    assert [path.name for path in run.iterdir()] == ["checkpoint-000002"]
    assert read_manifest(elsewhere) == EMPTY
    commit(begin(run).partial, EMPTY)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(disk, "rename", refuse)
    thin(run, 1)
    assert "checkpoint-000002: older than the 1 to be kept, and stays: Permission denied" in caplog.text


def test_files_are_looked_at_before_they_are_read(tmp_path: Path) -> None:
    """A pipe, a link and a file of another size are refused unopened."""
    saved = SavedFile(name="rank-00000.safetensors", nbytes=3, sha256="")
    path = tmp_path / saved.name
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        verify(tmp_path, [saved])
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="not a regular file"):
        verify(tmp_path, [saved])
