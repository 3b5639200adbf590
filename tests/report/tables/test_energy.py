"""The table of energy: joules per token of all GPUs, with marks for throttled or shared ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.records.trial_record import GpuUse, NodeUse, Record
from harness.suites.trial import Cluster, Trial
from report.data.frames import frames_of
from report.data.metrics import derive
from report.tables.provenance import HELD, energy
from tests.report.records import changed, record_of


def gpu_record(joules: float | None, *, throttled: float = 0.0, others: int = 0) -> Record:
    """A record of two nodes of two GPUs each, a quarter of the energy on each."""
    gpus = [
        GpuUse(
            index=index, name="GPU", samples=9, joules=None if joules is None else joules / 4,
            sampled_joules=(joules or 8.0) / 4, watts=100.0 * index, utilisation=0.5,
            clock_mhz=1000, throttled={"power cap": throttled} if throttled else {}, others=others,
        )
        for index in range(4)
    ]  # fmt: skip
    nodes = [NodeUse(node=node, seconds=1, gpus=on_node) for node, on_node in enumerate((gpus[:2], gpus[2:]))]
    return record_of(Trial(cluster=Cluster(rate="50 Mbit/s")), machine_use=nodes)


@settings(max_examples=5)
@given(st.floats(1, 1e6), st.floats(0, 1), st.integers(0, 2))
def test_energy_is_of_all_gpus_per_token(joules: float, throttled: float, others: int) -> None:
    """By the counters, else by the samples; a GPU that was held down or shared is marked."""
    held = throttled > 0.05 or others > 0
    with_counters = gpu_record(joules, throttled=throttled, others=others)
    for record, expected, marked in ((with_counters, joules, held), (gpu_record(None), 8.0, False)):
        (row,) = energy(derive(frames_of([record]))).data.to_dict("records")
        trial = Trial.from_canonical(record.trial)
        tokens = trial.tokens_per_rank * trial.accumulation * trial.topology().world * trial.steps
        assert row["joules_per_token"].estimate == pytest.approx(expected / tokens)
        assert row["watts"] == pytest.approx(150)
        assert (HELD in row["_taken"]) == (row["held_or_shared"] == 1) == marked


def test_without_gpus_there_is_no_table() -> None:
    """CPUs have no energy on record; one GPU's record has a row."""
    for machine_use, has_table in (([], False), (gpu_record(1.0).machine_use, True)):
        derived = derive(frames_of([changed(gpu_record(1.0), machine_use=machine_use)]))
        assert energy(derived).data.empty != has_table


@pytest.mark.parametrize(
    ("sweeps", "says"),
    [
        ([0] * 3, "n = 3: no interval; six are needed (ZeRO++)."),
        ([0, 1, 2] * 2, "3 occasions: no interval; six are needed (ZeRO++)."),
        ([0] * 6, "Parentheses: 95% confidence intervals"),
        (list(range(6)), "Parentheses: 95% confidence intervals"),
    ],
)
def test_a_median_of_few_values_or_sweeps_says_that_it_has_no_interval(sweeps: list[int], says: str) -> None:
    """Six values have one, and six sweeps, each at an occasion; three of two have none, though there are six values."""
    one = gpu_record(4.0)
    records = [
        changed(record_of(Trial.from_canonical(one.trial).model_copy(update={"repeat": repeat})),
                machine_use=one.machine_use, sweep=sweep, started=f"2026-01-{2 + sweep:02}T03:00:00+00:00",
                finished=f"2026-01-{2 + sweep:02}T03:10:00+00:00")
        for repeat, sweep in enumerate(sweeps)
    ]  # fmt: skip
    table = energy(derive(frames_of(records)))
    assert says in table.description
    assert table.data["joules_per_token"].iloc[0].known == ("Parentheses" in says)
