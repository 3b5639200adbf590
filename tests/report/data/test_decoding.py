"""Decoded tokens, and what follows from them."""

from __future__ import annotations

import pytest

from report.data.decoding import generations, speedup
from report.data.frames import frames_of
from tests.report.records import changed, committed


def test_rates_equal_those_recomputed_by_hand() -> None:
    """Tokens per second count every sequence's tokens over the sum of each token's slowest rank."""
    records = {record.id: record for record in committed("generation")}
    table = generations(frames_of(list(records.values())))
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

    Those of one trial are no samples of their own, nor are those of a trial that was run again: six repeats
    of two generations each are six pairs.
    """
    records = committed("generation")
    again = [changed(one, id=one.id[::-1]) for one in records]
    for table in (generations(frames_of(records)), generations(frames_of([*records, *again]))):
        for contender, group in table.groupby("contender"):
            assert group["baseline"].nunique() == 6
            found = speedup(group)
            assert found.n == 6
            assert (found.estimate == 1) == (contender == "ZeRO-3")
            assert group["speedup"].min() <= found.estimate <= group["speedup"].max()
