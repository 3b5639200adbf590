"""Tables: numbers from raw steps, and text that stays text in every form."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from harness.errors import Refusal
from harness.records.confidence_intervals import Interval
from harness.records.trial_record import LosslessSize, Record
from harness.suites.labels import PADDED
from harness.suites.trial import Cluster, PolicyChanges, Trial
from report.build import with_columns
from report.data import caveats
from report.data import text as wording
from report.data.caveats import warnings
from report.data.frames import frames_of
from report.data.metrics import Derived, derive
from report.data.speedups import geometric
from report.data.text import number
from report.tables import all_tables, break_even, errors, latex
from report.tables.table import Column, Table, interval_notes
from report.verdicts import MARKS
from tests.report.records import changed, committed, on_link, record_of, records_of, taken_by_others

WORDS = st.text(st.characters(codec="utf-8"), max_size=30)
LATEX_SPECIALS = set('\\&%$#_{}~^<>|"`-[]')


def _one_cell(cell: str) -> Table:
    data = pd.DataFrame({"name": [cell], "value": [1.5]})
    return Table("t", cell, cell, data, (Column("name", cell), Column("value", "Value", number())))


@given(WORDS)
@example("<script>alert(1)</script>")
@example("a|b\n|c")
@example("*x* _y_ [z](http://q) `c` &amp; https://x.y a@b.c ~~s~~ \\")
@example("1. x")
def test_markdown_prints_any_text_as_it_is(cell: str) -> None:
    """A cell of any text renders as that text, in one table of one row, with no markup in it."""
    rendered = MarkdownIt("commonmark", {"html": True}).enable("table").parse(_one_cell(cell).markdown())
    rows = [token for token in rendered if token.type == "td_open"]
    assert len(rows) == 2
    inline = next(rendered[i + 1] for i, token in enumerate(rendered) if token.type == "td_open")
    assert inline.children is not None
    kinds = {child.type for child in inline.children}
    assert kinds <= {"text", "text_special"}
    assert "".join(child.content for child in inline.children).strip() == wording.text(cell)


@given(WORDS)
@example("100% of $5 & #1_{a}^b~c\\d")
@example('[x] --- "q"')
def test_latex_has_no_special_left_bare(cell: str) -> None:
    """Taking away our escapes leaves no character that LaTeX would act on."""
    left = latex.escaped(cell)
    for escape in sorted(set(latex.SPECIAL.values()), key=len, reverse=True):
        left = left.replace(escape, "")
    assert not LATEX_SPECIALS & set(left)
    assert "\n" not in left


def test_latex_prints_every_mark_with_plain_characters() -> None:
    """LaTeX stops at a mark such as ▽ that is not in its fonts; marks that differ stay different."""
    marks = [*MARKS.values(), *caveats.FOOTNOTES, PADDED]
    printed = [latex.escaped(mark) for mark in marks]
    assert all(text.isascii() for text in printed)
    assert len({*printed}) == len({*marks})


def test_numbers_have_their_significant_digits() -> None:
    """Significant digits, plain where short; nothing for NaN and None."""
    texts = {1234.4: "1234", 0.12345: "0.123", 0.00001234: "1.23e-05", 0: "0", 9.996: "10.0"}
    assert {value: number(3)(value) for value in texts} == texts
    assert number(3)(math.nan) == number(3)(None) == wording.NOTHING


def test_the_summary_is_of_all_repeats() -> None:
    """Step seconds of the summary's CSV are the geometric mean over repeats, bytes the median."""
    derived = derive(frames_of(records_of("quickstart")))
    table = pd.read_csv(io.StringIO(all_tables.summary(derived).csv())).set_index("configuration")
    for name, trials in derived.trials.groupby("configuration"):
        assert table.loc[name, "step_seconds"] == pytest.approx(geometric(trials["step_seconds"]))
        assert table.loc[name, "sent_mb"] == pytest.approx(trials["sent_bytes"].median() / 1e6)
        assert table.loc[name, "trials"] == 3


def test_bytes_without_a_ledger_are_those_of_the_interfaces() -> None:
    """DDP's bytes between nodes are marked as counted by the interfaces; no others are."""
    records = [record_of(Trial(strategy=name)) for name in ("ddp", "exact", "zero3", "zeropp")]
    table = all_tables.summary(derive(frames_of(records)))
    sent = {name: row["Sent, MB/step"] for name, row in _printed(table).items()}
    assert sent["DDP"].endswith(" *")
    assert float(sent["DDP"].removesuffix(" *")) > 0
    assert not any("*" in cell for name, cell in sent.items() if name != "DDP")
    assert "*: counted by the interfaces of the nodes" in table.description


def test_short_names_are_explained() -> None:
    """The Summary's caption says what w and g are where a configuration's name has them, and only there."""
    trials = [Trial(strategy="zero3"), Trial(strategy="zeropp", policy=PolicyChanges(weights="int6:2048"))]
    caption = all_tables.summary(derive(frames_of([record_of(trial) for trial in trials]))).description
    assert "In names w is the codec of weights." in caption
    assert "g is" not in caption
    assert "In names" not in all_tables.summary(derive(frames_of(records_of("quickstart")))).description


def test_both_speedups_are_printed_where_the_papers_baseline_ran() -> None:
    """Over the hierarchical ZeRO-3 and over the flat one, each from pairs with it; elsewhere there is one column."""
    derived = derive(frames_of(records_of("baselines", repeats=6)))
    table = all_tables.summary(derived)
    titles = [column.title for column in table.columns]
    both = ["Speed-up over the hierarchical ZeRO-3", "over the paper's baseline"]
    assert [title for title in titles if title in both] == both
    rows = table.data.set_index("configuration")
    seconds = derived.trials.groupby("configuration")["step_seconds"].agg(geometric)
    for name in ("ZeRO-3", "hpZ", "ZeRO++"):
        for column, base in (("speedup", "ZeRO-3"), ("over_papers", "flat ZeRO-3")):
            assert rows.loc[name, column].estimate == pytest.approx(seconds[base] / seconds[name])
    printed = _printed(table)
    assert printed["flat ZeRO-3"]["over the paper's baseline"] == "1.00"
    assert re.fullmatch(r"[\d.]+ \([\d.]+ to [\d.]+\)", printed["ZeRO++"]["over the paper's baseline"])
    assert "one ring over all ranks sends" in table.description
    alone = all_tables.summary(derive(frames_of(records_of("quickstart"))))
    assert not {column.title for column in alone.columns} & set(both)
    assert "one ring" not in alone.description


def test_volume_is_in_units_of_one_gather() -> None:
    """ZeRO-3 sends 3 M less what stays for backward, ZeRO++ a little over 0.75 M, beside the published."""
    records = records_of("quickstart", repeats=1)
    table = all_tables.volume(derive(frames_of(records))).data.set_index("configuration")
    units = next(record.units for record in records if record.units)
    sizes, padded = ([unit[at] for unit in units] for at in (1, 2))
    assert sum(padded) > sum(sizes)
    stays, whole = ((counts[0] + counts[-1]) / sum(sizes) for counts in (sizes, padded))  # root, last block
    pads = sum(padded) / sum(sizes) - 1
    sent = (3 - stays, 3 * (1 + pads) - whole)
    assert table.loc["ZeRO-3", "ledger"] == pytest.approx(sent[1], abs=1e-4)
    assert table.loc["ZeRO-3", "padding"] == pytest.approx(sent[1] - sent[0], abs=1e-4)
    parts = ["gather in forward", "gather in backward", "gradients", "control"]
    assert table.loc["ZeRO-3", parts].sum() == pytest.approx(sent[0], abs=1e-4)
    assert 0.75 < table.loc["ZeRO++", parts].sum() < 0.78
    assert table.loc["ZeRO++", "segment"] == pytest.approx(
        table.loc["ZeRO++", "ledger"] * (1 + 66 / 1448), rel=1e-3
    )
    assert table.loc["ZeRO++", "published"] == 0.75


def test_checks_count_ledgers_that_equal_their_prediction() -> None:
    """The checks say how many ledgers equal the prediction, and how far interfaces lie above them."""
    records = records_of("quickstart", repeats=2)
    table = all_tables.checks(derive(frames_of(records))).data.set_index("configuration")
    assert set(table["equal"]) == {"2 of 2"}
    assert table["interface_over_ledger"].to_numpy() == pytest.approx(1.02, abs=1e-3)
    steps = [rank.steps[0].loss for rank in records[0].ranks]
    assert table.loc["ZeRO-3", "first_loss_deviation"] >= abs(float(np.mean(steps)) - 5.55) / 5.55 - 1e-12


def test_errors_of_codecs_that_were_tried_stand_by_block_and_are_one_configurations() -> None:
    """Each integer codec's median error stands under its block size, for the configuration in the caption; errors
    of messages have a table of their own.
    """
    records = [record for record in committed("quickstart") if record.quantisation]
    table = all_tables.quantisation(derive(frames_of(records)))
    assert [column.title for column in table.columns] == ["Of", "Codec", "64", "256", "1024", "2048", "shard"]
    tried = [row for record in records if record.trial["strategy"] == "zero2" for row in record.quantisation]
    errors = [row.vnmse for row in tried if (row.purpose, row.codec) == ("weights", "int8:64")]
    row = table.data.set_index(["purpose", "kind"]).loc[("weights", "int8")]
    assert row["64"] == pytest.approx(float(np.median(errors)))
    assert "ZeRO-2 (2x2 ranks" in table.description
    assert "nothing of this is sent" in table.description


def test_bytes_without_loss_stand_beside_those_of_the_codecs_that_were_tried() -> None:
    """Bytes a value are those of all units together; integer codecs have their scales; old records have no table."""
    records = [
        changed(record, lossless=[])
        for record in committed("quickstart")
        if record.quantisation and record.sweep == 0
    ]
    assert all_tables.lossless(derive(frames_of(records))).data.empty
    sizes = [
        LosslessSize(purpose=purpose, unit=unit, codec=codec, elements=1000, bytes=nbytes, vnmse=vnmse)
        for purpose in ("weights", "gradients")
        for unit, more in (("a", 0), ("b", 100))
        for codec, nbytes, vnmse in (
            ("lossless:zlib", 3300 + more, 0.0), ("lossless:zlib:bf16", 1300 + more, 1e-6)
        )
    ]  # fmt: skip
    table = all_tables.lossless(derive(frames_of([changed(record, lossless=sizes) for record in records])))
    rows = table.data.set_index(["purpose", "codec"])
    assert rows.loc[("weights", "lossless:zlib"), "bytes"] == pytest.approx(3.35)
    assert rows.loc[("gradients", "lossless:zlib:bf16"), "of_bf16"] == pytest.approx(0.675)
    assert rows.loc[("gradients", "lossless:zlib:bf16"), "vnmse"] == pytest.approx(1e-6)
    assert rows.loc[("weights", "int4:256"), "bytes"] == pytest.approx((4 + 32 / 256) / 8)
    assert len(rows) == 2 * (2 + 7)
    assert "none of them were sent" in table.description


@pytest.mark.parametrize("suite", ["quickstart", "algorithms"])
def test_errors_of_what_was_sent_are_never_put_together(suite: str) -> None:
    """Every configuration of every setting has a row for each measured step, with errors of its trials alone;
    hops stand beside the end.
    """
    records = [record for record in committed(suite) if record.communication_errors]
    derived = derive(frames_of(records))
    table = all_tables.sent_error(derived)
    of_trial = {row["id"]: (row["configuration"], row["where"]) for row in derived.trials.to_dict("records")}
    measured = {(of_trial[r.id], e.step) for r in records for e in r.communication_errors}
    assert len(table.data) == len(measured)
    for row in table.data.to_dict("records"):
        key, kind = (row["configuration"], row["where"]), (row["step"], "gradients", "")
        every = [e for r in records if of_trial[r.id] == key for e in r.communication_errors]
        chosen = [e for e in every if (e.step, e.purpose, e.unit) == kind]
        ends = [(e.squared_error or 0) / (e.squared_value or 1) for e in chosen if e.hop is None]
        hops = [(e.squared_error or 0) / (e.squared_value or 1) for e in chosen if e.hop is not None]
        assert len(set(ends)) == 1  # it is of one configuration in one setting
        assert row["end_to_end"] == pytest.approx(ends[0])
        assert (row["smallest_of_a_hop"], row["largest_of_a_hop"]) == pytest.approx((min(hops), max(hops)))
        for axis in {e.axis for e in chosen if e.hop is not None}:
            assert f"{axis} " in str(row["hops"])
    titles = [column.title for column in table.columns]
    assert titles.index("End to end") == titles.index("Each hop") + 1


def test_the_steps_of_a_ring_are_told_as_a_range() -> None:
    """Steps of a ring, which share axis and codec, are a range and their number; hops of two axes stand
    each by itself.
    """
    ring = [("world", "int4:64", hop, 0.01 * (hop + 1)) for hop in range(3)]
    hops = [("local", "int4:64", 0, 0.012), ("node", "int8:64", 1, 0.00034)]
    columns = ["axis", "codec", "hop", "vnmse"]
    texts = [errors.hops_text(pd.DataFrame(rows, columns=columns)) for rows in (ring, hops)]
    assert texts == ["world int4:64 0.010 to 0.030 in 3 steps", "local int4:64 0.012; node int8:64 0.00034"]


def _printed(table: Table) -> dict[str, dict[str, str]]:
    titles = [column.title for column in table.columns]
    rows = [dict(zip(titles, row, strict=True)) for row in table.rows()]
    return {row["Configuration"]: row for row in rows}


def test_a_share_above_one_is_marked_and_explained() -> None:
    """Where a probe measured a lower rate than steps had, shares above 1 have a mark, which the caption
    explains; below 1 there is neither.
    """
    record = record_of(Trial(strategy="zero3", cluster=Cluster(rate="50 Mbit/s"), steps=4, warmup=1))
    (row,) = derive(frames_of([record])).trials.to_dict("records")
    for wire, marked in ((1.2, True), (0.3, False)):  # the share of each step that its bytes alone need
        mbit = 8 * row["egress_bytes"] / (wire * row["step_seconds"]) / 1e6
        derived = derive(frames_of([on_link(record, mbit)]))
        for table in (all_tables.summary(derived), all_tables.time(derived)):
            cell = _printed(table)["ZeRO-3"]["Best possible step/step"]
            assert cell.endswith(" §") is marked
            assert float(cell.removesuffix(" §")) == pytest.approx(derived.trials["share"].iloc[0], abs=0.005)
            assert ("§: above 1" in table.description) is marked
            assert ("the lower bound is longer than the measured step" in table.description) is marked


def _at_two_rates_and_batches() -> list[Record]:
    """ZeRO-3 and ZeRO++ at a rate and at a quarter of it, with two batches.  With 512 tokens others had
    processors in a trial of ZeRO-3, and ZeRO++'s link was slower; with 2048 nothing is to be marked.
    """
    records = [
        record_of(Trial(strategy=name, tokens_per_rank=tokens, cluster=Cluster(rate=rate), steps=4, warmup=1))
        for name in ("zero3", "zeropp")
        for tokens in (512, 2048)
        for rate in ("12.5 Mbit/s", "50 Mbit/s")
    ]
    records[1] = taken_by_others(records[1], 0.3)  # ZeRO-3 at 50 Mbit/s
    records[4] = on_link(records[4], 9.0)  # ZeRO++ at 12.5 Mbit/s
    return records


@pytest.mark.parametrize(
    ("maker", "column"), [(all_tables.break_even, "Break-even, Mbit/s"), (all_tables.parity, "Parity")]
)
def test_tables_over_rates_bear_the_marks_of_the_summary(
    maker: Callable[[Derived], Table], column: str
) -> None:
    """A row of trials during which others had processors, and of links whose rates differ, has both marks,
    another none; the caption explains them as the Summary's does, and only where they stand.
    """
    derived = derive(frames_of(_at_two_rates_and_batches()))
    table = maker(derived)
    titles = [column.title for column in table.columns]
    cells = [dict(zip(titles, row, strict=True)) for row in table.rows()]
    marked, plain, *published = cells
    trials = {"Break-even": 4, "Parity": 2}[table.title]
    assert (marked["n"], plain["n"]) == (f"{trials} (1 ‡)", str(trials))
    assert marked[column].endswith(" †")
    assert not [row for row in (plain, *published) if "†" in row[column]]
    for footnote in (caveats.FOOTNOTES[caveats.RATES], caveats.FOOTNOTES[caveats.SOME_TAKEN]):
        assert footnote in table.description
        assert footnote in all_tables.summary(derived).description
    assert not {"†", "‡"} & set(maker(derive(frames_of(records_of("bandwidth", repeats=1)))).description)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(1.0, 1.2, "reached"), (0.8, 0.99, "missed"), (0.9, 1.1, "inconclusive"), (0.8, 1.0, "inconclusive"),
     (math.nan, math.nan, wording.NOTHING)],
)  # fmt: skip
def test_parity_is_held_missed_or_cannot_be_told(low: float, high: float, verdict: str) -> None:
    """It is held if the interval begins at 1 or above, missed if it ends below 1."""
    assert break_even.verdict(Interval((low * high) ** 0.5, low, high, 6)) == verdict


def test_parity_names_each_configuration_and_its_baseline() -> None:
    """If a suite names its baseline, each compared configuration has a row of its own, and the paper's have none."""
    roles = {"exact": "baseline", "qwz": "contrast", "qgz": "contrast"}
    records = [
        changed(record_of(Trial(strategy=name, cluster=Cluster(rate=rate), steps=4, warmup=1)), role=role)
        for name, role in roles.items()
        for rate in ("12.5 Mbit/s", "50 Mbit/s")
    ]
    derived = derive(frames_of(records))
    speed = derived.trials.set_index(["strategy", "rate_mbit"])["tokens_per_second"]
    found = all_tables.parity(derived).data.set_index("configuration")
    assert list(found.index) == ["qwZ", "qgZ"]
    assert set(found["baseline"]) == {"exact (fp32)"}
    for name, strategy in (("qwZ", "qwz"), ("qgZ", "qgz")):
        assert found.loc[name, "parity"].estimate == pytest.approx(
            speed[strategy, 12.5] / speed["exact", 50.0]
        )


def test_bytes_of_much_padding_are_marked() -> None:
    """In the summary, and in words among the warnings before all numbers; little padding is not."""
    for padding, mark in ((50, ""), (51, f" {PADDED}")):
        derived = derive(frames_of([record_of(Trial(strategy="zero3"), units=[("u", 1000, 1000 + padding)])]))
        cell = _printed(all_tables.summary(derived))["ZeRO-3"]["Sent, MB/step"]
        assert cell.endswith(mark or cell)
        assert any(
            f"{PADDED}: padding adds more than 5%" in warning for warning in warnings(derived)
        ) == bool(mark)


def test_the_table_of_memory_prints_hpzs_copy_in_both_forms() -> None:
    """Of policies that keep one: as frames, which are what the engine held here, and in 16 bits."""
    table = all_tables.memory(derive(frames_of(records_of("quickstart", repeats=1))))
    both = ["hpZ's copy as received", "in 16 bits"]
    assert [column.title for column in table.columns if column.title in both] == both
    rows = table.data.set_index("configuration")
    assert rows.loc["ZeRO++", "copy_frames_mib"] == pytest.approx(rows.loc["ZeRO++", "engine_secondary_mib"])
    assert rows.loc["ZeRO++", "copy_halves_mib"] > 1.9 * rows.loc["ZeRO++", "copy_frames_mib"]
    assert rows.loc["hpZ", "copy_halves_mib"] == rows.loc["hpZ", "copy_frames_mib"]  # 16-bit frames
    assert math.isnan(rows.loc["ZeRO-3", "copy_frames_mib"])
    without = [r for r in records_of("quickstart", repeats=1) if r.trial["strategy"] in ("zero3", "qwz")]
    assert "in 16 bits" not in [c.title for c in all_tables.memory(derive(frames_of(without))).columns]


def test_latex_is_a_bare_tabular_with_stacked_heads() -> None:
    """It has no float and no caption; heads are no wider than cells or their longest word."""
    table = all_tables.summary(derive(frames_of(records_of("quickstart"))))
    tabular = latex.tabular(table)
    assert tabular.startswith("% Summary. Needs booktabs.")
    assert "\\begin{table}" not in tabular
    assert table.description[:40] not in tabular
    assert r"\shortstack[r]{Speed{-}up\\over\\ZeRO{-}3}" in tabular or r"\shortstack[r]{Speed{-}up" in tabular
    assert tabular.count(r" \\") == 1 + len(table.data)


def test_every_number_is_a_macro_with_its_records() -> None:
    """By table, row and column; each row's comment has the ids of its trials."""
    records = records_of("quickstart", repeats=2)
    derived = derive(frames_of(records))
    shown = [all_tables.summary(derived), all_tables.checks(derived)]
    macros = latex.numbers(shown, derived)
    ids = sorted(record.id for record in records if record.trial["strategy"] == "zeropp")
    assert f"% summary, row {len(shown[0].data)}: {' '.join(ids)}" in macros
    place = shown[0].data["where"].iloc[0]
    start = rf"\zpset{{summary/ZeRO++, {place}/step_seconds}}"
    steps = [line for line in macros.splitlines() if line.startswith(start)]
    assert len(steps) == 1
    names = re.findall(r"^\\zpset\{([^}]*)\}", macros, re.MULTILINE)
    assert len(names) == len(set(names)) > 20


def test_only_the_columns_that_are_asked_for_are_printed() -> None:
    """In the requested order, by title or name, after places and configuration; the CSV keeps all; an unknown
    table is refused.
    """
    shown = [all_tables.summary(derive(frames_of(records_of("bandwidth", repeats=2))))]
    (table,) = with_columns(shown, {"summary": ["speedup", "Step, s"]})
    assert [column.title for column in table.columns if not column.place] == [
        "Configuration", "Speed-up over ZeRO-3", "Step, s",
    ]  # fmt: skip
    assert [column.place for column in table.columns][:1] == [True]
    assert table.csv() == shown[0].csv()
    with pytest.raises(Refusal, match="no table 'sumary': expected one of summary"):
        with_columns(shown, {"sumary": ["n"]})


def test_the_head_of_a_group_of_rows_has_only_the_fields_that_its_setting_has() -> None:
    """A setting with fewer fields than another one does not end in a comma."""
    rows = [("optimizer AdamW", "", name) for name in "ab"] + [
        ("optimizer Muon", "lr 0.02", name) for name in "ab"
    ]
    data = pd.DataFrame(rows, columns=["first", "second", "name"])
    places = (
        Column("first", "Setting", place=True),
        Column("second", "", place=True),
        Column("name", "Name"),
    )
    _, groups = Table("t", "T", "", data, places).by_place()
    assert [place for place, _ in groups] == ["optimizer AdamW", "optimizer Muon, lr 0.02"]


@pytest.mark.parametrize(("of_trials", "noun"), [(True, "trials"), (False, "pairs")])
def test_notes_say_whether_trials_or_pairs_are_left_out(of_trials: bool, noun: str) -> None:
    """The column says what its intervals are computed from, whatever its title is."""
    column = Column("value", "over ZeRO-3's", of_trials=of_trials)
    data = pd.DataFrame({"configuration": ["qwZ"], "value": [Interval(1.0, 0.9, 1.1, 4, 1, left_out=2)]})
    assert f"2 of the 6 {noun} of 1 row are left out" in interval_notes(data, [column])[2]
