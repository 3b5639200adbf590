"""What parts of the fastest configuration bring, its memory, its phases, and the bytes that offload copies."""

from __future__ import annotations

import re
from functools import partial

from harness.records.trial_record import Record, Step
from tests.report.heads import head_of, timed
from tests.report.records import changed, changed_steps


def test_the_changes_of_the_fastest_configuration_are_ranked() -> None:
    """Alone, from the largest to the smallest, whatever its verdict; and in pairs, if there are two pairs."""
    alone = {"zero3": 2.0, "qwz": 1.5, "hpz": 2.0, "qgz": 1.6, "zeropp": 1.0}
    first = r" Of ZeRO\+\+'s changes alone, qwZ brings the largest speed-up: 1\.3\d \(95 % CI .*, n = 6\)\. "
    text = head_of(timed(alone)).sentence
    assert re.search(
        first + r"hpZ brings the smallest: (1\.0\d|0\.9\d) \(95 % CI .*, n = 6\), not significant\.", text
    )
    assert "pairs of these" not in text
    text = head_of(timed(alone | {"hpz": 1.8, "qwz+qgz": 1.2, "hpz+qgz": 1.4})).sentence
    assert re.search(
        first
        + r"hpZ brings the smallest: 1\.1\d \(.*\)\. Of pairs of these changes, qwZ\+qgZ brings the largest speed-up: "
        r"1\.6\d \(.*\)\.",
        text,
    )


def test_a_configuration_that_is_not_faster_has_no_ranked_changes() -> None:
    """Nor has one of whose changes only one was measured alone."""
    slow = {"zero3": 1.0, "qwz": 1.5, "hpz": 1.6, "qgz": 1.7, "zeropp": 2.0}
    assert "changes alone" not in head_of(timed(slow)).sentence
    assert "changes alone" not in head_of(timed({"zero3": 2.0, "qwz": 1.5, "zeropp": 1.0})).sentence


def test_the_fastest_in_the_baselines_memory_is_named() -> None:
    """Before the memory of the fastest of all, where that is larger than the baseline's."""
    text = head_of(timed({"zero3": 2.0, "qwz+qgz": 1.25, "zeropp": 1.0})).sentence
    assert re.search(
        r" Of the configurations that hold no more memory than ZeRO-3, qwZ\+qgZ has the largest speed-up: 1\.(5|6)\d "
        r"\(95 % CI .*, n = 6\)\. ZeRO\+\+ holds \d+\.\d MiB a rank where ZeRO-3 holds \d+\.\d MiB\.",
        text,
    ), text
    slower = head_of(timed({"zero3": 2.0, "qwz+qgz": 2.5, "zeropp": 1.0})).sentence
    assert "hold no more" not in slower
    assert "holds" not in slower


def phased(zeropp: tuple[float, float, float]) -> list[Record]:
    """Records whose ZeRO++ generates, scores and trains for these seconds, and ZeRO-3 for one second each."""

    def change(step: Step, parts: tuple[float, float, float]) -> dict[str, float]:
        seconds = {
            "generate": step.total * parts[0] / sum(parts),
            "score": step.total * parts[1] / sum(parts),
        }
        return seconds | {"exposed_generate": 0.0, "exposed_score": 0.0}

    own = {"zero3": (1.0, 1.0, 1.0), "zeropp": zeropp}
    records = timed({name: sum(parts) for name, parts in own.items()})
    return [changed_steps(record, partial(change, parts=own[record.trial["strategy"]])) for record in records]


def test_the_phases_of_a_step_with_the_largest_and_the_smallest_gain_are_named() -> None:
    """A loss of speed has its interval too; steps that only train have no phases."""
    text = head_of(phased((0.25, 1.0, 0.5))).sentence
    assert re.search(
        r" ZeRO\+\+'s speed-up is (3\.9|4\.0)\d \(.*\) in generation, the largest of 3 phases, and (1\.0|0\.9)\d "
        r"\(.*\) in scoring, the smallest, not significant\.",
        text,
    ), text
    text = head_of(phased((0.25, 1.0, 1.25))).sentence
    assert re.search(r" and 0\.(79|80|81) \(95 % CI .*\) in training, the smallest\.", text), text
    assert "phases" not in head_of(timed({"zero3": 2.0, "zeropp": 1.0})).sentence


def test_the_verdicts_have_a_column_for_each_phase_of_a_step() -> None:
    """Every configuration has its speed-up in each phase, with its mark; steps that only train have no such columns."""
    table = head_of(phased((0.25, 1.0, 1.25))).table
    cells = [table.column(f"Speed-up in {phase}").key for phase in ("generation", "scoring", "training")]
    baseline, zeropp = table.data[cells].to_numpy().tolist()
    assert baseline == ["1.00"] * 3
    forms = (r"(3\.9|4\.0)\d .* ▲", r"(1\.0|0\.9)\d .* ○", r"0\.(79|80|81) .* ▼")
    for cell, form in zip(zeropp, forms, strict=True):
        assert re.fullmatch(form, cell)
    others = head_of(timed({"zero3": 2.0, "zeropp": 1.0})).table
    assert not [column.title for column in others.columns if column.title.startswith("Speed-up in")]


def test_the_bytes_that_offload_copies_follow_a_sentence_on_memory() -> None:
    """Those of the fullest rank in a step, of the configuration that the sentence names."""
    records = timed({"zero3": 1.0, "zeropp": 1.0}, range(2))
    for number, record in enumerate(records):
        timed_steps = sum(not step.warmup for step in record.ranks[0].steps)
        ranks = [
            rank.model_copy(
                update={
                    "memory": rank.memory.model_copy(
                        update={"copied": {"gradients": timed_steps * size * 2**20}}
                    )
                }
            )
            for size, rank in enumerate(record.ranks, start=1)
            if rank.memory is not None
        ]
        records[number] = changed(record, ranks=ranks)
    text = head_of(records, answer="memory").sentence
    assert text.endswith(" ZeRO++ copies 4.00 MiB a rank in a step between device and host.")
    assert "copies" not in head_of(timed({"zero3": 1.0, "zeropp": 1.0}, range(2)), answer="memory").sentence
