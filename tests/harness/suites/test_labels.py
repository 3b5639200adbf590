"""The fields in which trials differ are found."""

from __future__ import annotations

from harness.suites.labels import differing, varying_paths


def test_long_values_that_end_differently_differ() -> None:
    """Long values that differ only at their end differ, such as two DeepSpeed configurations; alignment, which
    follows from the suite, does not count as a difference.
    """
    first, second = ({"a": {"b": "x" * 90 + end}, "policy": {"align": len(end)}} for end in ("1", "22"))
    assert differing([first, second]) == ["a.b", "policy.align"]
    assert varying_paths([first, second]) == ["a.b"]
