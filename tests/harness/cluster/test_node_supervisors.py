"""Nodes whose interfaces cannot be let go are joined by no further link."""

from __future__ import annotations

from typing import Any

import pytest

from harness.cluster import node_supervisors
from harness.cluster.link import LinkError, Port
from harness.cluster.node_supervisors import Node, Nodes


class Channel:
    """What a second node answers, or None where it is lost."""

    def __init__(self, answer: dict[str, Any] | None) -> None:
        self.answer, self.posted = answer, list[Any]()

    def post(self, _: str, command: Any) -> None:
        self.posted.append(command)

    def read(self, _: str) -> dict[str, Any] | None:
        return self.answer

    def lost(self, nodes: tuple[int, ...]) -> int | None:
        return nodes[0] if self.answer is None else None


def nodes_of(answer: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """Two nodes, of which the first does as it is told."""
    monkeypatch.setattr(node_supervisors, "_shaped", lambda *_: {})
    two = [Node(Port("eth0", f"10.0.0.{number}"), str(number), {}) for number in range(2)]
    return Nodes(Channel(answer), {}, two)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["link", "timeout"])
def test_a_node_that_cannot_let_go_is_told_and_no_later_link_opens(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it asked again: its next answer would know nothing of the queue."""
    nodes = nodes_of({"kind": kind, "message": "eth0 may still be shaped"}, monkeypatch)
    with pytest.raises(LinkError, match="node 1: eth0 may still be shaped"):
        nodes.unshape(2)
    assert nodes.stuck == "node 1: eth0 may still be shaped"
    with pytest.raises(LinkError, match="node 1: eth0 may still be shaped"):
        nodes.shape(50.0, 2)
    assert len(nodes.channel.posted) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("answer", [None, {}])
def test_a_node_that_is_lost_has_let_go(
    answer: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As has one that says so: the keeper ends with its supervisor."""
    nodes = nodes_of(answer, monkeypatch)
    nodes.unshape(2)
    assert nodes.stuck is None


def test_where_one_refuses_none_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are told to let go, and the first refusal is the reason."""
    nodes = nodes_of({"kind": "link", "message": "it needs root"}, monkeypatch)
    with pytest.raises(LinkError, match="node 1: it needs root"):
        nodes.shape(50.0, 2)
    assert [command["shape"] for command in nodes.channel.posted] == [50.0, None]  # type: ignore[attr-defined]
