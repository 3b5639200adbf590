"""What a trial reads is on its record by digest, and another input is not taken for it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from harness import cli
from harness.measure import machine
from harness.records.trial_record import write
from harness.runs.feasibility import check_inputs
from harness.runs.sweep import finished
from harness.suites.suite_file import load
from harness.suites.trial import Model, PolicyChanges, Trial
from harness.workloads import input_digests as inputs
from harness.workloads.input_digests import digests
from tests.harness.conftest import Zeropp
from tests.report.records import CRASHED, record_of


@pytest.fixture(autouse=True)
def forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working folder, and no digests of an earlier one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    inputs._corpus_digest.cache_clear()


def test_digests(tmp_path: Path) -> None:
    """Corpus and modules are named by the SHA-256 of their bytes; a preset needs none: its corpus is all."""
    assert digests(Trial()).keys() == {"corpus"}
    (tmp_path / "text").write_text("some text")
    (tmp_path / "mine_a.py").write_text("x = 1\n")
    by_name = digests(Trial(corpus="text", model=Model(name="mine_a:build")))
    assert by_name == {
        "corpus": hashlib.sha256(b"some text").hexdigest(),
        "model": hashlib.sha256(b"x = 1\n").hexdigest(),
    }
    own_codec = Trial(policy=PolicyChanges(weights=("int8:64", "mine_a:C")))
    assert set(digests(own_codec)) == {"corpus", "codec mine_a:C"}


def test_what_cannot_be_read_has_no_digest(tmp_path: Path) -> None:
    """A missing corpus or module is no error here: running the trial says what is wrong."""
    (tmp_path / "leaving").mkdir()
    (tmp_path / "leaving" / "__init__.py").write_text("raise SystemExit(3)\n")
    assert digests(Trial(corpus="none", model=Model(name="no_such_module:f"))) == {}
    assert digests(Trial(corpus="none", model=Model(name="leaving.part:f"))) == {}


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("changed", ["corpus", "model", "module"])
def test_another_input(tmp_path: Path, zeropp: Zeropp, changed: str, *, failed: bool) -> None:
    """A result of another corpus, model or helper of it is refused, with what to do; a failure is run again.

    Also if other repeats are asked for, or one trial alone.
    """
    (tmp_path / "text").write_text("some text " * 1000)
    (tmp_path / "mine_b.py").write_text("from help_b import build\n")
    (tmp_path / "help_b.py").write_text("from tests.harness.runs.test_feasibility import tiny as build\n")
    (tmp_path / "q.toml").write_text(
        'name = "q"\nquestion = "?"\n[defaults]\nstrategy = "single"\ncorpus = "text"\nsequence = 32\n'
        'tokens_per_rank = 64\nmodel.name = "mine_b:build"\n'
    )
    (trial,) = load(tmp_path / "q.toml").trials
    code, results = machine.code(), tmp_path / "results" / "q"
    made = record_of(trial, code=code, inputs=digests(trial), failure=CRASHED if failed else None)
    write(results, made)
    check_inputs(results, {trial.id: trial}, [made])
    assert finished(results, trial, made.pool)
    assert (finished(results, trial, "another") is None) == failed
    file = {"corpus": "text", "model": "mine_b.py", "module": "help_b.py"}[changed]
    (tmp_path / file).write_text("# another\n" * 100)
    inputs._corpus_digest.cache_clear()
    if failed:
        check_inputs(results, {trial.id: trial}, [made])
        assert not finished(results, trial, made.pool)
        return
    repeats = tmp_path / "repeats.toml"
    repeats.write_text((tmp_path / "q.toml").read_text().replace("[defaults]", "repeats = 2\n[defaults]", 1))
    second = load(repeats).trials[1]
    for arguments in (["q.toml"], ["repeats.toml"], ["repeats.toml", "--only", second.id]):
        error = zeropp("run", *arguments, status=cli.REFUSED).stderr
        assert error.count("\n") == 1
        assert f"{trial.id}.json: was measured with another version of {changed}" in error
    assert (
        "keep the results under another name (mv results/q results/q-before), or choose another folder"
        in error
    )
