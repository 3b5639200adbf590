"""Words of captions and tables, by the values that they describe."""

from __future__ import annotations

import math

from harness.records.confidence_intervals import Interval
from report.data.text import (
    left_out_in_words,
    lowest_to_highest,
    none_in_words,
    number,
    occasions_in_words,
    parts_of,
    sentence,
    short_integer,
)


def test_captions_say_how_many_occasions_intervals_are_over() -> None:
    """Nothing is said without an occasion; one occasion says nothing about others; of several the number is named."""
    assert occasions_in_words(0) == ""
    assert "hold within this start of the machine" in occasions_in_words(1)
    assert "the means of 3 occasions" in occasions_in_words(3)


def test_trials_that_were_left_out_are_counted_over_all_rows() -> None:
    """Rows without such trials do not count, and without any nothing is said."""
    kept, some, more = (
        Interval(1.0, math.nan, math.nan, n, left_out=left) for n, left in ((6, 0), (4, 2), (5, 1))
    )
    assert left_out_in_words([kept]) == ""
    words = "a disturbed trial. In this table, 3 of the 12 pairs of 2 rows are left out."
    assert words in left_out_in_words([kept, some, more])
    assert "1 of the 6 trials of 1 row is left out." in left_out_in_words([kept, more], "trial")


def test_rows_without_an_interval_are_named() -> None:
    """Each reason names its rows once; more than four are counted; rows with an interval are not named."""
    few, known = Interval(1.0, math.nan, math.nan, 2), Interval(1.0, 0.9, 1.1, 6)
    assert none_in_words([("qwZ", known), ("", known)]) == ""
    assert none_in_words([("qwZ", few), ("hpZ", known), ("qgZ", few), ("qwZ", few)]) == (
        "n = 2: no interval; six are needed (qwZ, qgZ)."
    )
    assert none_in_words([(str(row), few) for row in range(5)]).endswith("needed (5 configurations).")
    assert none_in_words([("", few)]).endswith("six are needed.")


def test_margins_of_several_settings_are_given_as_a_range() -> None:
    """The lowest and the highest margin, or a single number if both have the same two digits."""
    assert lowest_to_highest([0.0252, 0.0236], number(2)) == "0.024 to 0.025"
    assert lowest_to_highest([0.0236, 0.0239], number(2)) == "0.024"


def test_a_sentence_begins_with_a_capital_letter_but_for_vnmse() -> None:
    """A clause gets a capital letter and a full stop; the name vNMSE stays as glossary and tables write it."""
    assert sentence("bytes of a step") == "Bytes of a step."
    assert sentence("vNMSE of each hop") == "vNMSE of each hop."


def test_a_text_is_split_at_commas_that_are_not_inside_numbers() -> None:
    """A comma after a word separates, also from a number of three digits, and a comma after a digit from a word."""
    assert parts_of("45,216 parameters, lr 0.01,ZeRO++") == ["45,216 parameters", "lr 0.01", "ZeRO++"]
    assert parts_of("2x2 ranks,100 Mbit/s") == ["2x2 ranks", "100 Mbit/s"]


def test_large_round_integers_are_written_short() -> None:
    """From a million on, with at most two digits before the zeros; other texts stay as they are."""
    short = {"1000000": "1e6", "50000000": "5e7", "2500000": "2.5e6", "1000000000": "1e9"}
    assert {whole: short_integer(whole) for whole in short} == short
    for text in ("100000", "1250000", "9223372036854775807", "0", "int8:2000000", "2000000.0", "none"):
        assert short_integer(text) == text
