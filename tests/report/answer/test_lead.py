"""The first sentence of a page answers its suite's question, by records whose outcomes are known."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from harness.records.record import Record
from harness.suites.trial import Cluster, PolicyChanges, Trial
from report.answer.effects import listed_most
from report.answer.lead import Answer, answer
from report.data.frames import frames_of
from report.data.metrics import derive
from tests.report.records import (
    CRASHED,
    changed,
    changed_steps,
    committed,
    ending_at,
    on_link,
    record_of,
    taken_by_others,
)

NOISE = (0.99, 1.01, 1.0, 1.005, 0.995, 1.0)
LOSS_NOISE = (0.001, -0.002, 0.001, 0.0, 0.002, -0.001)


def asked(records: Sequence[Record], question: str, **more: Any) -> Answer:
    """The answer to a question by records."""
    told = [changed(one, question=question, order=place, **more) for place, one in enumerate(records)]
    return answer(derive(frames_of(told)))


def ran(
    strategy: str, repeat: int, took: float, *, failed: bool = False, sweep: int = 0, **fields: Any
) -> Record:
    """A trial of a repeat, whose steps take so long, times a noise; or a failure."""
    trial = Trial(strategy=strategy, repeat=repeat, **{"cluster": Cluster(rate="50 Mbit/s"), **fields})
    if failed:
        return record_of(trial, failure=CRASHED, sweep=sweep)
    noise = NOISE[(2 * repeat + len(str(trial.canonical()))) % len(NOISE)]
    made = changed_steps(record_of(trial), lambda _: {"total": took * noise})
    return changed(made, sweep=sweep)


def paired(seconds: Mapping[tuple[str, str], float], repeats: int = 6) -> list[Record]:
    """Trials of (strategy, weights' codec), with steps of these seconds."""
    return [
        ran(strategy, repeat, took, policy=PolicyChanges(weights=weights or None))
        for repeat, ((strategy, weights), took) in product(range(repeats), seconds.items())
    ]


def numbers(sentence: str) -> list[float]:
    return [float(one) for one in re.findall(r"[+-]?\d+\.\d+", sentence)]


@pytest.mark.parametrize(
    ("seconds", "verdict", "start"),
    [(0.8, "yes", "Yes, a step of ZeRO++ with weights int6:2048 is 1.25 ("),
     (1.25, "no", "No, a step of ZeRO++ with weights int6:2048 is 0.80 ("),
     (1.0, "cannot be told", "Cannot be told (")],
)  # fmt: skip
def test_codecs_of_one_strategy_are_compared_with_each_other(
    seconds: float, verdict: str, start: str
) -> None:
    """Asked whether 6-bit weights pay, the answer is of 6 against 8 bits, also where ZeRO-3 and DDP ran."""
    steps = {
        ("zero3", ""): 2.0,
        ("ddp", ""): 3.0,
        ("zeropp", "int8:2048"): 1.0,
        ("zeropp", "int6:2048"): seconds,
    }
    found = asked(paired(steps), "Do 6-bit weights pay on three nodes?")
    assert (found.quantity, found.verdict, found.figure) == ("step", verdict, "speedup")
    assert found.sentences[0].startswith(start)
    assert "as with weights int8:2048" in found.sentences[0]
    assert "pairs would tell" in found.sentences[0] or verdict != "cannot be told"


def test_a_break_even_is_stated_with_its_interval() -> None:
    """Where ZeRO++ gains at one rate and loses at the next, the rate between is the answer."""
    found = [
        ran(strategy, repeat, took, cluster=Cluster(rate=f"{rate} Mbit/s"))
        for repeat, (rate, ours) in product(range(6), ((50, 0.5), (200, 2.0)))
        for strategy, took in (("zero3", 1.0), ("zeropp", ours))
    ]
    told = asked(found, "From which rate on does ZeRO++ no longer pay?")
    assert told.quantity == "rate"
    first = told.sentences[0]
    assert first.startswith("ZeRO++ is as fast as ZeRO-3 at ")
    place, low, high = (float(one) for one in re.findall(r"[\d.]+", first.partition(" at ")[2])[:3])
    assert 80 < place < 115
    assert low < place < high


def trained(ends: Mapping[str, Sequence[float]], steps: int = 120, **fields: Any) -> list[Record]:
    """Trials of gradients' codecs, a seed for each of their losses at the end; codec "" is ZeRO-3."""
    return [
        ending_at(
            Trial(
                strategy="qgz" if codec else "zero3",
                policy=PolicyChanges(gradients=codec) if codec else PolicyChanges(),
                seed=seed, steps=steps, warmup=0, validate_every=steps // 3,
                cluster=Cluster(rate="50 Mbit/s"), **fields,
            ),
            float(end),
        )
        for codec, losses in ends.items()
        for seed, end in enumerate(losses)
    ]  # fmt: skip


BASE = np.array([2.0, 2.1, 1.9, 2.05, 1.95, 2.0])


def test_many_strategies_are_answered_by_their_front() -> None:
    """Fewer bytes for a loss that none undercuts are on the front; who is beaten is off it, and by whom.

    Who trains as well as the baseline and sends least comes first.
    """
    noise = np.array(LOSS_NOISE)
    above = {
        "zero3": 0.0 * noise, "sdp4bit": 0.4 + noise, "zeropp": 0.3 - noise, "loco": 0.31 + noise,
        "qsdp": 0.2 + noise, "fp4-gather": 0.25 - noise, "fp8-gather": 0.001 - noise / 100,
        "exact": 20 * noise[::-1],
    }  # fmt: skip
    found = [
        ending_at(Trial(strategy=strategy, seed=seed, steps=120, warmup=0, validate_every=120), float(end))
        for strategy, worse in above.items()
        for seed, end in enumerate(BASE + worse)
    ]
    told = asked(found, "Which bytes buy which loss?")
    assert told.figure == "frontier"
    least, first, second, *_ = told.sentences
    assert least.startswith("FP8 gather trains as well as ZeRO-3 and sends least of those: ")
    assert first.startswith("Nobody who sends as few bytes between nodes has a lower loss than SDP4Bit (")
    on, _, unsure = first.partition("; of ")
    assert unsure == "exact (fp32) it cannot be told."
    assert [name for name in ("ZeRO++ (", "QSDP (", "FP8 gather (", "ZeRO-3 (") if name not in on] == []
    assert "LoCo (by ZeRO++)" in second
    assert "FP4 gather (by QSDP)" in second


@pytest.mark.parametrize(("worse", "verdict"), [(0.004, "Yes, "), (0.3, "No, ")])
def test_a_verdict_on_losses_is_against_the_suites_baseline(worse: float, verdict: str) -> None:
    """No ZeRO-3 ran: the verdict is against the named baseline, with difference, interval and margin."""
    noise = np.array(LOSS_NOISE)
    records = trained({"int8:2048": BASE, "int4:128": BASE + worse + noise})
    roles = [
        changed(one, role="contrast" if "int4" in str(one.trial["policy"]) else "baseline") for one in records
    ]
    found = asked(
        roles, "Is int4 with block 128 as good as int8 with block 2048: by loss, by bytes, by seconds?"
    )
    first = found.sentences[0]
    claim = "as well as" if worse < 0.1 else "worse than"
    assert first.startswith(f"{verdict}qgZ (gradients int4:128) trains {claim} ")
    difference, low, high, margin, *_ = numbers(first.partition("differs by")[2])
    assert low < difference < high
    assert (difference, margin) == (pytest.approx(worse, abs=1e-3), pytest.approx(0.02))
    assert any("of qgZ (gradients int8:2048)'s bytes" in one for one in found.sentences)
    assert any(one.startswith("By seconds ") for one in found.sentences)


def test_short_runs_show_their_losses_without_a_verdict() -> None:
    """After 60 steps the differences stand there, and that a verdict takes 100."""
    found = asked(trained({"": BASE, "int4:64": BASE + 0.004}, steps=60), "Does int4 train as well?")
    assert found.verdict == "cannot be told"
    assert found.sentences[0].startswith(
        "Cannot be told by loss (60 steps, where a verdict takes 100): losses minus ZeRO-3's"
    )
    assert "+0.0040" in found.sentences[0]
    # Validated once, in a short run: seconds answer, and a sentence says what a verdict on losses takes.
    records = [
        changed(one, trial={**one.trial, "validate_every": 0})
        for one in trained({"": BASE, "int8:64": BASE}, steps=30)
    ]
    found = asked(records, "Does int8 train as well as 16 bits?")
    assert found.quantity == "step"
    said = "Validation losses after 30 steps are not compared: a verdict takes 100 steps and 6 seeds."
    assert said in found.sentences


def test_a_suite_may_name_its_quantity() -> None:
    """``answer`` comes before what the axes say."""
    assert asked(TWO, "How much?").quantity == "step"
    told = asked(TWO, "Does it send less?", answer="bytes")
    assert (told.quantity, told.verdict, told.figure) == ("bytes", "yes", "volume")
    assert told.sentences[0].startswith("Yes, between nodes ZeRO++ sends 0.")
    everything = asked(TWO, "Does everything run?", answer="trials")
    assert everything.sentences[0] == "Yes, all 12 trials finished."


def test_disturbed_trials_scale_the_caveat() -> None:
    """So many of so many; from half of them on seconds are not to be relied on; none, no sentence."""

    def last(count: int) -> str:
        some = [taken_by_others(one, 0.5) if place < count else one for place, one in enumerate(TWO)]
        return asked(some, "How much?").sentences[-1]

    assert last(3) == "Others took more than 5% of the processors' time in 3 of 12 trials."
    assert last(10).startswith("The seconds are not to be relied on: others took more than 5% ")
    assert "10 of 12 trials" in last(10)
    assert "processors' time" not in last(0)


def test_links_of_other_rates_are_a_caveat() -> None:
    """Where a contender's link was slower than its baseline's, the lead says so."""
    slower = [on_link(one, 20.0) if one.trial["strategy"] == "zeropp" else one for one in TWO]
    assert "achieved rates more than 10% apart" in asked(slower, "How much?").sentences[-1]


ZERO3, ZEROPP = ("zero3", ""), ("zeropp", "")
TWO = paired({ZERO3: 2.0, ZEROPP: 1.0})
ONE_CELL_FAILED = [
    ran(strategy, repeat, took, failed=(strategy, tokens) == ("zero3", 1024), tokens_per_rank=tokens)
    for repeat, tokens in product(range(6), (512, 1024))
    for strategy, took in (("zero3", 1.0), ("zeropp", 0.5), ("qwz", 0.8))
]
OF_EQUAL_BLOCKS = [
    ran("qgz", repeat, took, policy=PolicyChanges(gradients=codec))
    for repeat, (codec, took) in product(range(6), (("int4:256", 1.0), ("int4:256:asym", 0.8)))
]
TWO_SWEEPS = [
    ran(strategy, repeat, took, sweep=repeat // 6)
    for repeat, (strategy, took) in product(range(12), (("zero3", 1.0), ("zeropp", 0.5)))
]


FIRST: dict[str, tuple[list[Record], str, str]] = {  # sentence of an answer
    "few pairs have no interval, and how many would is said": (
        paired({ZERO3: 2.0, ZEROPP: 1.0}, repeats=2), "Is ZeRO++ faster?",
        r"Cannot be told \(2 pairs, where an interval takes 6\): a step of ZeRO\+\+ is 2\.0\d"),
    "nor have few sweeps, however many pairs they have": (
        TWO_SWEEPS, "Is ZeRO++ faster?",
        r"Cannot be told \(2 sweeps, where an interval takes 3\): a step of ZeRO\+\+ is "),
    "without ZeRO-3 the contender that the suite lists first is the baseline": (
        paired({("zeropp", "int8:64"): 1.0, ("qwz", "int8:64"): 2.0}), "Which is faster?",
        r"A step of qwZ \(weights int8:64\) is 0\.5\d \(.* as ZeRO\+\+ \(weights int8:64\)'s"),
    "nobody else becomes the baseline of a cell whose own failed": (
        ONE_CELL_FAILED, "How much do they bring?",
        r"A step of qwZ is 1\.2\d \(.*\) times as fast as ZeRO-3's and that of ZeRO\+\+ 2\.0\d \("),
    "two contenders are never both called by their blocks": (
        OF_EQUAL_BLOCKS, "Do asymmetric codes pay?",
        r".*with gradients int4:256:asym is 1\.2.*as with gradients int4:256 \("),
    "the opposite question has no yes": (TWO, "Is ZeRO++ slower than ZeRO-3?", r"A step of ZeRO\+\+ is "),
    "nor has one of the baseline": (TWO, "Is ZeRO-3 faster than ZeRO++?", r"A step of ZeRO\+\+ is "),
    "only those that a question names decide": (
        paired({ZERO3: 2.0, ZEROPP: 1.0, ("zero3-flat", ""): 3.0}), "Is ZeRO++ faster than ZeRO-3?", "Yes, "),
    "failures alone are no answer": (
        [record_of(Trial(strategy="zeropp"), failure=CRASHED)], "Is it faster?",
        r"Cannot be told: no trial has finished, and 1 trial failed\.$"),
}  # fmt: skip


@pytest.mark.parametrize(("records", "question", "first"), FIRST.values(), ids=FIRST)
def test_the_first_sentence(records: list[Record], question: str, first: str) -> None:
    """It answers the question as far as records of its contenders do."""
    assert re.match(first, asked(records, question).sentences[0])


def test_losses_of_several_cells_are_told_apart() -> None:
    """A contender that trains well with one batch and badly with another is both, each with its batch."""
    noise = np.array(LOSS_NOISE)
    found = trained({"": BASE, "int4:64": BASE + noise})
    found += trained({"": BASE, "int4:64": BASE + 0.5 + noise}, tokens_per_rank=1024)
    told = asked(found, "Does int4 train as well?")
    assert told.verdict == "in part"
    assert "not inferior: qgZ (gradients int4:64) on 512 tokens/rank +0.0002" in told.sentences[0]
    assert "inferior: qgZ (gradients int4:64) on 1024 tokens/rank +0.5002" in told.sentences[0]


def test_seeds_that_ended_without_a_loss_are_counted() -> None:
    """Six of twelve seeds that failed are no evidence of those that did not."""
    twelve = np.concatenate([BASE, BASE + 0.01])
    records = trained({"": twelve, "int4:64": twelve + np.tile(LOSS_NOISE, 2)})
    lost = [
        record_of(trial, failure=CRASHED) if trial.strategy == "qgz" and trial.seed >= 6 else one
        for one in records
        for trial in [Trial.from_canonical(one.trial)]
    ]
    told = asked(lost, "Does it train as well?")
    assert told.verdict == "cannot be told"
    assert told.sentences[0].startswith(
        "Cannot be told by loss: 6 of 12 seeds of qgZ (gradients int4:64) ended"
    )


@pytest.mark.parametrize("answer_by", ["step", "memory", "error", "loss", "bytes", "trials"])
def test_no_records_break_the_answer(answer_by: str) -> None:
    """Trials that decode beside training that failed, peers alone, one contender alone, by any quantity."""
    decoded = [one for one in committed("generation") if one.trial["strategy"] in ("zero3", "zeropp")]
    failed = changed(ran("zero3", 0, 1.0, failed=True), pool=decoded[0].pool)
    mixed = [*decoded[:4], failed]
    peers = [ran(name, repeat, 1.0) for name in ("ddp", "fsdp2") for repeat in (0, 1)]
    single = [ran("zero3", repeat, 1.0) for repeat in (0, 1)]
    for records in (mixed, peers, single):
        told = asked(records, "How?", answer=answer_by).sentences
        assert told[0].endswith(".")
        assert "nan" not in " ".join(told)
        assert ", ." not in " ".join(told)


def test_rates_without_a_break_even_are_a_sentence() -> None:
    """Yes and its reason in one sentence, and an unshaped link by what it achieved."""
    each = product(range(6), (("zero3", 1.0), ("zeropp", 0.5)), ("50 Mbit/s", "unshaped"))
    found = [ran(name, repeat, took, cluster=Cluster(rate=rate)) for repeat, (name, took), rate in each]
    told = asked(found, "Does ZeRO++ pay at every rate?")
    assert told.sentences[0].startswith("Yes, no break-even was found up to the highest rate")
    assert "an unshaped link (" in told.sentences[0]
    assert "nan" not in " ".join(told.sentences)


def test_what_a_sentence_leaves_out_is_counted() -> None:
    """Of more contenders than a sentence names, the others are counted."""
    assert listed_most([str(n) for n in range(9)]).endswith("7 and 8")
    assert listed_most([str(n) for n in range(12)]).endswith("7 and 8 (3 more in the tables)")
