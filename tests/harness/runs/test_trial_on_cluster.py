"""The cluster of a sweep."""

from __future__ import annotations

from harness.cluster.link import slowest


def test_the_slowest_node_counts() -> None:
    """A repetition's rate is that of its slowest node."""
    assert slowest([[1.0, 5.0], [2.0, 4.0]]) == [1.0, 4.0]
    assert slowest([]) == []
