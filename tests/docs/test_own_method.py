"""The programs and suites of docs/guide/own_method.md run as they are printed."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from docs.tables import DOCS
from harness import cli
from harness.laws.gather_laws import GatherDuty
from harness.laws.method_laws import MethodDuty
from harness.suites.suite_file import load
from harness.suites.trial import Trial
from impl.policy.own_method import LAWS

PAGE = (DOCS / "guide" / "own_method.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(python|toml)\n(.*?)```", PAGE, re.DOTALL)
METHOD, RANDOM, PROGRAM, GATHER, STRATEGY = (text for language, text in BLOCKS if language == "python")
SUITE, GATHERS, LOCAL = (text for language, text in BLOCKS if language == "toml")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the guide's method as ``guides`` and its strategy as ``local``."""
    (tmp_path / "guides.py").write_text(METHOD, encoding="utf-8")
    (tmp_path / "local.py").write_text(STRATEGY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_the_guides_method_keeps_what_it_promises(capsys: pytest.CaptureFixture[str]) -> None:
    """All duties and laws of the guide's class hold."""
    for argument in ("true", "false"):
        options = ["--argument", f"feedback={argument}", "--examples", "10"]
        assert cli.main(["check", "method", "guides:Half", *options]) == cli.OK
        assert "FAILS" not in capsys.readouterr().out


def test_the_guides_random_method_keeps_what_it_promises(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The guide's random-k resumes, and its duties and laws hold."""
    (folder / "random_k.py").write_text(RANDOM, encoding="utf-8")
    assert cli.main(["check", "method", "random_k:RandomK", "--examples", "10"]) == cli.OK
    assert "FAILS" not in capsys.readouterr().out


def test_the_guides_gather_keeps_what_it_promises(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All duties and laws of the guide's gather hold, and its suite names the class and its argument."""
    (folder / "half_weights.py").write_text(GATHER, encoding="utf-8")
    assert cli.main(["check", "method", "half_weights:HalfWeights", "--examples", "10"]) == cli.OK
    assert "FAILS" not in capsys.readouterr().out
    text = f'name = "gathers"\nquestion = "Why?"\n{GATHERS}'
    (folder / "gathers.toml").write_text(text, encoding="utf-8")
    (own,) = load(folder / "gathers.toml").combinations
    assert str(own.own_gather) == "examples.differences:Differences(block=64)"


def test_the_guides_program_trains(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The program prints a loss and the bytes between nodes for each of four ranks."""
    program = folder / "program.py"
    program.write_text(PROGRAM.replace("from mine", "from guides"), encoding="utf-8")
    runpy.run_path(str(program))
    assert len(re.findall(r"\(\d\.\d+, \d+\)", capsys.readouterr().out)) == 4


def test_the_guides_suites_are_read(folder: Path) -> None:
    """The suite has the configurations that the guide lists, and the strategy's part is a suite too."""
    (folder / "mine.toml").write_text(SUITE, encoding="utf-8")
    suite = load(folder / "mine.toml")
    assert len(suite.combinations) == 5 * 6
    assert suite.merged == ()
    text = f'name = "local"\nquestion = "Why?"\n{LOCAL}'
    (folder / "local.toml").write_text(text, encoding="utf-8")
    (own,) = load(folder / "local.toml").combinations
    assert isinstance(own, Trial)
    assert own.own_strategy
    assert own.method == {"every": 4}


@pytest.mark.usefixtures("folder")
def test_the_guides_strategy_trains(tmp_path: Path) -> None:
    """The strategy of the guide trains on thread ranks, with its messages between nodes."""
    from harness.records.trial_record import read_all
    from tests.harness.runs.test_own_method import THREADS, trial
    from tests.harness.runs.test_sweep import sweep

    policy = {"max_padding": 9.0, "group": "node", "reduce": "examples.local_steps:NodeMean"}
    own = trial("stdlib", "local:LocalSteps", cluster=THREADS, policy=policy, method={"every": 2}, steps=4)
    outcome, shown = sweep([own], tmp_path / "results")
    assert outcome.failed == 0, shown
    (record,) = read_all(tmp_path / "results")
    assert any(row.purpose == "state" for row in record.ranks[0].ledger or [])


def test_the_guide_names_every_duty_and_law() -> None:
    """Each has a row in one of the guide's tables."""
    rows = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    duties = {duty.name.lower() for duty in (*MethodDuty, *GatherDuty)}
    assert duties | LAWS.keys() <= rows
