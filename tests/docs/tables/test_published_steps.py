"""Published throughput is predicted from a few of its rows, by any table of the same columns."""

from __future__ import annotations

import itertools
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from docs.tables import published_steps
from docs.tables.published_steps import DOCS, PublishedError, measured_trials, page, predict, read
from harness.measure import machine_file
from impl.plan.step_time import step_time
from report.data import published

SYSTEMS = {"zero3": 3.0, "zeropp": 0.75, "hpz": 2.0}


def write_table(path: Path, fixed: float, per_token: float, efficiency: float, overlap: str = "none") -> Path:
    """Writes the seconds that a known machine takes for three systems, two models, batches and rates."""
    rows = []
    for billions, tokens, adapters, (system, volume) in itertools.product(
        (1.5, 18.0), (512, 1024, 2048), (1, 4), SYSTEMS.items()
    ):
        compute = billions * 1e9 * (fixed + tokens * per_token)
        wire = volume * 2 * billions * 1e9 * 7 / 8 / (adapters * 100e9 / 8 * efficiency)
        rows.append({
            "system": system, "model": f"{billions}B", "parameters_billion": billions, "gpus": 64,
            "gpus_per_node": 8, "rate_gbps": 100, "adapters": adapters, "tokens_per_gpu": tokens,
            "overlap": overlap, "seconds": compute + wire if overlap == "none" else max(compute, wire),
        })  # fmt: skip
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


@settings(max_examples=4)
@given(st.floats(1e-11, 1e-9), st.floats(1e-14, 1e-12), st.floats(0.3, 1))
def test_a_known_machine_is_found(
    tmp_path_factory: pytest.TempPathFactory, fixed: float, per_token: float, efficiency: float
) -> None:
    """Rows of one machine without overlap are predicted from the others within a thousandth."""
    table = predict(read(write_table(tmp_path_factory.mktemp("t") / "t.csv", fixed, per_token, efficiency)))
    assert table.machine is None
    assert table.rows["error"].abs().max() < 1e-3


@pytest.mark.parametrize("overlap", ["none", "full"])
def test_all_rows_at_once_take_the_seconds_of_each(tmp_path: Path, overlap: str) -> None:
    """The arrays to which machines are fitted have the seconds of step_time(), bit by bit, also with idle stages."""
    path = write_table(tmp_path / "t.csv", 1e-10, 1e-13, 0.9, overlap)
    pd.read_csv(path).assign(accumulation=8, pp=2).to_csv(path, index=False)
    rows = read(path)
    machine = published_steps.fit(rows, 0.7)
    at_once = published_steps._seconds(machine, published_steps._columns(list(rows["work"])))
    assert at_once.tolist() == [step_time(machine, work).seconds for work in rows["work"]]


def test_overlap_is_the_systems_own(tmp_path: Path) -> None:
    """A table of full overlap is predicted well as such, and badly as one without."""
    path = write_table(tmp_path / "t.csv", 1e-10, 1e-13, 0.9, "full")
    rows = read(path)
    assert predict(rows).rows["error"].abs().max() < 0.02
    assert predict(rows.assign(overlap="none")).rows["error"].abs().max() > 0.05


def test_the_blogs_bars_follow_from_four_of_them() -> None:
    """Four of the announcement's 40 bars predict the others, with the errors that docs/modelled.md has."""
    table = predict(read(published.FOLDER / "zeropp_throughput.csv"))
    assert len(table.rows) == 40
    assert len(table.held_out) == 36
    assert (DOCS / "modelled.md").read_text(encoding="utf-8") == page(table) + published_steps.measured_here(
        measured_trials()
    )
    errors = table.held_out["error"].abs()
    assert errors.median() < table.held_out["naive_error"].abs().median()
    assert errors.median() < table.held_out["constant_error"].abs().median()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"system": "zero9"}, "row 1: the volume that system zero9 sends is not known"),
        ({"adapters": 0}, "row 1: adapters is 0"),
        ({"parameters_billion": float("nan")}, "row 1: parameters_billion is nan"),
        ({"tokens_per_gpu": "many"}, "row 1: tokens_per_gpu is many"),
        ({"seconds": 0.0}, "row 1: seconds \\(or tflops_per_gpu\\) is 0.0"),
        ({"tp": 0}, "row 1: tp is 0"),
        ({"tp": 16}, "row 1: tp is 16, and the 8 GPUs of a node are not a multiple of it"),
        ({"pp": 4}, "row 1: pp is 4, and accumulation is 1; as many micro-batches as stages are needed"),
        ({"pp": 3, "accumulation": 9}, "row 1: tp times pp is 3, and the 64 GPUs are not a multiple of it"),
        ({"pp": 16, "accumulation": 16}, "row 1: pp is 16, and the 8 nodes are not a multiple of it"),
    ],
)
def test_a_table_that_cannot_be_modelled_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    """The file, the row and the column are named."""
    path = write_table(tmp_path / "t.csv", 1e-10, 1e-13, 0.9)
    table = pd.read_csv(path).astype(object)
    for column, value in change.items():
        table[column] = table.get(column, 1)
        table.loc[0, column] = value
    table.to_csv(path, index=False)
    with pytest.raises(PublishedError, match=message):
        read(path)
    assert published_steps.main([str(path)]) == published_steps.main([str(tmp_path / "none.csv")]) == 2
    table.drop(columns="adapters").to_csv(path, index=False)
    with pytest.raises(PublishedError, match="column adapters is missing"):
        read(path)


def test_a_system_of_another_volume_is_named_by_its_bytes(tmp_path: Path) -> None:
    """``volume_m`` gives the bytes of a system that the committed volumes do not have."""
    path = write_table(tmp_path / "t.csv", 1e-10, 1e-13, 0.9)
    table = pd.read_csv(path).query("system == 'hpz'")
    table.assign(system="mine", volume_m=2.0).to_csv(path, index=False)
    assert predict(read(path)).rows["error"].abs().max() < 1e-3


def test_accumulation_and_stages_are_inputs(tmp_path: Path) -> None:
    """Each micro-batch sends all bytes; a stage of a pipeline sends its part, and is idle while the others fill."""
    path = write_table(tmp_path / "t.csv", 1e-10, 1e-13, 0.9)
    plain = read(path)["work"].iloc[0]
    for columns, egress, idle in (
        ({"accumulation": 4}, 4.0, 0.0),
        ({"tp": 8}, 1.0, 0.0),
        ({"accumulation": 8, "pp": 2}, 8 / 2 * (3 / 4) / (7 / 8), 1 / 8),
    ):
        table = pd.read_csv(path).assign(**columns)
        table.to_csv(tmp_path / "changed.csv", index=False)
        work = read(tmp_path / "changed.csv")["work"].iloc[0]
        assert work.egress_bytes == pytest.approx(egress * plain.egress_bytes)
        assert work.idle == idle
        machine = published_steps.fit(read(path))
        assert step_time(machine, work).compute == pytest.approx(
            (1 + idle) * step_time(machine, plain).compute
        )


def test_rows_of_one_policy_and_rate_identify_no_speed_up(tmp_path: Path) -> None:
    """Rows of one system, rate and batch fit any efficiency, so the page predicts no speed-up; those of several do."""
    rows = read(write_table(tmp_path / "t.csv", 1e-10, 1e-13, 0.9))
    alike = rows[rows["system"].eq("zero3") & rows["adapters"].eq(4) & rows["tokens_per_gpu"].eq(1024)]
    machines = published_steps.equal_fits(alike)
    low, high = published_steps.speed_up_range(machines, alike["work"].iloc[0], 0.25)
    assert low < 1.4
    assert high > 2.5
    assert "no speed-up is predicted" in page(predict(alike))
    machines = published_steps.equal_fits(rows)
    low, high = published_steps.speed_up_range(machines, alike["work"].iloc[0], 0.25)
    assert high / low < 1.05
    assert "no speed-up is predicted" not in page(predict(rows[rows["adapters"].eq(1)]))


def test_rows_that_test_nothing_are_counted(tmp_path: Path) -> None:
    """Rows whose sending takes less than a tenth of the step are counted on the page."""
    path = write_table(tmp_path / "t.csv", 1e-10, 1e-13, 0.9)
    table = pd.read_csv(path).assign(rate_gbps=1e5)
    table.to_csv(path, index=False)
    assert f"In {len(table)} of {len(table)} rows, sending at the nominal rate" in page(predict(read(path)))


def test_the_h100s_share_is_that_of_published_steps() -> None:
    """The machine h100-dgx computes at the median share of 26 published steps of other systems."""
    shares = published_steps.shares_of_peak()
    assert len(shares) == 26
    machine = machine_file.read(DOCS.parent / "suites" / "machines" / "h100-dgx.toml")
    assert machine.per_token == pytest.approx(6 / (shares.median() * 989e12), rel=0.01)
    assert f"{shares.median():.0%}".removesuffix("%") in machine.source
