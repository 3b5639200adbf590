"""The fields in which trials differ."""

from __future__ import annotations

from harness.suites.labels import differing, varying_paths


def test_long_values_that_end_differently_differ() -> None:
    """Such as two configurations of DeepSpeed; what follows from the suite alone is no difference."""
    first, second = ({"a": {"b": "x" * 90 + end}, "policy": {"align": len(end)}} for end in ("1", "22"))
    assert differing([first, second]) == ["a.b", "policy.align"]
    assert varying_paths([first, second]) == ["a.b"]
