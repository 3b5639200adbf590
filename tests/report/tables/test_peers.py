"""The table beside peers: on their transport first, over the best of each library, in one type."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.records.trial_record import Failure, Record
from harness.suites.trial import Trial
from report.data.frames import frames_of
from report.data.metrics import derive
from report.tables import all_tables
from report.tables.peers import peers, sent_types
from tests.report.records import changed_steps, record_of


def run(strategy: str, seconds: float, transport: str = "gloo", *, repeat: int = 0, **changes: Any) -> Record:
    """A record of a trial in which every step took ``seconds``."""
    cluster = {"transport": transport, "rate": "50 Mbit/s"}
    trial = Trial.model_validate({"strategy": strategy, "cluster": cluster, "repeat": repeat, **changes})
    return changed_steps(record_of(trial), lambda _: {"total": seconds})


def rows(*records: Record) -> pd.DataFrame:
    return peers(derive(frames_of(list(records)))).data.set_index(["configuration", "carried"])


@settings(max_examples=5)
@given(
    st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3), st.floats(0.5, 2.0), st.sampled_from([1.0, 3.0])
)
def test_the_best_of_each_library_is_divided_by(fsdp2: list[float], engine: float, deepspeed: float) -> None:
    """A gain is of pairs, over the setting of a library that gives the least, which is named."""
    names = ("fsdp2", "fsdp2-prefetch", "fsdp2-kept")
    records = [
        record
        for repeat, scale in enumerate((1.0, 1.1))
        for record in (
            *(run(name, scale * seconds, repeat=repeat) for name, seconds in zip(names, fsdp2, strict=True)),
            run("deepspeed", scale * deepspeed, repeat=repeat),
            run("exact", scale * engine, repeat=repeat),
            run("exact", scale * engine / 2, "shm", repeat=repeat),
        )
    ]
    table = rows(*records)
    ((_, gloo), (_, shm)) = table.loc[["exact (fp32)"]].iterrows()
    for row, seconds in ((gloo, engine), (shm, engine / 2)):
        assert row["over_fsdp2"].estimate == pytest.approx(min(fsdp2) / seconds)
        assert row["over_deepspeed"].estimate == pytest.approx(deepspeed / seconds)
        assert "over_ddp" not in row
        assert row["best_fsdp2"] in {"FSDP2", "FSDP2, prefetch", "FSDP2, kept"}


def test_the_same_transport_comes_first() -> None:
    """Peers, then ours over gloo alone, then ours with shared memory, whatever ran first, and said so."""
    table = rows(run("exact", 0.2, "shm"), run("exact", 0.4), run("ddp", 1.0), run("fsdp2", 1.0, "shm"))
    gloo = ("DDP", "FSDP2", "exact (fp32)")
    assert list(table.index) == [*((name, "gloo alone") for name in gloo), ("exact (fp32)", "shm, gloo")]
    assert (
        "like is compared with like"
        in peers(derive(frames_of([run("ddp", 1.0), run("exact", 1.0)]))).description
    )


def test_types_are_not_mixed() -> None:
    """Policies are compared with peers that compute in and send the same types, however fast others are; policies
    that quantise with peers that send bf16.
    """
    mixed = run("fsdp2", 0.01, peer={"compute": "bf16", "reduce_dtype": "fp32"})
    peer_records = run("fsdp2", 0.1), run("fsdp2", 2.0, peer={"compute": "bf16"}), mixed
    half = {"policy": {"compute": "bf16"}}
    ours = run("exact", 1.0), run("zero3", 1.0, **half), run("zeropp", 0.5, **half), run("zero3", 3.0)
    table = rows(*peer_records, *ours)
    assert table["over_fsdp2"]["exact (fp32)", "gloo alone"].estimate == pytest.approx(0.1)
    in_bf16 = table[table["types"] == "bf16"]["over_fsdp2"].dropna()
    assert [gain.estimate for gain in in_bf16] == pytest.approx([2.0, 4.0])
    assert set(table["types"]) == {"fp32", "bf16"}, (
        "ZeRO-3 that computes in fp32 and sends bf16 is beside none"
    )


@pytest.mark.parametrize(
    ("strategy", "changes", "types"),
    [
        ("exact", {}, "fp32"),
        ("zero3", {}, "bf16"),
        ("zero3", {"policy": {"gradients": "fp32"}}, "bf16 and fp32"),
        ("zeropp", {}, "int8 and int4"),
        ("ddp-bf16", {}, "bf16"),
        ("ddp", {"peer": {"compute": "bf16"}}, "fp32"),
        ("deepspeed", {"peer": {"compute": "bf16"}}, "bf16"),
    ],
)
def test_what_a_trial_sends(strategy: str, changes: dict[str, Any], types: str) -> None:
    """The types of its weights and gradients, each named once."""
    assert sent_types(Trial.model_validate({"strategy": strategy, **changes})) == types


def test_without_both_there_is_no_table() -> None:
    """Peers alone, policies alone, or one process beside them, are no comparison."""
    for records in ([run("ddp", 1.0)], [run("exact", 1.0)], [run("single", 1.0), run("exact", 1.0)]):
        assert peers(derive(frames_of(records))).data.empty


def test_a_refusal_of_a_library_is_a_row_with_its_reason() -> None:
    """It stands among the trials without a result, by its kind, and the caption says what that means."""
    failure = Failure(kind="refused", message="no kernels for CPUs", log=None, by="deepspeed")
    config = '{"zero_optimization": {"stage": 3, "zero_quantized_weights": true}}'
    refused = record_of(Trial(strategy="deepspeed", deepspeed_config=config), failure=failure)
    assert refused.answers
    table = all_tables.failures(derive(frames_of([run("exact", 1.0), refused])))
    (row,) = table.data.to_dict("records")
    assert (row["kind"], row["message"], row["by"]) == ("refused", failure.message, "deepspeed")
    assert row["configuration"] == "DeepSpeed (zero_quantized_weights True)"
    assert "Refused by a peer's library" in table.description
