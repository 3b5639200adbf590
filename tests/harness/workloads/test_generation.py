"""Decoding with sharded weights, on its ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from harness.reference_checks.comparison import TrialError
from harness.suites.contradictions import check
from harness.suites.trial import Trial
from tests.harness.runs.test_rank_trial import assembled, outcomes, result

TOKENS = 5


def trial(strategy: str, **changes: Any) -> Trial:
    sizes = {"sequence": 16, "tokens_per_rank": 32, "steps": 2, "warmup": 1}
    generate = {"workload": "generate", "generate": {"prompt": 4, "tokens": TOKENS}, "strategy": strategy}
    usual = {"model": {"name": "gpt-tiny"}, "policy": {"max_padding": 1.0}}
    generation = Trial.model_validate({**sizes, **generate, **usual, **changes})
    check(generation)
    return generation


@pytest.mark.parametrize("strategy", ["zero3", "hpz", "zeropp"])
def test_hpz_sends_nothing_between_nodes_after_the_first_token(strategy: str, tmp_path: Path) -> None:
    """Every generation fetches weights between nodes for its first token; with hpZ for no other."""
    record = result(trial(strategy), tmp_path / "log")
    assert record.predicted is not None
    assert record.predicted.equal
    for rank in record.ranks:
        assert rank.steps == []
        assert [(t.step, t.index, t.warmup) for t in rank.tokens] == [
            (step, index, step == 0) for step in range(3) for index in range(TOKENS)
        ]
        first = [t.inter_bytes for t in rank.tokens if t.index == 0]
        later = [t.inter_bytes for t in rank.tokens if t.index > 0]
        assert len(set(first)) == 1
        assert first[0]
        assert set(later) == ({first[0]} if strategy == "zero3" else {0})
        assert all(t.intra_bytes for t in rank.tokens)
        assert all(0 <= (t.exposed or 0) <= t.seconds for t in rank.tokens)
        timed = [t for t in rank.tokens if not t.warmup]
        rows = [row for row in rank.ledger or [] if row.link == "inter"]
        assert sum(t.inter_bytes or 0 for t in timed) == sum(row.bytes for row in rows)
        assert {row.phase for row in rank.ledger or []} == {"evaluate"}
        assert set(rank.memory.formula) & {"gradients", "optimizer"} == set()
        assert rank.memory.engine["gathered"] == rank.memory.formula["gathered"]


def test_all_strategies_decode_the_same_tokens(tmp_path: Path) -> None:
    """Exact, DDP's and FSDP2's ranks decode what one process decodes from all their prompts."""
    digests = {
        strategy: result(trial(strategy), tmp_path / strategy).decoded_sha256
        for strategy in ("exact", "ddp", "fsdp2")
    }
    assert digests["exact"] == digests["ddp"] == digests["fsdp2"]
    assert len(set(digests["exact"])) == 4  # each rank has its own sequences
    assert len(result(trial("single"), tmp_path / "single").decoded_sha256) == 1


def test_generations_that_differ_are_no_result(tmp_path: Path) -> None:
    """Greedy decoding of one prompt with the same weights gives the same tokens, or the trial fails."""
    ranks = outcomes(trial("zero3", steps=1, warmup=1), tmp_path / "log")
    ranks[2] = dataclasses.replace(ranks[2], decoded=[ranks[2].decoded[0], "0" * 64])
    with pytest.raises(TrialError, match="generation 1 of rank 2 decoded other tokens"):
        assembled(ranks)
