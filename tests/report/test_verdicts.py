"""The head of a page: values, verdicts, marks and the sentence, by records whose outcomes are known."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest

from harness.records.confidence_intervals import Interval
from harness.records.trial_record import Failure, Record
from harness.suites.trial import Cluster, Optimizer, PolicyChanges, Trial
from report.build import every_table
from report.data.frames import frames_of
from report.data.metrics import derive
from report.data.text import plus_or_minus
from report.page import render
from report.tables import latex
from report.verdicts import MARKS, MOST_OPEN, Verdicts, verdicts
from tests.report.heads import AT_50, NOISE, SEEDS, erring, head_of, timed, validated
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


def rows_of(head: Verdicts) -> dict[str, dict[str, str]]:
    """Printed cells by configuration, which is one, and title."""
    titles = [column.title for column in head.table.columns]
    rows = [dict(zip(titles, row, strict=True)) for row in head.table.rows()]
    return {row["Configuration"]: row for row in rows}


def csv_of(head: Verdicts) -> pd.DataFrame:
    return pd.read_csv(io.StringIO(head.table.csv()))


def bytes_of(contrast: str, **policy: Any) -> list[Record]:
    """Records of ZeRO-3 and of a strategy with changes of its policy."""
    pairs = [("zero3", {}), (contrast, policy)]
    return [
        record_of(Trial(strategy=name, repeat=repeat, policy=PolicyChanges(**changes), cluster=AT_50))
        for repeat in (0, 1)
        for name, changes in pairs
    ]


KINDS: dict[str, tuple[Callable[[], list[Record]], str, str, str, str, str]] = {
    # records, the quantity asked for, configuration, its cell (or what it matches), verdict, the sentence
    "faster": (
        lambda: timed({"zero3": 2.0, "zeropp": 1.0}), "", "ZeRO++", r"2\.0\d ± 0\.0\d ▲", "better",
        r"ZeRO\+\+ is 2\.0\dx faster than ZeRO-3 \(95 % CI within this start [12]\.\d\d to 2\.\d\d, n = 6\)\.",
    ),
    "slower": (
        lambda: timed({"zero3": 1.0, "zeropp": 2.0}), "", "ZeRO++", r"0\.50 ± 0\.01 ▼", "worse",
        (r"A step of ZeRO\+\+ takes 2\.\d\dx as long as ZeRO-3's \(95 % CI within this start 1\.\d\d to 2\.\d\d, "
        r"n = 6\)\."),
    ),
    "equally fast": (
        lambda: timed({"zero3": 1.0, "zeropp": 1.0}), "", "ZeRO++", r"1\.00 ± 0\.01 ○", "not significant",
        (r"ZeRO\+\+ does not differ significantly from ZeRO-3 in step time \(6 pairs\); .*\d+ pairs would show "
        "a difference of this size."),
    ),
    "fewer bytes": (
        lambda: bytes_of("zeropp"), "bytes", "ZeRO++", r"0\.2\d\d ▲", "better",
        r"ZeRO\+\+ sends 0\.2\d\d of ZeRO-3's bytes between nodes\.",
    ),
    "more bytes": (
        lambda: bytes_of("zero3-flat"), "bytes", "flat ZeRO-3", r"1\.50 ▼", "worse",
        r"flat ZeRO-3 sends 1\.50 times ZeRO-3's bytes between nodes\.".replace("flat", "Flat", 1),
    ),
    "the same bytes": (
        lambda: bytes_of("zero3", prefetch=0), "bytes", "ZeRO-3 (prefetch 0)", r"1\.00 ○", "not significant",
        r"No configuration differs from ZeRO-3 in bytes between nodes\.",
    ),
    "less error": (
        lambda: erring({"int4:256": 0.02, "int8:256": 0.0002}), "error", "qgZ (g int8:256)", r"0\.000200.* ▲",
        "better", (r"The gradient error \(vNMSE\) of qgZ \(gradients int8:256\) is 0\.010x that of qgZ \(gradients "
        r"int4:256\) \(95 % CI 0\.010 to 0\.010, n = 6\)\. qgZ \(gradients int8:256\) sends 1\.\d+ times the bytes of "
        r"qgZ \(gradients int4:256\) between nodes\."),
    ),
    "more error": (
        lambda: erring({"int4:256": 0.02, "int3:256": 0.2}), "error", "qgZ (g int3:256)", r"0\.200.* ▼",
        "worse", (r"The gradient error \(vNMSE\) of qgZ \(gradients int3:256\) is 10x that of qgZ \(gradients "
        r"int4:256\) \(95 % CI 10 to 10, n = 6\)\. qgZ \(gradients int3:256\) sends 0\.9\d+ of the bytes of qgZ "
        r"\(gradients int4:256\) between nodes\."),
    ),
    "the same error": (
        lambda: erring({"int4:256": 0.02, "int4:256:asym": 0.02}), "error", "qgZ (g int4:256:asym)",
        r"0\.0200.* ○", "not significant", (r"qgZ \(gradients int4:256:asym\) does not differ significantly from "
        r"qgZ \(gradients int4:256\) in gradient error \(6 pairs\); more than 200 pairs would show .*"),
    ),
    "a higher loss": (
        lambda: validated({"": 0.0, "int4:64": 0.3}), "loss", "qgZ (g int4:64)", r"\+0\.3000 ± 0\.00\d\d ▼", "worse",
        (r"After 120 steps the validation loss of qgZ \(gradients int4:64\) is 0\.300 nats higher than ZeRO-3's "
        r"\(95 % CI 0\.2\d\d to 0\.3\d\d, 6 seeds\), beyond the margin of 0\.022 nats\."),
    ),
    "a lower loss": (
        lambda: validated({"": 0.0, "int4:64": -0.3}), "loss", "qgZ (g int4:64)", r"-0\.3000 ± 0\.00\d\d ▲", "better",
        (r"After 120 steps the validation loss of qgZ \(gradients int4:64\) is 0\.300 nats lower than ZeRO-3's "
        r"\(95 % CI 0\.2\d\d to 0\.3\d\d, 6 seeds\)\."),
    ),
    "a loss that is higher within the margin": (
        lambda: validated({"": 0.0, "int4:64": 0.01}), "loss", "qgZ (g int4:64)", r"\+0\.0100 ± 0\.00\d\d ▽",
        "higher within the margin", (r"After 120 steps .* is 0\.0100 nats higher than ZeRO-3's \(95 % CI .*, 6 "
        r"seeds\), within the margin of 0\.022 nats\."),
    ),
    "the same loss": (
        lambda: validated({"": 0.0, "int4:64": 0.0}), "loss", "qgZ (g int4:64)", r"[+-]0\.0000 ± 0\.00\d\d ○",
        "not significant", (r"qgZ \(gradients int4:64\) does not differ significantly from ZeRO-3 in validation loss "
        r"\(6 seeds\); more than 200 seeds would show a difference of this size\. qgZ \(gradients int4:64\) reaches "
        r"ZeRO-3's final validation loss 1\.3\dx as fast \(95 % CI within this start 1\.\d\d to 1\.\d\d\)\."),
    ),
    "more memory": (
        lambda: bytes_of("zeropp"), "memory", "ZeRO++", r"\d\d\.\d \(1\.\d\d\) ▼", "worse",
        r"ZeRO\+\+ holds (\d\d\.\d) MiB a rank where ZeRO-3 holds \d\d\.\d MiB\.",
    ),
    "the same memory": (
        lambda: bytes_of("qgz"), "memory", "qgZ", r"\d\d\.\d \(1\.00\) ○", "not significant",
        r"No configuration differs from ZeRO-3 in memory\.",
    ),
    "less memory": (
        lambda: [
            changed(record, role="baseline" if record.trial["strategy"] == "zeropp" else "contrast")
            for record in bytes_of("zeropp")
        ],
        "memory", "ZeRO-3", r"\d\d\.\d \(0\.\d\d\) ▲", "better",
        r"ZeRO-3 holds (\d\d\.\d) MiB a rank where ZeRO\+\+ holds \d\d\.\d MiB\.",
    ),
}  # fmt: skip
TITLES = {"": "Speed-up", "bytes": "Bytes between nodes", "error": "Error (vNMSE)",
          "loss": "Change of loss, nats", "memory": "Memory, MiB a rank"}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_an_effect_has_its_value_its_verdict_and_its_sentence(kind: str) -> None:
    """Of every quantity, in both directions and without a difference; the baseline is the first row."""
    records, asked, name, cell, verdict, sentence = KINDS[kind]
    head = head_of(records(), **({"answer": asked} if asked else {}))
    row = rows_of(head)[name]
    assert re.fullmatch(cell, row[TITLES[asked]]), row
    raw = csv_of(head).set_index("configuration")
    (column,) = [column for column in head.table.columns if column.title == TITLES[asked]]
    assert raw.loc[name, f"{column.name}_verdict"] == verdict
    assert re.fullmatch(sentence, head.sentence), head.sentence
    first = head.table.rows()[0]
    assert first[1] == "baseline"
    assert not {*first[-1]} & {*MARKS.values()} - {MARKS["not measured"]}
    assert head.quantity == (asked or "step")


NOTHING: dict[str, tuple[Callable[[], list[Record]], str]] = {
    "failed and interrupted": (
        lambda: [
            *(record_of(Trial(strategy=name), failure=CRASHED) for name in ("zero3", "zeropp", "qwz")),
            record_of(Trial(strategy="hpz"), failure=Failure(kind="interrupted", message="Ctrl-C", log=None)),
        ],
        "No trial has finished: 3 failed, 1 was interrupted.".replace(", 1", " and 1"),
    ),
    "one configuration alone": (
        lambda: [*timed({"zeropp": 1.0}, range(2)), record_of(Trial(strategy="zero3", cluster=AT_50), failure=CRASHED)],
        "Nothing is compared: 2 trials finished, all of ZeRO++; 1 trial failed.",
    ),
    "repeats that nobody shares": (
        lambda: timed({"zero3": 1.0}, range(3)) + timed({"zeropp": 1.0}, range(3, 6)),
        (
            "Nothing is compared: 6 trials finished, and no configuration shares setting, seed and repeat with the "
            "baseline."
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("records", "sentence"), NOTHING.values(), ids=NOTHING)
def test_where_nothing_is_measured_the_sentence_says_why(
    records: Callable[[], list[Record]], sentence: str
) -> None:
    """And there are no verdicts on seconds."""
    head = head_of(records())
    assert head.sentence == sentence
    assert "▲" not in head.table.markdown_rows()


def test_a_setting_without_nodes_has_no_bytes_between_them() -> None:
    """A column that is nowhere measured is left out."""
    alone = Cluster(nodes=1, ranks_per_node=4)
    head = head_of(timed({"zero3": 2.0, "zeropp": 1.0}, cluster=alone))
    titles = [column.title for column in head.table.columns]
    assert "Bytes between nodes" not in titles
    assert "Change of loss, nats" not in titles
    assert "Setting" not in titles
    assert titles[:3] == ["Configuration", "Change", "Speed-up"]


def test_ranks_that_are_threads_have_no_column_of_speed_ups() -> None:
    """They take turns, so that no step of theirs is timed."""
    for cluster, timed_steps in ((AT_50, True), (Cluster(ranks="threads"), False)):
        head = head_of(timed({"zero3": 2.0, "zeropp": 1.0}, cluster=cluster), answer="bytes")
        titles = [column.title for column in head.table.columns]
        assert ("Speed-up" in titles) is timed_steps
        assert "Bytes between nodes" in titles


def test_the_change_is_the_policy_fields_that_differ_from_the_baselines() -> None:
    """In short; a peer, which has no policy, has none."""
    head = head_of(timed({"zero3": 2.0, "zeropp": 1.0, "ddp": 3.0, "zero3-flat": 3.0}))
    changes = {name: row["Change"] for name, row in rows_of(head).items()}
    assert changes == {
        "ZeRO-3": "baseline", "flat ZeRO-3": "gather flat, reduce ring", "DDP": "",
        "ZeRO++": "weights int8:2048, hpZ 2, gradients int4:256:clip",
    }  # fmt: skip
    assert "DDP sends fp32" in head.table.caption


def test_the_change_is_that_of_the_rows_own_setting() -> None:
    """A node's copy of the weights belongs to 4 ranks on one node of four, and to 2 on two nodes of two."""
    places = (Cluster(nodes=1, ranks_per_node=4), Cluster(nodes=2, ranks_per_node=2, rate="50 Mbit/s"))
    records = [
        record_of(Trial(strategy=name, repeat=repeat, cluster=cluster))
        for cluster in places
        for repeat in (0, 1)
        for name in ("zero3", "zeropp")
    ]
    table = head_of(records).table
    titles = [column.title for column in table.columns]
    rows = [dict(zip(titles, row, strict=True)) for row in table.rows()]
    changes = [row["Change"].split(", ")[1] for row in rows if row["Configuration"] == "ZeRO++"]
    assert changes == ["hpZ 4", "hpZ 2"]


def test_a_peer_may_be_the_baseline() -> None:
    """It is if the suite says so; a peer's bytes are those of the interfaces, and have an interval."""
    records = timed({"ddp": 2.0, "zeropp": 1.0})
    named = [changed(r, role="baseline" if r.trial["strategy"] == "ddp" else "contrast") for r in records]
    head = head_of(named)
    assert re.match(r"ZeRO\+\+ is 2\.0\dx faster than DDP ", head.sentence)
    assert list(rows_of(head)) == ["DDP", "ZeRO++"]
    assert rows_of(head)["ZeRO++"]["Bytes between nodes"].endswith("▲")
    slower = head_of(timed({"zero3": 1.0, "fsdp2": 4.0}))
    assert slower.sentence.endswith("; FSDP2 sends fp32.")


def test_without_significant_differences_the_largest_of_all_is_named() -> None:
    """A changed strategy is "the largest of 2 differences" if it differs more than an unchanged one."""
    run: dict[str, Any] = {"steps": 12, "warmup": 0, "validate_every": 4, "cluster": AT_50}
    near = [ending_at(Trial(strategy="zeropp", seed=seed, **run), 2.01 + 0.1 * seed) for seed in range(2)]
    head = head_of([*validated({"": 0.0, "int2:64": 0.3}, seeds=2, steps=12), *near], answer="loss")
    assert re.search(
        r"qgZ \(.*\) is 0\.3\d* nats higher than .*, the largest of 2 differences", head.sentence
    ), head.sentence


def test_the_largest_gain_is_named_with_its_setting_and_all_verdicts_are_counted() -> None:
    """A larger slow-down is counted, and is the subject only where nothing is faster."""
    records = [
        record
        for rate, slow in ((50, 3.0), (200, 1.5))
        for record in timed(
            {"zero3": 1.0, "zeropp": 0.5, "qwz": slow}, cluster=Cluster(rate=f"{rate} Mbit/s")
        )
    ]
    head = head_of(records, answer="step")
    assert re.fullmatch(
        r"With \d+ Mbit/s, ZeRO\+\+ is (1\.9|2\.0)\dx faster than ZeRO-3 \(95 % CI .*, n = 6\); of 4 comparisons of "
        r"step time, 2 are better and 2 are worse\. With \d+ Mbit/s, ZeRO\+\+ is (1\.9|2\.0)\dx faster than .*\.",
        head.sentence,
    )
    slower = head_of([record for record in records if record.trial["strategy"] != "zeropp"], answer="step")
    assert re.fullmatch(
        r"With 50 Mbit/s, a step of qwZ takes (2\.9|3\.0)\dx as long as ZeRO-3's \(95 % CI .*, n = 6\); of 2 "
        r"comparisons of step time, 2 are worse\. With 200 Mbit/s, a step of qwZ takes 1\.\d\dx as long as .*\.",
        slower.sentence,
    )
    table = head.table
    assert [column.title for column in table.columns][:2] == ["Setting", "Configuration"]
    assert [row[:2] for row in table.rows()] == [
        [rate, name] for rate in ("50 Mbit/s", "200 Mbit/s") for name in ("ZeRO-3", "qwZ", "ZeRO++")
    ]


def test_more_rows_than_a_page_shows_are_folded() -> None:
    """Those of the largest significant effects are open, with the baseline, in the order of the table."""
    codecs = [f"int{bits}:{block}" for bits in (2, 3, 4, 6, 8) for block in (64, 128, 256)]
    above = {codec: 0.1 * place for place, codec in enumerate(codecs)}
    head = head_of(validated({"": 0.0, **above}), answer="loss")
    assert len(head.table.data) == 16 > MOST_OPEN == len(head.open)
    shown, rest = head.parts(head.table)
    names = [row[0] for row in shown.rows()]
    assert names[0] == "ZeRO-3"
    largest = codecs[-(MOST_OPEN - 1) :]
    assert {*names[1:]} == {f"qgZ (g {codec})" for codec in largest}
    assert names == [row[0] for row in head.table.rows() if row[0] in names]
    assert len(shown.data) + len(rest.data) == 16
    derived = derive(frames_of(validated({"": 0.0, **above})))
    page = render(derived, [], every_table(derived))
    assert "<summary>4 more configurations</summary>" in page
    section = page.split('<section id="table-verdicts"')[1].split("</section>")[0]
    assert section.count("<tr>") == 2 + 16


def test_the_row_that_the_sentence_is_about_is_never_folded() -> None:
    """A small gain of a strategy without changes stays open beside larger losses, with its baseline."""
    slow = (
        "zero0",
        "zero1",
        "zero2",
        "zero3-flat",
        "mics",
        "qwz",
        "hpz",
        "qgz",
        "qwz+hpz",
        "qwz+qgz",
        "loco",
        "qsdp",
    )
    head = head_of(timed({"zero3": 2.0, **dict.fromkeys(slow, 9.0), "zeropp": 1.5}))
    assert len(head.table.data) == 14 > MOST_OPEN == len(head.open)
    assert head.sentence.startswith("ZeRO++ is 1.3")
    shown, _ = head.parts(head.table)
    assert {"ZeRO-3", "ZeRO++"} <= {row[0] for row in shown.rows()}


def test_a_sentence_begins_with_the_configurations_name_as_it_is_written() -> None:
    """The name qwZ gets no capital letter; a word such as "flat" does."""
    assert head_of(timed({"zero3": 2.0, "qwz": 1.0})).sentence.startswith("qwZ is 2.0")


FEW: dict[str, tuple[Callable[[], list[Record]], str]] = {
    "pairs": (
        lambda: timed({"zero3": 2.0, "zeropp": 1.0}, range(2)),
        r"Inconclusive \(two pairs; a verdict needs six\): ZeRO\+\+ is 2\.0\dx faster than ZeRO-3\.",
    ),
    "seeds": (
        lambda: [changed(r, answer="loss") for r in validated({"": 0.0, "int4:64": 0.3}, seeds=1)],
        (r"Inconclusive \(one seed; a verdict needs six\): after 120 steps the validation loss of qgZ \(gradients "
        r"int4:64\) is 0\.310 nats higher than ZeRO-3's\."),
    ),
    "steps": (
        lambda: [changed(r, answer="loss") for r in validated({"": 0.0, "int4:64": 0.3}, steps=60)],
        r"Inconclusive \(60 steps; a verdict needs 100\): after 60 steps .* 0\.300 nats higher than ZeRO-3's\.",
    ),
    "disturbed pairs": (
        lambda: [
            taken_by_others(record, 0.3) if record.trial["repeat"] > 1 else record
            for record in timed({"zero3": 2.0, "zeropp": 1.0})
        ],
        (r"Inconclusive \(two undisturbed of six pairs; a verdict needs three\): ZeRO\+\+ is 2\.\d\dx faster than "
        r"ZeRO-3\."),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("records", "sentence"), FEW.values(), ids=FEW)
def test_too_few_values_are_inconclusive(records: Callable[[], list[Record]], sentence: str) -> None:
    """The estimate stands with the reason, and the cell has the mark of what is inconclusive."""
    head = head_of(records())
    assert re.fullmatch(sentence, head.sentence), head.sentence
    kind = "Change of loss, nats" if head.quantity == "loss" else "Speed-up"
    assert head.table.rows()[1][[column.title for column in head.table.columns].index(kind)].endswith(" ?")


def at_occasions(records: Sequence[Record], repeats: int) -> list[Record]:
    """Records of a sweep for so many repeats each, on different days."""
    sweeps = [record.trial["repeat"] // repeats for record in records]
    days = [f"2026-01-{2 + sweep:02}T03:00:00+00:00" for sweep in sweeps]
    return [
        changed(record, sweep=sweep, started=day, finished=day)
        for record, sweep, day in zip(records, sweeps, days, strict=True)
    ]


def test_occasions_are_counted_in_the_sentence_and_predict_a_further_run() -> None:
    """An interval of three occasions is that of their means, and wider than within one start; so many sweeps of one
    start are one occasion, which predicts nothing.
    """
    records = timed({"zero3": 2.0, "zeropp": 1.0}, range(18))
    several, one = at_occasions(records, 6), [changed(r, sweep=r.trial["repeat"] // 6) for r in records]
    apart, together = head_of(several), head_of(one)
    assert apart.sentence.endswith(", n = 18 at 3 occasions).")
    assert re.search(r"\(95 % CI within this start .*, n = 18\)\.", together.sentence)
    assert list(csv_of(apart)["speedup_over"].dropna()) == ["3 occasions"]
    assert list(csv_of(together)["speedup_over"].dropna()) == ["within this start"]
    assert "Expected in a new run" in [column.title for column in apart.table.columns]
    assert "Expected in a new run" not in [column.title for column in together.table.columns]
    assert (
        "from the means of 3 occasions (starts of a machine, or runs more than an hour apart)"
        in apart.table.footnotes
    )
    assert "hold within this start of the machine" in together.table.footnotes


def test_disturbed_pairs_are_left_out_counted_and_kept_in_the_csv() -> None:
    """The speed-up is that of the undisturbed pairs; where all are disturbed it is marked, and so are documents."""
    quiet = timed({"zero3": 2.0, "zeropp": 1.0})
    slow = [
        taken_by_others(changed_steps(r, lambda step: {"total": 9 * step.total}), 0.3)
        if r.trial["strategy"] == "zeropp" and r.trial["repeat"] in (1, 4)
        else r
        for r in quiet
    ]
    head = head_of(slow)
    row, raw = rows_of(head)["ZeRO++"], csv_of(head).set_index("configuration")
    assert re.fullmatch(r"(1\.9|2\.0)\d .*▲", row["Speed-up"])
    assert row["n"] == "4"
    assert raw.loc["ZeRO++", "speedup_left_out"] == 2
    left_out = "with a disturbed trial. In this table, 2 of the 6 pairs of 1 row are left out."
    assert left_out in head.table.footnotes
    assert re.search(r"n = 4, 2 disturbed left out\)\.", head.sentence)
    assert len(derive(frames_of(slow)).trials) == 12
    all_taken = head_of([taken_by_others(record, 0.3) for record in quiet])
    assert re.fullmatch(r"2\.0\d ± 0\.0\d ‡ ▲", rows_of(all_taken)["ZeRO++"]["Speed-up"])
    assert re.search(r"n = 6, all disturbed\)\.", all_taken.sentence)
    assert "‡ after a number: all trials behind it were disturbed" in all_taken.table.footnotes


def test_one_error_has_no_verdict_and_no_mark() -> None:
    """It is measured in the first repeat of a seed alone, so that one seed is one value."""
    head = head_of(erring({"int4:256": 0.02, "int8:256": 0.0002}, seeds=1), answer="step")
    assert re.fullmatch(r"0\.0\d+", rows_of(head)["qgZ (g int8:256)"]["Error (vNMSE)"])
    assert csv_of(head).set_index("configuration").loc["qgZ (g int8:256)", "vnmse_verdict"] == "one value"
    assert (
        "Errors without a mark were measured in one trial only, so they have no interval and no verdict."
        in head.table.footnotes
    )


def test_the_memory_of_a_library_is_not_compared() -> None:
    """Its count lacks gathered weights, so that it has no number; the footnote says why."""
    head = head_of(timed({"zero3": 2.0, "zeropp": 1.0, "ddp": 3.0}))
    memory = {name: row["Memory, MiB a rank"] for name, row in rows_of(head).items()}
    assert memory["DDP"] == MARKS["not measured"]
    assert memory["ZeRO++"].endswith("▼")
    assert "The memory of DDP is not compared" in head.table.footnotes


def test_seeds_that_ended_without_a_loss_leave_no_verdict() -> None:
    """The losses of those that remain are no fair sample."""
    records = validated({"": 0.0, "int4:64": 0.3}, seeds=12)
    failed = [record_of(Trial.from_canonical(record.trial), failure=CRASHED) for record in records[-6:]]
    head = head_of([*records[:-6], *failed], answer="loss")
    assert head.sentence.startswith(
        "Inconclusive (6 of 12 seeds of qgZ (gradients int4:64) ended without a loss): after "
    )
    assert csv_of(head)["loss_difference_verdict"].to_list() == ["baseline", "inconclusive"]


def test_a_control_is_in_the_table_and_not_in_the_sentence_where_others_are_compared() -> None:
    """A control is a deliberate fault; where it is all that is compared with one other, it is the subject."""
    trial = Trial(strategy="qgz", control="unordered", steps=120, warmup=0, validate_every=40, cluster=AT_50)
    controls = [ending_at(trial.model_copy(update={"seed": seed}), 4 + 0.1 * seed) for seed in SEEDS]
    two = [*validated({"": 0.0, "int4:64": 0.1, "int3:64": 0.2}), *controls]
    head = head_of(two, answer="loss")
    assert "int3:64" in head.sentence
    assert head.sentence.endswith("; of 2 comparisons of validation loss, 2 are worse; the control is worse.")
    assert rows_of(head)["qgZ (control: unordered)"]["Change"].endswith("control: unordered")
    one = [*validated({"": 0.0, "int4:64": 0.1}), *controls]
    assert "the validation loss of qgZ (control: unordered)" in head_of(one, answer="loss").sentence


def test_the_question_is_never_parsed() -> None:
    """Whatever its words, the sentence and the table are the same."""
    records = timed({"zero3": 2.0, "zeropp": 1.0, "qwz": 1.5})
    asked = ["Is ZeRO++ slower than ZeRO-3?", "Which is fastest in the memory of ZeRO-3?", "qwZ?"]
    heads = [head_of(records, question=question) for question in asked]
    assert len({(head.sentence, head.table.markdown()) for head in heads}) == 1


def test_seconds_that_others_disturbed_have_a_caveat_and_no_prediction() -> None:
    """From more than half of the trials on; it is no part of the sentence, and a warning of the page."""
    records = at_occasions(timed({"zero3": 2.0, "zeropp": 1.0}), 3)
    few = head_of([taken_by_others(records[0], 0.5), *records[1:]])
    assert few.caveat == ""
    assert "Expected in a new run" in rows_of(few)["ZeRO++"]
    most = [taken_by_others(record, 0.5) for record in records[:10]]
    head = head_of([*most, *records[10:]])
    assert head.sentence.startswith("Inconclusive (one undisturbed of six pairs; ")
    assert head.caveat == (
        "The seconds are unreliable: in 10 of 12 trials other programs and the hypervisor together took more than 5% "
        "of the processors' time."
    )
    assert "Expected in a new run" not in rows_of(head)["ZeRO++"]
    derived = derive(frames_of([*most, *records[10:]]))
    assert f"<li>{head.caveat}</li>".replace("'", "&#39;") in render(derived, [], every_table(derived))
    slow = [on_link(r, 20.0) if r.trial["strategy"] == "zeropp" else r for r in records]
    assert "achieved rates more than 10% apart" in head_of(slow).caveat


def test_a_new_run_is_expected_in_a_wider_interval() -> None:
    """The prediction interval of a further occasion after three is twice as wide, of the quantity asked for."""
    head = head_of(at_occasions(timed({"zero3": 2.0, "zeropp": 1.0}, range(9)), 3))
    row = csv_of(head).set_index("configuration").loc["ZeRO++"]
    widths = [
        np.log(row[f"{name}_high"] / row[f"{name}_low"]) for name in ("expected", "speedup")
    ]  # fmt: skip
    assert widths[0] / widths[1] == pytest.approx(2)
    low, high = map(float, rows_of(head)["ZeRO++"]["Expected in a new run"].split(" to "))
    assert (low, high) == (
        pytest.approx(row["expected_low"], abs=0.005),
        pytest.approx(row["expected_high"], abs=0.005),
    )


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (Interval(2.36, 2.29, 2.43, 6), "2.36 ± 0.07"),
        (Interval(2.36, 2.29, 2.44, 6), "2.36 (2.29 to 2.44)"),
        (Interval(2.36, float("nan"), float("nan"), 2), "2.36"),
        (Interval(2.0, 2.0, 2.0, 0), "2.00"),
    ],
)
def test_an_interval_is_short_where_it_is_symmetric(interval: Interval, text: str) -> None:
    """To the printed digits; a counted value has none."""
    assert plus_or_minus(interval, "{:.2f}".format) == text


def test_every_form_of_the_table_has_the_marks() -> None:
    """Markdown, LaTeX, macros and HTML; the last also has a class for the colour."""
    records = timed({"zero3": 2.0, "zeropp": 1.0, "qwz": 4.0})
    derived = derive(frames_of(records))
    table = verdicts(derived).table
    for mark, macro in (("▲", "bigtriangleup"), ("▼", "bigtriangledown")):
        assert mark in table.markdown()
        assert mark not in latex.tabular(table)
        assert macro in latex.tabular(table)
    macros = latex.numbers([table], derived)
    assert re.search(
        r"\\zpset\{verdicts/ZeRO\+\+, [^}]*/speedup\}\{[\d.]+ \\ensuremath\{\\pm\} [\d.]+ "
        r"\\ensuremath\{\\bigtriangleup\}\}",
        macros,
    )
    page = render(derived, [], every_table(derived))
    assert re.search(r'<td class="n better">[^<]*▲</td>', page)
    assert re.search(r'<td class="n worse">[^<]*▼</td>', page)
    of_losses = "higher within the margin"
    assert all(
        (f"{mark} {verdict}" in table.caption) is (verdict != of_losses) for verdict, mark in MARKS.items()
    )
    losses = head_of(validated({"": 0.0, "int4:64": 0.01}), answer="loss").table
    assert f"{MARKS[of_losses]} {of_losses}" in losses.caption


def test_optimizers_by_role_are_configurations() -> None:
    """Losses of two optimizers are compared where the suite names one as the baseline."""
    records = [
        changed(
            ending_at(
                Trial(
                    strategy="zero3", seed=seed, steps=118, validate_every=30, optimizer=Optimizer(name=name)
                ),
                loss + NOISE[seed] * (name == "SGD"),
            ),
            role="baseline" if name == "AdamW" else "contrast",
        )
        for seed, (name, loss) in product(SEEDS, {"AdamW": 2.0, "SGD": 3.0}.items())
    ]
    assert re.match(
        r"After \d+ steps the validation loss of ZeRO-3 \(optimizer SGD\) is 1\.000 nats higher than that of ZeRO-3 "
        r"\(optimizer AdamW\) ",
        head_of(records).sentence,
    )


@pytest.mark.parametrize("asked", ["step", "memory", "error", "loss", "bytes", "trials"])
def test_no_records_break_the_head(asked: str) -> None:
    """Trials that decode beside training that failed, peers alone, one configuration alone, by any quantity."""
    decoded = [r for r in committed("generation") if r.trial["strategy"] in ("zero3", "zeropp")]
    failed = changed(record_of(Trial(strategy="zero3", cluster=AT_50), failure=CRASHED), pool=decoded[0].pool)
    peers = timed({"ddp": 1.0, "fsdp2": 1.0}, range(2))
    for records in ([*decoded[:4], failed], peers, timed({"zero3": 1.0}, range(2))):
        head = head_of(records, answer=asked)
        assert head.sentence.endswith(".")
        assert not re.search(r"\bnan\b|\binf\b|, \.|None", head.sentence + head.table.markdown())


COMMITTED = {
    "generation": (
        "tokens", r"qwZ\+hpZ decodes \d+\.\d\dx as many tokens/s as ZeRO-3 \(95 % CI .*", "Tokens/s of a rank",
    ),
    "stages": (
        "size",
        (r"Within 64 MiB a rank without activations, the largest model that ZeRO-0 trained has 2\.51 M parameters, "
        r"where ZeRO-3's has 14\.3 M; of 3 comparisons of the largest model, 3 are worse\."
        r"( Within 64 MiB a rank .* ZeRO-[12] trained has 7\.23 M parameters, where ZeRO-3's has 14\.3 M\.){2}"),
        "Largest model that trained, M parameters (activations not counted)",
    ),
    "nodes": (
        "nodes",
        (r"Inconclusive \(two repeats; a verdict needs six\): from 1 to 4 nodes with equal "
        r"batches in all, ZeRO-3's tokens/s of all ranks change by a factor of 0\.\d\d, the largest of 4 "
        r"differences\.( Inconclusive \(.*\): from 1 to 4 nodes with equal batches .*){2}"),
        "Tokens/s",
    ),
    "bandwidth": (
        "rate",
        (r"With 2x2 ranks, 25 Mbit/s, 256 tokens/rank, ZeRO\+\+ is 3\.\d\dx faster than ZeRO-3 .*; of 42 comparisons "
        r"of step time, \d+ are better, .*\. With 2x2 ranks, 256 tokens/rank, ZeRO\+\+'s break-even is not determined: "
        r".*\. With 2x2 ranks, 1024 tokens/rank, ZeRO\+\+'s break-even is not determined: .* With 4x2 .*"),
        "Break-even, Mbit/s",
    ),
    "peers": (
        "step", (r"In the same types, a step of our engine is 1\.\d\d to 2\.\d\d times as fast as with the fastest "
        r"setting of each library; of 14 comparisons, 14 are better\. In fp32, the fastest "
        r"settings \(.* each\) are DDP.*; FSDP2.*; and DeepSpeed.*\."), "Speed-up",
    ),
    "engine": (
        "rate", (r"In the same types, a step of our engine is 0\.\d\d to 1\.\d\d times as fast as with the fastest "
        r"setting of each library; of 10 comparisons, 2 are better and 8 are not significant\. "
        r"With 1x4 ranks, unshaped, these speed-ups are .* \(\d comparisons\)\. With 2x2 ranks, 1 "
        r"Gbit/s, these speed-ups are .* \(\d comparisons\)\."), "Speed-up",
    ),
    "successors": (
        "step", (r"With 25 Mbit/s, SDP4Bit is 1\.\d\dx faster than ZeRO\+\+ \(95 % CI .* at 3 occasions\); of 27 .*"
        r" SDP4Bit's speed-up over ZeRO\+\+ is 1\.5\d times as large with 25 Mbit/s as with 400 Mbit/s \(.*\)\."),
        "Speed-up",
    ),
    "schedules": (
        "loss",
        (r"After 200 steps ZeRO\+\+'s .* higher than ZeRO-3's .*\. Where only policy\.schedule differs, .* of "
        r"ZeRO\+\+ \(gradients bf16 from 50 %\) is 0\.011 nats lower than ZeRO\+\+'s .* \(gradients int8:256 from "
        r"50 %\) sends the fewest bytes between nodes: 0\.376 of ZeRO-3's\. The net speed-up of ZeRO\+\+ \(gradients "
        r"int8:256 from 50 %\) over ZeRO-3 is 1\.08 \(95 % CI .*\), not significant\."),
        "Change of loss, nats",
    ),
    "muon": (
        "loss",
        (r"With optimizer Muon, after 200 steps ZeRO\+\+'s .* 0\.063 nats higher .*\. With optimizer AdamW, ZeRO\+\+'s "
        r".* 0\.0039 nats higher .*, not significant, .*\. ZeRO\+\+'s loss difference from ZeRO-3 is 0\.059 nats "
        r"higher with optimizer Muon than with optimizer AdamW \(95 % CI .*, 6 seeds\)\. Where only policy\.owned "
        r"differs, .*\(owned int4:256\) is 0\.041 nats higher .*"),
        "Change of loss, nats",
    ),
    "lossless": (
        "bytes", r".* losses equal those of ZeRO-3 in every digit, ZeRO-3 \(reduce Lossless\), sends 0\.884 of .*",
        "Bytes between nodes",
    ),
    "methods": (
        "loss",
        (r"After 100 steps the validation loss of ZeRO-3 \(reduce TopK\(share=0\.01\)\) is 0\.654 nats higher than "
        r"ZeRO-3's \(95 % CI .*, 6 seeds\), beyond the margin of 0\.034 nats; of 9 comparisons of validation loss, .*"),
        "Change of loss, nats",
    ),
    "reordering": ("loss", r"After 100 steps .*unordered.* 1\.00\d nats higher .*", "Change of loss, nats"),
    "offload": ("memory", r"ZeRO\+\+ .* holds 8\.77 MiB a rank where ZeRO-3 holds 20\.0 MiB; .*", "Memory, MiB a rank"),
    "block_size": ("error", r"Inconclusive \(one pair; .*", "Error (vNMSE)"),
}  # fmt: skip


@pytest.mark.parametrize("suite", COMMITTED)
def test_committed_records_have_a_sentence_and_the_quantity_that_they_ask_for(suite: str) -> None:
    """One of each quantity."""
    asked, sentence, title = COMMITTED[suite]
    head = verdicts(derive(frames_of(committed(suite))))
    assert head.quantity == asked
    assert re.fullmatch(sentence, head.sentence), head.sentence
    assert title in [column.title for column in head.table.columns]
    assert len(head.open) <= MOST_OPEN


def test_of_several_baselines_each_configuration_has_its_nearest() -> None:
    """In its losses, its change and the sentence: one codec each at two numbers of bits, with and without hpZ."""
    ends = {
        ("qgz", "int4:64"): 0.0,
        ("qgz", "int2:64"): 0.3,
        ("zeropp", "int4:64"): 0.1,
        ("zeropp", "int2:64"): 0.2,
    }
    records = [
        changed(
            ending_at(
                Trial(
                    strategy=strategy, seed=seed, steps=120, warmup=0, validate_every=40, cluster=AT_50,
                    policy=PolicyChanges(gradients=codec),
                ),
                2 + 0.1 * seed + above + NOISE[seed] * (strategy == "zeropp"),
            ),
            role="baseline" if strategy == "qgz" else "contrast",
        )
        for (strategy, codec), above in ends.items()
        for seed in SEEDS
    ]  # fmt: skip
    head = head_of(records, answer="loss")
    rows = csv_of(head).set_index("configuration")
    assert rows["loss_difference"].round(2).to_dict() == {
        "qgZ (g int4:64)": 0.0, "qgZ (g int2:64)": 0.0, "ZeRO++ (g int4:64)": 0.1, "ZeRO++ (g int2:64)": -0.1,
    }  # fmt: skip
    assert not any("gradients" in change for change in rows["change"])
    assert re.search(
        r"ZeRO\+\+ \(gradients int([24]):64\) .* than that of qgZ \(gradients int\1:64\)", head.sentence
    )


def test_it_is_made_once() -> None:
    """For the page, its files and documents."""
    derived = derive(frames_of(timed({"zero3": 2.0, "zeropp": 1.0}, range(2))))
    assert verdicts(derived) is verdicts(derived)
