"""Tests of the formulas for bytes that a rank sends."""

from __future__ import annotations

import pytest

from harness.audit.calls import Count, Group, Key, Topology
from harness.audit.wire import between_by_node, sent
from tests.harness.audit.events import calls_of, events, row

WORLD = Group("0", (0, 1, 2, 3))
NODES = Topology({0: 0, 1: 0, 2: 1, 3: 1})


def key(done_as: str, peer: int = -1) -> Key:
    return Key("forward", done_as, done_as, "float32", "0", peer, "", "", "recorder")


@pytest.mark.parametrize(
    ("done_as", "inside", "between"),
    [
        ("all_gather", (75, 0), (0, 75)),
        ("reduce_scatter", (75, 0), (0, 75)),
        ("all_reduce", (150, 0), (0, 150)),
        ("all_to_all", (25, 50), (25, 50)),
        ("recv", (0, 0), (0, 0)),
        ("barrier", (75, 0), (0, 75)),
    ],
)
def test_bytes_of_a_ring(done_as: str, inside: tuple[int, int], between: tuple[int, int]) -> None:
    """Of four ranks on two nodes, rank 0's neighbour is on its node, and rank 1's on the other."""
    count = Count(1, 25, 100)
    assert sent(0, key(done_as), count, WORLD, NODES) == inside
    assert sent(1, key(done_as), count, WORLD, NODES) == between


def test_a_send_goes_to_its_peer() -> None:
    """A send to the other node counts between nodes; one to a peer that is not known counts inside."""
    count = Count(1, 25, 100)
    assert [sent(0, key("send", peer), count, WORLD, NODES) for peer in (1, 2, -1)] == [
        (100, 0),
        (0, 100),
        (100, 0),
    ]


def test_a_group_of_one_rank_sends_nothing() -> None:
    """There is nobody to send to."""
    assert sent(0, key("all_reduce"), Count(1, 25, 100), Group("x", (0,)), NODES) == (0, 0)


def test_bytes_that_leave_each_node() -> None:
    """In a ring of 2x2 ranks, one rank of each node sends to the other node."""
    calls = calls_of([events(rank, 4, [row("all_gather", 25)]) for rank in range(4)], 2)
    assert between_by_node(calls, 2) == {0: 75, 1: 75}
