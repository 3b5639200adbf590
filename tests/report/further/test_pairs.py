"""Configurations that are compared with a counterpart other than the suite's baseline."""

from __future__ import annotations

import re

import pytest

from tests.report.heads import head_of, scheduled, trained
from tests.report.records import changed

SCHEDULES: dict[str, tuple[dict[str, float], str]] = {
    "lower": (
        {"100": 0.3, "25": 0.2, "50": 0.1, "75": 0.4},
        (r"the validation loss of ZeRO\+\+ \(gradients int8:256 from 50 %\) is 0\.20\d nats lower than ZeRO\+\+'s "
        r"\(95 % CI .*, 6 seeds\); of 3 such comparisons, 2 are better and 1 is worse\. ZeRO\+\+ \(gradients int8:256 "
        r"from 50 %\) sends 0\.\d+ of ZeRO-3's bytes between nodes, and ZeRO\+\+ sends 0\.\d+\. The net speed-up of "
        r"ZeRO\+\+ \(gradients int8:256 from 50 %\) over ZeRO\+\+ is .*\."),
    ),
    "higher": (
        {"100": 0.1, "25": 0.2, "50": 0.3, "75": 0.4},
        (r"the validation loss of ZeRO\+\+ \(gradients int8:256 from 75 %\) is 0\.30\d nats higher than ZeRO\+\+'s "
        r".*; of 3 such comparisons, 3 are worse\. .*"),
    ),
    "equal": (
        {"100": 0.3, "25": 0.3, "50": 0.3, "75": 0.3},
        (r"no configuration differs significantly from ZeRO\+\+ in validation loss \(6 seeds\); more than 200 "
        r"seeds would show the largest of 3 differences: .*"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("above", "second"), SCHEDULES.values(), ids=SCHEDULES)
def test_configurations_that_differ_in_one_field_are_compared_with_one_another(
    above: dict[str, float], second: str
) -> None:
    """Schedules with ZeRO++ without one, which is not the suite's baseline; a lower loss is preferred."""
    head = head_of(scheduled(above), answer="loss")
    first, _, further = head.sentence.partition(" Where only policy.schedule differs, ")
    assert re.match(
        r"After 120 steps ZeRO\+\+'s validation loss is 0\.[13]\d\d nats higher than ZeRO-3's", first
    )
    assert re.match(second, further), head.sentence


def test_fewer_than_three_configurations_of_one_field_have_no_sentence() -> None:
    """Nor have those whose counterpart is the suite's baseline, with which the first sentence compares them."""
    assert "Where only" not in head_of(scheduled({"100": 0.3, "25": 0.2, "50": 0.1}), answer="loss").sentence
    records = scheduled({"100": 0.3, "25": 0.2, "50": 0.1, "75": 0.4})
    plain = [record for record in records if record.trial["strategy"] == "zeropp"]
    named = [changed(r, role="contrast" if r.trial["policy"].get("schedule") else "baseline") for r in plain]
    assert "Where only" not in head_of(named, answer="loss").sentence


CHANGES: dict[str, tuple[tuple[float, float, float], str]] = {
    "lower": (
        (0.3, 0.4, 0.1),
        (r"the validation loss of ZeRO\+\+, DeepSpeed's is 0\.200 nats lower than ZeRO\+\+'s \(95 % CI .*, 6 seeds\); "
        r"of 3 such comparisons, 1 is better, 1 is worse and 1 is not significant\."),
    ),
    "higher": (
        (0.4, 0.5, 0.6),
        (r"the validation loss of ZeRO\+\+, DeepSpeed's is 0\.300 nats higher than ZeRO\+\+'s .*; of 3 such "
        r"comparisons, 3 are worse\."),
    ),
    "equal": (
        (0.3, 0.3, 0.3),
        (r"no configuration differs significantly from ZeRO\+\+ in validation loss \(6 seeds\); more than 200 seeds "
        r"would show the largest of 3 differences: .*"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("above", "second"), CHANGES.values(), ids=CHANGES)
def test_changes_of_a_strategy_are_compared_with_the_strategy(
    above: tuple[float, float, float], second: str
) -> None:
    """Although the suite's baseline is ZeRO-3; qwZ, which sends the gradients of ZeRO-3, is no change of ZeRO++."""
    sums, blocks, deepspeed = above
    records = trained(
        [
            ("zero3", {}, 0.0),
            ("zeropp", {}, 0.3),
            ("qwz", {}, 0.0),
            ("zeropp", {"sums": "fp16"}, sums),
            ("zeropp", {"blocks": "shape"}, blocks),
            ("zeropp-deepspeed", {}, deepspeed),
        ]
    )
    text = head_of(records, answer="loss").sentence
    _, _, further = text.partition(" Among changes of ZeRO++, ")
    assert re.match(second, further), text


def test_a_single_change_of_a_strategy_has_no_sentence() -> None:
    """Nor have techniques of ZeRO++ that only extend one another."""
    one = [("zero3", {}, 0.0), ("zeropp", {}, 0.3), ("zeropp", {"sums": "fp16"}, 0.1)]
    parts = [(name, {}, 0.1) for name in ("qwz", "hpz", "qwz+hpz", "zeropp")]
    for configured in (one, [("zero3", {}, 0.0), *parts]):
        assert "Among changes" not in head_of(trained(configured), answer="loss").sentence


def test_memory_that_differs_from_the_counterparts_has_a_sentence() -> None:
    """Bytes that are equal have none."""
    ends = {"classic": 0.4, "loco": 0.1, "classic:all": 0.6}
    codec = {"gradients": "int2:128"}
    records = trained(
        [
            ("zero3", {}, 0.0),
            ("qgz", codec, 0.5),
            *(("qgz", codec | {"feedback": feedback}, worse) for feedback, worse in ends.items()),
        ]
    )
    text = head_of(records, answer="loss").sentence
    assert re.search(
        r" Where only policy\.feedback differs, the validation loss of qgZ \(gradients int2:128, feedback loco\) is "
        r"0\.400 nats lower than that of qgZ \(gradients int2:128\) \(95 % CI .*, 6 seeds\); of 3 such comparisons, 2 "
        r"are better and 1 is worse\. qgZ \(gradients int2:128, feedback loco\) holds [\d.]+ MiB a rank where qgZ "
        r"\(gradients int2:128\) holds [\d.]+ MiB\. ",
        text,
    ), text
    assert "between nodes" not in text
