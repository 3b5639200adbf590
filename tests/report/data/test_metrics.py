"""Derived quantities equal what a hand computes from raw steps."""

from __future__ import annotations

import math
import statistics

import pytest

from harness.records.trial_record import LedgerRow, Record
from harness.suites.trial import Cluster, Model, Trial
from report.data import decoding, speedups
from report.data.break_even import break_even
from report.data.frames import frames_of
from report.data.metrics import derive
from report.quantities import QUANTITIES, formula
from report.tables import bytes_and_memory
from tests.report.records import (
    changed,
    changed_steps,
    committed,
    record_of,
    records_of,
    taken_by_others,
    trials_of,
)


def _step_seconds(record: Record) -> float:
    timed = [[step.total for step in rank.steps if not step.warmup] for rank in record.ranks]
    return statistics.median(max(ranks) for ranks in zip(*timed, strict=True))


def _compute_seconds(record: Record) -> float:
    return _step_seconds(changed_steps(record, lambda s: {"total": s.total - (s.exposed or 0)}))


def _between(record: Record) -> list[LedgerRow]:
    return [row for rank in record.ranks for row in rank.ledger or [] if row.link == "inter"]


def test_times_and_bytes_equal_those_recomputed_by_hand() -> None:
    """Step seconds, throughput, bytes, wire and the best step follow their formulas."""
    records = {record.id: record for record in records_of("quickstart")}
    table = derive(frames_of(list(records.values()))).trials
    assert len(table) == len(records)
    for row in table.to_dict("records"):
        record = records[row["id"]]
        seconds = _step_seconds(record)
        assert row["step_seconds"] == pytest.approx(seconds)
        assert row["tokens_per_second"] == pytest.approx(512 * 4 / seconds)
        between = _between(record)
        sent = sum(row.bytes for row in between) / record.trial["steps"]
        assert row["sent_bytes"] == pytest.approx(sent)
        assert row["predicted_bytes"] == pytest.approx(sent)
        assert record.link is not None
        assert record.interfaces is not None
        wire = 8 * row["egress_bytes"] / (statistics.median(record.link.probed_mbit) * 1e6)
        assert row["wire_seconds"] == pytest.approx(wire)
        assert row["compute_seconds"] == pytest.approx(_compute_seconds(record))
        assert row["ideal_share"] == pytest.approx(max(_compute_seconds(record), wire) / seconds)
        assert row["best_seconds"] > 0
        assert row["share"] == pytest.approx(row["best_seconds"] / seconds)
        counted = sum(counters.tx_bytes for counters in record.interfaces) / record.trial["steps"]
        assert row["interface_bytes"] == pytest.approx(counted)
        assert row["m_bytes"] == 2 * sum(numel for _, numel, _ in record.units)
        packets = sum(row.messages * math.ceil(row.bytes / row.messages / 1448) for row in between)
        assert row["segment_bytes"] == pytest.approx(sent + 66 * packets / record.trial["steps"])


def test_zero_bytes_between_nodes_leave_the_computation() -> None:
    """Where nothing crosses, the best step is the median of the longest computation of any rank in a step."""
    record = next(record for record in records_of("quickstart") if record.trial["strategy"] == "zero3")
    ranks = [
        rank.model_copy(update={"ledger": [row for row in rank.ledger or [] if row.link != "inter"]})
        for rank in record.ranks
    ]
    (row,) = derive(frames_of([changed(record, ranks=ranks)])).trials.to_dict("records")
    assert row["best_seconds"] == pytest.approx(_compute_seconds(record))


def test_speedup_pairs_equal_repeats() -> None:
    """The speed-up is the geometric mean of step ratios within each repeat."""
    records = records_of("quickstart", repeats=6)
    seconds = {(r.trial["strategy"], r.trial["repeat"]): _step_seconds(r) for r in records}
    pairs = derive(frames_of(records)).pairs
    pairs = pairs[pairs["strategy"] == "zeropp"]
    ratios = [seconds["zero3", repeat] / seconds["zeropp", repeat] for repeat in range(6)]
    assert sorted(pairs["speedup"]) == pytest.approx(sorted(ratios))
    speedup = speedups.speedup(pairs)
    assert speedup.estimate == pytest.approx(math.exp(statistics.fmean(map(math.log, ratios))))
    assert speedup.low < speedup.estimate < speedup.high
    # A quarter of the gathered weights; ZeRO-3 keeps the last block's from forward to backward.
    assert pairs["bytes_ratio"].max() == pytest.approx(0.278, abs=0.001)


def test_a_trial_run_again_is_no_second_pair() -> None:
    """Trials that differ in their time limit alone share seed and repeat: the interval counts them once."""
    records = records_of("quickstart")
    again = [
        record_of(trial.model_copy(update={"timeout_seconds": 9.0})) for trial in trials_of("quickstart")
    ]
    pairs = derive(frames_of([*records, *again])).pairs
    pairs = pairs[pairs["strategy"] == "zeropp"]
    assert len(pairs) == 6
    assert speedups.speedup(pairs).n == 3


def test_parity_divides_a_quarter_of_the_rate_by_the_whole() -> None:
    """Parity pairs ZeRO++ at B/4 with ZeRO-3 at B and the same batch."""
    records = records_of("bandwidth", repeats=1)
    table = speedups.parity(derive(frames_of(records)).trials)
    trials = [(record.trial, _step_seconds(record)) for record in records]
    seconds = {(t["strategy"], t["tokens_per_rank"], t["cluster"]["rate"]): step for t, step in trials}
    assert len(table) == 6
    for row in table.to_dict("records"):
        tokens, rate = row["tokens_per_rank"], row["full_rate"]
        expected = seconds["zero3", tokens, rate] / seconds["zeropp", tokens, rate / 4]
        assert row["parity"] == pytest.approx(expected)


def test_models_that_differ_in_arguments_alone_are_not_mixed() -> None:
    """They have no break-even at one rate, an M each, and a row each among bytes and memory."""
    records = [
        record_of(Trial(strategy=name, model=Model(name="gpt-tiny", arguments={"layers": layers}),
                        cluster=Cluster(rate="50 Mbit/s")), units=[("u", 100 * layers, 100 * layers)])
        for layers in (1, 2)
        for name in ("zero3", "zeropp")
    ]  # fmt: skip
    derived = derive(frames_of(records))
    assert break_even(derived.pairs).empty
    assert derived.trials["m_bytes"].nunique() == 2
    for table in (bytes_and_memory.volume(derived), bytes_and_memory.memory(derived)):
        assert table.data["where"].nunique() == 2


def test_peers_have_interfaces_and_no_ledger() -> None:
    """FSDP2 has bytes by interface, and neither ledger, nor exposed time, nor a best step."""
    table = derive(frames_of(records_of("bandwidth", repeats=1))).trials
    peers = table[table["strategy"] == "fsdp2"]
    assert peers["interface_bytes"].gt(0).all()
    assert peers[["sent_bytes", "exposed_seconds", "share", "ideal_share"]].isna().all().all()


def test_others_share_is_what_no_rank_had() -> None:
    """The others' share is the programs' time less the ranks', and never negative; the host's share is apart,
    and both are NaN without a record of the machine.
    """
    record = records_of("quickstart", repeats=1)[0]
    for others, steal in ((0.0, 0.0), (0.25, 0.125), (-0.01, 0.0)):
        (row,) = derive(frames_of([taken_by_others(record, others, steal)])).trials.to_dict("records")
        assert row["others_share"] == pytest.approx(max(others, 0.0), abs=1e-9)
        assert row["steal_share"] == pytest.approx(steal)
        assert row["taken_share"] == pytest.approx(max(others, 0.0) + steal, abs=1e-9)
    derived = derive(frames_of([changed(record, processor_use=None)]))
    assert derived.trials["taken_share"].isna().all()
    assert not derived.disturbed


def test_rates_equal_those_recomputed_by_hand() -> None:
    """Tokens per second count every sequence's tokens over the sum of each token's slowest rank."""
    records = {record.id: record for record in committed("generation")}
    table = decoding.generations(frames_of(list(records.values())))
    assert len(table) == 2 * len(records)
    for row in table.to_dict("records"):
        ranks = [[t for t in rank.tokens if t.step == row["step"]] for rank in records[row["id"]].ranks]
        slowest = [max(t.seconds for t in token) for token in zip(*ranks, strict=True)]
        assert row["tokens_per_second"] == pytest.approx(4 * 12 / sum(slowest))
        assert row["later_tokens_per_second"] == pytest.approx(4 * 11 / sum(slowest[1:]))
        assert row["first_bytes"] == sum(tokens[0].inter_bytes or 0 for tokens in ranks)
        assert row["later_bytes"] == sum(t.inter_bytes or 0 for tokens in ranks for t in tokens[1:]) / 11


def test_ratios_are_of_the_same_generation() -> None:
    """A generation is compared with ZeRO-3's of the same number and repeat; ZeRO-3's ratio is one.

    Generations of one trial, and of one run again, are one sample: six repeats of two are six pairs, of which
    disturbed ones are left out.
    """
    records = committed("generation")
    again = [changed(record, id=record.id[::-1]) for record in records]
    for sample in (records, [*records, *again]):
        table = decoding.generations(frames_of(sample))
        for configuration, group in table.groupby("configuration"):
            assert group["baseline"].nunique() == 6
            faster = decoding.speedup(group)
            assert faster.n + faster.left_out == 6
            assert faster.n >= 3
            assert (faster.estimate == 1) == (configuration == "ZeRO-3")
            assert group["speedup"].min() <= faster.estimate <= group["speedup"].max()


def test_a_column_that_a_quantity_names_is_one_of_the_trials() -> None:
    """Nor do two quantities share a column."""
    named = [row["column"] for row in QUANTITIES.values() if row["column"]]
    assert len(named) == len(set(named)) > 20
    assert set(named) <= set(derive(frames_of(records_of("quickstart", repeats=1))).trials.columns)


def test_a_caption_has_no_markup() -> None:
    """Each quantity's caption is a sentence without Markdown's backquotes and escaped bars."""
    for name, row in QUANTITIES.items():
        assert row["formula"]
        assert not {"`", "\\"} & set(text := formula(name))
        assert text.endswith(".")
