"""Which folders are checkpoints, how saves complete, and what a killed save leaves."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from impl.checkpoint.commit import CheckpointError, begin, checkpoints, commit, latest, sync, thin
from impl.checkpoint.resharding import write_tensors
from impl.checkpoint.save_load import load, save
from impl.comm.mesh import Mesh
from impl.policy.topology import Topology
from impl.zero import shard
from tests.impl.checkpoint.checkpointed import EMPTY
from tests.support.ranks import on_threads
from tests.support.strategies import EXACT
from tests.support.training import model


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    """Partial checkpoints do not count, numbers continue, and leftovers of saves are removed but no other folders."""
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


def test_a_checkpoint_that_cannot_be_removed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint that cannot be removed is a warning, not an error."""
    for _ in range(2):
        commit(begin(tmp_path), EMPTY.text())
    monkeypatch.setattr(os, "rename", mock.Mock(side_effect=PermissionError(13, "Permission denied")))
    thin(tmp_path, 1)
    kept = "checkpoint-000001: should be removed, since keep=1, but cannot be removed: Permission denied"
    assert kept in caplog.text


def test_a_disk_that_is_full_at_the_manifest_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks raise an error that names the file, and nothing of the checkpoint is left."""
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))  # as write() says it, without a name

    def fails(mesh: Mesh) -> None:
        with pytest.raises(
            CheckpointError, match=r"^rank 0: .*manifest.json: cannot be written: No space left on device$"
        ):
            numbered(mesh, tmp_path, 1)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        on_threads(PAIR, fails)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_when_a_file_is_synced_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delayed errors of a disk come from ``fsync``, without a name; the error that users get has the file's name."""
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(5, "Input/output error")))
    path = tmp_path / "tensors.safetensors"
    with pytest.raises(
        CheckpointError, match=r"tensors\.safetensors: cannot be written: Input/output error$"
    ):
        write_tensors(path, [("a", torch.zeros(2))])
    with pytest.raises(OSError, match=r"Input/output error: '.*tensors\.safetensors'"):
        sync(path)


PAIR = Topology(1, 2)
OPERATIONS = ("mkdir", "fsync", "rename", "unlink", "rmdir")  # of the disk


class Killed(BaseException):
    """The process was killed: no handler may act on this."""


def numbered(mesh: Mesh, folder: Path, number: int, keep: int | None = None) -> None:
    zero = shard(model(depth=1), mesh=mesh, policy=EXACT)
    with torch.no_grad():
        for unit in zero.units:
            unit.master_shard.master.fill_(number)
    zero.weights_changed()
    save(folder, zero, extra=number, keep=keep)


def sound(mesh: Mesh, folder: Path) -> int:
    """Load the newest checkpoint and check that it is whole: it returns the number that it was saved with."""
    zero = shard(model(depth=1), mesh=mesh, policy=EXACT)
    number = load(folder, zero).extra
    weights = [v for name, v in zero.full_state_dict().items() if name != "scale"]
    assert all(bool((value == number).all()) for value in weights)
    return int(number)


def _stop_before(monkeypatch: pytest.MonkeyPatch, operation: int) -> None:
    """Make the disk stop for good before its n-th operation."""
    done = [0]

    def stopping(name: str) -> Any:
        real = getattr(os, name)

        def stop(*args: Any, **options: Any) -> Any:
            done[0] += 1
            if done[0] >= operation:
                raise Killed
            return real(*args, **options)

        return stop

    for name in OPERATIONS:
        monkeypatch.setattr(os, name, stopping(name))


def test_a_save_stopped_before_any_operation_leaves_the_one_before(tmp_path: Path) -> None:
    """With keep=1, if the disk stops before its n-th operation, the old or the new checkpoint is whole."""
    whole, stops = False, 0
    while not whole:
        stops += 1
        folder = tmp_path / str(stops)
        on_threads(PAIR, numbered, folder, 1)
        with pytest.MonkeyPatch.context() as monkeypatch:
            _stop_before(monkeypatch, stops)
            try:
                on_threads(PAIR, numbered, folder, 2, 1)
                whole = True
            except (Killed, SystemExit):  # of this rank, or of the other
                pass
        (number,) = set(on_threads(PAIR, sound, folder))
        assert number == 2 if whole else number in (1, 2)
        on_threads(PAIR, numbered, folder, 3, 1)  # and saving goes on, over what is left
        assert on_threads(PAIR, sound, folder) == [3, 3]
        assert len(list(folder.iterdir())) == 1
    assert stops > 14  # operations of one save
