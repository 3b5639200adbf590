"""The table of a step that generates, scores and trains."""

from __future__ import annotations

import pytest

from report.data.frames import frames_of
from report.data.metrics import derive, split
from report.tables.bytes_and_memory import volume
from report.tables.phases import PHASES, by_phase, phases
from tests.report.records import changed_steps, committed, records_of


def test_phases_add_up_to_the_step() -> None:
    """Each trial has all phases; their bytes between nodes are the step's, and so are their seconds."""
    alike = [  # all steps of all ranks: medians of parts are then parts of the median
        changed_steps(
            record, lambda _, last=record.ranks[0].steps[-1]: last.model_dump(exclude={"index", "warmup"})
        )
        for record in committed("rlhf")
    ]
    derived = derive(frames_of(alike))
    table, parts = by_phase(derived), split(derived.frames)
    assert len(table) == 3 * len(derived.trials)
    for identity, group in table.groupby("id"):
        (row,) = derived.trials[derived.trials["id"] == identity].to_dict("records")
        assert tuple(group["phase"].sort_values()) == PHASES
        assert group["inter_bytes"].sum() == row["sent_bytes"] == row["predicted_bytes"]
        assert group["seconds"].sum() == pytest.approx(row["step_seconds"], rel=1e-6)
        waited = (group["seconds"] * group["exposed"]).sum()
        assert waited == pytest.approx(row["exposed_seconds"], rel=1e-6)
        assert {"generate", "exposed in score"} <= set(parts[parts["id"] == identity]["part"])
    kept = table[(table["phase"] == "score") & (table["strategy"] == "hpz")]
    sent = table[(table["phase"] == "score") & (table["strategy"] == "zero3")]
    assert kept["inter_bytes"].max() < sent["inter_bytes"].min()


def test_the_table_stands_beside_the_published_rates() -> None:
    """A row for each configuration and phase, then the blog's four pairs, each by its phase."""
    derived = derive(frames_of(committed("rlhf")))
    rows = phases(derived).data
    measured = rows[rows["published"].isna()]
    assert list(measured["phase"]) == [phase for phase in PHASES for _ in range(5)]
    by_key = {(row["phase"], row["configuration"]): row for row in rows.to_dict("records")}
    assert by_key["generate", "ZeRO-3"]["speedup"].estimate == 1
    faster = by_key["train", "ZeRO++"]["speedup"]
    assert faster.known
    assert faster.low > 1
    blog = by_key["generate", "published: ZeRO++, 66B on 32 GPUs"]
    assert (blog["published"], round(blog["speedup"], 2)) == ("0.834 tokens/s/GPU", 2.25)
    assert by_key["train", "published: ZeRO-3, 30B on 16 GPUs"]["published"] == "5.68 samples/s/GPU"
    assert volume(derived).data.empty  # M is of one model


def test_other_suites_have_no_such_table() -> None:
    """Steps that only train are of one phase."""
    for records in (records_of("quickstart", repeats=1), committed("generation")):
        assert phases(derive(frames_of(records))).data.empty
