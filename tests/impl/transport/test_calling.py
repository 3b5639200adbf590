"""Ranks find each other, and nobody else; where they cannot, all are told why."""

from __future__ import annotations

import socket
import time
from typing import Any, Self

import psutil
import pytest

from impl.comm.mesh import Mesh
from impl.plan.topology import Topology
from impl.transport import calling
from impl.transport.calling import connected
from impl.transport.shared_memory import Waiting
from tests.support.ranks import on_threads


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def _waiting(mesh: Mesh, seconds: float = 20.0) -> Waiting:
    return Waiting(mesh.group(mesh.topology.world_axis), seconds, lambda _: ())


def _greeted(mesh: Mesh) -> bool:
    """Whether each connection leads to the rank that it is said to lead to."""
    found = connected(_waiting(mesh))
    for connection in found.values():
        connection.settimeout(20)
        connection.sendall(bytes([mesh.rank]))
    told = {index: connection.recv(1)[0] for index, connection in found.items()}
    calling.close(found.values())
    return told == {rank: rank for rank in range(mesh.topology.world) if rank != mesh.rank}


@pytest.mark.parametrize("world", [1, 2, 5])
def test_each_rank_is_connected_with_each_other(world: int) -> None:
    """A connection leads to the rank under whose index it stands."""
    assert all(on_threads(Topology(world, 1), _greeted))


def test_an_interface_that_is_not_there_is_told_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that cannot listen says so to all: none waits for it."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")

    def body(mesh: Mesh) -> str:
        with pytest.raises(ConnectionError) as caught:
            connected(_waiting(mesh))
        return str(caught.value)

    told = on_threads(Topology(2, 1), body)
    assert (
        told
        == ["rank 0 cannot listen for other ranks (GLOO_SOCKET_IFNAME nowhere0 is no interface here)"] * 2
    )


@pytest.mark.parametrize(
    ("first", "told"),
    [
        ("nowhere.invalid", r"MASTER_ADDR nowhere\.invalid: "),
        ("a..b", "label"),
        ("255.255.255.255", r"no way to 255\.255\.255\.255: "),
    ],
)
def test_a_first_rank_that_cannot_be_found_is_told_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, first: str, told: str
) -> None:
    """A MASTER_ADDR that leads nowhere is named, whatever is wrong with it."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("MASTER_ADDR", first)

    def body(mesh: Mesh) -> None:
        with pytest.raises(ConnectionError, match=f"^rank 0 cannot listen for other ranks .*{told}"):
            connected(_waiting(mesh))

    on_threads(Topology(2, 1), body)


def test_a_machine_whose_own_name_leads_nowhere_has_its_own_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without MASTER_ADDR ranks of one machine find each other, as over gloo, whatever it is called."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere.invalid")
    assert all(on_threads(Topology(2, 1), _greeted))


def test_an_interface_of_ipv6_alone_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the named interface has no IPv4 address its IPv6 one is taken."""
    if not any(one.address == "::1" for one in psutil.net_if_addrs().get("lo", [])):
        pytest.skip("no IPv6 on this machine")
    alone = [one for one in psutil.net_if_addrs()["lo"] if one.family == socket.AF_INET6]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": alone})
    assert all(on_threads(Topology(2, 1), _greeted))


def test_where_nobody_listens_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that cannot be reached is named with its address; the other is told who did not call."""
    listener = calling._listener

    def deaf(address: str, most: int) -> socket.socket:
        told = listener(address, most)
        return mute(told)

    def mute(told: socket.socket) -> Any:
        class Deaf:
            """Tells where it listened, and listens no more."""

            name = told.getsockname()
            timeout = 0.0

            def getsockname(self) -> Any:
                return self.name

            def settimeout(self, seconds: float) -> None:
                self.timeout = seconds

            def accept(self) -> Any:
                time.sleep(self.timeout)
                raise TimeoutError

            def __enter__(self) -> Self:
                return self

            def __exit__(self, *_: object) -> None:
                pass

        told.close()
        return Deaf()

    monkeypatch.setattr(calling, "_listener", deaf)

    def body(mesh: Mesh) -> str:
        with pytest.raises((ConnectionError, TimeoutError)) as caught:
            connected(_waiting(mesh, 0.5))
        return str(caught.value)

    first, second = on_threads(Topology(2, 1), body)
    assert first == "waited 0.5 s: rank 1 did not call"
    assert second.startswith("rank 1 cannot reach rank 0 at 127.0.0.1 port ")
    assert second.endswith("(Connection refused)")


def test_strangers_are_not_taken_for_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who calls without the token, with a wrong one, or as a rank that was not expected, is sent away."""
    monkeypatch.setattr(calling, "_CALL_SECONDS", 0.2)
    listener, strangers = calling._listener, []

    def beset(address: str, most: int) -> socket.socket:
        told = listener(address, most)
        for said in (b"", b"x" * 20, b"GET / HTTP/1.0\r\n\r\n"):
            stranger = socket.create_connection(told.getsockname())
            stranger.sendall(said)
            strangers.append(stranger)
        return told

    monkeypatch.setattr(calling, "_listener", beset)
    assert all(on_threads(Topology(3, 1), _greeted))
    for stranger in strangers:
        stranger.close()
