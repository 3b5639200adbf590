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
    """Its loss before training is that of its codecs, every rank sent what was predicted, steps and
    validation alike, and a step what was planned.
    """
    settings: dict[str, Any] = {"accumulation": 2, "clip": 1.0, "warmup": 0, "steps": 2}
    found = result(trial(text, name, validate_every=1, **settings), tmp_path / "log")
    assert found.predicted.equal
    rows = [row for rank in found.ranks for row in rank.ledger or []]
    phases = {row.phase for row in rows}
    assert phases == ({"backward"} if name == "ddp+qgz" else {"forward", "backward", "evaluate", "step"})
    assert len(found.units) == 3
    assert found.ran["host"] == name.split("+", 1)[0]
    assert found.ran["transports"]["local"] == "shm"
    assert all(step.exposed_backward is not None for rank in found.ranks for step in rank.steps)
    (planned,) = forecast([trial(text, name, **settings)], HERE)
    sent = sum(row.bytes for row in rows if row.link == "inter" and row.phase != "evaluate")
    assert planned.problems == ()
    assert planned.inter == sent / 2
    assert planned.padded == sum(padded for _, _, padded in found.units)


def test_suites_of_hosts(tmp_path: Path) -> None:
    """Hosts stand beside peers and policies; keys that a host does not carry stay away from it, and are
    told; a host's trial is not our engine's of the same policy.
    """
    file = tmp_path / "q.toml"
    file.write_text(
        "name = 'q'\nquestion = '?'\n"
        "[defaults]\npolicy.weights = 'int8:512'\npolicy.feedback = 'classic'\npolicy.prefetch = 5\n"
        "policy.max_padding = 1.0\n"
        "[matrix]\nstrategy = ['ddp', 'fsdp2', 'qwz+qgz', 'fsdp2+qwz+qgz', 'fsdp2+exact', 'ddp+qgz']\n",
        encoding="utf-8",
    )
    found = load(file)
    by_name = {one.strategy: one for one in found.trials}
    assert len(by_name) == 6
    assert found.merged == ()
    ours, fsdp2, ddp = (by_name[name].resolved_policy() for name in ("qwz+qgz", "fsdp2+qwz+qgz", "ddp+qgz"))
    assert ours.weights == fsdp2.weights == parse("int8:512")
    assert ours.feedback is not None
    assert fsdp2.feedback is None
    assert ddp.weights == parse("fp32")
    assert ddp.gradients == ours.gradients
    exact = by_name["fsdp2+exact"].resolved_policy()
    assert exact.weights == parse("fp32")
    assert any("policy.feedback" in line and "ddp+qgz" in line for line in found.left_out)
    assert any("policy.prefetch" in line and "fsdp2+qwz+qgz" in line for line in found.left_out)


@pytest.mark.parametrize("name", HOSTED)
def test_every_host_is_planned(name: str) -> None:
    """Of every strategy inside a host it is told before it runs what a step sends and a rank holds."""
    one = Trial.model_validate(
        {"strategy": name, "policy": {"max_padding": 1.0}, "cluster": {"rate": "50 Mbit/s"}}
    )
    check(one)
    (found,) = forecast([one], HERE)
    assert found.problems == ()
    assert found.inter > 0
    assert found.wire_seconds == pytest.approx(found.inter / 2 * 8 / 50e6)
    assert math.fsum((found.memory or {}).values()) > 0
