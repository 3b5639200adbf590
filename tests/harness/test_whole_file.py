"""Files appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.records.trial_record import RecordError, write_whole
from harness.whole_file import is_hidden, written_whole

DIES = """
import os, signal, sys
from pathlib import Path
from harness.whole_file import written_whole
with written_whole([Path(name) for name in sys.argv[2:]]) as unfinished:
    for path in unfinished:
        path.write_text("half")
    os.kill(os.getpid(), int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("error", "names"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EPERM, "not permitted"), False),
    ],
)
def test_an_error_of_the_disk_names_the_file(tmp_path: Path, error: OSError, *, names: bool) -> None:
    """The system names no file when a disk is full; other errors stay as they are."""
    target = tmp_path / "new"
    with pytest.raises(OSError, match=str(error.strerror)) as raised, written_whole([target]):
        raise error
    assert raised.value.filename == (str(target) if names else None)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_writer_that_is_killed_changes_no_target(tmp_path: Path, number: signal.Signals) -> None:
    """A process that is killed while it writes leaves old files as they were, and makes no new ones.

    What it leaves is hidden, and the next process that writes into the folder removes it.
    """
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("whole")
    command = [sys.executable, "-c", DIES, str(int(number)), str(old), str(new)]
    assert subprocess.run(command, check=False).returncode == -number
    assert old.read_text() == "whole"
    assert not new.exists()
    (left,) = {*tmp_path.iterdir()} - {old}
    assert is_hidden(left)
    write_whole(new, "whole")
    assert {*tmp_path.iterdir()} == {old, new}


def test_what_others_hold_is_not_removed(tmp_path: Path) -> None:
    """A folder of a running writer stays, and so do other hidden folders, files and links."""
    beyond, strange = tmp_path / "beyond", tmp_path / "here" / ".other"
    beyond.mkdir()
    (beyond / "file").touch()
    strange.mkdir(parents=True)
    link = tmp_path / "here" / ".zeropp-unfinished-link"
    link.symlink_to(beyond)
    (tmp_path / "here" / ".zeropp-unfinished-file").touch()
    first, second = (tmp_path / "here" / name for name in ("first", "second"))
    with written_whole([first]) as (unfinished,):
        unfinished.write_text("first")
        write_whole(second, "second")
    assert first.read_text() == "first"
    assert second.read_text() == "second"
    assert strange.is_dir()
    assert link.is_symlink()
    assert (beyond / "file").exists()
    assert (tmp_path / "here" / ".zeropp-unfinished-file").exists()


def test_a_folder_that_is_taken_for_a_left_one_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may remove a new folder between its making and its locking."""
    made = tempfile.TemporaryDirectory
    folders: list[Path] = []

    def make(**options: Any) -> Any:
        folder = made(**options)
        folders.append(Path(folder.name))
        if len(folders) == 1:
            folders[0].rmdir()
        return folder

    monkeypatch.setattr(tempfile, "TemporaryDirectory", make)
    write_whole(tmp_path / "file", "text")
    assert len(folders) == 2
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]


def test_a_file_system_without_locks_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files appear whole there, too; folders that were left stay, since their writers may be running."""

    def without_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", without_locks)
    (tmp_path / ".zeropp-unfinished-left").mkdir()
    write_whole(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"
    assert {path.name for path in tmp_path.iterdir()} == {".zeropp-unfinished-left", "file"}


def _write(
    targets: Sequence[Path], text: str, *, new: bool = False, before: Callable[[], object] = str
) -> None:
    """Write ``text`` into all targets, and call ``before`` before they are renamed."""
    with written_whole(targets, new=new) as unfinished:
        for path in unfinished:
            path.write_text(text)
        before()


def test_a_writer_that_raises_leaves_nothing(tmp_path: Path) -> None:
    """If writing fails, no file is written, and no temporary file is left."""
    (tmp_path / "0").write_text("whole")
    with pytest.raises(ZeroDivisionError):
        _write([tmp_path / "0", tmp_path / "1"], "half", before=lambda: 1 / 0)
    assert [*tmp_path.iterdir()] == [tmp_path / "0"]
    assert (tmp_path / "0").read_text() == "whole"


def test_a_full_disk_is_one_line_and_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the file and the reason."""
    target = tmp_path / "table.csv"
    write_whole(target, "whole")

    def full(_: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RecordError, match=r"table\.csv: cannot be written: No space left on device"):
        write_whole(target, "half")
    assert target.read_text() == "whole"


def test_new_files_replace_none(tmp_path: Path) -> None:
    """With ``new``, a file that appears meanwhile stays, and none of the others is written."""
    targets = [tmp_path / "0", tmp_path / "1"]
    with pytest.raises(FileExistsError):
        _write(targets, "mine", new=True, before=lambda: targets[1].write_text("theirs"))
    assert [*tmp_path.iterdir()] == targets[1:]
    assert targets[1].read_text() == "theirs"


def test_links_and_pipes_stay(tmp_path: Path) -> None:
    """A link to a file is followed; a target such as a pipe is written directly."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "file")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "file").read_text() == "text"
    write_whole(Path(os.devnull), "text")
    assert Path(os.devnull).is_char_device()
