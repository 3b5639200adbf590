"""The first sentence of a page answers its suite's question, by records whose outcomes are known."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from harness.records.trial_record import Record
from harness.suites.trial import Cluster, Optimizer, PolicyChanges, Trial
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


def answer_to(question: str, records: Sequence[Record], **fields: Any) -> Answer:
    """The answer to a question by records with these fields, in their order."""
    of_suite = [changed(r, question=question, order=order, **fields) for order, r in enumerate(records)]
    return answer(derive(frames_of(of_suite)))


def timed_record(
    strategy: str, repeat: int, seconds: float, *, failed: bool = False, sweep: int = 0, **fields: Any
) -> Record:
    """The record of a trial with steps of ``seconds`` times a noise, or of a failure."""
    trial = Trial(strategy=strategy, repeat=repeat, **{"cluster": Cluster(rate="50 Mbit/s"), **fields})
    if failed:
        return record_of(trial, failure=CRASHED, sweep=sweep)
    noise = NOISE[(2 * repeat + len(str(trial.canonical()))) % len(NOISE)]
    record = changed_steps(record_of(trial), lambda _: {"total": seconds * noise})
    return changed(record, sweep=sweep)


def timed_records(seconds: Mapping[tuple[str, str], float], repeats: int = 6) -> list[Record]:
    """Records of trials by (strategy, weights' codec), with steps of these seconds."""
    return [
        timed_record(strategy, repeat, step, policy=PolicyChanges(weights=weights or None))
        for repeat, ((strategy, weights), step) in product(range(repeats), seconds.items())
    ]


def numbers(sentence: str) -> list[float]:
    return list(map(float, re.findall(r"[+-]?\d+\.\d+", sentence)))


@pytest.mark.parametrize(
    ("seconds", "verdict", "start"),
    [(0.8, "yes", "Yes, a step of ZeRO++ with weights int6:2048 is 1.25 ("),
     (1.25, "no", "No, a step of ZeRO++ with weights int6:2048 is 0.80 ("),
     (1.0, "cannot be told", "Cannot be told (")],
)  # fmt: skip
def test_codecs_of_one_strategy_are_compared_with_each_other(
    seconds: float, verdict: str, start: str
) -> None:
    """Whether 6-bit weights pay is answered by 6 against 8 bits, also where ZeRO-3 and DDP ran."""
    steps = {
        ("zero3", ""): 2.0,
        ("ddp", ""): 3.0,
        ("zeropp", "int8:2048"): 1.0,
        ("zeropp", "int6:2048"): seconds,
    }
    lead = answer_to("Do 6-bit weights pay on three nodes?", timed_records(steps))
    assert (lead.quantity, lead.verdict, lead.figure) == ("step", verdict, "speedup")
    assert lead.sentences[0].startswith(start)
    assert "as with weights int8:2048" in lead.sentences[0]
    assert "pairs would tell" in lead.sentences[0] or verdict != "cannot be told"


def test_a_break_even_is_stated_with_its_interval() -> None:
    """Where ZeRO++ gains at one rate and loses at the next, the rate between is the answer."""
    records = [
        timed_record(strategy, repeat, step, cluster=Cluster(rate=f"{rate} Mbit/s"))
        for repeat, (rate, fast) in product(range(6), ((50, 0.5), (200, 2.0)))
        for strategy, step in (("zero3", 1.0), ("zeropp", fast))
    ]
    lead = answer_to("From which rate on does ZeRO++ no longer pay?", records)
    assert lead.quantity == "rate"
    first = lead.sentences[0]
    assert first.startswith("ZeRO++ is as fast as ZeRO-3 at ")
    mbit, low, high = map(float, re.findall(r"[\d.]+", first.partition(" at ")[2])[:3])
    assert 80 < mbit < 115
    assert low < mbit < high


def validated_records(ends: Mapping[str, Sequence[float]], steps: int = 120, **fields: Any) -> list[Record]:
    """Records by gradients' codec ("" is ZeRO-3), a seed for each loss at the end."""
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
    """The front has those whose loss none with as few bytes undercuts; others are named with who beats them.

    The one that trains as well as the baseline and sends least comes first.
    """
    noise = np.array(LOSS_NOISE)
    above = {
        "zero3": 0.0 * noise, "sdp4bit": 0.4 + noise, "zeropp": 0.3 - noise, "loco": 0.31 + noise,
        "qsdp": 0.2 + noise, "fp4-gather": 0.25 - noise, "fp8-gather": 0.001 - noise / 100,
        "exact": 20 * noise[::-1],
    }  # fmt: skip
    records = [
        ending_at(Trial(strategy=strategy, seed=seed, steps=120, warmup=0, validate_every=120), float(end))
        for strategy, worse in above.items()
        for seed, end in enumerate(BASE + worse)
    ]
    lead = answer_to("Which bytes buy which loss?", records)
    assert lead.figure == "frontier"
    least, first, second, *_ = lead.sentences
    assert least.startswith("FP8 gather trains as well as ZeRO-3 and sends least of those: ")
    assert first.startswith("Nobody who sends as few bytes between nodes has a lower loss than SDP4Bit (")
    front, _, unsure = first.partition("; of ")
    assert unsure == "exact (fp32) it cannot be told."
    assert [name for name in ("ZeRO++ (", "QSDP (", "FP8 gather (", "ZeRO-3 (") if name not in front] == []
    assert "LoCo (by ZeRO++)" in second
    assert "FP4 gather (by QSDP)" in second


@pytest.mark.parametrize(("worse", "verdict"), [(0.004, "Yes, "), (0.3, "No, ")])
def test_a_verdict_on_losses_is_against_the_suites_baseline(worse: float, verdict: str) -> None:
    """No ZeRO-3 ran: the verdict is against the named baseline, with difference, interval and margin."""
    noise = np.array(LOSS_NOISE)
    codecs = {"baseline": {"int8:2048": BASE}, "contrast": {"int4:128": BASE + worse + noise}}
    records = [changed(r, role=role) for role, ends in codecs.items() for r in validated_records(ends)]
    lead = answer_to(
        "Is int4 with block 128 as good as int8 with block 2048: by loss, by bytes, by seconds?", records
    )
    first = lead.sentences[0]
    claim = "as well as" if worse < 0.1 else "worse than"
    assert first.startswith(f"{verdict}qgZ (gradients int4:128) trains {claim} ")
    difference, low, high, margin, *_ = numbers(first.partition("differs by")[2])
    assert low < difference < high
    assert (difference, margin) == (pytest.approx(worse, abs=1e-3), pytest.approx(0.02))
    assert any("of qgZ (gradients int8:2048)'s bytes" in text for text in lead.sentences)
    assert any(text.startswith("By seconds ") for text in lead.sentences)


def test_short_runs_show_their_losses_without_a_verdict() -> None:
    """The lead gives differences after 60 steps, and says that a verdict takes 100."""
    records = validated_records({"": BASE, "int4:64": BASE + 0.004}, steps=60)
    lead = answer_to("Does int4 train as well?", records)
    assert lead.verdict == "cannot be told"
    assert lead.sentences[0].startswith(
        "Cannot be told by loss (60 steps, where a verdict takes 100): losses minus ZeRO-3's"
    )
    assert "+0.0040" in lead.sentences[0]
    # Validated once, in a short run: seconds answer, and a sentence says what a verdict on losses takes.
    records = validated_records({"": BASE, "int8:64": BASE}, steps=30)
    records = [changed(record, trial={**record.trial, "validate_every": 0}) for record in records]
    lead = answer_to("Does int8 train as well as 16 bits?", records)
    assert lead.quantity == "step"
    few = "Validation losses after 30 steps are not compared: a verdict takes 100 steps and 6 seeds."
    assert few in lead.sentences


def test_a_suite_may_name_its_quantity() -> None:
    """``answer`` overrides the quantity of the axes."""
    assert answer_to("How much?", TWO).quantity == "step"
    lead = answer_to("Does it send less?", TWO, answer="bytes")
    assert (lead.quantity, lead.verdict, lead.figure) == ("bytes", "yes", "volume")
    assert lead.sentences[0].startswith("Yes, between nodes ZeRO++ sends 0.")
    lead = answer_to("Does everything run?", TWO, answer="trials")
    assert lead.sentences[0] == "Yes, all 12 trials finished."


def test_disturbed_trials_scale_the_caveat() -> None:
    """They are counted; if they are more than half, seconds are not to be relied on; none, no sentence."""

    def last(count: int) -> str:
        disturbed = [taken_by_others(record, 0.5) for record in TWO[:count]]
        return answer_to("How much?", [*disturbed, *TWO[count:]]).sentences[-1]

    assert last(3) == "Others took more than 5% of the processors' time in 3 of 12 trials."
    assert last(10).startswith("The seconds are not to be relied on: others took more than 5% ")
    assert "10 of 12 trials" in last(10)
    assert "processors' time" not in last(0)


def test_links_of_other_rates_are_a_caveat() -> None:
    """Where a configuration's link was slower than its baseline's, the lead says so."""
    records = [on_link(r, 20.0) if r.trial["strategy"] == "zeropp" else r for r in TWO]
    assert "achieved rates more than 10% apart" in answer_to("How much?", records).sentences[-1]


ZERO3, ZEROPP = ("zero3", ""), ("zeropp", "")
TWO = timed_records({ZERO3: 2.0, ZEROPP: 1.0})
ONE_SETTING_FAILED = [
    timed_record(strategy, repeat, step, failed=(strategy, tokens) == ("zero3", 1024), tokens_per_rank=tokens)
    for repeat, tokens in product(range(6), (512, 1024))
    for strategy, step in (("zero3", 1.0), ("zeropp", 0.5), ("qwz", 0.8))
]
OF_EQUAL_BLOCKS = [
    timed_record("qgz", repeat, step, policy=PolicyChanges(gradients=codec))
    for repeat, (codec, step) in product(range(6), (("int4:256", 1.0), ("int4:256:asym", 0.8)))
]
TWO_SWEEPS = [
    timed_record(strategy, repeat, step, sweep=repeat // 6)
    for repeat, (strategy, step) in product(range(12), (("zero3", 1.0), ("zeropp", 0.5)))
]


FIRST: dict[str, tuple[list[Record], str, str]] = {  # sentence of an answer
    "few pairs have no interval, and how many would is said": (
        timed_records({ZERO3: 2.0, ZEROPP: 1.0}, repeats=2), "Is ZeRO++ faster?",
        r"Cannot be told \(2 pairs, where an interval takes 6\): a step of ZeRO\+\+ is 2\.0\d"),
    "nor have few sweeps, however many pairs they have": (
        TWO_SWEEPS, "Is ZeRO++ faster?",
        r"Cannot be told \(2 sweeps, where an interval takes 3\): a step of ZeRO\+\+ is "),
    "without ZeRO-3 the configuration that the suite lists first is the baseline": (
        timed_records({("zeropp", "int8:64"): 1.0, ("qwz", "int8:64"): 2.0}), "Which is faster?",
        r"A step of qwZ \(weights int8:64\) is 0\.5\d \(.* as ZeRO\+\+ \(weights int8:64\)'s"),
    "nobody else becomes the baseline of a setting whose own failed": (
        ONE_SETTING_FAILED, "How much do they bring?",
        r"A step of qwZ is 1\.2\d \(.*\) times as fast as ZeRO-3's and that of ZeRO\+\+ 2\.0\d \("),
    "two configurations are never both called by their blocks": (
        OF_EQUAL_BLOCKS, "Do asymmetric codes pay?",
        r".*with gradients int4:256:asym is 1\.2.*as with gradients int4:256 \("),
    "the opposite question has no yes": (TWO, "Is ZeRO++ slower than ZeRO-3?", r"A step of ZeRO\+\+ is "),
    "nor has one of the baseline": (TWO, "Is ZeRO-3 faster than ZeRO++?", r"A step of ZeRO\+\+ is "),
    "only those that a question names decide": (
        timed_records({ZERO3: 2.0, ZEROPP: 1.0, ("zero3-flat", ""): 3.0}),
        "Is ZeRO++ faster than ZeRO-3?", "Yes, "),
    "failures alone are no answer": (
        [record_of(Trial(strategy="zeropp"), failure=CRASHED)], "Is it faster?",
        r"Cannot be told: no trial has finished, and 1 trial failed\.$"),
}  # fmt: skip


@pytest.mark.parametrize(("records", "question", "first"), FIRST.values(), ids=FIRST)
def test_the_first_sentence(records: list[Record], question: str, first: str) -> None:
    """It answers the question as far as records of its configurations do."""
    assert re.match(first, answer_to(question, records).sentences[0])


def test_losses_of_several_settings_are_told_apart() -> None:
    """A configuration that trains well with one batch and badly with another is both, each with its batch."""
    noise = np.array(LOSS_NOISE)
    records = validated_records({"": BASE, "int4:64": BASE + noise})
    records += validated_records({"": BASE, "int4:64": BASE + 0.5 + noise}, tokens_per_rank=1024)
    lead = answer_to("Does int4 train as well?", records)
    assert lead.verdict == "in part"
    assert "not inferior: qgZ (gradients int4:64) on 512 tokens/rank +0.0002" in lead.sentences[0]
    assert "inferior: qgZ (gradients int4:64) on 1024 tokens/rank +0.5002" in lead.sentences[0]


def test_seeds_that_ended_without_a_loss_are_counted() -> None:
    """Where six of twelve seeds failed, the losses of the others give no verdict."""
    twelve = np.concatenate([BASE, BASE + 0.01])
    records = validated_records({"": twelve, "int4:64": twelve + np.tile(LOSS_NOISE, 2)})
    failed = [record_of(Trial.from_canonical(record.trial), failure=CRASHED) for record in records[-6:]]
    lead = answer_to("Does it train as well?", [*records[:-6], *failed])
    assert lead.verdict == "cannot be told"
    assert lead.sentences[0].startswith(
        "Cannot be told by loss: 6 of 12 seeds of qgZ (gradients int4:64) ended"
    )


@pytest.mark.parametrize("answer_by", ["step", "memory", "error", "loss", "bytes", "trials"])
def test_no_records_break_the_answer(answer_by: str) -> None:
    """Trials that decode beside training that failed, peers alone, one configuration alone, by any quantity."""
    decoded = [r for r in committed("generation") if r.trial["strategy"] in ("zero3", "zeropp")]
    failed = changed(timed_record("zero3", 0, 1.0, failed=True), pool=decoded[0].pool)
    mixed = [*decoded[:4], failed]
    peers = [timed_record(name, repeat, 1.0) for name in ("ddp", "fsdp2") for repeat in (0, 1)]
    single = [timed_record("zero3", repeat, 1.0) for repeat in (0, 1)]
    for records in (mixed, peers, single):
        sentences = answer_to("How?", records, answer=answer_by).sentences
        assert sentences[0].endswith(".")
        assert "nan" not in " ".join(sentences)
        assert ", ." not in " ".join(sentences)


def test_rates_without_a_break_even_are_a_sentence() -> None:
    """Yes and its reason stand in one sentence; an unshaped link is named by its achieved rate."""
    axes = product(range(6), (("zero3", 1.0), ("zeropp", 0.5)), ("50 Mbit/s", "unshaped"))
    records = [timed_record(name, i, step, cluster=Cluster(rate=rate)) for i, (name, step), rate in axes]
    lead = answer_to("Does ZeRO++ pay at every rate?", records)
    assert lead.sentences[0].startswith("Yes, no break-even was found up to the highest rate")
    assert "an unshaped link (" in lead.sentences[0]
    assert "nan" not in " ".join(lead.sentences)


def test_configurations_that_a_sentence_omits_are_counted() -> None:
    """Configurations beyond those that a sentence names are counted."""
    assert listed_most([str(n) for n in range(9)]).endswith("7 and 8")
    assert listed_most([str(n) for n in range(12)]).endswith("7 and 8 (3 more in the tables)")


@pytest.mark.parametrize("named", [True, False])
def test_a_baseline_by_its_optimizer_is_the_pages(*, named: bool) -> None:
    """By roles, optimizers are configurations of one setting, and losses and steps are compared.

    Without roles each is a setting.
    """
    records = []
    for seed, (optimizer, loss) in product(range(6), {"AdamW": 2.0, "SGD": 3.0}.items()):
        trial = Trial(
            strategy="zero3", seed=seed, steps=118, validate_every=30, optimizer=Optimizer(name=optimizer)
        )
        role = ("baseline" if optimizer == "AdamW" else "contrast") if named else ""
        records.append(changed(ending_at(trial, loss + LOSS_NOISE[seed]), role=role))
    found = answer_to("What does SGD cost?", records)
    if named:
        text = "ZeRO-3 (optimizer SGD) trains worse than ZeRO-3 (optimizer AdamW) by more than 1%"
        assert text in found.sentences[0]
        assert found.verdict == "no"
    else:
        assert "SGD" not in found.sentences[0]
