"""Sockets get short paths, wherever the folder of temporary files is."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from harness.errors import Refusal
from harness.shaping import socket_folder
from tests.harness.cluster.test_link import cluster_with


@pytest.fixture
def long_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the folder of temporary files to a path as long as those that job schedulers make."""
    folder = tmp_path / "/".join(["job_scratch_folder"] * 6)
    folder.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return folder


def test_a_long_folder_is_left_to_files(long_folder: Path) -> None:
    """A socket gets another, short folder, which is removed after use."""
    with socket_folder.new() as folder, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "link"))
        assert not folder.is_relative_to(long_folder)
    assert not folder.exists()
    assert Path(tempfile.gettempdir()) == long_folder


def test_a_short_folder_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own folder of temporary files is used if its path is short enough."""
    short = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    with socket_folder.new() as folder:
        assert folder.parent == short
    short.rmdir()


def test_the_users_runtime_folder_comes_before_shared_ones(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the user has a runtime folder, it is preferred to shared folders such as ``/tmp``."""
    runtime = tempfile.mkdtemp(dir="/tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    assert socket_folder.parent() == runtime
    Path(runtime).rmdir()


def test_a_refusal_names_each_folder_that_was_tried(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's runtime folder is among them, if there is one."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(Refusal, match=r"\(/run/user/7, /tmp, /var/tmp, /dev/shm\): set TMPDIR"):
        socket_folder.parent()


def test_without_any_short_folder_the_variable_is_named(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal is one line that names TMPDIR and the way out."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(
        Refusal, match=r"TMPDIR = '.*': a folder .*: set TMPDIR to a writable folder with a shorter path"
    ):
        socket_folder.parent()


@pytest.mark.needs("namespaces")
def test_a_link_opens(long_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link between nodes opens although its keeper inherits a long TMPDIR."""
    from harness.cluster.link import open_link

    monkeypatch.setenv("TMPDIR", str(long_folder))
    with open_link(cluster_with("namespaces", 2, 50.0), f"{os.getpid():x}"[-6:]) as link:
        assert 0 < len(link.ports[0].control) < 108
