"""Records become frames."""

from __future__ import annotations

import json

import pytest

from harness.records.trial_record import Failure
from harness.suites.trial import Cluster, PolicyChanges, Trial
from report.data import metrics
from report.data.frames import ReportError, frames_of, occasions
from tests.report.records import MACHINE, SUITES, changed, committed, record_of, records_of, trials_of


@pytest.mark.parametrize("suite", [*SUITES, "algorithms", "generation", "rlhf"])
def test_frames_hold_every_raw_value(suite: str) -> None:
    """Frames have every step and token of every rank, every failure, and every byte of every ledger row."""
    records = records_of(suite, repeats=1) if suite in SUITES else committed(suite)
    frames = frames_of(records)
    assert len(frames.finished) + len(frames.failures) == len(records)
    assert len(frames.failures) == sum(record.failure is not None for record in records)
    assert len(frames.tokens) == sum(len(rank.tokens) for record in records for rank in record.ranks)
    assert len(frames.steps) == sum(len(rank.steps) for record in records for rank in record.ranks)
    training = [record for record in records if record.trial.get("workload") != "generate"]
    ledgers = [rank.ledger for record in training for rank in record.ranks if rank.ledger]
    sent = frames.bytes[frames.bytes["source"] == "ledger"]
    assert sent["bytes"].sum() == sum(row.bytes for rows in ledgers for row in rows)
    assert sent["messages"].sum() == sum(row.messages for rows in ledgers for row in rows)
    assert len(frames.validations) == sum(len(record.validations) for record in records)
    assert len(frames.quantisation) == sum(len(record.quantisation) for record in records)
    assert len(frames.interfaces) == sum(len(record.interfaces or []) for record in training)


def test_configuration_seed_and_repeat_do_not_split_a_setting() -> None:
    """Strategy, policy, DeepSpeed's configuration, seed and repeat do not split a setting; the rate does."""
    config = json.dumps({"zero_optimization": {"stage": 3}})
    same = [
        Trial(strategy="zero3", repeat=0),
        Trial(strategy="zeropp", repeat=1, seed=4, policy=PolicyChanges(weights="int8:64", align=64)),
        Trial(strategy="recipe", deepspeed_config=config),
    ]
    other = Trial(strategy="zero3", cluster=Cluster(rate="5 Mbit/s"))
    trials = frames_of([record_of(trial) for trial in (*same, other)]).finished.set_index("id")
    assert trials["setting"][[trial.id for trial in same]].nunique() == 1
    assert trials["setting"][other.id] != trials["setting"][same[0].id]
    assert not trials["where"].str.contains("deepspeed").any()


def test_names_tell_what_differs_from_the_preset() -> None:
    """A change to the preset's own value is no change; any other codec is named."""
    changes = PolicyChanges(weights="int8:2048", gradients="int4:256:clip", secondary=2, align=2048)
    trials = [
        Trial(strategy="zeropp", policy=changes),
        Trial(strategy="zeropp", policy=PolicyChanges(gradients=("int8:256", "int4:256"))),
        Trial(strategy="zero3", policy=PolicyChanges(weights="bf16", gradients="bf16", secondary=0)),
        Trial(strategy="zeropp", policy=PolicyChanges(secondary=0)),
    ]
    configurations = frames_of([record_of(trial) for trial in trials]).finished.set_index("id")[
        "configuration"
    ]
    names = ["ZeRO++", "ZeRO++ (g int8:256/int4:256)", "ZeRO-3", "ZeRO++ (no hpZ copy)"]
    assert [configurations[trial.id] for trial in trials] == names


def test_types_that_all_policies_share_leave_a_baseline() -> None:
    """Where all compute in bf16, ZeRO-3 is still the baseline; where one does, its name says so; names always
    have a codec, which makes a technique.
    """
    changes = PolicyChanges(compute="bf16")
    both = [Trial(strategy=name, policy=changes) for name in ("zero3", "zeropp")]
    frames = frames_of([record_of(trial) for trial in both])
    assert list(frames.finished["configuration"]) == ["ZeRO-3", "ZeRO++"]
    assert frames.shared == {"compute": "bf16"}
    assert list(metrics.derive(frames).pairs["configuration"]) == ["ZeRO-3", "ZeRO++"]
    frames = frames_of([record_of(trial) for trial in (Trial(strategy="zero3"), both[1])])
    assert list(frames.finished["configuration"]) == ["ZeRO-3", "ZeRO++ (compute bf16)"]
    changes = PolicyChanges(weights="int8:64")
    frames = frames_of([record_of(Trial(strategy=name, policy=changes)) for name in ("zero3", "zeropp")])
    assert list(frames.finished["configuration"]) == ["ZeRO-3 (w int8:64)", "ZeRO++ (w int8:64)"]


def test_two_pools_are_refused_naming_what_differs() -> None:
    """Records of two machines in one sweep are refused, with their pools and facts; whole sweeps of two
    machines are drawn together, those of two codes never.
    """
    first, second = trials_of("quickstart", repeats=1)[:2]
    elsewhere = record_of(second, pool="ffff00000000", machine=MACHINE | {"cpu": "Another CPU"})
    records = [record_of(first), elsewhere]
    with pytest.raises(ReportError, match=r"2 machines or versions of the code in one sweep") as refused:
        frames_of(records)
    for fact in ("0123456789ab", "ffff00000000", "machine.cpu", "Example CPU", "Another CPU"):
        assert fact in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(frames_of(records, across_pools=True).pools) == 2
    apart = [records[0], changed(records[1], sweep=1)]
    assert len(frames_of(apart).pools) == 2
    other = changed(apart[1], code={**apart[1].code, "source": "other"})
    with pytest.raises(ReportError, match=r"2 machines or versions of the code cannot .*code.source"):
        frames_of([apart[0], other])


_DAY = "2026-01-02T"


@pytest.mark.parametrize(
    ("sweeps", "numbers"),
    [
        ([("03:00", "03:10", "a"), ("03:15", "03:25", "a"), ("04:20", "04:30", "a")], [0, 0, 0]),  # a chain
        ([("03:00", "03:10", "a"), ("04:11", "04:20", "a")], [0, 1]),  # more than an hour apart
        (
            [("03:00", "03:10", "a"), ("03:15", "03:25", "b"), ("03:30", "03:40", "a")],
            [0, 1, 0],
        ),  # another start
        ([("03:00", "03:10", None), ("03:15", "03:25", None), ("09:00", "09:10", None)], [0, 0, 1]),  # older
    ],
)
def test_sweeps_of_one_start_within_an_hour_are_one_occasion(
    sweeps: list[tuple[str, str, str | None]], numbers: list[int]
) -> None:
    """By the machine's boot, or by hardware and kernel in older records, and by the time between two sweeps."""
    records = [
        record_of(
            Trial(strategy=strategy, repeat=number), sweep=number, machine=MACHINE | ({"boot": boot} if boot else {}),
            started=f"{_DAY}{begun}:00+00:00", finished=f"{_DAY}{ended}:00+00:00",
        )
        for number, (begun, ended, boot) in enumerate(sweeps)
        for strategy in ("zero3", "zeropp")
    ]  # fmt: skip
    assert occasions(records) == dict(enumerate(numbers))
    finished = frames_of(records).finished
    assert dict(zip(finished["sweep"], finished["occasion"], strict=True)) == dict(enumerate(numbers))


def test_trials_that_ran_different_kernels_are_refused() -> None:
    """Trials with the reference's kernels are not drawn with those of C++; a peer without kernels is drawn
    with either.
    """
    records = records_of("quickstart", repeats=1)
    runs = [{**records[0].ran, "device": "cpu", "kernels": name} for name in ("cpu", "reference")]
    mixed = [changed(record, ran=ran) for record, ran in zip(records[:2], runs, strict=True)]
    peer = changed(records[2], ran={"device": "cpu"})
    with pytest.raises(ReportError, match="different kernels") as refused:
        frames_of([*mixed, peer])
    for name, record in zip(("cpu", "reference"), mixed, strict=True):
        assert f"{name}: 1 record, such as {record.id}" in str(refused.value)
    assert frames_of([mixed[0], peer]).pools
    assert frames_of([mixed[1], peer]).pools


def test_failures_of_another_pool_are_left_out() -> None:
    """They have no measurements, so they hinder no report of measured trials or of later failures."""
    records = records_of("quickstart", repeats=1)
    failure = Failure(kind="crashed", message="it broke", log=None)
    old = {"failure": failure, "ranks": [], "pool": "other", "started": "1"}
    mixed = [changed(records[0], **old), *records[1:]]
    frames = frames_of(mixed)
    assert (frames.left_out, len(frames.failures), frames.pools) == (1, 0, (records[1].pool,))
    frames = frames_of([mixed[0], changed(records[1], failure=failure, ranks=[])])
    assert (frames.left_out, len(frames.failures), frames.pools) == (1, 1, (records[1].pool,))
    assert frames_of(mixed, across_pools=True).left_out == 0


def test_a_trial_that_this_version_does_not_know_gives_one_clear_line() -> None:
    """An unknown strategy in a record is refused, naming the record and the field."""
    with pytest.raises(ReportError, match=r"record .* cannot read trial.strategy") as refused:
        frames_of([record_of(Trial(), trial=Trial().canonical() | {"strategy": "zero9"})])
    assert "\n" not in str(refused.value)


def test_a_record_of_a_preset_that_went_is_drawn() -> None:
    """Its trials are read as any others, with the record's name of the model."""
    new = [record_of(Trial(strategy=name)) for name in ("zero3", "zeropp")]
    old = [changed(record, trial=record.trial | {"model": {"name": "gpt-old"}}) for record in new]
    frames = frames_of(old)
    assert {trial.model.name for trial in frames.trial_of.values()} == {"gpt-old"}
    assert list(frames.finished["configuration"]) == ["ZeRO-3", "ZeRO++"]
    assert frames.steps.equals(frames_of(new).steps)


@pytest.mark.parametrize("field", ["started", "finished"])
def test_a_record_without_a_time_is_named(field: str) -> None:
    """A text that is no time is refused with the record and the field; a time without a zone counts as UTC."""
    whole = record_of(Trial(), started="2026-01-01T00:00:00", finished="2026-01-01T00:00:01+00:00")
    assert occasions([whole]) == {0: 0}
    with pytest.raises(ReportError, match=rf"record {whole.id}: {field} = 'soon': expected a time such as"):
        occasions([whole.model_copy(update={field: "soon"})])


def test_settings_name_their_fields_apart() -> None:
    """Fields of equal names are told apart by their tables, and a setting does not name what only another one has."""
    muon = {"name": "Muon", "arguments": {"lr": 0.02, "adamw": {"lr": 0.001}}}
    adamw = {"name": "AdamW", "arguments": {"lr": 0.001}}
    frames = frames_of([record_of(Trial.model_validate({"optimizer": each})) for each in (muon, adamw)])
    places = {where.partition("tokens/rank, ")[2] for where in frames.finished["where"]}
    assert places == {"optimizer Muon, adamw lr 0.001, lr 0.02", "optimizer AdamW, lr 0.001"}
    shapes = {"gpt-small, Muon", "gpt-small, AdamW"}  # never in one row of bytes or memory
    assert set(frames.finished["shape"]) == shapes


@pytest.mark.parametrize(
    ("trials", "names"),
    [
        (
            [
                {"warmup": warmup, "optimizer": {"schedule": {"warmup": rising, "decay": "cosine"}}}
                for warmup, rising in ((0, 1), (1, 2))
            ],
            {"schedule warmup 1, warmup 0", "schedule warmup 2, warmup 1"},
        ),
        (
            [
                {
                    "model": {"name": "mine:Model", "arguments": {"eps": of_model}},
                    "optimizer": {"arguments": {"eps": of_optimizer}},
                }
                for of_model, of_optimizer in ((0.5, 0.25), (0.25, 0.5))
            ],
            {"model eps 0.5, optimizer eps 0.25", "model eps 0.25, optimizer eps 0.5"},
        ),
    ],
    ids=["of no table", "arguments"],
)
def test_fields_of_equal_names_are_named_after_their_tables(
    trials: list[dict[str, object]], names: set[str]
) -> None:
    """A field of no table has no table's name, and arguments of two things have the names of these."""
    frames = frames_of([record_of(Trial.model_validate(each)) for each in trials])
    assert {where.partition("tokens/rank, ")[2] for where in frames.finished["where"]} == names


SMALL, LARGE = {"layers": 2, "width": 32, "heads": 1}, {"layers": 3, "width": 96, "heads": 3}


@pytest.mark.parametrize(
    ("second", "parameters", "places"),
    [
        (LARGE, (45_216, 393_888), {"45,216 parameters", "393,888 parameters"}),
        (LARGE, (45_216, 45_216), {"heads 1, layers 2, width 32", "heads 3, layers 3, width 96"}),
        (LARGE, (45_216, 0), {"heads 1, layers 2, width 32", "heads 3, layers 3, width 96"}),
        (SMALL | {"layers": 4}, (45_216, 70_000), {"layers 2", "layers 4"}),
    ],
    ids=["sizes", "equal sizes", "an unknown size", "one argument"],
)
def test_models_that_differ_in_several_arguments_are_named_by_their_parameters(
    second: dict[str, int], parameters: tuple[int, int], places: set[str]
) -> None:
    """Unless two models have equally many parameters, or a number is not known; one argument names itself."""
    records = [
        changed(
            record_of(Trial.model_validate({"model": {"name": "gpt-tiny", "arguments": arguments}})),
            parameters=size,
        )
        for arguments, size in zip((SMALL, second), parameters, strict=True)
    ]
    frames = frames_of(records)
    assert {where.partition("tokens/rank, ")[2] for where in frames.finished["where"]} == places
