"""The leading supervisor finds the cause of a failure, on whichever node it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.cluster import node_supervisors
from harness.cluster.control_channel import Place
from harness.cluster.node_supervisors import Node, Nodes
from harness.cluster.port import Port
from harness.cluster.rank import Rank
from harness.cluster.rank_processes import Launch, LaunchError
from impl.policy.topology import Topology

PORTS = (Port("eth0", "10.0.0.0"), Port("eth0", "10.0.0.1"))


def double(rank: Rank, number: int) -> int:
    return 2 * number


class Channel:
    """A channel to a second node that has posted one answer; None if that node is lost."""

    place = Place(0, 2, "10.0.0.0", 0, serves=True)

    def __init__(self, answer: dict[str, Any] | None) -> None:
        self.answer, self.posted = answer, list[str]()

    def post(self, key: str, _: Any) -> None:
        self.posted.append(key)

    def read(self, _: str) -> dict[str, Any] | None:
        return self.answer

    def lost(self, _: int) -> bool:
        return self.answer is None


def failure(kind: str, message: str, *, effect: bool = False) -> dict[str, Any]:
    return {"kind": kind, "message": message, "effect": effect}


@pytest.mark.parametrize(
    ("local", "answer", "message"),
    [
        (None, None, "lost: node 1 is lost"),
        (None, failure("memory", "rank 1: no more"), "memory: rank 1: no more"),
        (failure("crashed", "closed by peer", effect=True), failure("killed", "rank 1"), "killed: rank 1"),
        (failure("crashed", "rank 0"), failure("crashed", "closed by peer", effect=True), "crashed: rank 0"),
        (failure("timeout", "rank 0"), failure("timeout", "rank 1"), "timeout: rank 0; rank 1"),
        (None, failure("link", "eth0 may still be shaped"), "link: eth0 may still be shaped"),
    ],
)
def test_the_error_is_the_cause(
    local: dict[str, Any] | None, answer: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is the first failure, and not its effect on another node."""

    def run_ranks(*_: Any) -> list[int]:
        if local is not None:
            raise LaunchError(local["kind"], local["message"], effect=local["effect"])
        return [2]

    monkeypatch.setattr(node_supervisors, "run_ranks", run_ranks)
    nodes = Nodes(Channel(answer), [Node(port, port.address, {}) for port in PORTS])  # type: ignore[arg-type]
    launch = Launch(Topology(2, 1), PORTS, None, 1, 1.0, tmp_path / "log")
    with pytest.raises(LaunchError) as caught:
        nodes.run(double, 1, launch, lambda _: None)
    assert f"{caught.value.kind}: {caught.value}".startswith(message)
    assert nodes.channel.posted == ["command/1", "stop/1"]  # type: ignore[attr-defined]


def test_results_come_back_by_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of the first node come first, then those of the other nodes."""
    monkeypatch.setattr(node_supervisors, "run_ranks", lambda *_: [2])
    answer = {"results": [4], "shaped": {}}
    nodes = Nodes(Channel(answer), [Node(port, port.address, {}) for port in PORTS])  # type: ignore[arg-type]
    launch = Launch(Topology(2, 1), PORTS, None, 1, 1.0, tmp_path / "log")
    assert nodes.run(double, 1, launch, lambda _: None) == [2, 4]
