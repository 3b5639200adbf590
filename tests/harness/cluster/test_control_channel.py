"""Only processes with the run's token can read or command a run, whoever connects to its store."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.cluster import node_supervisors, remote, run_token
from harness.cluster.control_channel import Channel, ChannelError, Place
from harness.cluster.node_supervisors import Nodes, follow, lead
from harness.cluster.run_token import Seal
from harness.errors import Refusal
from harness.runs import slurm

NOBODY = 65534  # another user of this machine
LEADER = Place(0, 2, "127.0.0.1", 0, serves=True, job="run")

# Started as another user, it reads all keys, posts a command of its own, and prints what it read.
STRANGER = """
import json, os, sys
import torch.distributed as dist
uid, port, folder = map(json.loads, sys.argv[1:])
os.setgroups([])
os.setgid(uid)
os.setuid(uid)
store = dist.PrefixStore("zeropp/run", dist.TCPStore("127.0.0.1", port, is_master=False))
for name in sys.stdin.read().split():
    print(name, store.get(name).decode())
store.set("command/1", json.dumps({"work": "work", "nodes": 2}))
try:
    print("token files", os.listdir(folder))
except PermissionError:
    print("no token files")
"""


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Token files lie in the test's folder; no token is in the environment."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv(run_token.VARIABLE, raising=False)
    yield
    assert not list(tmp_path.glob("zeropp-tokens-*/*")), "a token file was left behind"


def place_of(channel: Channel, node: int = 1) -> Place:
    """Return the place of another node of the channel's run."""
    return dataclasses.replace(channel.place, node=node, serves=False)


def stranger(channel: Channel, *keys: str) -> str:
    """Return what another user finds under the keys, after posting a command."""
    folder = run_token.write(channel.token).parent
    command = [sys.executable, "-c", STRANGER, str(NOBODY), str(channel.place.port), f'"{folder}"']
    done = subprocess.run(command, input=" ".join(keys), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become a second user")


@needs_root
def test_another_user_neither_reads_nor_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run without a token in the environment: values are sealed, the token's file is closed to others, and a
    forged command ends the follower before any work starts.
    """
    started = list[Any]()
    monkeypatch.setattr(node_supervisors, "_obey", lambda *command: started.append(command))
    errors = list[Exception]()

    def follower(place: Place) -> None:
        try:
            follow(place, {"work": print}, {"secret": "kept"}, lambda argument, _: argument)
        except Refusal as error:
            errors.append(error)

    with lead_of_two(follower) as (nodes, thread):
        read = stranger(nodes.channel, "node/1", "session", "token")
        thread.join(timeout=30)
    assert "kept" not in read
    assert nodes.channel.token not in read
    assert "no token files" in read
    assert "'command/1' in the store at 127.0.0.1" in str(errors[0])
    assert not started


@contextlib.contextmanager
def lead_of_two(follower: Callable[[Place], None]) -> Iterator[tuple[Nodes, threading.Thread]]:
    """Lead two nodes, the second of which is a thread that calls ``follower`` with its place."""
    place = dataclasses.replace(LEADER, port=free_port())
    thread = threading.Thread(target=follower, args=(dataclasses.replace(place, node=1, serves=False),))
    thread.start()  # it connects once the store is served
    with lead(place, {}) as nodes:
        yield nodes, thread
    thread.join()


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_nodes_meet_with_a_token_and_end_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a token in the environment no file is written, and the follower ends with the leader's status."""
    monkeypatch.setenv(run_token.VARIABLE, "t" * 32)
    statuses = list[int]()

    def follower(place: Place) -> None:
        statuses.append(follow(place, {}, {"node": 1}, lambda argument, _: argument))

    with lead_of_two(follower) as (nodes, _):
        assert [node.facts for node in nodes.nodes] == [{}, {"node": 1}]
        assert not list(tmp_path.iterdir())
        nodes.status = 7
    assert statuses == [7]


def test_a_node_without_the_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a token, as on another host, and with another one; the refusal names the variable."""
    monkeypatch.setenv(run_token.VARIABLE, "t" * 32)
    with Channel(LEADER) as leading:
        monkeypatch.delenv(run_token.VARIABLE)
        with pytest.raises(
            Refusal, match="node 1 has no token of this run: set ZEROPP_TOKEN to the same text"
        ):
            Channel(place_of(leading))
        monkeypatch.setenv(run_token.VARIABLE, "u" * 32)
        with pytest.raises(Refusal, match=r"a token \(ZEROPP_TOKEN\) other than node 0's"):
            Channel(place_of(leading))
        monkeypatch.setenv(run_token.VARIABLE, "short")
        with pytest.raises(Refusal, match="ZEROPP_TOKEN is too short: 5 of at least 32 characters"):
            Channel(place_of(leading))


def test_old_messages_do_not_open() -> None:
    """A message opens under its own key only, in its own meeting only, and only as it was written."""
    seal = run_token.of_session("t" * 32, ["a", "b"])
    text = seal.close("run/command/1", {"status": 0}).encode()
    assert seal.open("run/command/1", text) == {"status": 0}
    changed = text[:-1] + (b"0" if text[-1:] != b"0" else b"1")
    for other, key, content in (
        (seal, "run/command/2", text),
        (run_token.of_session("t" * 32, ["a", "c"]), "run/command/1", text),
        (Seal(b"t" * 32), "run/command/1", text),
        (seal, "run/command/1", changed),
        (seal, "run/command/1", b'{"status": 0}'),
        (seal, "run/command/1", b""),
    ):
        with pytest.raises(ValueError, match=r"sealed|hexadecimal"):
            other.open(key, content)


def test_a_heart_does_not_beat_backwards() -> None:
    """An older heartbeat, written again, does not make a lost node seem alive."""
    with Channel(LEADER) as channel:
        key = "beat/1"
        for count in (5, 4):
            channel._store.set(key, channel._meeting.close(channel._full(key), count))
            channel.lost(1)
        assert channel._seen[1][0] == 5


def test_a_command_that_cannot_be_opened_is_an_error() -> None:
    """Text that was written without the token is refused by its key."""
    with Channel(LEADER) as channel:
        channel._store.set("command/1", '{"status": 0}')
        with pytest.raises(
            ChannelError, match=r"'command/1' in the store at 127.0.0.1:.* no process of this run"
        ):
            channel.read("command/1")


@needs_root
def test_the_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    """A folder for token files that another user made first, or that others may read, is not used."""
    folder = tmp_path / f"zeropp-tokens-{os.getuid()}"
    folder.mkdir(mode=0o755)
    with pytest.raises(Refusal, match="must be a folder of this user with mode 0700"):
        run_token.write("t" * 32)
    folder.chmod(0o700)
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(Refusal, match="set ZEROPP_TOKEN on all hosts"):
        run_token.write("t" * 32)
    os.chown(folder, 0, 0)


def test_ssh_gets_the_token_through_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remote supervisor has the token in its environment, and no command line has it."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\necho "$@" > "$OUT/line"\nfor last; do :; done\nexec sh -c "$last"\n')
    ssh.chmod(0o755)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$ZEROPP_TOKEN" > "$OUT/token"\n')
    python.chmod(0o755)
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(python))
    with remote.supervisors(["first", "second"], LEADER, "t" * 32):
        pass
    assert (tmp_path / "token").read_text() == "t" * 32 + "\n"
    assert "t" * 32 not in (tmp_path / "line").read_text()


def test_slurm_gets_the_token_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job step starts with a new token in its environment, and without it on the command line."""
    monkeypatch.setenv(run_token.VARIABLE, "t" * 32)
    monkeypatch.delenv(run_token.VARIABLE)
    lines = list[list[str]]()
    monkeypatch.setattr(os, "execvp", lambda _, line: lines.append(line))
    slurm.step(["run", "q.toml"], 2)
    token = os.environ[run_token.VARIABLE]
    assert len(token) == 64
    assert token not in " ".join(lines[0])
