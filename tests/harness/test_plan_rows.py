"""Plans as JSON and CSV hold what the printed table shows."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from docs.tables import published_steps
from docs.tables.published_steps import machine_of, read
from harness import cli
from harness.measure import machine_file
from harness.plan_rows import rows
from harness.runs.feasibility import Forecast, any_host, forecast
from harness.suites.suite_file import load
from harness.suites.trial import Cluster, Model, Trial
from impl.plan.step_time import Machine
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


def test_a_machine_adds_seconds(zeropp: Zeropp, monkeypatch: pytest.MonkeyPatch) -> None:
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
        low, high = (row[f"modelled_fits_{end}_speed_up"] for end in ("low", "high"))
        assert low < row["modelled_speed_up"] < high or (low == high and row["strategy"] == "zero3")
    monkeypatch.setenv("COLUMNS", "240")
    printed = planned().stdout
    assert "TFLOPS" in printed
    assert "2.18 (2.11 to 2.26)" in printed
    assert "the interval over 6 fits of the machine file" in printed
    for command, file, message in (
        ("plan", path, "unknown key 'question' of a machine"),
        ("run", machine, "zeropp run needs costs that were measured on this host"),
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


def _planned(machine: Machine, **changes: object) -> list[dict[str, object]]:
    """Return the rows of ZeRO-3 and ZeRO++ at the blog's batch, model, nodes and rate on a machine."""
    setting: dict[str, Any] = {
        "model": Model(name="gpt-18b"), "cluster": Cluster(nodes=24, ranks_per_node=16, rate="400 Gbit/s"),
        "tokens_per_rank": 1024, "sequence": 1024,
    }  # fmt: skip
    trials = [Trial(**setting | changes, strategy=name) for name in ("zero3", "zeropp")]
    return rows(forecast(trials, any_host()), machine)


@settings(max_examples=25, deadline=None)
@given(
    alternatives=st.lists(
        st.fixed_dictionaries(
            {}, optional={
                "fixed": st.floats(0, 1e-9), "per_token": st.floats(1e-14, 1e-12), "efficiency": st.floats(0.01, 1),
            },
        ),
        max_size=3,
    )
)  # fmt: skip
def test_an_interval_contains_the_best_estimate(alternatives: list[dict[str, float]]) -> None:
    """The interval over all fits contains the best fit's step and speed-up; a single fit has no interval."""
    machine = Machine(
        name="m", source="s", fixed=1e-10, per_token=8e-14, efficiency=0.9, fewest=1, most=4096,
        alternatives=alternatives,
    )  # fmt: skip
    for row in _planned(machine):
        for quantity in ("seconds", "speed_up"):
            ends = [row[f"modelled_fits_{end}_{quantity}"] for end in ("low", "high")]
            if alternatives:
                assert ends[0] <= row[f"modelled_{quantity}"] <= ends[1]  # type: ignore[operator]
            else:
                assert ends == [None, None]
    (_, row), (_, alone) = _planned(machine), _planned(replace(machine, alternatives=()))
    assert row["modelled_speed_up"] == alone["modelled_speed_up"]


def test_rows_of_one_policy_and_rate_leave_a_wide_interval(tmp_path: Path) -> None:
    """The blog's four bars of ZeRO-3 at 400 Gbit/s do not tell computation from the link.

    A machine that is fitted to these bars alone predicts anything from 1.3 to 3.9 for ZeRO++, which published 1.4 to
    1.6; the shipped machine, fitted to bars of two systems and batches, predicts 1.35 to 1.5.
    """
    table = pd.read_csv(published.FOLDER / "zeropp_throughput.csv")
    gbit = table["rate_gbps"] * table["adapters"]
    alike = table[table["system"].eq("zero3") & table["tokens_per_gpu"].eq(1024) & gbit.eq(400)]
    alike.assign(fitted="no").to_csv(tmp_path / "bars.csv", index=False)
    assert published_steps.main([str(tmp_path / "bars.csv"), str(tmp_path / "bars.toml")]) == 0
    for path, least, most in (
        (tmp_path / "bars.toml", 1.3, 3.9),
        (SUITES / "machines" / "v100-dgx2.toml", 1.35, 1.5),
    ):
        _, row = _planned(machine_file.read(path))
        assert row["modelled_fits_low_speed_up"] == pytest.approx(least, rel=0.05)
        assert row["modelled_fits_high_speed_up"] == pytest.approx(most, rel=0.05)


@pytest.mark.parametrize(
    ("alternatives", "says", "silent"),
    [
        ("", "The file states one fit; speed-ups are without an interval.", "In parentheses"),
        ("efficiency = 0.5", "the interval over 2 fits of the machine file", "does not tell which is faster"),
        ("unit = 0.0\nefficiency = 0.01", "the machine file does not tell which is faster", "one fit"),
    ],
)
def test_a_plan_says_what_a_machine_file_tells(
    alternatives: str, says: str, silent: str, zeropp: Zeropp, tmp_path: Path
) -> None:
    """A line says that a file has one fit, or over how many fits intervals are; rows that include 1 have a mark."""
    machine, suite = tmp_path / "m.toml", tmp_path / "q.toml"
    machine.write_text(
        "name = 'm'\nsource = 's'\nfixed = 1e-9\nper_token = 0.0\nefficiency = 1.0\nfewest = 1\nmost = 100.0\n"
        "overlap = 'schedule'\n[codecs.bf16]\nencode = 0\ndecode = 0\n"
        "[codecs.'int4:128']\nencode = 1e-8\ndecode = 1e-8\n[codecs.'int8:2048']\nencode = 1e-8\ndecode = 1e-8\n"
        + (f"[[alternatives]]\n{alternatives}\n" if alternatives else "")
    )
    suite.write_text(
        "name = 'q'\nquestion = 'Is it fast?'\n[defaults]\nmodel.name = 'gpt-tiny'\nsequence = 8\n"
        "tokens_per_rank = 8\npolicy.max_padding = 9\ncluster = {nodes = 2, rate = '1 Gbit/s'}\n"
        "[matrix]\nstrategy = ['zero3', 'zeropp']\n"
    )
    printed = " ".join(zeropp("plan", suite, "--machine", machine).stdout.split())
    assert says in printed
    assert silent not in printed
    assert (" ?" in printed) == ("which is faster" in says)


def test_the_published_machine_is_the_fitted_one() -> None:
    """The numbers of the shipped machine are those of the fit to published bars, to four digits, with all other fits
    that are equally good.
    """
    path = SUITES / "machines" / "v100-dgx2.toml"
    shipped = machine_file.read(path)
    fitted = machine_of(
        read(published.FOLDER / "zeropp_throughput.csv"), name=shipped.name, source=shipped.source
    )
    for ours, theirs in zip(shipped.fits, fitted.fits, strict=True):
        for name in ("fixed", "per_token", "efficiency"):
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=2e-3)


def test_a_rate_gives_the_least_time() -> None:
    """The least time counts all steps, warm-ups too; peers have none, since their bytes are not known."""
    cluster = Cluster(rate="8 Mbit/s")  # type: ignore[arg-type]
    trial = Trial(strategy="zero3", cluster=cluster, steps=3, warmup=2)
    (row,) = rows([Forecast(trial, parameters=1, egress=2_000_000, wire_seconds=2.0)])
    assert (row["wire_seconds"], row["least_seconds"]) == (2.0, 10.0)
    (row,) = rows([Forecast(Trial(strategy="ddp", cluster=cluster), parameters=1)])
    assert row["wire_seconds"] is row["least_seconds"] is None
