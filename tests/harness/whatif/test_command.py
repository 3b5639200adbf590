"""The command ``zeropp whatif`` prints predictions, or refuses in one line with status 2, and needs no torch."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness import cli
from tests.harness.whatif.written import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    RATE,
    Writer,
    ddp,
    ddp_seconds,
    fsdp,
)


def _traces(folder: Path) -> list[str]:
    return [str(ddp(Writer(rank)).write(folder)) for rank in (0, 1)]


def test_a_table_of_predictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each policy at each rate has a row, and notes below the table name the policy."""
    options = ["--policy", "same", "--policy", "zeropp", "--rate", "800 Mbit/s", "--rate", "1 Gbit/s"]
    assert cli.main(["whatif", *_traces(tmp_path), *options]) == cli.OK
    out = capsys.readouterr().out
    assert "2 steps of 2x1 ranks" in out
    waits = ddp_seconds() - FORWARD - BACKWARD - OPTIMIZER
    assert f"the rank that waits most waits for messages for {waits / 1e3:.3g} s of a step" in out
    assert sum(line.strip().startswith("zeropp ") for line in out.splitlines()) == 2
    assert "zeropp: codecs are counted as taking no time: give --machine" in out


def test_json_and_csv_hold_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both formats hold the seconds that the written steps take at the rate."""
    command = ["whatif", *_traces(tmp_path), "--rate", "400 Mbit/s"]
    assert cli.main([*command, "--json"]) == cli.OK
    (row,) = json.loads(capsys.readouterr().out)["predictions"]
    assert 1e3 * row["seconds"] == pytest.approx(ddp_seconds(RATE / 2), rel=1e-4)
    assert (row["rate_mbit"], row["bound"], row["nodes"]) == (400, "link", 2)
    assert cli.main([*command, "--csv"]) == cli.OK
    (cells,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert float(cells["seconds"]) == row["seconds"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--rate", "fast"], "--rate 'fast': expected a rate from 1 kbit/s to 100,000 Gbit/s, such as"),
        (["--rate", "unshaped"], "--rate 'unshaped': expected a rate"),
        (["--policy", "zero++"], "did you mean 'zeropp'"),
        (["--traced-ranks-per-node", "3"], "does not divide the 2 ranks"),
        (["--nodes", "1"], "one node has no link"),
        (["--slower", "inf"], "--slower"),
        (["--json", "--csv"], "--json and --csv exclude each other"),
        (["--ranks-per-node", "999999999", "--policy", "zeropp"], "at most 65,536 ranks are predicted"),
        (
            ["--traced-rate", "1 Mbit/s"],
            "messages of a step take 48 s, but the traced step lasted only 0.081 s",
        ),
        (["--machine", "none.toml"], "none.toml: cannot be read"),
    ],
)
def test_bad_options_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    """Options that cannot be used end with status 2 and one line that names the option."""
    assert cli.main(["whatif", *_traces(tmp_path), *options]) == cli.REFUSED
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out


@pytest.mark.parametrize("content", ['{"traceEvents": [', "hello", "{}"])
def test_bad_traces_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    """A truncated or foreign file ends with status 2 and one line that names the file."""
    path = tmp_path / "x.json"
    path.write_text(content)
    for bad in (path, tmp_path / "missing.json"):
        assert cli.main(["whatif", str(bad)]) == cli.REFUSED
        err = capsys.readouterr().err
        assert bad.name in err
        assert err.count("\n") == 1


def test_other_processes_steps_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks of different programs are refused with what differs."""
    paths = [str(ddp(Writer(0)).write(tmp_path)), str(fsdp(Writer(1)).write(tmp_path))]
    assert cli.main(["whatif", *paths]) == cli.REFUSED
    assert "issued different collectives" in capsys.readouterr().err


def test_no_torch_is_imported(tmp_path: Path) -> None:
    """Traces are read, and steps are predicted, without importing torch."""
    command = ["whatif", *_traces(tmp_path), "--policy", "zeropp"]
    code = f"import sys; from harness import cli; s = cli.main({command!r}); print('torch' in sys.modules); sys.exit(s)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "False"
