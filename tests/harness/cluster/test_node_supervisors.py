"""Interfaces of a run's nodes are shaped together, and let go."""

from __future__ import annotations

from typing import Any

import pytest

from harness.cluster import node_supervisors
from harness.cluster.link import Port
from harness.cluster.node_supervisors import Node, Nodes
from harness.errors import LinkError, Refusal


class Channel:
    """What a second node answers to one command after the other; None where it is lost."""

    def __init__(self, *answers: dict[str, Any] | None) -> None:
        self.answers, self.posted = answers, list[Any]()

    def post(self, _: str, command: Any) -> None:
        self.posted.append(command["shape"])

    def read(self, _: str) -> dict[str, Any] | None:
        return self.answers[len(self.posted) - 1]

    def lost(self, nodes: tuple[int, ...]) -> int | None:
        return nodes[0] if self.read("") is None else None


def nodes_of(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """Two nodes, of which the first does as it is told."""
    monkeypatch.setattr(node_supervisors, "_shaped", lambda *_: {})
    two = [Node(Port("eth0", f"10.0.0.{number}"), str(number), {}) for number in range(2)]
    return Nodes(channel, {}, two)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["link", "timeout"])
def test_a_node_that_cannot_let_go_ends_the_run(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No further link between these nodes would be what it is called."""
    nodes = nodes_of(Channel({"kind": kind, "message": "eth0 may still be shaped"}), monkeypatch)
    with pytest.raises(Refusal, match="node 1: eth0 may still be shaped"):
        nodes.unshape(2)


@pytest.mark.parametrize("answer", [None, {}])
def test_a_node_that_is_lost_has_let_go(
    answer: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As has one that says so: the keeper ends with its supervisor."""
    nodes_of(Channel(answer), monkeypatch).unshape(2)


def test_where_one_refuses_none_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are told to let go, and the first refusal is the reason."""
    channel = Channel({"kind": "link", "message": "it needs root"}, {})
    with pytest.raises(LinkError, match="node 1: it needs root"):
        nodes_of(channel, monkeypatch).shape(50.0, 2)
    assert channel.posted == [50.0, None]
