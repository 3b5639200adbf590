"""How a difference changes from setting to setting."""

from __future__ import annotations

import re

import pytest

from harness.suites.trial import Cluster
from tests.report.heads import head_of, of_optimizers, paced, timed

OPTIMIZERS: dict[str, tuple[float, str, str]] = {
    "lower": (
        0.3,
        r"ZeRO\+\+'s validation loss is 0\.300 nats higher than ZeRO-3's \(.*\), beyond the margin of .* nats",
        "0.300 nats higher",
    ),
    "negative": (
        -0.3,
        r"ZeRO\+\+'s validation loss is 0\.300 nats lower than ZeRO-3's \(95 % CI .*, 6 seeds\)",
        "0.900 nats higher",
    ),
    "zero": (
        0.0,
        (r"ZeRO\+\+'s validation loss is 0\.0000 nats .* than ZeRO-3's \(95 % CI -0\.\d* to 0\.\d*, 6 seeds\), not "
        r"significant, within the margin of 0\.022 nats"),
        "0.600 nats higher",
    ),
    "almost equal": (
        0.599,
        r"ZeRO\+\+'s validation loss is 0\.599 nats higher than ZeRO-3's \(.*\), beyond the margin of .* nats",
        "0.0010 nats higher",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("adamw", "second", "apart"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_two_settings_have_a_sentence_each_and_their_difference(
    adamw: float, second: str, apart: str
) -> None:
    """Whatever its verdict; settings are named by the field in which they differ, although they have unlike fields."""
    head = head_of(of_optimizers({"AdamW": adamw, "SGD": 0.6}), answer="loss")
    assert re.fullmatch(
        r"With optimizer SGD, after 120 steps ZeRO\+\+'s validation loss is 0\.600 nats higher than ZeRO-3's .*; of 2 "
        rf"comparisons of validation loss, .*\. With optimizer AdamW, {second}\. ZeRO\+\+'s loss difference from "
        rf"ZeRO-3 is {re.escape(apart)} with optimizer SGD than with optimizer AdamW \(95 % CI .*, 6 seeds\)"
        rf"{', not significant' if apart.startswith('0.00') else ''}\.",
        head.sentence,
    ), head.sentence


SPEEDS = {
    "larger": (0.5, r"2\.0\d times as large with 50 Mbit/s as with 200 Mbit/s \(95 % CI .*, n = 6\)\."),
    "equal": (0.25, r"\d\.\d\d times as large with \d+ Mbit/s as with \d+ Mbit/s \(.*\), not significant\."),
}


@pytest.mark.parametrize(("slower", "text"), SPEEDS.values(), ids=SPEEDS)
def test_the_speed_ups_of_two_settings_are_divided(slower: float, text: str) -> None:
    """The larger by the smaller, in pairs of one repeat."""
    records = [
        *paced([("zero3", {}, 1.0), ("zeropp", {}, 0.25)]),
        *paced([("zeropp", {}, slower), ("zero3", {}, 1.0)], Cluster(rate="200 Mbit/s")),
    ]
    sentence = head_of(records, answer="step").sentence
    assert re.search(rf" ZeRO\+\+'s speed-up over ZeRO-3 is {text}", sentence), sentence


def of_rates(one_hop: tuple[float, float, float]) -> str:
    """The head's text for ZeRO++ with steps of 0.4 s at three rates, and with ``one_hop`` of so many seconds."""
    records = [
        record
        for rate, seconds in zip((25, 50, 100), one_hop, strict=True)
        for record in paced(
            [("zero3", {}, 1.0), ("zeropp", {}, 0.4), ("zeropp", {"reduce": "one_hop"}, seconds)],
            Cluster(rate=f"{rate} Mbit/s"),
        )
    ]
    return head_of(records, answer="step").sentence


def test_settings_are_listed_by_which_of_two_like_configurations_is_faster() -> None:
    """ZeRO++ and ZeRO++ with one field changed, at three rates; words that all places share are written once."""
    subject = r" ZeRO\+\+ is {} than ZeRO\+\+ \(reduce one_hop\) with "
    assert re.search(
        subject.format("faster")
        + r"100 Mbit/s, is slower with 25 Mbit/s and does not differ significantly with 50 "
        r"Mbit/s\.",
        of_rates((0.3, 0.4, 0.5)),
    )
    assert re.search(
        subject.format("slower") + r"25, 50 and 100 Mbit/s\.",
        of_rates((0.3, 0.3, 0.3)),
    )
    assert not re.search(r"is (faster|slower) than ZeRO\+\+ \(", of_rates((0.4, 0.4, 0.4)))


def test_many_settings_are_not_compared_in_pairs() -> None:
    """With four rates there is no sentence on two of them."""
    records = [
        record
        for rate in (25, 50, 100, 200)
        for record in timed({"zero3": 1.0, "zeropp": 12.5 / rate}, cluster=Cluster(rate=f"{rate} Mbit/s"))
    ]
    assert "times as large" not in head_of(records, answer="step").sentence
