"""Decoded tokens, and what follows from them."""

from __future__ import annotations

import pytest

from harness.suites.trial import Trial
from report.data.decoding import generations, speedup
from report.data.frames import frames_of
from tests.report.records import record_of, records_of


def test_rates_equal_those_recomputed_by_hand() -> None:
    """Tokens per second count every sequence's tokens over the sum of each token's slowest rank."""
    records = {record.id: record for record in records_of("generation", repeats=1)}
    table = generations(frames_of(list(records.values())))
    assert len(table) == 2 * len(records)
    for row in table.to_dict("records"):
        ranks = [[t for t in rank.tokens if t.step == row["step"]] for rank in records[row["id"]].ranks]
        slowest = [max(t.seconds for t in token) for token in zip(*ranks, strict=True)]
        assert not any(t.warmup for t in ranks[0])
        assert row["tokens_per_second"] == pytest.approx(4 * 6 / sum(slowest))
        assert row["later_tokens_per_second"] == pytest.approx(4 * 5 / sum(slowest[1:]))
        assert row["first_bytes"] == sum(tokens[0].inter_bytes or 0 for tokens in ranks)
        assert row["later_bytes"] == sum(t.inter_bytes or 0 for tokens in ranks for t in tokens[1:]) / 5


def test_ratios_are_of_the_same_generation() -> None:
    """A generation is compared with ZeRO-3's of the same number and repeat; ZeRO-3's ratio is one.

    Those of one trial are no samples of their own: two trials of two generations each are two pairs.
    """
    table = generations(frames_of(records_of("generation", repeats=2)))
    for contender, group in table.groupby("contender"):
        assert group["baseline"].nunique() == 2
        found = speedup(group)
        assert found.n == 2
        assert (found.estimate == 1) == (contender == "ZeRO-3")
        assert group["speedup"].min() <= found.estimate <= group["speedup"].max()


def test_a_generation_run_again_is_no_second_pair() -> None:
    """Trials that differ in their time limit alone share seed, repeat and number: they count once."""
    records = records_of("generation", repeats=2)
    limit = Trial.from_canonical(records[0].trial).timeout_seconds + 1
    again = [
        record_of(Trial.from_canonical(record.trial).model_copy(update={"timeout_seconds": limit}))
        for record in records
    ]
    for _, group in generations(frames_of([*records, *again])).groupby("contender"):
        assert speedup(group).n == 2
