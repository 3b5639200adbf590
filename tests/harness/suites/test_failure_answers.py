"""What follows a failure is read from a suite, or refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.suites.failure_answers import Answer
from harness.suites.suite_file import SuiteError, load

TOP = 'name = "q"\nquestion = "?"\n'


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("skip", Answer()),
        ("stop", Answer(stop=True)),
        ("retry 3", Answer(retries=3)),
        ("retry 1, then stop", Answer(retries=1, stop=True)),
    ],
)
def test_answers(tmp_path: Path, text: str, answer: Answer) -> None:
    """Each answer means what it says."""
    file = tmp_path / "q.toml"
    file.write_text(f'{TOP}[on_failure]\nkilled = "{text}"\n', encoding="utf-8")
    assert load(file).on_failure == {"killed": answer}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('on_failure = "skip"', "expected a valid dictionary"),
        ('[on_failure]\nmurdered = "skip"', "\"murdered\": expected 'crashed', 'disk', 'killed'"),
        ('[on_failure]\nkilled = "retry"', 'expected "skip", "stop", "retry 2"'),
        ('[on_failure]\nkilled = "retry 11"', "at most 10"),
        ("[on_failure]\nkilled = 3", 'expected "skip"'),
    ],
)
def test_other_answers_are_refused(tmp_path: Path, line: str, words: str) -> None:
    """In one line that names the key and what it may be."""
    file = tmp_path / "q.toml"
    file.write_text(f"{TOP}{line}\n", encoding="utf-8")
    with pytest.raises(SuiteError, match="on_failure") as caught:
        load(file)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
