"""Whatever the records are, a page says what it can, or one line says why there is none."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.records.trial_record import Failure, Record, RecordError, Validation, with_digest, write
from harness.suites.trial import Cluster, PeerSettings, Trial
from report.build import build, every_table
from report.compare import compare
from report.data.frames import frames_of
from report.data.metrics import derive
from report.draw.figure import style_of
from report.figures.all_figures import FIGURES
from report.page import render
from report.tables import latex
from report.verdicts import verdicts
from tests.report.records import (
    CRASHED,
    POOL,
    changed,
    changed_steps,
    committed,
    ending_at,
    on_link,
    record_of,
)

AT_50 = {"cluster": Cluster(rate="50 Mbit/s"), "steps": 4, "warmup": 1}
LONG = {"cluster": Cluster(rate="50 Mbit/s"), "steps": 120, "warmup": 0, "validate_every": 30}
INTERRUPTED = Failure(kind="interrupted", message="Ctrl-C", log=None)
DIVERGED = Failure(kind="wrong", message="the loss of rank 0 is nan in step 3", log=None)
BOTH = ("zero3", "zeropp")


def runs(*strategies: str, repeats: Sequence[int] = range(7), **fields: Any) -> list[Record]:
    return [
        record_of(Trial(strategy=name, repeat=repeat, **(AT_50 | fields)))
        for repeat in repeats
        for name in strategies
    ]


def failed(*strategies: str, failure: Failure = CRASHED, **fields: Any) -> list[Record]:
    return [record_of(Trial(strategy=name, **(AT_50 | fields)), failure=failure) for name in strategies]


def validated(loss_of: Callable[[str, int], float], *, seeds: int = 7) -> list[Record]:
    """Records of both whose last validation is ``loss_of`` a strategy and a seed."""
    records = []
    for seed in range(seeds):
        for name in BOTH:
            losses = (3.0, 2.5, 2.2, loss_of(name, seed))
            curve = [
                Validation(step=30 * (part + 1), loss=loss, train_seconds=part + 1.0, inter_bytes=0)
                for part, loss in enumerate(losses)
            ]
            records.append(record_of(Trial(strategy=name, seed=seed, **LONG), validations=curve))
    return records


def without_bytes(record: Record) -> Record:
    assert record.interfaces is not None
    return changed(
        record,
        ranks=[rank.model_copy(update={"ledger": []}) for rank in record.ranks],
        interfaces=[i.model_copy(update={"tx_bytes": 0, "tx_packets": 0}) for i in record.interfaces],
    )


def at_rates(*rates: str, without: tuple[str, str] = ("", "")) -> list[Record]:
    records = [
        (rate, record) for rate in rates for record in runs(*BOTH, cluster=Cluster(rate=f"{rate} Mbit/s"))
    ]
    return [record for rate, record in records if (rate, record.trial["strategy"]) != without]


PAGES: dict[str, tuple[Callable[[], list[Record]], str]] = {  # with the beginning of the sentence
    "all trials failed": (lambda: failed(*BOTH), "No trial has finished: 2 failed."),
    "all were stopped": (
        lambda: failed(*BOTH, failure=INTERRUPTED),
        "No trial has finished: 2 were interrupted.",
    ),
    "one trial": (lambda: runs("zeropp", repeats=[0]), "Nothing is compared: 1 trial finished, all of Z"),
    "one configuration": (lambda: runs("zeropp"), "Nothing is compared: 7 trials finished, all of ZeRO"),
    "one configuration, validated": (
        lambda: [ending_at(Trial(strategy="zeropp", seed=seed, **LONG), 2.0) for seed in range(7)],
        "Nothing is compared: 7 trials finished, all of ZeRO",
    ),
    "the baseline failed": (
        lambda: failed("zero3") + runs("zeropp", repeats=range(2)),
        "Nothing is compared: 2 trials finished, .*; 1 trial failed",
    ),
    "a configuration diverged": (
        lambda: [r for r in validated(lambda _, seed: 2 + seed / 50) if r.trial["strategy"] == "zero3"]
        + failed("zeropp", failure=DIVERGED),
        "Nothing is compared: 7 trials finished, .*; 1 trial failed",
    ),
    "ties of seconds": (
        lambda: [changed_steps(r, lambda _: {"total": 1.0}) for r in runs(*BOTH)],
        r"ZeRO\+\+ does not differ significantly from ZeRO-3 in step time \(7 pairs\); more than 200 pairs ",
    ),
    "ties of losses": (lambda: validated(lambda *_: 2.0), r"ZeRO\+\+ does not differ .* in validation loss "),
    "losses of zero": (lambda: validated(lambda *_: 0.0), r"ZeRO\+\+ does not differ significantly "),
    "unequal repeats": (
        lambda: runs("zero3") + runs("zeropp", repeats=range(2)),
        r"Inconclusive \(two pairs; a verdict needs six\)",
    ),
    "repeats that nobody shares": (
        lambda: runs("zero3", repeats=range(3)) + runs("zeropp", repeats=range(3, 6)),
        "Nothing is compared: 6 trials finished, and no configuration shares setting, seed and repeat with",
    ),
    "zero bytes": (lambda: list(map(without_bytes, runs(*BOTH))), r"ZeRO\+\+ is 3.5\dx faster than ZeRO-3"),
    "one node": (
        lambda: runs(*BOTH, cluster=Cluster(nodes=1, ranks_per_node=4)), r"(A step|ZeRO\+\+ )",
    ),
    "one rank": (
        lambda: runs(*BOTH, cluster=Cluster(nodes=1, ranks_per_node=1)), r"(A step|ZeRO\+\+ )",
    ),
    "nothing of links and interfaces": (
        lambda: [changed(r, link=None, interfaces=None) for r in runs(*BOTH)], r"ZeRO\+\+ is ",
    ),
    "two rates that came out equal": (
        lambda: [on_link(r, 50.0) for r in at_rates("25", "100")], r"With \d+ Mbit/s, ZeRO\+\+ is ",
    ),
    "a rate without a configuration": (
        lambda: at_rates("25", "100", "400", without=("100", "zeropp")),
        r"With 25 Mbit/s, ZeRO\+\+ is .*; of 2 comparisons of step time, 2 are better\.",
    ),
    "a rate without a baseline": (
        lambda: at_rates("25", "100", without=("100", "zero3")), r"With 25 Mbit/s, ZeRO\+\+ is ",
    ),
    "whole sweeps of two machines": (
        lambda: [
            changed(record, sweep=sweep, pool=pool, machine=record.machine | {"boot": pool})
            for sweep, pool in enumerate((POOL, "ffff00000000"))
            for record in runs(*BOTH, repeats=range(3 * sweep, 3 * sweep + 3))
        ],
        r"ZeRO\+\+ is 3\.\d\dx faster than ZeRO-3 \(95 % CI \d\.\d\d to \d\.\d\d, n = 6 at 2 occasions\)",
    ),
    "peers that differ only in the type that they compute in": (
        lambda: [
            record for compute in ("fp32", "bf16")
            for record in runs("ddp", peer=PeerSettings(compute=compute))
        ],
        ".",
    ),
    "a single generation": (lambda: committed("generation")[:1], "Nothing is compared: 1 trial finished"),
}  # fmt: skip


@pytest.mark.parametrize(("records", "first"), PAGES.values(), ids=PAGES)
def test_a_page_says_what_it_can(records: Callable[[], list[Record]], first: str, tmp_path: Path) -> None:
    """With no number that is none in its text."""
    made = [changed(record, order=order) for order, record in enumerate(records())]
    derived = derive(frames_of(made))
    style = style_of(derived)
    drawn = [figure.draw(derived, tmp_path, style, ("svg",)) for figure in FIGURES]
    shown = every_table(derived)
    page = render(derived, list(filter(None, drawn)), shown)
    assert latex.numbers(shown, derived)
    assert re.match(first, verdicts(derived).sentence)
    text = re.sub("<[^>]+>", " ", re.sub(r'src(set)?="[^"]*"', "", page.split("</style>")[1]))
    assert re.findall(r".{20}\b(?:nan|inf|None|NaT)\b.{20}", text) == []


REFUSED: dict[str, tuple[Callable[[], list[Record]], str]] = {
    "two machines in one sweep": (
        lambda: [changed(r, pool=pool) for r, pool in zip(runs(*BOTH), (POOL, "ffff0000") * 7, strict=True)],
        r"records of 2 machines or versions of the code in one sweep cannot be compared",
    ),
    "losses that are no numbers": (
        lambda: validated(lambda name, _: math.nan if name == "zeropp" else 2.0),
        r"not a record: validations.3.loss: .*; delete the file and run again",
    ),
    "steps without seconds": (
        lambda: [changed_steps(r, lambda _: {"total": 0.0}) for r in runs(*BOTH)],
        r"record [0-9a-f]{12} has a step of 0 s, so that no ratio can be computed; delete the record's file, and",
    ),
    "no timed steps": (
        lambda: [changed_steps(r, lambda _: {"warmup": True}) for r in runs(*BOTH)], "has no timed step",
    ),
    "a link that carries nothing": (lambda: [on_link(r, 0.0) for r in runs(*BOTH)], "has a link of 0 Mbit/s"),
    "no ranks": (
        lambda: [changed(r, ranks=[]) for r in runs(*BOTH)],
        "has no rank, so that no ratio can be computed; delete the record's file, and run",
    ),
    "units without elements": (
        lambda: [changed(r, units=[("a", 0, 0)]) for r in runs(*BOTH)], "has units without elements, so that no",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("records", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_drawn_is_refused_in_one_line(
    records: Callable[[], list[Record]], message: str, tmp_path: Path
) -> None:
    """It names the record and the way out, and nothing is written; a comparison of folders says the same."""
    for record in records():
        write(tmp_path, with_digest(record))
    with pytest.raises(RecordError, match=message) as refused:
        build(tmp_path)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "report.html").exists()
    if "machines" not in message and "pools" not in message:
        with pytest.raises(RecordError, match=message):
            compare(tmp_path, tmp_path, 0.02)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_seeds_whose_loss_is_no_number_are_counted_as_without_one(loss: float) -> None:
    """Of records that were not written, such as those of a sweep that is under way."""
    records = validated(lambda name, seed: loss if seed < 2 and name == "zeropp" else 2 + seed / 50, seeds=8)
    question = "Does ZeRO++ train as well as ZeRO-3?"
    derived = derive(frames_of([changed(record, question=question) for record in records]))
    sentence = verdicts(derived).sentence
    assert sentence.startswith("Inconclusive (2 of 8 seeds of ZeRO++ ended without a loss): after ")
