"""Libraries: our engine's speed-ups by setting, and the fastest settings of each library."""

from __future__ import annotations

import math
import re

import pytest

from harness.records.confidence_intervals import Interval
from harness.suites.trial import Cluster
from report.sentence import on_peers
from tests.report.heads import head_of, timed

SECONDS = {"ddp": 1.0, "ddp-tuned": 0.9, "fsdp2": 1.2, "fsdp2-kept": 1.1}


def test_the_fastest_setting_of_each_library_is_named() -> None:
    """Where most configurations are those of libraries, whether our engine is faster or slower; one library is not
    compared with others.
    """
    for ours in (0.5, 2.0):
        text = head_of(timed(SECONDS | {"exact": ours})).sentence
        assert re.fullmatch(
            r"In the same types, .*\. In fp32, the fastest settings \(6 trials each\) are DDP, tuned; and FSDP2, "
            r"kept\.",
            text,
        ), text
    alone = {name: seconds for name, seconds in SECONDS.items() if name.startswith("ddp")}
    assert "fastest settings" not in head_of(timed(alone | {"exact": 0.5})).sentence


def test_speed_ups_over_libraries_are_given_for_each_of_several_settings() -> None:
    """The lowest and the highest of each setting, and how many there are."""
    records = [
        record
        for rate, ours in ((50, 0.5), (200, 2.0))
        for record in timed(SECONDS | {"exact": ours}, cluster=Cluster(rate=f"{rate} Mbit/s"))
    ]
    text = head_of(records, answer="step").sentence
    assert re.fullmatch(
        r"In the same types, .*\. With 50 Mbit/s, these speed-ups are 1\.[78]\d to 2\.[12]\d \(2 comparisons\)\. With "
        r"200 Mbit/s, these speed-ups are 0\.4\d to 0\.5\d \(2 comparisons\)\.",
        text,
    ), text


@pytest.mark.parametrize(
    ("kept", "left_out", "why"),
    [
        (3, 0, "at most three undisturbed pairs; a verdict needs six"),
        (2, 4, "at most two undisturbed pairs; a verdict needs three of at least six measured"),
    ],
)
def test_a_verdict_that_is_missing_says_how_many_pairs_it_needs(kept: int, left_out: int, why: str) -> None:
    """Six measured pairs, of which three are undisturbed: after six, more undisturbed ones are missing, not six."""
    one = Interval(1.2, math.nan, math.nan, kept, occasions=1, left_out=left_out)
    assert on_peers([one]).startswith(f"Inconclusive ({why}): in the same types, ")
