"""FSDP2 and DDP with our collectives as strategies of suites: planned, run, and refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from harness.runs.feasibility import Host, forecast
from harness.suites.contradictions import check
from harness.suites.suite_file import load
from harness.suites.trial import Trial
from impl.adapters.traffic import HOSTED
from impl.codecs.codec import parse
from tests.harness.runs.test_rank_trial import result, text, trial
from tests.support.params import long

__all__ = ["text"]  # a fixture
HERE = Host(memory=1 << 36, gpus=(), namespaces=lambda: None)


@pytest.mark.parametrize("name", ["fsdp2+qwz+qgz", *long("fsdp2+exact", "ddp+qgz")])
def test_a_hosted_trial_runs(text: str, tmp_path: Path, name: str) -> None:  # the fixture
    """The loss before training is that of the codecs, and every rank sends the predicted bytes in steps and
    validations, and a step sends the planned bytes.
    """
    settings: dict[str, Any] = {"accumulation": 2, "clip": 1.0, "warmup": 0, "steps": 2}
    record = result(trial(text, name, validate_every=1, **settings), tmp_path / "log")
    assert record.predicted.equal
    rows = [row for rank in record.ranks for row in rank.ledger or []]
    phases = {row.phase for row in rows}
    assert phases == ({"backward"} if name == "ddp+qgz" else {"forward", "backward", "evaluate", "step"})
    assert len(record.units) == 3
    assert record.ran["host"] == name.split("+", 1)[0]
    assert record.ran["transports"]["local"] == "shm"
    assert all(step.exposed_backward is not None for rank in record.ranks for step in rank.steps)
    (planned,) = forecast([trial(text, name, **settings)], HERE)
    sent = sum(row.bytes for row in rows if row.link == "inter" and row.phase != "evaluate")
    assert planned.problems == ()
    assert planned.inter == sent / 2
    assert planned.padded == sum(padded for _, _, padded in record.units)


def test_suites_of_hosts(tmp_path: Path) -> None:
    """Hosts are compared with peers and policies in one suite.

    Keys that do not apply to a host are left out of its trial and listed.  A host's trial is another one than our
    engine's with the same policy.
    """
    file = tmp_path / "q.toml"
    file.write_text(
        "name = 'q'\nquestion = '?'\n"
        "[defaults]\npolicy.weights = 'int8:512'\npolicy.feedback = 'classic'\npolicy.prefetch = 5\n"
        "policy.max_padding = 1.0\n"
        "[matrix]\nstrategy = ['ddp', 'fsdp2', 'qwz+qgz', 'fsdp2+qwz+qgz', 'fsdp2+exact', 'ddp+qgz']\n",
        encoding="utf-8",
    )
    suite = load(file)
    policies = {trial.strategy: trial.resolved_policy() for trial in suite.trials}
    assert len(policies) == 6
    assert suite.merged == ()
    zero, fsdp2, ddp = (policies[name] for name in ("qwz+qgz", "fsdp2+qwz+qgz", "ddp+qgz"))
    assert zero.weights == fsdp2.weights == parse("int8:512")
    assert zero.feedback is not None
    assert fsdp2.feedback is None
    assert ddp.weights == policies["fsdp2+exact"].weights == parse("fp32")
    assert ddp.gradients == zero.gradients
    assert any("policy.feedback" in line and "ddp+qgz" in line for line in suite.left_out)
    assert any("policy.prefetch" in line and "fsdp2+qwz+qgz" in line for line in suite.left_out)


@pytest.mark.parametrize("name", HOSTED)
def test_every_host_is_planned(name: str) -> None:
    """The bytes of a step and of a rank are predicted for every strategy inside a host."""
    fields = {"strategy": name, "policy": {"max_padding": 1.0}, "cluster": {"rate": "50 Mbit/s"}}
    hosted = Trial.model_validate(fields)
    check(hosted)
    (planned,) = forecast([hosted], HERE)
    assert planned.problems == ()
    assert planned.inter > 0
    assert planned.wire_seconds == pytest.approx(planned.inter / 2 * 8 / 50e6)
    assert math.fsum((planned.memory or {}).values()) > 0
