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
    ],
)
def test_a_table_that_cannot_be_modelled_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    """The file, the row and the column are named."""
    path = write_table(tmp_path / "t.csv", 1e-10, 1e-13, 0.9)
    table = pd.read_csv(path).astype(object)
    for column, value in change.items():
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
