"""Messages are safe for a terminal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import one_line, suggestion
from harness.suites.labels import in_words
from harness.suites.trial import STRATEGIES


@given(st.text(max_size=2000))
def test_a_message_is_one_printable_line_of_readable_words(text: str) -> None:
    """Whatever a message contains, it moves no cursor, ends no line, and fills no screen with one word."""
    line = one_line(text)
    assert line.isprintable()
    assert all(len(word) <= 300 for word in line.split())
    assert in_words({"a": [text]}).isprintable()


def test_what_cannot_be_read_is_escaped_or_cut() -> None:
    """NUL, escape sequences and lone surrogates are escaped, a word of a thousand characters is cut, a path is not."""
    assert one_line("a\0b\x1b[31mc\udc80\n d") == r"a\x00b\x1b[31mc\udc80 d"
    assert one_line(f"x = {'9' * 1000}: too much") == f"x = {'9' * 297}... too much"
    assert one_line(path := "/a/path" * 40) == path


@pytest.mark.parametrize(
    ("name", "hint"),
    [("zero++", "; did you mean 'zeropp'?"), ("ZeRO-3", "; did you mean 'zero3'?"), ("nothing like it", "")],
)
def test_a_name_close_to_a_known_one_is_suggested(name: str, hint: str) -> None:
    """For ZeRO++, as the literature writes it, zeropp is suggested, and not zero3, which has the nearer letters."""
    assert suggestion(name, STRATEGIES) == hint
