"""A plan for programs says what the table says."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from docs.tables.published_steps import predict, read
from harness import cli
from harness.measure import machine_file
from harness.plan_rows import rows
from harness.runs.feasibility import Forecast
from harness.suites.suite_file import load
from harness.suites.trial import Cluster, Trial
from report.data import published

SUITES = Path(__file__).parents[2] / "suites"


@pytest.mark.parametrize("suite", ["quickstart", "peers", "generation", "offload"])
def test_json_and_csv_hold_the_same_trials(suite: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every trial of the suite once, under its id, with what is predicted; unknown is null, or empty."""
    path = str(SUITES / f"{suite}.toml")
    assert cli.main(["plan", path, "--json"]) == cli.OK
    told = json.loads(capsys.readouterr().out)
    assert cli.main(["plan", path, "--csv"]) == cli.OK
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    trials = load(Path(path)).trials
    assert [one["id"] for one in told["trials"]] == [one["id"] for one in lines] == [one.id for one in trials]
    for one, line, trial in zip(told["trials"], lines, trials, strict=True):
        assert Trial.from_canonical(one["trial"]) == trial
        assert one["runs_here"] is True
        for key in ("inter_bytes", "memory_bytes"):
            assert line[key] == ("" if one[key] is None else str(one[key]))


def test_what_cannot_run_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With status 1; two forms at once are refused with status 2."""
    path = str(SUITES / "gpu_node.toml")
    assert cli.main(["plan", path, "--csv"]) == cli.SOME_FAILED
    line = next(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert (line["runs_here"], "need a GPU" in line["why"]) == ("False", True)
    assert cli.main(["plan", path, "--csv", "--json"]) == cli.REFUSED


def test_a_machine_adds_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    """By trial, over ZeRO-3 of the same setting, and whether the machine was measured there."""
    path, machine = str(SUITES / "paper_scale.toml"), str(SUITES / "machines" / "v100-dgx2.toml")
    assert cli.main(["plan", path, "--machine", machine, "--json"]) == cli.SOME_FAILED
    table = json.loads(capsys.readouterr().out)["trials"]
    assert len(table) == 24
    for row in table:
        assert row["modelled_seconds"] == pytest.approx(
            row["modelled_compute_seconds"] + row["modelled_wire_seconds"]
        )
        assert row["modelled_wire_seconds"] == pytest.approx(row["wire_seconds"] / 0.8962)
        longer = row["modelled_wire_seconds"] > row["modelled_compute_seconds"]
        assert row["modelled_critical"] == ("link" if longer else "processor")
        assert row["modelled_low_seconds"] is row["modelled_high_seconds"] is None
        assert (row["modelled_basis"] == "calibrated") == (row["tokens_per_rank"] == 1024)
        assert (row["modelled_speed_up"] == 1) == (row["strategy"] == "zero3")
    assert cli.main(["plan", path, "--machine", machine]) == cli.SOME_FAILED
    assert "TFLOPS" in capsys.readouterr().out
    assert cli.main(["plan", path, "--machine", path]) == cli.REFUSED
    assert "no key of a machine" in capsys.readouterr().err
    assert cli.main(["run", path, "--machine", machine]) == cli.REFUSED
    assert "nothing is run by it" in capsys.readouterr().err


def test_the_published_machine_is_the_fitted_one() -> None:
    """What is shipped are the numbers that the fit to the published bars gives, to four digits."""
    shipped = machine_file.read(SUITES / "machines" / "v100-dgx2.toml")
    found = predict(read(published.FOLDER / "zeropp_throughput.csv")).machine
    for name in ("fixed", "per_token", "efficiency"):
        assert getattr(shipped, name) == pytest.approx(getattr(found, name), rel=2e-3)


def test_a_rate_gives_the_least_time() -> None:
    """Of all steps, untimed ones too; not of peers, whose bytes are not known."""
    cluster = Cluster(rate="8 Mbit/s")  # type: ignore[arg-type]
    trial = Trial(strategy="zero3", cluster=cluster, steps=3, warmup=2)
    (row,) = rows([Forecast(trial, parameters=1, egress=2_000_000, wire_seconds=2.0)])
    assert (row["wire_seconds"], row["least_seconds"]) == (2.0, 10.0)
    (row,) = rows([Forecast(Trial(strategy="ddp", cluster=cluster), parameters=1)])
    assert row["wire_seconds"] is row["least_seconds"] is None
