"""Plans as JSON and CSV hold what the printed table shows."""

from __future__ import annotations

import csv
import io
import json
from functools import partial
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
from tests.harness.conftest import Zeropp

SUITES = Path(__file__).parents[2] / "suites"


@pytest.mark.parametrize("suite", ["quickstart", "peers", "generation", "offload"])
def test_json_and_csv_hold_the_same_trials(suite: str, zeropp: Zeropp) -> None:
    """JSON and CSV have every trial once, under its id, with its predictions; what is not known is null or empty."""
    path = SUITES / f"{suite}.toml"
    rows = json.loads(zeropp("plan", path, "--json").stdout)["trials"]
    lines = list(csv.DictReader(io.StringIO(zeropp("plan", path, "--csv").stdout)))
    trials = load(path).trials
    for row, line, trial in zip(rows, lines, trials, strict=True):
        assert row["id"] == line["id"] == trial.id
        assert Trial.from_canonical(row["trial"]) == trial
        assert row["runs_here"] is True
        for key in ("inter_bytes", "memory_bytes"):
            assert line[key] == ("" if row[key] is None else str(row[key]))


def test_what_cannot_run_says_why(zeropp: Zeropp) -> None:
    """A plan with trials that cannot run has status 1 and their reasons; --json with --csv is refused with status
    2.
    """
    path = SUITES / "gpu_node.toml"
    line = next(csv.DictReader(io.StringIO(zeropp("plan", path, "--csv", status=cli.SOME_FAILED).stdout)))
    assert (line["runs_here"], "need a GPU" in line["why"]) == ("False", True)
    zeropp("plan", path, "--csv", "--json", status=cli.REFUSED)


def test_a_machine_adds_seconds(zeropp: Zeropp) -> None:
    """With a machine, each trial has predicted seconds, a speed-up over ZeRO-3 of the same setting, and their
    basis.
    """
    path, machine = SUITES / "paper_scale.toml", SUITES / "machines" / "v100-dgx2.toml"
    planned = partial(zeropp, "plan", path, "--machine", machine, status=cli.SOME_FAILED)
    table = json.loads(planned("--json").stdout)["trials"]
    assert len(table) == 24
    for row in table:
        assert row["modelled_seconds"] == pytest.approx(
            row["modelled_compute_seconds"] + row["modelled_wire_seconds"]
        )
        assert row["modelled_wire_seconds"] == pytest.approx(row["wire_seconds"] / 0.8962)
        longer = row["modelled_wire_seconds"] > row["modelled_compute_seconds"]
        assert row["modelled_critical"] == ("link" if longer else "processor")
        assert row["modelled_low_seconds"] is row["modelled_high_seconds"] is None
        assert row["modelled_basis"] == ("fitted" if row["tokens_per_rank"] == 1024 else "transferred")
        assert (row["modelled_speed_up"] == 1) == (row["strategy"] == "zero3")
    assert "TFLOPS" in planned().stdout
    for command, file, message in (
        ("plan", path, "unknown key 'question' of a machine"),
        ("run", machine, "zeropp run needs one that is calibrated here"),
    ):
        assert message in zeropp(command, path, "--machine", file, status=cli.REFUSED).stderr


@pytest.mark.parametrize(
    ("lines", "basis", "says"),
    [
        ("nature = 'data sheet'", "data sheet", "rest on data sheets and assumptions"),
        ("nature = 'data sheet'\nfewest = 9", "data sheet, out of range", "nothing was measured"),
        ("nature = 'published steps'", "fitted", "is 'fitted' if the batch"),
        ("host = 'here'", "calibrated", "is 'calibrated' if model and batch"),
        ("host = 'here'\nfewest = 9", "transferred", "is 'calibrated' if model and batch"),
        ("", "not calibrated", "was not calibrated"),
    ],
)
def test_a_plan_names_what_its_seconds_rest_on(
    lines: str, basis: str, says: str, zeropp: Zeropp, tmp_path: Path
) -> None:
    """Only predictions that rest on a calibration or fit are called calibrated or fitted, in rows and notes."""
    machine = tmp_path / "m.toml"
    usual = "" if "fewest" in lines else "fewest = 1\n"
    rates = "fixed = 1e-9\nper_token = 0.0\nefficiency = 1.0\nmost = 10.0"
    machine.write_text(f"name = 'm'\nsource = 's'\n{rates}\n{usual}{lines}")
    suite = tmp_path / "q.toml"
    suite.write_text(
        "name = 'q'\nquestion = 'Is it fast?'\n[defaults]\nmodel.name = 'gpt-tiny'\nsequence = 8\n"
        "tokens_per_rank = 8\npolicy.max_padding = 9\n[matrix]\nstrategy = ['zero3']\n"
    )
    (row,) = json.loads(zeropp("plan", suite, "--machine", machine, "--json").stdout)["trials"]
    assert row["modelled_basis"] == basis
    printed = zeropp("plan", suite, "--machine", machine).stdout
    assert says in " ".join(printed.split())


def test_the_machine_of_data_sheets_says_so() -> None:
    """The shipped machine that rests on data sheets is not called calibrated."""
    machine = machine_file.read(SUITES / "machines" / "h100-dgx.toml")
    assert machine.basis(known=True) == "data sheet"


def test_the_published_machine_is_the_fitted_one() -> None:
    """The numbers of the shipped machine equal those of the fit to published bars, to four digits."""
    shipped = machine_file.read(SUITES / "machines" / "v100-dgx2.toml")
    fitted = predict(read(published.FOLDER / "zeropp_throughput.csv")).machine
    for name in ("fixed", "per_token", "efficiency"):
        assert getattr(shipped, name) == pytest.approx(getattr(fitted, name), rel=2e-3)


def test_a_rate_gives_the_least_time() -> None:
    """The least time counts all steps, warm-ups too; peers have none, since their bytes are not known."""
    cluster = Cluster(rate="8 Mbit/s")  # type: ignore[arg-type]
    trial = Trial(strategy="zero3", cluster=cluster, steps=3, warmup=2)
    (row,) = rows([Forecast(trial, parameters=1, egress=2_000_000, wire_seconds=2.0)])
    assert (row["wire_seconds"], row["least_seconds"]) == (2.0, 10.0)
    (row,) = rows([Forecast(Trial(strategy="ddp", cluster=cluster), parameters=1)])
    assert row["wire_seconds"] is row["least_seconds"] is None
