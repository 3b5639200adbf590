"""What follows a failure, as suites say it."""

from __future__ import annotations

import pytest

from harness.suites.failure_answers import Answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("skip", Answer()),
        ("stop", Answer(stop=True)),
        ("retry 3", Answer(retries=3)),
        ("retry 10", Answer(retries=10)),
        ("retry 1, then stop", Answer(retries=1, stop=True)),
    ],
)
def test_answers(text: str, answer: Answer) -> None:
    """Each answer means what it says."""
    assert Answer.of(text) == answer
